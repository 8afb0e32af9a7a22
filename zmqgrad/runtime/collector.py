"""Where the garbage collector runs: the finalizers that it calls may find one of our locks held.

The collector runs at any line of any thread, and then the finalizers of the program: while this library is at
work in the thread, it may hold a lock that a call made by a finalizer needs, which would wait for itself. So
a finalizer that is called there must leave it to another thread to send, and cannot wait for an answer. The
library holds no lock while it calls the program, so anywhere else finalizers may do what they like.
"""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import Any

_OWN = __name__.partition(".")[0]

_CALLED_WITH_LOCKS = sys.stdlib_module_names | {"torch", "zmq", "msgspec", "cryptography"}
"""Packages whose functions this library calls while it holds a lock."""

thread = 0
"""The thread that runs the collector; there is one at most. While it is 0, nothing interrupts the library."""
_frame: FrameType | None = None  # where it was when the collector began


_noted: dict[str, Any] = {}
"""Holds "stop" once the collector has ended."""


def _note(phase: str, _: dict[str, Any]) -> None:
    global thread, _frame
    if phase == "start":
        _noted.clear()
        _frame, thread = sys._getframe().f_back, threading.get_ident()  # none: the thread is about to end
    else:
        _frame, thread = None, 0


# Ctrl-C may keep a Python function from noting the end, but not one of C. (It is raised, and ignored, there.)
gc.callbacks += [_note, _noted.__setitem__]


def interrupts_library() -> bool:
    """Whether the calling thread is in a finalizer for which the collector has interrupted this library."""
    if not thread or thread != threading.get_ident() or "stop" in _noted:
        return False
    frame = _frame
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == _OWN:
            return True
        if package not in _CALLED_WITH_LOCKS:
            return False
        frame = frame.f_back
    return False
