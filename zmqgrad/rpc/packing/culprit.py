"""What in a value cannot be sent, for the error that says so."""

from __future__ import annotations

import reprlib
import types
from collections.abc import Callable
from typing import Any

import torch

DEEPEST = 8
"""So many steps into a value are named when something in it cannot be sent."""


def shorten(value: Any) -> str:
    """``value`` for a message, in one line and cut short; whatever its own ``__repr__`` does."""
    return "a tensor" if isinstance(value, torch.Tensor) else " ".join(reprlib.repr(value).split())


def name_culprit(value: Any, travels: Callable[[Any], bool], names: tuple[str, ...] = ()) -> str:
    """Where in ``value`` the thing is that cannot be sent: ``its part [0].name (type): ``, or nothing.

    ``travels`` says whether something can be; ``names``: what the parts of ``value``, a tuple, are called.
    """
    path, seen = "", {id(value)}
    while (found := _first_bad(value, travels)) is not None:
        step, value = found
        path += step
        if id(value) in seen or path.count("[") + path.count(".") > DEEPEST:
            break
        seen.add(id(value))
    for number, name in enumerate(names):
        path = name + path.removeprefix(f"[{number}]") if path.startswith(f"[{number}]") else path
    return f"its part {path} ({type(value).__name__}): " if path else ""


def _first_bad(value: Any, travels: Callable[[Any], bool]) -> tuple[str, Any] | None:
    inner: list[tuple[str, Any]] = []
    if isinstance(value, (tuple, list)):
        inner = [(f"[{i}]", v) for i, v in enumerate(value)]
    elif isinstance(value, dict):
        inner = [(f"[{shorten(k)}]", v) for k, v in value.items()]
    elif isinstance(value, types.MethodType):
        inner = [(".__self__", value.__self__)]
    elif isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        inner = [(f".{n}", c) for n, c in zip(names, _contents(value), strict=True)]
        inner += [(f".{n}", value.__globals__[n]) for n in value.__code__.co_names if n in value.__globals__]
        inner += [(".__defaults__", value.__defaults__), (".__kwdefaults__", value.__kwdefaults__)]
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
        inner = [(f".{k}", v) for k, v in vars(value).items()]
    for step, member in inner:
        if not travels(member):
            return step, member
    return None


def _contents(function: types.FunctionType) -> list[Any]:
    """What a closure holds, in the order of its ``co_freevars``."""
    return [getattr(cell, "cell_contents", None) for cell in function.__closure__ or ()]
