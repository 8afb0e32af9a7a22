"""Lets the kernel kill a worker when its agent dies, even by SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """A function for the child to call: from then on the kernel kills it when its parent dies.

    The kernel counts the thread that forked as the parent, so it must live as long as the worker may. None
    where the system has no such signal (outside of Linux).
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def request_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl, so there will be no signal
            os._exit(1)

    return request_death_signal
