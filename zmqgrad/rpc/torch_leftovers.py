"""Finds names of torch's RPC in a program that was changed to use this library, but not everywhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, ModuleType

logger = logging.getLogger(__name__)

_PACKAGES = (
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "torch._C._distributed_rpc",
    "torch._C._distributed_autograd",
    "torch.distributed.optim.optimizer",
    "torch.distributed.nn.api.remote_module",
)
"""Modules of torch that define what this library replaces."""

_GENERATED_BY_TORCH = "_remote_module_"

_LIBRARIES = ("site-packages", "dist-packages")
"""Directories of modules that are not the program's: what they import is seldom its mistake."""


@lru_cache(maxsize=1)
def warn_of_leftovers() -> None:
    """Log which names of torch's RPC the program's modules have imported, once per process."""
    found = {name: names for name, module in _program_modules() if (names := _names_in(module))}
    theirs = sys.modules.get("torch.distributed.rpc")
    if found and theirs is not None and theirs.__name__ in _PACKAGES:  # otherwise zmqgrad.install() warned
        logger.warning(
            "the program uses zmqgrad.rpc, but these names are still torch's: %s. Import them from "
            "zmqgrad.rpc, zmqgrad.autograd, zmqgrad.optim and zmqgrad.nn, or call zmqgrad.install() first",
            "; ".join(f"{name} ({', '.join(names)})" for name, names in found.items()),
        )


def _program_modules() -> Iterator[tuple[str, ModuleType]]:
    skipped = {*sys.stdlib_module_names, "torch", "zmqgrad", "__mp_main__"} - {"__main__"}
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        if root in skipped or not isinstance(module, ModuleType):
            continue
        path = vars(module).get("__file__") or ""
        if root.startswith(_GENERATED_BY_TORCH) or any(each in path for each in _LIBRARIES):
            skipped.add(root)
        else:
            yield name, module


def _names_in(module: ModuleType) -> list[str]:
    return sorted(name for name, value in list(vars(module).items()) if _is_of_torch(value))


def _is_of_torch(value: object) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.startswith(_PACKAGES)
    if not isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return False  # other objects may run code of the program when they are asked
    defined_in = value.__module__
    return isinstance(defined_in, str) and defined_in.startswith(_PACKAGES)
