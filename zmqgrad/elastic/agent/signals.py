"""Signals as events that a thread waits for, instead of interrupts."""

from __future__ import annotations

import signal
import socket
import threading
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end an agent."""


class SignalInbox:
    """While entered, queues SIGINT, SIGTERM, SIGHUP and SIGQUIT; the exit of a child wakes a select.

    Python handles signals on the main thread only; on another one, this queues nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalInbox:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            self._install()
        return self

    def _install(self) -> None:
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno())
        for signum in (*STOPPING, signal.SIGCHLD):
            # A signal that was ignored when this process started, as under nohup, stays ignored.
            if signum == signal.SIGCHLD or signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, _only_wake)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """The descriptor to select on."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Return the stopping signals received since the last call."""
        try:
            return [signum for signum in self._reader.recv(4096) if signum in STOPPING]
        except BlockingIOError:
            return []


def _only_wake(signum: int, frame: FrameType | None) -> None:
    """A handler that does nothing: Python writes to the wakeup descriptor only for handled signals."""
