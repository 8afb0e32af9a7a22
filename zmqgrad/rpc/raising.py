"""Copies of exceptions: for futures that raise them more than once, and for pickling.

Note [Errors of futures]: the garbage collector cannot see what a future holds in C++. A raised exception
refers to the frames that it passed through, and these refer to the future: stored in the future, the
exception would form a cycle that is never freed. So a future holds a copy that was never raised, and each
``wait`` raises another copy.
"""

from __future__ import annotations

import copy
import logging
import traceback
from typing import Any

logger = logging.getLogger(__name__)


MAX_CAUSES = 8
"""Length of the chain of causes that is copied: some chains are endless."""


class PickledException:
    """Pickles an exception as class, ``args`` and attributes, to be rebuilt without calling ``__init__``.

    Pickle and ``copy`` call the class with ``args``. That fails where ``__init__`` passes other arguments to
    its base class than it accepts itself.
    """

    def __init__(self, error: BaseException) -> None:
        self._kind, self._args, self._state = type(error), error.args, vars(error)

    @staticmethod
    def fits(error: BaseException) -> bool:
        """Whether this reproduces ``error``: not if its class has a ``__reduce__`` of its own (OSError)."""
        return type(error).__reduce__ is BaseException.__reduce__

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._kind, self._args, self._state)


class StrippedException(PickledException):
    """Pickles an exception without its arguments and attributes, which are too large to send."""

    def __init__(self, error: BaseException) -> None:
        self._kind, self._args, self._state = type(error), ("",), {}


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def _copy_without_init(error: BaseException) -> BaseException:
    return _rebuild(type(error), error.args, vars(error)) if PickledException.fits(error) else error


def copy_exception(error: BaseException, causes: int = MAX_CAUSES) -> Any:
    """Return a never-raised copy of ``error`` and its causes, or ``error`` itself if copying fails."""
    copied = _copy(error)
    if type(copied) is not type(error):
        return error
    copied.args = error.args  # __init__ may have built a text from its argument, now for the second time
    cause = error.__cause__
    copied.__cause__ = None if cause is None or not causes else copy_exception(cause, causes - 1)
    copied.__suppress_context__ = error.__suppress_context__
    return copied


def _copy(error: BaseException) -> BaseException:
    """Return a copy, or ``error`` itself if its class (user code) prevents copying."""
    for copier in (copy.copy, _copy_without_init):
        try:
            return copier(error)
        except BaseException as e:
            logger.debug("%s cannot be copied: %s", type(error).__qualname__, type(e))
    return error


def raise_copy(error: Exception) -> None:
    """Raise a copy of ``error``. Torch calls this for the error of a failed future."""
    raise copy_exception(error)


def error_of_callback(error: BaseException) -> RuntimeError:
    """Convert an error raised in a callback to torch's form; a note keeps the traceback, which gets lost."""
    converted = error
    if not isinstance(converted, RuntimeError):
        prefix = "Got the following error when running the callback"
        converted = RuntimeError(f"{prefix}: {type(error).__name__}: {_text(error)}")
        converted.__cause__ = error
    trace = "".join(traceback.format_tb(error.__traceback__)[1:])
    vars(converted)["__notes__"] = [*getattr(converted, "__notes__", ()), f"Raised in a callback:\n{trace}"]
    return converted


def _text(error: BaseException) -> str:
    """The text of ``error``, which code of the program makes."""
    try:
        return str(error)
    except BaseException as e:
        return f"(whose text cannot be made: {type(e).__name__})"
