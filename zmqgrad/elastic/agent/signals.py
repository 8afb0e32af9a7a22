"""Signals as events that a thread waits for, instead of interrupts."""

from __future__ import annotations

import signal
import socket
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from zmqgrad.runtime.polling import Wakeup

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end an agent."""


class SignalInbox:
    """While entered, queues SIGINT, SIGTERM, SIGHUP and SIGQUIT; the exit of a child wakes a select.

    Python handles signals on the main thread only; on another one, this queues nothing.

    Attributes:
        stopping: set by the first of these signals.
    """

    def __init__(self) -> None:
        self.stopping = Wakeup()
        self._before: dict[int, Any] = {}
        self._received: list[int] = []

    def __enter__(self) -> SignalInbox:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            self._install()
        return self

    def _install(self) -> None:
        # Full, it wakes as well: by the exits of some hundred children while nobody reads.
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in (*STOPPING, signal.SIGCHLD):
            # A signal that was ignored when this process started, as under nohup, stays ignored.
            if signum == signal.SIGCHLD or signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._receive)

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

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if signum in STOPPING:
            self._received.append(signum)
            self.stopping.set()

    def take(self) -> list[int]:
        """Return the stopping signals received since the last call."""
        with suppress(BlockingIOError):
            self._reader.recv(4096)
        received, self._received = self._received, []
        return received
