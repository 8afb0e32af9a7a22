"""A gate: of the threads that wait for messages, one is let in when there is something to read.

The thread that is in reads; before it does something else, it opens the gate for the next. Those who wait
are waiting in the kernel already, so a reader that goes to work wakes nobody: only the next message does.
Of several, the one that came last is let in first, as its caches are the warmest. Whoever comes back from
work takes the gate, if nobody has been let in meanwhile, and looks before it sleeps.
"""

from __future__ import annotations

import os
import select
import threading
from typing import Protocol

from zmqgrad.transport.looking import UNASKED_SECONDS, Eyes, Look
from zmqgrad.transport.wakeup import Wakeup

MOST = 64
"""So many descriptors are looked at in one go."""


class Gate(Protocol):
    """What is read, and who reads it. It is shut at first."""

    def register(self, number: int, mask: int) -> None:
        """Poll file descriptor ``number`` for ``mask`` (``select.POLLIN``). From any thread; without effect
        after :meth:`close`."""
        ...

    def unregister(self, number: int) -> None:
        """Poll it no more; it is still open."""
        ...

    def poll(self, seconds: float | None) -> list[tuple[int, int]]:
        """By the thread that is in: what is ready, or will be within ``seconds``, as of ``select.poll``."""
        ...

    def wait(self) -> bool:
        """Wait to be let in; False: the gate was closed for good."""
        ...

    def take(self) -> bool:
        """Be let in at once, though there may be nothing to read yet; False: somebody else is in."""
        ...

    def open(self, at_once: bool) -> None:
        """Let one in: when something is ready to be read, or ``at_once``. Shut behind it. From any thread,
        but only while nobody is in who goes on to read."""
        ...

    def close(self) -> None:
        """All who wait leave. By the thread that is in, or before the first was let in. Idempotent."""
        ...


def make_gate(eyes: Eyes | None = None) -> Gate:
    """The best gate that there is on this system; whoever is in looks with ``eyes`` before it sleeps."""
    return EpollGate(eyes) if hasattr(select, "epoll") and hasattr(os, "eventfd") else PlainGate()


class EpollGate:
    """A :class:`Gate` of two epolls: one for what is read, inside one at which threads wait for it.

    The outer one is armed for one event (``EPOLLONESHOT``), so the kernel wakes one thread, and no other
    before it is armed again.
    """

    def __init__(self, eyes: Eyes | None = None) -> None:
        self._eyes = eyes
        self._look = Look(eyes or Eyes(), at_most=UNASKED_SECONDS)
        self._inside = select.epoll()
        self._gate = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # guards _waiting and _closed, and whoever is let in
        self._waiting = 0
        self._closed = False
        self._taken = True
        self._rung = False
        self._inside_number = self._inside.fileno()
        self._inside.register(self._bell, select.EPOLLIN)
        self._gate.register(self._inside_number, select.EPOLLONESHOT)

    def register(self, number: int, mask: int) -> None:
        """As :class:`Gate`."""
        with self._lock:
            if not self._inside.closed:
                self._inside.register(number, mask)

    def unregister(self, number: int) -> None:
        """As :class:`Gate`."""
        with self._lock:
            if not self._inside.closed:
                self._inside.unregister(number)

    def poll(self, seconds: float | None) -> list[tuple[int, int]]:
        """As :class:`Gate`."""
        # While threads wait for answers, those come next, and each wakes one who needs the processor.
        looks = seconds is None and self._eyes is not None and not self._eyes.expecting
        ready = (looks and self._look.at(self._inside.poll)) or self._inside.poll(seconds, MOST)
        return self._hush(ready) if self._rung else ready

    def _hush(self, ready: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The bell has let somebody in, and is nobody's message."""
        self._rung = False
        os.eventfd_read(self._bell)
        return [entry for entry in ready if entry[0] != self._bell]

    def wait(self) -> bool:
        """As :class:`Gate`."""
        with self._lock:
            self._waiting += 1
        while True:
            if not self._closed:
                self._gate.poll(None, 1)
            with self._lock:
                if self._closed:
                    self._waiting -= 1
                    self._see_off()
                    return False
                if not self._taken:
                    self._waiting -= 1
                    self._taken = True
                    return True

    def take(self) -> bool:
        """As :class:`Gate`."""
        with self._lock:
            if self._taken or self._closed:
                return False
            self._taken = True
            self._gate.modify(self._inside_number, select.EPOLLONESHOT)  # else the next message wakes one
            return True

    def open(self, at_once: bool) -> None:
        """As :class:`Gate`."""
        with self._lock:  # else one could take it, and close it, before it was armed
            self._let_in(at_once)

    def _let_in(self, at_once: bool) -> None:
        """Let one in. Called with the lock held."""
        if at_once:
            self._rung = True
            os.eventfd_write(self._bell, 1)
        self._taken = False
        self._gate.modify(self._inside_number, select.EPOLLIN | select.EPOLLONESHOT)

    def close(self) -> None:
        """As :class:`Gate`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._see_off()

    def _see_off(self) -> None:
        """Let the next of those who wait leave; the last one tidies up. Called with the lock held."""
        if self._waiting:
            self._let_in(at_once=True)
            return
        if not self._gate.closed:
            self._gate.close()
            self._inside.close()
            os.close(self._bell)


class PlainGate:
    """A :class:`Gate` for systems without epoll: whoever is let in waits inside for something to read."""

    def __init__(self) -> None:
        self._inside = select.poll()
        self._turns = threading.Semaphore(0)
        self._closed = False
        self._wakeup = Wakeup()
        self._inside.register(self._wakeup.number, select.POLLIN)

    def register(self, number: int, mask: int) -> None:
        """As :class:`Gate`."""
        self._inside.register(number, mask)
        self._wakeup.set()  # a thread that polls already does not see it before its next poll

    def unregister(self, number: int) -> None:
        """As :class:`Gate`."""
        self._inside.unregister(number)

    def poll(self, seconds: float | None) -> list[tuple[int, int]]:
        """As :class:`Gate`."""
        ready = self._inside.poll(None if seconds is None else int(seconds * 1000))
        if (self._wakeup.number, select.POLLIN) in ready:
            self._wakeup.clear()
            ready.remove((self._wakeup.number, select.POLLIN))
        return ready

    def wait(self) -> bool:
        """As :class:`Gate`."""
        self._turns.acquire()
        if self._closed:
            self._turns.release()
        return not self._closed

    def take(self) -> bool:
        """As :class:`Gate`."""
        if not self._turns.acquire(blocking=False):
            return False
        if self._closed:
            self._turns.release()
        return not self._closed

    def open(self, at_once: bool) -> None:
        """As :class:`Gate`."""
        self._turns.release()

    def close(self) -> None:
        """As :class:`Gate`."""
        if not self._closed:
            self._closed = True
            self._wakeup.close()
            self._turns.release()
