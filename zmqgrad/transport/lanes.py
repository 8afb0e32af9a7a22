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

from zmqgrad.transport.base import Inbound
from zmqgrad.transport.door import Door, door_address

logger = logging.getLogger(__name__)

MAX_LANES = 8
"""So many threads of a worker can wait at lanes at a time."""

LONGEST_WAIT_MS = 1 << 30

LOOKS = 300
"""A thread looks so many times (some 400 us) before it sleeps: waking costs as much as a short call takes.

With 150 the answer to an empty call, which takes 200 us, often came too late, so the lane gave up looking
(see ``PATIENCE``), and a call took 300. With 600, others that needed the processor waited at times; with
none, a call took 380 to 730.
"""

MOST_LUCK = 8
PATIENCE = 16
"""A lane whose looks were in vain too often sleeps at once for so many answers."""

Decode = Callable[[bytes], "Inbound | None"]
"""A frame to a message; None for what was none of ours and has been counted."""


class _Eyes:
    """One thread of a worker looks at a time."""

    __slots__ = ("of",)

    def __init__(self) -> None:
        self.of: Lane | None = None


class Lane:
    """One lane, held by one thread at a time.

    Raises:
        OSError: if it cannot listen.
    """

    def __init__(
        self, number: int, endpoint: str, decode: Decode, free: Callable[[Lane], None], eyes: _Eyes
    ) -> None:
        self.number = number
        self._eyes = eyes
        self._decode = decode
        self._free = free
        self._arrived: deque[bytes] = deque()
        self._luck = MOST_LUCK  # falls by looks in vain; below zero nobody looks, and it counts up
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
            ready = self._look() or self._poll.poll(
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

    def _look(self) -> list[tuple[int, int]]:
        """What is ready, if something is soon and such looks have paid lately.

        Each look lets go of the interpreter, so that other threads of this process are not kept from it. But
        it gets in their way: it ends as soon as another looks, or works (:meth:`Lanes.look_away`).
        """
        if self._luck <= 0:
            self._luck += 1
            return []
        poll, eyes = self._poll.poll, self._eyes
        eyes.of = self
        for _ in range(LOOKS):
            ready = poll(0)
            if ready:
                self._luck = min(self._luck + 1, MOST_LUCK)
                return ready
            if eyes.of is not self:
                return []
        self._luck = self._luck - 2 if self._luck > 2 else -PATIENCE
        return []

    def poke(self) -> None:
        """Let the thread that waits here look around. From any thread."""
        try:
            self._waker.send(b"!")
        except OSError as e:  # closed, or poked so often already that it does not matter
            logger.debug("lane %d: no need to poke: %s", self.number, e)

    def give_back(self) -> None:
        """The calling thread waits no more."""
        self._free(self)

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
    """

    def __init__(self, endpoint: str, decode: Decode) -> None:
        self._endpoint = endpoint
        self._decode = decode
        self._lock = threading.Lock()  # guards all below
        self._eyes = _Eyes()
        self._free: list[Lane] = []
        self._made = 0
        self._open = 0
        self._closed = False
        self._all_closed = threading.Condition(self._lock)

    def take(self) -> Lane | None:
        """A lane for the calling thread, which gives it back; None if there is none to be had."""
        with self._lock:
            if self._free:
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
            return lane

    def look_away(self) -> None:
        """Another thread is about to work: whoever waits sleeps meanwhile. From any thread."""
        self._eyes.of = None

    def take_idle(self) -> list[Lane]:
        """All lanes that nobody holds, for the calling thread, which gives them back."""
        with self._lock:
            idle, self._free = self._free, []
            return idle

    def _take_back(self, lane: Lane) -> None:
        with self._lock:
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
