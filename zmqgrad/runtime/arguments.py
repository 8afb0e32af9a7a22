"""Checks of arguments that many public functions take, with errors that name the argument."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

from zmqgrad.errors import ArgumentTypeError, ConfigurationError

T = TypeVar("T")

MAX_SECONDS = 1e12
"""Longest time of a setting, except for infinity: no limit."""


def as_list(values: Iterable[T], expected: str) -> list[T]:
    """Check that ``values`` are several, and return them as a list. An error begins with ``expected``.

    Raises:
        ArgumentTypeError: if they are not, or are a string.
    """
    try:
        each = None if isinstance(values, (str, bytes)) else iter(values)
    except TypeError:  # also of what can be iterated by its type, such as a tensor without dimensions
        each = None
    if each is None:
        raise ArgumentTypeError(f"{expected}, not the {type(values).__name__} {values!r:.60}")
    return list(each)


def as_integer(value: Any, what: str) -> int:
    """Check that ``value`` is an integer, and return it as an int. An error begins with ``what`` it is.

    Raises:
        ArgumentTypeError: if it is not.
    """
    try:
        return int(operator.index(value))  # a bool or a numpy integer becomes an int
    except TypeError:
        raise ArgumentTypeError(f"{what} must be an int, not {type(value).__name__}") from None


def check_seconds(name: str, value: object, least: float = 0.001) -> None:
    """Raise ConfigurationError unless ``value`` is a number of seconds that is at least ``least``."""
    valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not valid or not (least <= value < MAX_SECONDS or value == math.inf):  # type: ignore[operator]
        raise ConfigurationError(
            f"{name} is {value!r:.60}; it must be a number of seconds, at least {least:g}"
        )


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise ConfigurationError unless ``value`` is an integer from ``least`` to ``most``; None: no limit."""
    valid = isinstance(value, int) and not isinstance(value, bool)
    if not valid or value < least or (most is not None and value > most):  # type: ignore[operator]
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigurationError(f"{name} is {value!r}; it must be an integer, {bounds}")


def check_callable(callback: object, what: str = "A callback") -> None:
    """Check that ``callback`` can be called. An error says ``what`` it is.

    Raises:
        ArgumentTypeError: if it cannot.
    """
    if not callable(callback):
        raise ArgumentTypeError(f"incompatible function arguments. {what} must be callable, not {callback!r}")


def check_instance(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raises ArgumentTypeError if ``value`` is no ``kind``, which the error calls ``expected``."""
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{name} must be {expected}, not {type(value).__name__}")
