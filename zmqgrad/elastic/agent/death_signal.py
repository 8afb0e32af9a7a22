"""Ends workers, and what they have started, when their agent dies, even by SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1

_REAP_SECONDS = 1.0

_SHELL = "/bin/sh"
_SCRIPT = 'read end; kill -s TERM -- "$@"; sleep 1; kill -s KILL -- "$@"'
"""Between the signals, processes that outlive their worker clean up: Python's resource tracker does."""


def ends_workers() -> bool:
    """Whether the workers end when this process does, whatever ends it."""
    return sys.platform.startswith("linux")


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """A function for the child to call: from then on the kernel kills it when its parent dies.

    The kernel counts the thread that forked as the parent, so it must live as long as the worker may. None
    where the system has no such signal (outside of Linux).
    """
    if not ends_workers():
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def request_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl, so there will be no signal
            os._exit(1)

    return request_death_signal


class ProcessGroupGuard:
    """A shell that ends process groups when this process dies: it waits for the end of a pipe.

    The signal of :func:`die_with_parent` reaches only the worker itself. Without a shell at /bin/sh, there is
    no guard.

    Args:
        leaders: process ids of the leaders of the groups.

    Raises:
        OSError: if the shell cannot be started.
    """

    def __init__(self, leaders: Iterable[int]) -> None:
        groups = [f"-{pid}" for pid in leaders]
        self._shell: subprocess.Popen[bytes] | None = None
        if os.path.exists(_SHELL):
            self._shell = subprocess.Popen(
                [_SHELL, "-c", _SCRIPT, "zmqgrad-guard", *groups],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # no signal of the terminal or to the group of the agent ends it
            )

    def close(self) -> None:
        """End the guard, once the groups have ended. Idempotent."""
        if self._shell is not None:
            self._shell.kill()
            with suppress(subprocess.TimeoutExpired):  # blocked in the kernel; it dies when that ends
                self._shell.communicate(timeout=_REAP_SECONDS)
