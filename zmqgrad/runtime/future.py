"""A one-shot outcome that one thread sets and others wait for.

Lighter than :class:`concurrent.futures.Future` (no lock but those of threads that wait), interruptible by
Ctrl-C where ``torch.futures.Future.wait`` is not (DESIGN 16.10), and it tells the engine pool when a task
blocks.
"""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from zmqgrad.runtime.blocking import about_to_block

logger = logging.getLogger(__name__)

T = TypeVar("T")

_UNSET: Any = object()
_OPEN: Any = object()


class _Gate:
    """Where one thread waits for an outcome."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def open(self, _: object) -> None:
        """It is there."""
        self._lock.release()

    def wait(self, seconds: float) -> None:
        """Wait for that; -1: for ever."""
        self._lock.acquire(timeout=seconds)


class Outcome(Generic[T]):
    """Set once, to a value or an error; waited for by any number of threads."""

    __slots__ = ("_callbacks", "_done", "_error", "_value")

    def __init__(self) -> None:
        self._value: T = _UNSET
        self._error: BaseException | None = None
        self._done = False
        # Every step on this list is one that no other thread can interrupt. Whoever takes _OPEN out settles.
        self._callbacks: list[Any] = [_OPEN]

    def done(self) -> bool:
        """Is it set?"""
        return self._done

    def set(self, value: T) -> bool:
        """Set the value. False if it was set before (the first one counts)."""
        return self._settle(value, None)

    def fail(self, error: BaseException) -> bool:
        """Set an error. False if it was set before (the first one counts)."""
        return self._settle(_UNSET, error)

    def _settle(self, value: T, error: BaseException | None) -> bool:
        callbacks = self._callbacks
        try:
            callbacks.remove(_OPEN)
        except ValueError:
            return False
        self._value, self._error = value, error
        self._done = True
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:  # by whom it came from, who has seen that this is done
                break
            self._tell(callback)
        return True

    def _tell(self, callback: Callable[[Outcome[T]], None]) -> None:
        # One bad callback must cost neither the others nor the thread that brought the news.
        try:
            callback(self)
        except Exception:
            logger.exception("a callback of %r failed", self)

    def wait_done(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (None: for ever). True if the outcome is there."""
        if self._done:
            return True
        seconds = -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        gate = _Gate()
        self.then(gate.open)
        try:
            with about_to_block():
                gate.wait(seconds)
        finally:
            if not self._done:
                self._take_back(gate.open)
        return self._done

    def _take_back(self, callback: Callable[[Outcome[T]], None]) -> bool:
        """``callback`` need not be told. False: it has been, or is about to be."""
        try:
            self._callbacks.remove(callback)
        except ValueError:
            return False
        return True

    def result(self) -> T:
        """The value.

        Raises:
            the error, if one was set; ``RuntimeError`` if the outcome is not there yet.
        """
        if not self._done:
            raise RuntimeError("the outcome is not there yet; wait for it first")
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the error's traceback now holds this frame: make no cycle of it
        return self._value

    def wait(self, timeout: float | None = None) -> T:
        """Wait up to ``timeout`` seconds and give the value.

        Raises:
            TimeoutError: if it did not come in time; otherwise the error that was set.
        """
        if not self.wait_done(timeout):
            raise TimeoutError(f"no outcome within {timeout} s")
        try:
            return self.result()
        finally:
            del self  # as in result()

    def error(self) -> BaseException | None:
        """The error, if the outcome is there and is one."""
        return self._error

    def then(self, callback: Callable[[Outcome[T]], None]) -> None:
        """Call ``callback(self)`` when the outcome is there (at once if it is), in the setting thread.

        An exception that it raises is logged; it reaches nobody else.
        """
        if not self._done:
            self._callbacks.append(callback)
            # Set meanwhile, perhaps after whoever did it had looked for the last time.
            if not self.done() or not self._take_back(callback):
                return
        self._tell(callback)

    def __repr__(self) -> str:
        if not self.done():
            return f"<{type(self).__name__} pending>"
        said = repr(self._error) if self._error is not None else type(cast("Any", self._value)).__name__
        return f"<{type(self).__name__} {said}>"
