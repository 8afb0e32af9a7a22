"""Finalizers for stores that are not closed.

Sockets and contexts of ZeroMQ must not be left to the garbage collector: in a cycle, it may terminate a
context before the sockets in it, and then wait for them forever. A :class:`Finalizer` keeps the resources
alive until they are closed: explicitly, after their owner was collected, or at interpreter exit.
"""

from __future__ import annotations

import _thread
import os
import weakref
from collections.abc import Callable

from zmqgrad.runtime.exit import run_at_exit

_open: dict[Finalizer, None] = {}


class Finalizer:
    """Calls ``close`` once ``owner`` was collected, if not before. ``close`` must not refer to ``owner``.

    ``close`` must be idempotent, and callable from any thread.
    """

    def __init__(self, owner: object, close: Callable[[], None]) -> None:
        self._close = close
        self._pid = os.getpid()
        weakref.finalize(owner, self._on_collected).atexit = False  # _close_all() does that
        _open[self] = None

    def close(self) -> None:
        """Close now. Does nothing in a forked child: the sockets belong to the parent."""
        if os.getpid() == self._pid:
            self._close()
        _open.pop(self, None)  # only now: interpreter exit waits for a close under way, or interrupted

    def _on_collected(self) -> None:
        if self not in _open:
            return
        # Finalizers run at any line of any thread, perhaps with a lock held that closing needs.
        # This starts a thread without taking a lock of Python's, as threading.Thread would.
        try:
            _thread.start_new_thread(self.close, ())
        except RuntimeError:
            return  # no more threads can be started; _close_all() closes it


@run_at_exit
def _close_all() -> None:
    """Close everything before the interpreter tears down modules and threads."""
    for finalizer in list(_open):
        finalizer.close()
