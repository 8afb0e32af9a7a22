"""A one-shot outcome that one thread sets and others wait for.

Lighter than :class:`concurrent.futures.Future` (one lock, no condition), interruptible by Ctrl-C where
``torch.futures.Future.wait`` is not (DESIGN 16.10), and it tells the engine pool when a task blocks.
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


class Outcome(Generic[T]):
    """Set once, to a value or an error; waited for by any number of threads."""

    __slots__ = ("_callbacks", "_error", "_gate", "_guard", "_value")

    def __init__(self) -> None:
        self._value: T = _UNSET
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Outcome[T]], None]] | None = []
        self._guard = _thread.allocate_lock()  # guards _callbacks and the one-time setting
        self._gate = _thread.allocate_lock()  # held until the outcome is there
        self._gate.acquire()

    def done(self) -> bool:
        """Is it set?"""
        return self._callbacks is None

    def set(self, value: T) -> bool:
        """Set the value. False if it was set before (the first one counts)."""
        return self._settle(value, None)

    def fail(self, error: BaseException) -> bool:
        """Set an error. False if it was set before (the first one counts)."""
        return self._settle(_UNSET, error)

    def _settle(self, value: T, error: BaseException | None) -> bool:
        with self._guard:
            callbacks = self._callbacks
            if callbacks is None:
                return False
            self._value, self._error = value, error
            self._callbacks = None
        self._gate.release()
        for callback in callbacks:
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
        if self._callbacks is None:
            return True
        seconds = -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        with about_to_block():
            if self._gate.acquire(timeout=seconds):
                self._gate.release()
        return self.done()

    def result(self) -> T:
        """The value.

        Raises:
            the error, if one was set; ``RuntimeError`` if the outcome is not there yet.
        """
        if self._callbacks is not None:
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
        with self._guard:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        self._tell(callback)

    def __repr__(self) -> str:
        if not self.done():
            return f"<{type(self).__name__} pending>"
        said = repr(self._error) if self._error is not None else type(cast("Any", self._value)).__name__
        return f"<{type(self).__name__} {said}>"
