"""TorchScript functions and modules in payloads.

A function that the callee has compiled as well goes by its name. Whatever else TorchScript has made goes by
value, as ``torch.jit.save`` writes it: code, parameters, buffers and attributes, of which the callee gets a
copy. Script code that makes remote calls itself cannot be compiled: those operators are of torch's own RPC.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zmqgrad.errors import OperatorError

_PREFIX = "__torch__."
"""So begin the names of what Python modules have compiled."""


def scripted_name(function: Any) -> tuple[str, str]:
    """Module and name where a program that was not told otherwise keeps ``function``."""
    module, _, name = function.qualified_name.removeprefix(_PREFIX).rpartition(".")
    return module or "__main__", name


def reduce_script(obj: Any) -> tuple[Any, ...] | None:
    """As ``__reduce__``, if ``obj`` is a function or module of TorchScript."""
    if isinstance(obj, torch.jit.ScriptFunction):
        arguments = _arguments(obj)
        defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        return _load_function, (_saved(obj), obj.name, [a.name for a in arguments], defaults)
    if isinstance(obj, torch.jit.ScriptModule):
        return _load_module, (_saved(obj),)
    return None


def _arguments(function: Any) -> list[Any]:
    arguments: list[Any] = function.schema.arguments
    return arguments


def _saved(obj: Any) -> bytes:
    file = io.BytesIO()
    torch.jit.save(obj, file)
    return file.getvalue()


def _load_module(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]


def _load_function(
    saved: bytes, name: str, arguments: list[str], defaults: dict[str, Any]
) -> ArrivedFunction:
    return ArrivedFunction(_load_module(saved), name, arguments, defaults)


class ArrivedFunction:
    """A script function that came by value: the code of a saved one has lost its defaults."""

    def __init__(
        self, module: Callable[..., Any], name: str, arguments: Sequence[str], defaults: Mapping[str, Any]
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self._module = module
        self._arguments = arguments
        self._defaults = defaults

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rest = self._arguments[len(args) :]
        given = {name: self._defaults[name] for name in rest if name in self._defaults}
        return self._module(*args, **{**given, **kwargs})

    def __repr__(self) -> str:
        return f"<script function {self.__name__}({', '.join(self._arguments)})>"


def check_script_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """See that ``function`` takes as many arguments, by these names; of which types is left to the callee.

    Raises:
        OperatorError: otherwise.
    """
    schema, arguments = function.schema, _arguments(function)
    if len(args) > len(arguments):
        raise OperatorError(
            f"{schema.name}() expected at most {len(arguments)} argument(s) but received {len(args)} "
            f"argument(s). Declaration: {schema}"
        )
    names = [argument.name for argument in arguments]
    for name in kwargs:
        if name not in names:
            raise OperatorError(
                f"Unknown keyword argument '{name}' for operator '{schema.name}'. Schema: {schema}"
            )
    for argument in arguments[len(args) :]:
        if argument.name not in kwargs and not argument.has_default_value():
            raise OperatorError(
                f"{schema.name}() is missing value for argument '{argument.name}'. Declaration: {schema}"
            )
