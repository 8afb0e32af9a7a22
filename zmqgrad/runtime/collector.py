"""Where the garbage collector runs: the finalizers that it calls may find one of our locks held.

The collector runs at any line of any thread, and then the finalizers of the program: while this library is at
work in the thread, it may hold a lock that a call made by a finalizer needs, which would wait for itself. So
a finalizer that is called there must leave it to another thread to send, and cannot wait for an answer. The
library holds no lock while it calls the program, so anywhere else finalizers may do what they like.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections import defaultdict
from functools import partial
from types import FrameType
from typing import Any

_OWN = __name__.partition(".")[0]

_CALLED_WITH_LOCKS = sys.stdlib_module_names | {"torch", "zmq", "msgspec", "cryptography"}
"""Packages whose functions this library calls while it holds a lock."""

running: defaultdict[object, int] = defaultdict(threading.get_ident)
"""Has the thread that runs the collector, if one does. While it is empty, nothing interrupts the library."""

_current_frame = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyEval_GetFrame", ctypes.pythonapi))
"""Returns the address of the calling thread's frame; None in a thread that is about to end, for which
``sys._getframe`` raises. (``sys._current_frames`` makes objects of the frames of all threads.)"""

_frames: defaultdict[object, int | None] = defaultdict(_current_frame)
"""Has where that thread was when the collector began, while it runs. So the frame exists then."""


def _noting(noted: defaultdict[object, Any]) -> object:
    """Returns an object: to read its attribute ``start`` fills ``noted``, and ``stop`` empties it."""

    class Note:
        start = property(noted.__missing__)
        stop = property(defaultdict[object, None](noted.clear).__missing__)

    return Note()


# Functions of C alone: Ctrl-C is raised by the next line of Python, and would be lost if that were one of a
# callback. It comes as a rule in a long call of C, in which the collector may run.
gc.callbacks += [partial(getattr, _noting(running)), partial(getattr, _noting(_frames))]


def interrupts_library() -> bool:
    """Whether the calling thread is in a finalizer for which the collector has interrupted this library."""
    here = threading.get_ident()
    if here not in running.values():
        return False
    address = next(iter(_frames.values()), None)
    frame: FrameType | None = ctypes.cast(address, ctypes.py_object).value if address else None
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == _OWN:
            return True
        if package not in _CALLED_WITH_LOCKS:
            return False
        frame = frame.f_back
    return False
