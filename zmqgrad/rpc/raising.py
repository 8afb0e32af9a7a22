"""Copies of exceptions, so that the error of a future can be raised by each ``wait``.

Note [Errors of futures]: a future holds its result in C++, where the garbage collector does not see it. A
raised exception refers to the frames it passed through, and these refer to the future: such a cycle would
never be freed. So a future holds a copy that was never raised, and ``wait`` raises another copy.
"""

from __future__ import annotations

import copy
import logging
import traceback
from typing import Any

logger = logging.getLogger(__name__)


CAUSES = 8
"""How many chained causes are kept: some chains are endless."""


class PickledException:
    """An exception as its class, ``args`` and ``__dict__``, to be rebuilt without calling its ``__init__``.

    Pickle and ``copy`` call the class with the ``args`` of the exception. These are the arguments of the base
    class's ``__init__``: often one text, where the class itself needs two arguments, or one by keyword.
    """

    def __init__(self, error: BaseException) -> None:
        self._kind, self._args, self._state = type(error), error.args, vars(error)

    @staticmethod
    def fits(error: BaseException) -> bool:
        """Whether these describe ``error``. False for classes with their own ``__reduce__`` (OSError)."""
        return type(error).__reduce__ is BaseException.__reduce__

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._kind, self._args, self._state)


class StrippedException(PickledException):
    """An exception without its text and ``__dict__``, which are too large to be sent."""

    def __init__(self, error: BaseException) -> None:
        self._kind, self._args, self._state = type(error), ("",), {}


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def _rebuilt(error: BaseException) -> BaseException:
    return _rebuild(type(error), error.args, vars(error)) if PickledException.fits(error) else error


def copy_exception(error: BaseException, causes: int = CAUSES) -> Any:
    """Copy ``error`` and its causes, without tracebacks. Returns ``error`` itself if it cannot be copied."""
    copied = _copy(error)
    if type(copied) is not type(error):
        return error
    copied.args = error.args  # the class may have made a text of its argument already
    cause = error.__cause__
    copied.__cause__ = None if cause is None or not causes else copy_exception(cause, causes - 1)
    copied.__suppress_context__ = error.__suppress_context__
    return copied


def _copy(error: BaseException) -> BaseException:
    """A copy, or ``error`` itself if its class (user code) cannot be copied."""
    for method in (copy.copy, _rebuilt):
        try:
            return method(error)
        except Exception as e:
            logger.debug("%s cannot be copied: %s", type(error).__qualname__, e)
    return error


def raise_copy(error: Exception) -> None:
    """Raise a copy of the error of a future; torch calls this in ``wait`` and ``value``."""
    raise copy_exception(error)


def callback_error(error: Exception) -> RuntimeError:
    """The RuntimeError that torch sets for ``error``, raised in a callback; a note has its traceback."""
    reported = error
    if not isinstance(reported, RuntimeError):
        text = "Got the following error when running the callback"
        reported = RuntimeError(f"{text}: {type(error).__name__}: {error}")
        reported.__cause__ = error
    where = "".join(traceback.format_tb(error.__traceback__)[1:])
    vars(reported)["__notes__"] = [*getattr(reported, "__notes__", ()), f"Raised in a callback:\n{where}"]
    return reported
