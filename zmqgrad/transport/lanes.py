"""Lanes: answers that are read by the very thread that waits for them.

An answer that the receiver reads still has to wake the thread that asked, which costs as much as the way
between the processes. So a thread that is about to wait takes a lane, a door of its own
(:mod:`zmqgrad.transport.door`), names it in the envelope of its request, and blocks in a system call until
the answer is there. Lanes are few and only for peers of this host. Who gets none, or whose answer is not
one small frame, finds the answer by way of the receiver as ever.

What ends a wait from elsewhere (an answer to the receiver, a lost peer, the end of this worker) pokes the
lane.
"""

from __future__ import annotations

import logging
import select
import socket as sockets
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from zmqgrad.transport.base import Inbound
from zmqgrad.transport.door import Door, door_address
from zmqgrad.transport.looking import Eyes, Look

logger = logging.getLogger(__name__)

MAX_LANES = 8
"""So many threads of a worker can wait at lanes at a time."""

LONGEST_WAIT_MS = 1 << 30

Decode = Callable[[bytes], "Inbound | None"]
"""A frame to a message; None for what was none of ours and has been counted."""


class Lane:
    """One lane, held by one thread at a time.

    Raises:
        OSError: if it cannot listen.
    """

    def __init__(
        self, number: int, endpoint: str, decode: Decode, free: Callable[[Lane], None], eyes: Eyes
    ) -> None:
        self.number = number
        self._look = Look(eyes)
        self._decode = decode
        self.give_back: Callable[[], None] = partial(free, self)
        """The calling thread waits no more."""
        self._arrived: deque[bytes] = deque()
        self._poll = select.poll()
        self._door = Door(door_address(endpoint, number), self._poll)
        try:
            self._woken, self._waker = sockets.socketpair()
        except OSError:
            self._door.close()
            raise
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._woken_number = self._woken.fileno()
        self._poll.register(self._woken, select.POLLIN)

    def receive(self, seconds: float | None) -> Inbound | None:
        """The next message; None if there is none within ``seconds`` (None: no limit), or after a poke."""
        while not self._arrived:
            ready = self._look.at(self._poll.poll) or self._poll.poll(
                -1 if seconds is None else min(int(seconds * 1000) + 1, LONGEST_WAIT_MS)
            )
            poked = not ready
            for number, _ in ready:
                if number == self._woken_number:
                    poked = bool(self._woken.recv(4096))
                else:
                    self._arrived.extend(self._door.read(number))
            if poked and not self._arrived:
                return None
        return self._decode(self._arrived.popleft())

    def poke(self) -> None:
        """Let the thread that waits here look around. From any thread."""
        try:
            self._waker.send(b"!")
        except OSError as e:  # closed, or poked so often already that it does not matter
            logger.debug("lane %d: no need to poke: %s", self.number, e)

    def close(self) -> None:
        """Called by :class:`Lanes` for a lane that nobody holds."""
        self._door.close()
        self._woken.close()
        self._waker.close()


class Lanes:
    """The lanes of one mailbox, made as they are needed.

    Args:
        endpoint: the mailbox's ipc address; a lane's is derived from it.
        decode: makes messages of frames, counts, and refuses garbage.
        eyes: of the threads of this mailbox.
    """

    def __init__(self, endpoint: str, decode: Decode, eyes: Eyes) -> None:
        self._endpoint = endpoint
        self._decode = decode
        self._lock = threading.Lock()  # guards all below
        self._eyes = eyes
        self._free: list[Lane] = []
        self._made = 0
        self._open = 0
        self._closed = False
        self._all_closed = threading.Condition(self._lock)

    def take(self) -> Lane | None:
        """A lane for the calling thread, which gives it back; None if there is none to be had."""
        with self._lock:
            if self._free:
                self._eyes.expecting += 1
                return self._free.pop()
            if self._closed or self._made >= MAX_LANES:
                return None
            self._made += 1
            try:
                lane = Lane(self._made, self._endpoint, self._decode, self._take_back, self._eyes)
            except OSError as e:
                self._made = MAX_LANES  # what does not work now will not work later
                logger.debug("no more lanes: %s", e)
                return None
            self._open += 1
            self._eyes.expecting += 1
            return lane

    def take_idle(self) -> list[Lane]:
        """All lanes that nobody holds, for the calling thread, which gives them back."""
        with self._lock:
            idle, self._free = self._free, []
            self._eyes.expecting += len(idle)
            return idle

    def _take_back(self, lane: Lane) -> None:
        with self._lock:
            self._eyes.expecting -= 1
            if self._closed:
                self._shut(lane)
            else:
                self._free.append(lane)

    def _shut(self, lane: Lane) -> None:
        lane.close()
        self._open -= 1
        self._all_closed.notify_all()

    def close(self) -> None:
        """No more lanes. Those that are held are closed when they are given back. Idempotent."""
        with self._lock:
            self._closed = True
            while self._free:
                self._shut(self._free.pop())

    def join(self, seconds: float | None) -> bool:
        """Wait until all are closed; False if that has not come within ``seconds``."""
        with self._lock:
            return self._all_closed.wait_for(lambda: self._open == 0, seconds)
