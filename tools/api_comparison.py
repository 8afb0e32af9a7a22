"""Compares the names, signatures and defaults of this library with those of the installed torch.

:mod:`tools.api_differences` lists the differences that are deliberate.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
from collections.abc import Collection, Iterator
from inspect import Parameter
from types import ModuleType
from typing import Any, NamedTuple

MODULES = (
    "rpc",
    "rpc.api",
    "rpc.backend_registry",
    "rpc.constants",
    "rpc.functions",
    "rpc.options",
    "autograd",
    "optim",
    "nn",
    "nn.functional",
    "nn.api.remote_module",
)
"""The modules below ``torch.distributed`` that have a module of the same path here."""

_OWN = tuple(f"torch.{part}" for part in ("distributed", "_C._distributed_rpc", "_C._distributed_autograd"))
_IGNORED = {"_pybind11_conduit_v1_"}
_UNKNOWN = object()
"""The default of a parameter whose text is no literal."""


class Difference(NamedTuple):
    """A name of torch's ``module`` that is missing here, or whose signature accepts less."""

    module: str
    name: str
    detail: str

    @property
    def is_missing(self) -> bool:
        """Whether the name is missing."""
        return not self.detail


def differences() -> Iterator[Difference]:
    """All differences of the modules in :data:`MODULES`."""
    for path in MODULES:
        torch_module = importlib.import_module(f"torch.distributed.{path}")
        own_module = importlib.import_module(f"zmqgrad.{path}")
        for name in sorted(names_of(torch_module)):
            theirs = getattr(torch_module, name)
            ours = getattr(own_module, name, _UNKNOWN)
            if ours is _UNKNOWN:
                yield Difference(path, name, "")
            elif ours is not theirs and not isinstance(theirs, (ModuleType, enum.EnumMeta)):
                yield from _compare(path, name, theirs, ours)


def names_of(module: ModuleType) -> Iterator[str]:
    """The names that a module of torch defines, without what it imports from elsewhere."""
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        if isinstance(value, ModuleType):
            if value.__name__.startswith(f"{module.__name__}."):
                yield name
            continue
        # What Python 3.13 shows for a dict is the module of its type, which says nothing.
        origin = None if isinstance(value, Collection) else getattr(value, "__module__", None)
        if (origin or _OWN[0]).startswith(_OWN):
            yield name


def _compare(path: str, name: str, theirs: Any, ours: Any) -> Iterator[Difference]:
    if inspect.isclass(theirs):
        if theirs.__init__ is not object.__init__ and parameters_of(theirs.__init__):
            yield from _compare_signatures(path, name, theirs.__init__, ours.__init__)
        bases = [base for base in theirs.__mro__ if base.__module__.startswith(_OWN)]
        fields = getattr(ours, "__dataclass_fields__", {})
        for member in sorted({each for base in bases for each in vars(base)} - _IGNORED):
            if member.startswith("__") or member in fields:
                continue
            if not hasattr(ours, member):
                yield Difference(path, f"{name}.{member}", "")
            else:
                yield from _compare_signatures(
                    path, f"{name}.{member}", getattr(theirs, member), getattr(ours, member)
                )
    elif callable(theirs):
        yield from _compare_signatures(path, name, theirs, ours)
    elif isinstance(theirs, (int, float, str)) and theirs != ours:
        yield Difference(path, name, f"{theirs!r} is {ours!r} here")


def _compare_signatures(path: str, name: str, theirs: Any, ours: Any) -> Iterator[Difference]:
    wanted, offered = parameters_of(theirs), parameters_of(ours)
    if wanted is not None and offered is not None:
        detail = lacks(wanted, offered)
        if detail:
            yield Difference(path, name, detail)


def parameters_of(function: Any) -> list[Parameter] | None:
    """The parameters of a function or method without ``self``; None if they are not known."""
    if not callable(function):
        return None
    try:
        found = list(inspect.signature(function).parameters.values())
    except ValueError:
        return _from_docstring(function.__doc__ or "")
    own = found[1:] if found and found[0].name == "self" else found
    if [p.kind for p in own] == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]:
        return _from_docstring(function.__doc__ or "")  # a wrapper that forwards to a function of C++
    return own


def _from_docstring(text: str) -> list[Parameter] | None:
    """Parameters by the signature that pybind11 writes into a docstring: of overloads, the last one."""
    lines = [line.strip() for line in text.strip().splitlines()]
    overloads = [line.split(" ", 1)[1] for line in lines if line.split(".")[0].isdecimal()]
    signatures = overloads or [line for line in lines[:1] if "(" in line]
    if not signatures:
        return None
    try:
        tree = ast.parse(f"def {signatures[-1]}: ...").body[0]
    except SyntaxError:
        return None
    assert isinstance(tree, ast.FunctionDef)
    args = tree.args.posonlyargs + tree.args.args
    defaults = [None] * (len(args) - len(tree.args.defaults)) + list(tree.args.defaults)
    found = []
    for arg, default in zip(args, defaults, strict=True):
        nameless = arg.arg.startswith("arg") and arg.arg[3:].isdecimal()
        kind = Parameter.POSITIONAL_ONLY if nameless else Parameter.POSITIONAL_OR_KEYWORD
        found.append((arg.arg, kind, Parameter.empty if default is None else _literal(default)))
    if any(kind is Parameter.POSITIONAL_OR_KEYWORD for _, kind, _ in found[:1]) and found[0][0] == "self":
        found = found[1:]
    return [Parameter(name, kind, default=default) for name, kind, default in found]


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN


def lacks(wanted: list[Parameter], offered: list[Parameter]) -> str:
    """What ``offered`` does not accept that ``wanted`` does; empty if nothing."""
    by_name = {p.name: p for p in offered}
    kinds = {p.kind for p in offered}
    takes_all = Parameter.VAR_POSITIONAL in kinds and Parameter.VAR_KEYWORD in kinds
    positional = [
        p for p in offered if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    problems, used = [], set()
    for i, theirs in enumerate(wanted):
        if theirs.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            if theirs.kind not in kinds:
                problems.append(f"no {theirs}")
            continue
        if theirs.kind is Parameter.KEYWORD_ONLY:
            ours = by_name.get(theirs.name)
        else:
            ours = positional[i] if i < len(positional) else None
        if ours is None:
            if not takes_all:
                problems.append(f"no {theirs.name}")
            continue
        used.add(ours.name)
        if theirs.kind is Parameter.POSITIONAL_OR_KEYWORD and (
            ours.name != theirs.name or ours.kind is Parameter.POSITIONAL_ONLY
        ):
            problems.append(f"{theirs.name} is named {ours.name}")
        if theirs.default is not _UNKNOWN and ours.default != theirs.default:
            problems.append(
                f"the default of {theirs.name} is {_shown(ours.default)}, not {_shown(theirs.default)}"
            )
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    for ours in offered:
        if ours.name not in used and ours.default is Parameter.empty and ours.kind not in variable:
            problems.append(f"{ours.name} is required")
    return "; ".join(problems)


def _shown(default: Any) -> str:
    return "missing" if default is Parameter.empty else repr(default)
