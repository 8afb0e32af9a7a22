"""The page that lists every public name of torch's RPC, and whether this library has it.

The comparison is that of :mod:`tools.api_comparison`; the reasons are those of :mod:`tools.api_differences`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from tools import api_differences
from tools.api_comparison import names_of
from tools.docs.sources import to_markdown

MODULES = ("rpc", "autograd", "optim", "nn")

BETTER = {
    "rpc.RRef": "Lost workers are detected, proxies do not block, and references may be kept until exit.",
    "rpc.PyRRef": "See `RRef`.",
    "rpc.TensorPipeRpcBackendOptions": (
        "Also limits on memory, times of failure detection and other [settings](../settings.md)."
    ),
    "rpc.init_rpc": (
        "Works without a world size too, so that [workers join and leave](../groups.md#dynamic-groups). "
        "Checks all arguments before it starts anything."
    ),
    "rpc.remote": "Accepts lambdas and closures. Calls run exactly once even if connections break.",
    "rpc.rpc_async": (
        "The future can be awaited and interrupted, and a lost worker fails it at once. See `remote`."
    ),
    "rpc.rpc_sync": "Can be interrupted by Ctrl-C. See `remote`.",
    "rpc.shutdown": (
        "Never waits for a dead worker; logs what it waits for; `init_rpc` works again afterwards."
    ),
    "autograd.backward": "Has [modes](../concepts/modes.md), so that unused results do not block it.",
    "autograd.context": "Is released everywhere even if a worker has died.",
    "optim.DistributedOptimizer": (
        "Also parameter groups, `state_dict`, `load_state_dict`, gradient clipping and learning-rate "
        "schedules."
    ),
    "nn.RemoteModule": "Also timeouts, `train`, `eval`, and copies that can be called.",
}
"""Names that do more here, with the same arguments."""

DIFFERENT = "See [different behaviour](../api-differences.md#same-name-different-behaviour)."


class Row(NamedTuple):
    """One name of torch, and what it is here."""

    name: str
    status: str
    note: str


def rows() -> Iterator[Row]:
    """Every public name of torch's modules, and those that only this library has, in order."""
    for path in MODULES:
        theirs = importlib.import_module(f"torch.distributed.{path}")
        ours = importlib.import_module(f"zmqgrad.{path}")
        public = sorted(name for name in names_of(theirs) if not (name.startswith("_") or name.isupper()))
        for name in public:
            yield _row(path, name)
        for name in sorted(set(ours.__all__) - set(public)):
            if not name.startswith("_") and not isinstance(getattr(ours, name), ModuleType):
                yield Row(f"{path}.{name}", "only here", _summary(getattr(ours, name)))


def _row(path: str, name: str) -> Row:
    full = f"{path}.{name}"
    for each in api_differences.MISSING:
        if name in each.names.get(path, "").split():
            return Row(full, "missing", each.reason)
    if any(f"`{name}`" in each.name for each in api_differences.BEHAVIOURS):
        return Row(full, "different", f"{BETTER.get(full, '')} {DIFFERENT}".lstrip())
    if full in BETTER:
        return Row(full, "better", BETTER[full])
    return Row(full, "same", "")


def _summary(value: object) -> str:
    first = to_markdown(inspect.getdoc(value) or "").split("\n\n")[0]
    return first.replace("\n", " ").replace("|", "&#124;")


def page() -> str:
    """The text of the page."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    found = list(rows())
    yield from ("# Every public name", "")
    yield "Each public name of `torch.distributed.rpc`, `.autograd`, `.optim` and `.nn`, compared with"
    yield "the module of the same name below `zmqgrad`. The list is generated from torch"
    yield f"{api_differences.TORCH}. Private names that libraries use, and all other differences, are on"
    yield "[differences from torch's API](../api-differences.md)."
    yield ""
    yield "- **same**: the same arguments and results."
    yield "- **better**: the same arguments and results, and it does more."
    yield "- **different**: the same arguments; some results differ."
    yield "- **missing**: this library does not have it."
    yield "- **only here**: torch does not have it."
    for path in MODULES:
        yield from ("", f"## torch.distributed.{path}", "", "| name | status | remarks |", "|---|---|---|")
        for row in found:
            if row.name.startswith(f"{path}."):
                yield f"| `{row.name}` | {row.status} | {row.note} |"
