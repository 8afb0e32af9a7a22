"""TorchScript functions and modules in payloads.

A script function is sent by its qualified name, as torch's RPC does, so the callee must have compiled it as
well. A script module is sent as a copy, written by ``torch.jit.save``: code, parameters, buffers, attributes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zmqgrad.errors import OperatorError
from zmqgrad.rpc.serialization.context import RpcSerializable

_PREFIX = "__torch__."
"""Prefix of the qualified names of compiled Python functions."""


def scripted_name(function: Any) -> tuple[str, str]:
    """Module and name under which a script function is usually found, from its qualified name."""
    module, _, name = function.qualified_name.removeprefix(_PREFIX).rpartition(".")
    return module or "__main__", name


def reduce_script_module(module: torch.jit.ScriptModule) -> tuple[Any, ...]:
    """``__reduce__`` of a script module, which has none of its own."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    return _load_module, (file.getvalue(),)


def _load_module(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]


def check_script_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the number and the names of the arguments of a script function. The callee checks their types.

    Raises:
        OperatorError: with torch's text, if they do not match the schema; or if one of them is a reference.
    """
    schema = function.schema
    arguments = schema.arguments
    if any(isinstance(value, RpcSerializable) for value in (*args, *kwargs.values())):
        raise OperatorError(
            f"TorchScript knows only the references of torch's own RPC, so {schema.name}() cannot have one: "
            f"call it by a Python function that calls local_value() or to_here()"
        )
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
