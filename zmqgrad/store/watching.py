"""Watching as a loop, ``for event in store.watch("key")``, in threads and in asyncio."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from zmqgrad.errors import StoreTimeoutError
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.followers import Backlog, WatchEvent
from zmqgrad.store.topics import Target

if TYPE_CHECKING:
    import asyncio


class Inbox:
    """Takes events until somebody fetches them. Does not know the store that they come from."""

    def __init__(self) -> None:
        self._condition = threading.Condition()  # guards all that follows
        self._events = Backlog()
        self._ended = False
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def __call__(self, event: WatchEvent) -> None:
        """Keep ``event``."""
        with self._condition:
            if not self._ended:
                self._events.add(event)
            self._wake()

    def end(self) -> None:
        """Nothing more will come: who waits, and whoever comes when all has been fetched, is told so."""
        with self._condition:
            self._ended = True
            self._wake()

    def _wake(self) -> None:
        self._condition.notify_all()
        sleepers, self._sleepers = self._sleepers, []
        for loop, future in sleepers:
            try:
                loop.call_soon_threadsafe(_set, future)
            except RuntimeError:
                continue  # that loop has ended, and nobody sleeps in it

    def _fetch(self) -> WatchEvent | None:
        """The next event; None if none is there. Called with the lock held. ``EOFError`` at the end."""
        if self._events:
            return self._events.pop()
        if self._ended:
            raise EOFError
        return None

    def wait(self, deadline: Deadline) -> WatchEvent | None:
        """The next event; None if none came by ``deadline``.

        Raises:
            EOFError: if none will come any more.
        """
        with self._condition:
            while True:
                event = self._fetch()
                if event is not None or deadline.passed():
                    return event
                with blocking_section():
                    self._condition.wait(deadline.timeout())

    async def sleep(self, deadline: Deadline) -> WatchEvent | None:
        """As :meth:`wait`, for a task: cancelled, it has taken no event."""
        import asyncio  # which whoever awaits has loaded; others should not have to

        while True:
            with self._condition:
                event = self._fetch()
                if event is not None or deadline.passed():
                    return event
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._sleepers.append((loop, future))
            await asyncio.wait([future], timeout=deadline.timeout())


class Watch:
    """The changes of a key, or of all that begin alike: ``for`` or ``async for`` gives them in order.

    Whoever is slow may miss values that were soon replaced, never the last one of a key. The loop ends when
    this, or the store, is closed. You should close it, or use it in a ``with``.
    """

    def __init__(self, target: Target, timeout: float | None, inbox: Inbox, stop: Callable[[], None]) -> None:
        self._target = target
        self._timeout = timeout
        self._inbox = inbox
        self._stop = stop

    def next(self, timeout: float | None = None) -> WatchEvent:
        """The next event, which may take ``timeout`` seconds to come; None: as long as it takes.

        Raises:
            StoreTimeoutError: if none came within ``timeout``.
            EOFError: if none will come any more.
        """
        return self._there(self._inbox.wait(Deadline.after(timeout)), timeout)

    def _there(self, event: WatchEvent | None, timeout: float | None) -> WatchEvent:
        if event is None:
            raise StoreTimeoutError(f"{self!r}: nothing changed within {timeout:g} s")
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
            return self._there(await self._inbox.sleep(Deadline.after(self._timeout)), self._timeout)
        except EOFError:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Watch no more; a loop over this ends when it has seen what had come. Idempotent."""
        self._inbox.end()
        self._stop()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Watch of {self._target!r}>"


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():  # or its task was cancelled
        future.set_result(None)
