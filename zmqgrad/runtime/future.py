"""A one-shot result that one thread sets and other threads wait for.

Lighter than :class:`concurrent.futures.Future` (its only locks are those of waiting threads), interruptible
by Ctrl-C where ``torch.futures.Future.wait`` is not, and its waits are managed
(:mod:`~zmqgrad.runtime.blocking`).
"""

from __future__ import annotations

import _thread
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from zmqgrad.runtime.blocking import blocking_section

logger = logging.getLogger(__name__)

T = TypeVar("T")

_UNSET: Any = object()
_PENDING: Any = object()


class _Waiter:
    """Blocks one thread until a promise is done."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def wake(self, _: object) -> None:
        """The callback of the promise."""
        self._lock.release()

    def wait(self, seconds: float) -> None:
        """Waits for :meth:`wake`; -1 means no limit."""
        self._lock.acquire(timeout=seconds)


class Promise(Generic[T]):
    """Set once, to a value or an exception. Any number of threads may wait for it."""

    __slots__ = ("_callbacks", "_done", "_error", "_value")

    def __init__(self) -> None:
        self._value: T = _UNSET
        self._error: BaseException | None = None
        self._done = False
        # Every operation on this list is atomic. The thread that removes _PENDING sets the result.
        self._callbacks: list[Any] = [_PENDING]

    def done(self) -> bool:
        """Whether a result or an exception was set."""
        return self._done

    def set_exception(self, error: BaseException) -> bool:
        """Sets an exception. Returns False, without effect, if the promise was done."""
        return self.set_result(_UNSET, error)

    def set_result(self, value: T, error: BaseException | None = None) -> bool:
        """Sets the value, or ``error`` instead. Returns False, without effect, if the promise was done."""
        callbacks = self._callbacks
        try:
            callbacks.remove(_PENDING)
        except ValueError:
            return False
        self._value, self._error = value, error
        self._done = True
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:  # removed by the thread that added it, which calls it itself
                break
            self._call(callback)
        return True

    def _call(self, callback: Callable[[Promise[T]], None]) -> None:
        # A failing callback must affect neither the other callbacks nor the thread that sets the result.
        try:
            callback(self)
        except Exception:
            logger.exception("a callback of %r failed", self)

    def wait_done(self, timeout: float | None = None) -> bool:
        """Waits up to ``timeout`` seconds (None, infinite: no limit). Returns whether the promise is done."""
        if self._done:
            return True
        seconds = -1 if timeout is None or timeout > threading.TIMEOUT_MAX else max(0.0, timeout)
        waiter = _Waiter()
        self.add_done_callback(waiter.wake)
        try:
            with blocking_section():
                waiter.wait(seconds)
        finally:
            if not self._done:
                self._remove_callback(waiter.wake)
        return self._done

    def _remove_callback(self, callback: Callable[[Promise[T]], None]) -> bool:
        """Removes ``callback``. Returns False if it was called or is about to be."""
        try:
            self._callbacks.remove(callback)
        except ValueError:
            return False
        return True

    def result(self) -> T:
        """Returns the value of a promise that is done.

        Raises:
            RuntimeError: if the promise is not done. Otherwise the exception that was set.
        """
        if not self._done:
            raise RuntimeError("the result is not set yet; wait for it first")
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the traceback refers to this frame: avoid a reference cycle
        return self._value

    def wait(self, timeout: float | None = None) -> T:
        """Waits up to ``timeout`` seconds (None: no limit) and returns the value.

        Raises:
            TimeoutError: if the promise is not done in time. Otherwise the exception that was set.
        """
        if not self.wait_done(timeout):
            raise TimeoutError(f"no result within {timeout} s")
        try:
            return self.result()
        finally:
            del self  # as in result()

    def exception(self) -> BaseException | None:
        """Returns the exception, or None if the promise has a value or is not done."""
        return self._error

    def add_done_callback(self, callback: Callable[[Promise[T]], None]) -> None:
        """Calls ``callback(self)`` in the thread that sets the result, or at once if the promise is done.

        An exception that the callback raises is logged.
        """
        if not self._done:
            self._callbacks.append(callback)
            # The promise may have been set since, and its thread may have emptied the list before the append.
            if not self.done() or not self._remove_callback(callback):
                return
        self._call(callback)

    def __repr__(self) -> str:
        if not self.done():
            return f"<{type(self).__name__} pending>"
        text = repr(self._error) if self._error is not None else type(cast("Any", self._value)).__name__
        return f"<{type(self).__name__} {text}>"


def countdown(count: int, then: Callable[[], object]) -> Callable[[object], None]:
    """A callback that calls ``then`` when it has been called ``count`` times, in any threads."""
    left = itertools.count(count - 1, -1)  # ``next`` of it is atomic

    def on_done(_: object) -> None:
        if not next(left):
            then()

    return on_done
