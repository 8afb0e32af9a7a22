"""Function references: ``module:qualified.name`` in a call, resolved by the callee."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch

from zmqgrad.errors import FunctionNotFoundError, ProtocolError
from zmqgrad.rpc.serialization.scripts import scripted_name

MAIN_NAMES = ("__main__", "__mp_main__")
"""Names of the main module, in a process and in the processes that it spawns."""

_TORCH_FUNCTION_MODULES = ("torch.nn.functional", "torch.linalg", "torch.fft", "torch.special")

TORCH_OPERATOR = "_VariableFunctionsClass."
"""Prefix of the qualified names of functions such as ``torch.add``."""


def reference_to(function: Any, main_by_reference: bool = True) -> str:
    """Return the reference by which a peer finds ``function``, or an empty string if it has none."""
    if type(function) is types.FunctionType:  # most are found in few steps
        home, short = function.__module__, function.__qualname__
        found = getattr(sys.modules.get(home), short, None) if type(home) is str else None
        if found is function and home not in MAIN_NAMES and "." not in short:
            return f"{home}:{short}"
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    module = getattr(function, "__module__", None)
    if not isinstance(name, str) or isinstance(function, types.MethodType):
        return ""
    if module in MAIN_NAMES:
        return f"__main__:{name}" if main_by_reference and _resolves_to("__main__", name, function) else ""
    if name.startswith(TORCH_OPERATOR):  # their qualified names cannot be resolved
        return _builtin_reference(function)
    if isinstance(module, str) and _resolves_to(module, name, function):
        return f"{module}:{name}"
    if isinstance(function, torch.jit.ScriptFunction):
        module, short = scripted_name(function)
        if module == "__main__" and not main_by_reference:
            return ""
        return f"{module}:{short}" if _resolves_to(module, short, function) else ""
    return _builtin_reference(function)


def _builtin_reference(function: Any) -> str:
    if isinstance(function, types.BuiltinFunctionType):
        short = function.__name__
        if getattr(torch, short, None) is function:  # most functions
            return f"torch:{short}"
        for module in _TORCH_FUNCTION_MODULES:
            if _resolves_to(module, short, function):
                return f"{module}:{short}"
    return ""


def _resolves_to(module: str, name: str, function: Any) -> bool:
    found: Any = sys.modules.get(module)
    if "." not in name:
        return getattr(found, name, None) is function
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return False
    return found is function


_METHOD = "rref:"


def method_reference(rref_id: int, name: str) -> str:
    """Return the reference of a method of a value that the callee owns."""
    return f"{_METHOD}{rref_id}:{name}"


def method_of(reference: str) -> tuple[int, str] | None:
    """Return RRef id and method name if ``reference`` names a method of a value, else None."""
    if not reference.startswith(_METHOD):
        return None
    _, rref_id, name = reference.split(":", 2)
    if not rref_id.isdecimal():
        raise ProtocolError(f"malformed method reference {reference!r}")
    return int(rref_id), name


def find_function(reference: str) -> Any:
    """Resolve ``reference`` in this process.

    Raises:
        FunctionNotFoundError: if its module cannot be imported or lacks that name.
    """
    module_name, _, qualname = reference.partition(":")
    module = sys.modules.get(module_name)
    try:
        found: Any = module if module is not None else importlib.import_module(module_name)
        if "." not in qualname:
            return getattr(found, qualname)
        for name in qualname.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as e:
        raise FunctionNotFoundError(
            f"cannot find function {qualname!r} of module {module_name!r} here ({e}); "
            f"the RPC pickler does not serialize the code of what the caller can import: it must be "
            f"importable on the callee as well"
        ) from e
    return found


def in_main(obj: Any) -> bool:
    """Whether ``obj`` can be found by name in the main module."""
    return getattr(obj, "__module__", None) in MAIN_NAMES and _resolves_to("__main__", obj.__qualname__, obj)
