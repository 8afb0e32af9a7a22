"""Sends packets that the kernel did not accept at once, in a thread that starts when that first happens."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque

from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.local.connection import LocalConnection

logger = logging.getLogger(__name__)


class BacklogWriter:
    """Flushes connections whose peers read slowly, in a thread named ``<name>-writer``."""

    def __init__(self, name: str) -> None:
        self._name = f"{name}-writer"
        self._lock = threading.Lock()  # guards _thread and _closed
        self._thread: threading.Thread | None = None
        self._closed = False
        self._new: deque[LocalConnection] = deque()
        self._wakeup = -1

    def add(self, connection: LocalConnection) -> None:
        """Registers ``connection``, which has a backlog. From any thread; does not block."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._new.append(connection)
            os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        poll, waiting = select.poll(), dict[int, LocalConnection]()
        poll.register(self._wakeup, select.POLLIN)
        while not self._closed:
            for fd, _ in poll.poll():
                if fd == self._wakeup:
                    os.eventfd_read(self._wakeup)
                elif self._flushed(waiting[fd]):
                    poll.unregister(fd)
                    del waiting[fd]
            while self._new:
                connection = self._new.popleft()
                fd = connection.fd
                if fd >= 0 and not self._flushed(connection):
                    waiting[fd] = connection
                    poll.register(fd, select.POLLOUT)
        with self._lock:
            os.close(self._wakeup)

    def _flushed(self, connection: LocalConnection) -> bool:
        """Flushes ``connection``. Returns whether that is done, or the connection is broken."""
        try:
            return connection.flush()
        except OSError as e:  # the next sender gets the error, too
            logger.debug("%s: %d packets are lost with their peer: %s", self._name, connection.backlog(), e)
            connection.close()
            return True

    def close(self) -> None:
        """Stops flushing. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                if self._thread is not None:
                    os.eventfd_write(self._wakeup, 1)

    def join(self, deadline: Deadline) -> list[str]:
        """Waits for the thread. Returns its name if it has not ended by ``deadline``."""
        if self._thread is None:
            return []
        self._thread.join(deadline.timeout())
        return [self._name] if self._thread.is_alive() else []
