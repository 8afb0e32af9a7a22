"""Copies of exceptions: for futures that raise them more than once, and for pickling.

Note [Errors of futures]: the garbage collector cannot see what a future holds in C++. A raised exception
refers to the frames that it passed through, and these refer to the future: stored in the future, the
exception would form a cycle that is never freed. So a future holds a copy that was never raised, and each
``wait`` raises another copy.

Note [Errors of values]: an RRef whose value could not be made keeps the error, with its traceback, which goes
to all who ask for the value. The frames may hold other RRefs, on whose owner an error holds this one: a cycle
that no garbage collector sees. So their variables are freed (:func:`forget_variables`), and each who asks
gets a copy (:func:`result_of`), or the error would go on to collect the frames of them all.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import traceback
from types import TracebackType
from typing import Any, TypeVar

from zmqgrad.runtime.future import Promise

logger = logging.getLogger(__name__)


MAX_CAUSES = 8
"""Length of the chain of causes that is copied: some chains are endless."""

T = TypeVar("T")

_ARGS, _CAUSE, _CONTEXT, _SUPPRESS, _TRACEBACK = (
    vars(BaseException)[name]
    for name in ("args", "__cause__", "__context__", "__suppress_context__", "__traceback__")
)  # by which they can be read and set whatever methods or properties the class of an error has


def args_of(error: BaseException) -> tuple[Any, ...]:
    """The arguments of ``error``, whatever its class says they are."""
    args: tuple[Any, ...] = _ARGS.__get__(error)
    return args


def traceback_of(error: BaseException) -> TracebackType | None:
    """The traceback of ``error``, whatever its class says it is."""
    trace: TracebackType | None = _TRACEBACK.__get__(error)
    return trace


def set_args(error: BaseException, args: tuple[Any, ...]) -> None:
    """Set the arguments of ``error``, whose class may be frozen."""
    _ARGS.__set__(error, args)


def set_cause(error: BaseException, cause: BaseException | None) -> None:
    """Set the cause of ``error``, whose class may be frozen."""
    _CAUSE.__set__(error, cause)


class PickledException:
    """Pickles an exception as class, ``args`` and attributes, to be rebuilt without calling ``__init__``.

    Pickle and ``copy`` call the class with ``args``. That fails where ``__init__`` passes other arguments to
    its base class than it accepts itself. Exceptions among ``args``, as in a group, are pickled so as well.
    """

    def __init__(self, error: BaseException) -> None:
        self._kind, self._state = type(error), vars(error)
        self._args = tuple([_with_pickled(argument) for argument in args_of(error)])

    @staticmethod
    def fits(error: BaseException) -> bool:
        """Whether this reproduces ``error``: not if its class has a ``__reduce__`` of its own (OSError)."""
        return type(error).__reduce__ is BaseException.__reduce__

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._kind, self._args, self._state)


class StrippedException(PickledException):
    """Pickles an exception without its arguments and attributes: too large, or nothing that can be sent."""

    def __init__(self, error: BaseException) -> None:
        self._kind, self._args, self._state = type(error), ("",), {}


def _with_pickled(argument: Any) -> Any:
    if isinstance(argument, BaseException) and PickledException.fits(argument):
        return PickledException(argument)
    kind = type(argument)
    return kind(map(_with_pickled, argument)) if kind in (list, tuple) else argument


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    set_args(error, args)
    vars(error).update(state)
    return error


def _copy_without_init(error: BaseException) -> BaseException:
    return _rebuild(type(error), args_of(error), vars(error)) if PickledException.fits(error) else error


def copy_exception(error: BaseException, causes: int = MAX_CAUSES) -> Any:
    """Return a never-raised copy of ``error`` and its causes, or ``error`` itself if copying fails."""
    copied = _copy(error)
    if type(copied) is not type(error):
        return error
    set_args(copied, args_of(error))  # __init__ may have built a text, now for the second time
    cause = _CAUSE.__get__(error)
    set_cause(copied, None if cause is None or not causes else copy_exception(cause, causes - 1))
    _SUPPRESS.__set__(copied, _SUPPRESS.__get__(error))
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


def forget_variables(error: BaseException) -> BaseException:
    """Free the variables in the tracebacks of ``error`` and of what led to it; returns ``error``.

    Except those of running functions, and of generators, which may go on.
    """
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        each = chain.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        chain += _CAUSE.__get__(each), _CONTEXT.__get__(each)
        for frame, _ in traceback.walk_tb(traceback_of(each)):
            if not frame.f_code.co_flags & _GENERATORS:
                with contextlib.suppress(RuntimeError):
                    frame.clear()
    return error


_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def result_of(promise: Promise[T]) -> T:
    """The value of ``promise``, which is done. Raises a copy of its error: see Note [Errors of values]."""
    error = promise.exception()
    if error is None:
        return promise.result()
    copied = copy_exception(error, causes=0)
    try:
        if copied is not error:
            for kept in (_CAUSE, _CONTEXT, _SUPPRESS, _TRACEBACK):
                kept.__set__(copied, kept.__get__(error))
        raise copied
    finally:
        del copied, error, promise  # the traceback refers to this frame


def error_of_callback(error: BaseException) -> RuntimeError:
    """Convert an error raised in a callback to torch's form; a note keeps the traceback, which gets lost."""
    converted = error
    if not isinstance(converted, RuntimeError):
        prefix = "Got the following error when running the callback"
        converted = RuntimeError(f"{prefix}: {type(error).__name__}: {_text(error)}")
        converted.__cause__ = error
    trace = "".join(traceback.format_tb(traceback_of(error))[1:])
    notes = vars(converted).get("__notes__")  # of the program: it may be anything
    kept = notes if isinstance(notes, list) else []
    vars(converted)["__notes__"] = [*kept, f"Raised in a callback:\n{trace}"]
    return converted


def _text(error: BaseException) -> str:
    """The text of ``error``, which code of the program makes."""
    try:
        return str(error)
    except BaseException as e:
        return f"(whose text cannot be made: {type(e).__name__})"
