"""Writing to a socket without letting go of the interpreter.

Python lets go of it for each system call. With many calls on their way, the thread that reads their answers
takes it then, for one answer, and the sender has to wait until that sleeps again: two changes of threads for
each message. A write that does not block has no need of that.
"""

from __future__ import annotations

import ctypes
import os
import socket

_send = ctypes.PyDLL(None, use_errno=True).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t

_AT_ONCE = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)


def send_holding(number: int, message: bytes) -> int:
    """As ``send`` of the socket with descriptor ``number``, which never waits.

    Raises:
        BlockingIOError: if the kernel takes nothing now. OSError: if it cannot be written to.
    """
    written: int = _send(number, message, len(message), _AT_ONCE)
    if written < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))  # of the kind that the number says
    return written
