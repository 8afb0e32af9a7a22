"""Errors that futures hold, to be raised as often as somebody waits.

Note [Errors of futures]: what a future holds is out of the garbage collector's sight, in C++. An exception
that was raised refers to the frames that it went through, and these to the future that it came from: held
there, the two would live for ever. So a future holds a copy that was never raised; ``wait`` raises another.
"""

from __future__ import annotations

import copy
import logging
import traceback
from typing import Any

logger = logging.getLogger(__name__)


CAUSES = 8
"""How many causes behind each other are kept: of some, there is no end."""


class Unmade:
    """An exception as its class, what it shows, and what it holds: to be made again without its ``__init__``.

    Pickle and ``copy`` call the class with the ``args`` of the exception. Those are what ``__init__`` gave to
    that of its base: one text, often, where the class itself wants two things, or one by name.
    """

    def __init__(self, error: BaseException) -> None:
        self._kind, self._args, self._state = type(error), error.args, vars(error)

    @staticmethod
    def fits(error: BaseException) -> bool:
        """Is all of ``error`` in these? Not where its class has a manner of its own (OSError, ...)."""
        return type(error).__reduce__ is BaseException.__reduce__

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self._kind, self._args, self._state)


class Emptied(Unmade):
    """An exception without what it holds, which is too large to travel."""

    def __init__(self, error: BaseException) -> None:
        self._kind, self._args, self._state = type(error), ("",), {}


def _make(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def _remade(error: BaseException) -> BaseException:
    return _make(type(error), error.args, vars(error)) if Unmade.fits(error) else error


def anew(error: BaseException, causes: int = CAUSES) -> Any:
    """A copy of ``error``, and of its causes, that was never raised; itself if it cannot be copied."""
    again = _copy(error)
    if type(again) is not type(error):
        return error
    again.args = error.args  # where the class makes a text of its argument, that has been done
    cause = error.__cause__
    again.__cause__ = None if cause is None or not causes else anew(cause, causes - 1)
    again.__suppress_context__ = error.__suppress_context__
    return again


def _copy(error: BaseException) -> BaseException:
    """A copy; itself, if its class (user code) lets nobody make one."""
    for copied in (copy.copy, _remade):
        try:
            return copied(error)
        except Exception as e:
            logger.debug("%s cannot be copied: %s", type(error).__qualname__, e)
    return error


def raise_anew(error: Exception) -> None:
    """Called by torch for what a failed future holds."""
    raise anew(error)


def error_of_callback(error: Exception) -> RuntimeError:
    """What a callback raised as torch tells it; where, is told by a note, as the traceback goes."""
    told = error
    if not isinstance(told, RuntimeError):
        said = "Got the following error when running the callback"
        told = RuntimeError(f"{said}: {type(error).__name__}: {error}")
        told.__cause__ = error
    where = "".join(traceback.format_tb(error.__traceback__)[1:])
    vars(told)["__notes__"] = [*getattr(told, "__notes__", ()), f"Raised in a callback:\n{where}"]
    return told
