"""Ends for what people forget to close.

Sockets and contexts of ZeroMQ that are left to the garbage collector can hang it: of a cycle, it may end a
context before the sockets in it, and wait for them for ever. So what holds some is kept alive by an
:class:`Ending` until it is closed: on request, after its owner became garbage, or at the interpreter's end.
"""

from __future__ import annotations

import _thread
import atexit
import os
import weakref
from collections.abc import Callable

_open: set[Ending] = set()


class Ending:
    """Calls ``close`` once ``owner`` is garbage, if not before; it must not refer to ``owner``.

    You must see to it that ``close`` may be called twice, and in any thread.
    """

    def __init__(self, owner: object, close: Callable[[], None]) -> None:
        self._close = close
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(owner, self._forgotten)
        self._finalizer.atexit = False  # see below: not one by one in the order of their birth
        _open.add(self)

    def now(self) -> None:
        """Close now. In a fork of the process that made this, nothing: the sockets are the parent's."""
        self._finalizer.detach()
        if os.getpid() != self._pid:
            return
        try:
            self._close()
        finally:
            _open.discard(self)  # not before: the interpreter's end waits for those under way

    def _forgotten(self) -> None:
        # A finalizer can run at any line of any thread, with a lock held that closing needs (DESIGN 16.3).
        # This starts a thread without taking a lock of Python's, as threading.Thread would.
        try:
            _thread.start_new_thread(self.now, ())
        except RuntimeError:
            return  # no thread to be had: the interpreter's end will see to it


@atexit.register
def _close_all() -> None:
    """Before the interpreter takes modules and threads apart."""
    for ending in list(_open):
        ending.now()
