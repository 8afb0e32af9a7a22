"""Iteration over changes, ``for event in store.watch("key")``, in threads and in asyncio."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from zmqgrad.errors import StoreTimeoutError
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.events import EventBacklog, EventHandler, WatchEvent
from zmqgrad.store.watch_targets import Target

if TYPE_CHECKING:
    import asyncio


class EventQueue(EventHandler):
    """Queues events until they are fetched. Holds no reference to the store."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards all that follows
        self._changed = threading.Condition(self._lock)
        self._events = EventBacklog()
        self._ended = False
        self._async_waiters: dict[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]], None] = {}

    def __call__(self, event: WatchEvent) -> None:
        """Queue ``event``."""
        with self._lock:
            if not self._ended:
                self._events.add(event)
            self._wake()

    def end(self) -> None:
        """End the queue: fetches fail once it is empty."""
        with self._lock:
            self._ended = True
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        waiters, self._async_waiters = self._async_waiters, {}
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_set, future)
            except RuntimeError:
                continue  # the loop is closed, so no task waits in it

    def _fetch(self) -> WatchEvent | None:
        """The next event, or None. Called with the lock held. Raises ``EOFError`` at the end."""
        if self._events:
            return self._events.pop()
        if self._ended:
            raise EOFError
        return None

    def wait(self, deadline: Deadline) -> WatchEvent | None:
        """Wait for the next event. Returns None at ``deadline``.

        Raises:
            EOFError: if the watch has ended.
        """
        with self._lock:
            while True:
                event = self._fetch()
                if event is not None or deadline.passed():
                    return event
                with blocking_section():
                    self._changed.wait(deadline.timeout())

    async def wait_async(self, deadline: Deadline) -> WatchEvent | None:
        """As :meth:`wait`, in asyncio. A cancelled wait has removed no event."""
        import asyncio  # loaded here, so that programs without asyncio do not pay for it

        while True:
            with self._lock:
                event = self._fetch()
                if event is not None or deadline.passed():
                    return event
                loop = asyncio.get_running_loop()
                waiter = loop, loop.create_future()
                self._async_waiters[waiter] = None
            try:
                await asyncio.wait([waiter[1]], timeout=deadline.timeout())
            finally:
                with self._lock:  # else those whose time ends would be kept until the next event
                    self._async_waiters.pop(waiter, None)


class Watch:
    """Iterator over the changes of a key or prefix, for ``for`` and ``async for``, in order.

    A slow loop may miss values that were soon replaced, never the last value of a key. The loop ends when the
    watch or the store is closed. You should close it, or use it in a ``with``.

    Example:
        >>> store = HashStore()
        >>> with store.watch("step", timeout=30) as changes:
        ...     store.set("step", "7")
        ...     print(next(changes).new)
        b'7'
    """

    def __init__(
        self, target: Target, timeout: float | None, queue: EventQueue, stop: Callable[[], None]
    ) -> None:
        self._target = target
        self._timeout = timeout
        self._queue = queue
        self._stop = stop

    def next(self, timeout: float | None = None) -> WatchEvent:
        """Wait for the next event, and return it.

        Args:
            timeout: in seconds; None: no limit.

        Raises:
            StoreTimeoutError: if there was none within ``timeout``.
            EOFError: if the watch has ended.
        """
        return self._checked(self._queue.wait(Deadline.after(timeout)), timeout)

    def _checked(self, event: WatchEvent | None, timeout: float | None) -> WatchEvent:
        if event is None:
            raise StoreTimeoutError(f"{self!r}: no change within {timeout:g} s")
        return event

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> WatchEvent:
        try:
            return self.next(self._timeout)
        except EOFError:
            raise StopIteration from None

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> WatchEvent:
        try:
            return self._checked(await self._queue.wait_async(Deadline.after(self._timeout)), self._timeout)
        except EOFError:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """End the watch. A loop over it ends after the events queued so far. Idempotent."""
        self._queue.end()
        self._stop()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Watch of {self._target!r}>"


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():  # it is when its task was cancelled
        future.set_result(None)
