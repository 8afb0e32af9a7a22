"""Managed blocking: a thread notifies its pool before it waits.

A thread of a :class:`~zmqgrad.runtime.thread_pool.ThreadPool` that waits for another call does not count as
working, so the pool may start another thread in its place. Nested calls of any depth therefore cannot exhaust
the pool. Every wait of this library goes through :func:`blocking_section`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from zmqgrad.errors import RpcError
from zmqgrad.runtime import collector

logger = logging.getLogger(__name__)


class ManagedPool(Protocol):
    """A thread pool that is notified when one of its threads blocks."""

    def blocked(self) -> Any:
        """Returns a context manager for the wait."""

    def reads_here(self) -> bool:
        """Whether the calling thread is the one that reads tasks."""


class _ThreadState(threading.local):
    pool: ManagedPool | None = None
    """The pool that the calling thread belongs to."""
    all_depend_on_it: bool = False
    """Whether the calling thread runs what ends all waits, such as the timer."""
    pause: Callable[[Any], Any] | None = None
    """Wraps the waits of the calling thread in a context manager that leaves to others what it uses."""

    nothing: AbstractContextManager[object] = nullcontext()
    """A context manager without effect."""

    def __init__(self) -> None:
        self.nothing = threading.RLock()  # which no other thread has. Faster than one written in Python


thread_state = _ThreadState()
"""For waits so short that the cost of :func:`blocking_section` would be noticeable."""

used_by_a_pool = False
"""Whether any thread of this process ever belonged to a pool. A third of the cost of reading
``thread_state``."""


def set_pool(pool: ManagedPool | None) -> None:
    """Sets the pool that the calling thread belongs to."""
    global used_by_a_pool
    used_by_a_pool = True
    thread_state.pool = pool


def may_wait_for_others() -> bool:
    """Whether the calling thread may wait for another worker.

    Not if other waits end only through this thread. The library's own code does not wait there, but a
    finalizer of the program (``__del__``) may run in any thread, also while that holds a lock.
    """
    if collector.running and collector.interrupts_library():
        return False
    state = thread_state
    return not state.all_depend_on_it and (state.pool is None or not state.pool.reads_here())


def check_may_wait() -> None:
    """Checks that the calling thread may wait: see :func:`may_wait_for_others`.

    Raises:
        RpcError: if not.
    """
    if not may_wait_for_others():
        error = RpcError(
            f"nothing can be waited for in {threading.current_thread().name} just now: a finalizer (__del__) "
            f"that runs there would stop all other calls. In finalizers do not wait for results"
        )
        logger.warning("%s", error)  # what a finalizer raises reaches no caller
        raise error


def blocking_section() -> Any:
    """Returns a context manager for a wait in the calling thread."""
    state = thread_state
    pool, pause = state.pool, state.pause
    wait = state.nothing if pool is None else pool.blocked()
    return wait if pause is None else pause(wait)


@contextmanager
def holding(lock: threading.Lock | threading.RLock, timeout: float = -1.0) -> Iterator[bool]:
    """Hold ``lock``, for which to wait counts as a wait. Yields whether it is held.

    Ctrl-C at any moment leaves it to other threads: the call of C that acquires it also notes it.

    Args:
        lock: to be acquired, and released afterwards.
        timeout: how many seconds to wait at most; -1: no limit.
    """
    held: list[bool] = []
    try:
        held.extend(map(lock.acquire, (False,)))
        if True not in held:
            with blocking_section():
                held.extend(map(lock.acquire, (True,), (timeout,)))
        yield True in held
    finally:
        if True in held:
            lock.release()


class Bell:
    """What any thread rings, and one waits for.

    As ``threading.Event``, whose lock Ctrl-C can leave locked for ever: here all that locks is of C.
    """

    def __init__(self) -> None:
        self._rung: SimpleQueue[None] = SimpleQueue()

    def ring(self, *_: object) -> None:
        """Wake the thread that waits, or that will wait next. Never blocks."""
        self._rung.put(None)

    def wait(self, seconds: float | None) -> bool:
        """Wait up to ``seconds`` (None: no limit). Returns whether it has been rung since the last wait."""
        try:
            with blocking_section():
                self._rung.get(timeout=seconds)
        except Empty:
            return False
        while not self._rung.empty():
            self._rung.get()
        return True
