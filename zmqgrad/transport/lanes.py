"""Lanes: answers that are read by the very thread that waits for them.

An answer that comes in at the ROUTER is read by one thread and then wakes another, the one that asked; on
an idle machine that second wake-up costs as much as the way between the processes. So a thread that is
about to wait takes a lane, a small DEALER of its own, names it in the envelope of its request, and blocks
in ``recv`` until the answer is there. Lanes are few and only for peers of this host; who gets none, or whose
answer cannot be sent by one, finds the answer at the ROUTER as ever.

What ends a wait from elsewhere (a lost peer, the end of this worker) pokes the lane: a message to it over
``inproc``, known by a token that nobody outside the process can have.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable

import zmq
from zmq.backend import zmq_poll

from zmqgrad.transport.base import Buffer, Inbound

logger = logging.getLogger(__name__)

MAX_LANES = 8
"""So many threads of a worker can wait at lanes at a time."""

LONGEST_WAIT_MS = 1 << 30

LOOKS = 80
"""A thread looks so many times (some 200 us) before it sleeps: waking costs as much as a short call takes."""

MOST_LUCK = 8
PATIENCE = 64
"""A lane whose looks were in vain too often sleeps at once for so many answers."""

Decode = Callable[[bytes, "list[Buffer] | tuple[()]"], "Inbound | None"]
"""First frame and the others to a message; None for what was none of ours and has been counted."""


def lane_address(endpoint: str, number: int) -> str:
    """Where lane ``number`` of the worker at ``endpoint`` (ipc) listens."""
    return f"{endpoint}-{number}"


class Lane:
    """One lane, held by one thread at a time."""

    __slots__ = ("_inproc", "_lanes", "_limit", "_luck", "_socket", "_there", "number")

    def __init__(self, lanes: Lanes, number: int, socket: zmq.Socket[bytes], inproc: str) -> None:
        self.number = number
        self._lanes = lanes
        self._socket = socket
        self._inproc = inproc
        self._there = [(socket, zmq.POLLIN)]
        self._limit = -1
        self._luck = MOST_LUCK  # falls by looks in vain; below zero nobody looks, and it counts up

    def receive(self, seconds: float | None) -> Inbound | None:
        """The next message; None if there is none within ``seconds`` (None: no limit), or after a poke."""
        socket = self._socket
        first = self._look()
        if first is None:
            first = self._sleep(seconds)
            if first is None:
                return None
        frames: list[Buffer] | tuple[()] = ()
        if socket.getsockopt(zmq.RCVMORE):
            frames = []
            while True:
                frame = socket.recv(copy=False)
                frames.append(frame.buffer)
                if not frame.more:
                    break
        if first == self._lanes.token:
            return None
        return self._lanes.decode(first, frames)

    def _look(self) -> bytes | None:
        """The first frame, if it comes soon and such looks have paid lately.

        Each look lets go of the interpreter, so that other threads of this process are not kept from it.
        """
        if self._luck <= 0:
            self._luck += 1
            return None
        there = self._there
        for _ in range(LOOKS):
            if zmq_poll(there, 0):  # a third of what a recv with NOBLOCK costs in vain, with its exception
                self._luck = min(self._luck + 1, MOST_LUCK)
                return self._socket.recv()
        self._luck = self._luck - 2 if self._luck > 2 else -PATIENCE
        return None

    def _sleep(self, seconds: float | None) -> bytes | None:
        """The first frame; None if it does not come within ``seconds``."""
        limit = -1 if seconds is None else min(int(seconds * 1000) + 1, LONGEST_WAIT_MS)
        if limit != self._limit:
            self._limit = limit
            self._socket.setsockopt(zmq.RCVTIMEO, limit)
        try:
            return self._socket.recv()
        except zmq.Again:
            return None

    def poke(self) -> None:
        """Let the thread that waits here look around. From any thread."""
        self._lanes.poke(self._inproc)

    def give_back(self) -> None:
        """The calling thread waits no more."""
        self._lanes.take_back(self)

    def close(self) -> None:
        """Called by :class:`Lanes` for a lane that nobody holds."""
        self._socket.close(linger=0)


class Lanes:
    """The lanes of one mailbox, made as they are needed.

    Args:
        endpoint: the mailbox's ipc address; a lane's is derived from it.
        set_up: sets the options that every socket has from birth.
        decode: makes messages of frames, counts, and refuses garbage.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        set_up: Callable[[zmq.Socket[bytes]], None],
        decode: Decode,
    ) -> None:
        self.token = secrets.token_bytes(16)
        self.decode = decode
        self._context = context
        self._endpoint = endpoint
        self._set_up = set_up
        self._lock = threading.Lock()  # guards all below
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
            number = self._made
            socket = self._context.socket(zmq.DEALER)
            inproc = f"inproc://lane-{self.token.hex()}-{number}"
            try:
                self._set_up(socket)
                socket.bind(lane_address(self._endpoint, number))
                socket.bind(inproc)
            except zmq.ZMQError as e:
                socket.close(linger=0)
                self._made = MAX_LANES  # what does not work now will not work later
                logger.debug("no lanes beyond %d: %s", number - 1, e)
                return None
            self._open += 1
            return Lane(self, number, socket, inproc)

    def take_back(self, lane: Lane) -> None:
        """``lane`` is free again."""
        with self._lock:
            if not self._closed:
                self._free.append(lane)
                return
            self._shut(lane)

    def _shut(self, lane: Lane) -> None:
        lane.close()
        self._open -= 1
        self._all_closed.notify_all()

    def poke(self, inproc: str) -> None:
        """Send the token to ``inproc``."""
        try:
            with self._context.socket(zmq.DEALER) as waker:
                waker.linger = -1  # inproc: delivered in memory, at once
                waker.connect(inproc)
                waker.send(self.token, zmq.NOBLOCK)
        except zmq.ZMQError as e:  # the lane, or all of them, has just been closed: nobody waits there
            logger.debug("nobody to poke at %s: %s", inproc, e)

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
