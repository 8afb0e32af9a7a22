"""Asks one server, from any thread: the thread that asks sends and receives itself, over a line of its own.

A client keeps a few lines and lends one to each request for as long as that takes, so a round trip costs
no hop to another thread, and a long wait in one thread is in nobody's way. A line whose request was given
up is closed, so a late answer never meets a later question. How a line asks, and asks again should its
connection break, stands in :mod:`~zmqgrad.transport.requests.line`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

from zmqgrad.errors import ClosedError
from zmqgrad.runtime import blocking
from zmqgrad.runtime.clock import MONOTONIC, Clock
from zmqgrad.transport.requests.line import Line
from zmqgrad.transport.security import Keys
from zmqgrad.wire.messages import Message

MAX_IDLE = 8
"""How many lines a client keeps between requests."""

_clients: weakref.WeakSet[RequestClient] = weakref.WeakSet()


class RequestClient:
    """Asks the server at ``address``. Connects at the first request, and by itself anew.

    Args:
        keys: those of the job; None: nothing is encrypted.
    """

    def __init__(
        self, address: str, *, name: str = "client", keys: Keys | None = None, clock: Clock = MONOTONIC
    ) -> None:
        self.address = address
        self.name = name
        self._keys = keys
        self._clock = clock
        self._pid = os.getpid()
        self._idle: deque[Line] = deque()
        self._lines: set[Line] = set()
        self._closed = False
        self._closing = threading.Event()  # set with it, for those who pause
        self._lock = threading.Lock()  # guards _lines and the setting of _closed
        _clients.add(self)

    def request(self, message: Message, seconds: float) -> Message:
        """Send ``message`` and give the answer. A Ctrl-C in the meantime gives the request up.

        Raises:
            TimeoutError: if there is no answer within ``seconds``; says what was tried last.
            ClosedError: after, or by, :meth:`close`; and in a fork of the process that made this client.
            ProtocolError: if ``message`` cannot be written, or what comes back is no message of ours.
            SecretError: if the server has another secret, or one of the two ends has none.
        """
        try:
            line = self._idle.pop()  # there is none once this is closed, nor in a fork
        except IndexError:
            line = self._new_line()
        try:
            if not blocking.anybody or blocking.here.pool is None:
                answer = line.request(message, seconds)
            else:
                with blocking.here.pool.blocked():
                    answer = line.request(message, seconds)
        except BaseException:
            self._drop(line)
            raise
        if len(self._idle) < MAX_IDLE:
            self._idle.append(line)
            if not self._closed:  # otherwise close() may have looked before we appended
                return answer
        self._drop(line)
        return answer

    def _new_line(self) -> Line:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self.name}, connected to {self.address}, belongs to process {self._pid} and cannot be "
                f"used in a fork of it: start processes by spawn or forkserver, or connect in the child"
            )
        line = Line(self.address, self.name, self._keys, self._closing, self._clock)
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.name}, connected to {self.address}, is closed")
            self._lines.add(line)
        return line

    def forget_lines(self) -> None:
        """In a fork: the connections are the other process's."""
        self._idle.clear()
        for line in self._lines:
            line.abandon()
        self._lines.clear()

    def _drop(self, line: Line) -> None:
        with self._lock:
            self._lines.discard(line)
        line.disconnect()

    def close(self) -> None:
        """Disconnect; requests under way end with ``ClosedError``. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            lines, self._lines = list(self._lines), set()
        self._closing.set()
        while self._idle:
            try:
                self._idle.pop().disconnect()
            except IndexError:
                break  # somebody took it, and finds that this is closed
        for line in lines:
            line.hang_up()

    def __repr__(self) -> str:
        closed = ": closed" if self._closed else ""
        return f"<RequestClient {self.name} of {self.address}{closed}>"


def _forget_lines() -> None:
    for client in _clients:
        client.forget_lines()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lines)
