"""The gradients that have arrived for one pass on one worker: a FIFO queue with several consumers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from zmqgrad.autograd.graph.node import Gradient
from zmqgrad.runtime.spinning import CORES
from zmqgrad.wire.tensors.streams import NO_COPIES, DeviceCopies

Arrival = tuple[int, Sequence[Gradient]]
"""An entry of the local graph (the autograd id of a send), and the gradients that arrived for it."""

MAX_CONSUMERS = CORES
"""As many threads as this process has cores run groups of one pass."""


class WorkQueue:
    """Queues each arrival once.

    The thread that adds to an idle queue becomes its consumer. It calls :meth:`take` until nothing is left
    and :meth:`finish` returns True. So gradients that arrive meanwhile run together and can travel together.
    While others wait, more threads may become consumers (:meth:`help`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._waiting: deque[Arrival] = deque()
        self._on_devices: dict[int, DeviceCopies] = {}  # of the arrivals that wait, by autograd id
        self._seen: set[int] = set()
        self._consumers = 0
        self._requested = 0  # helpers that have not begun
        self._abandoned = False

    def add(self, arrivals: Sequence[Arrival], arrived: DeviceCopies = NO_COPIES) -> bool:
        """Add arrivals, except those that were added before.

        Args:
            arrivals: what has arrived.
            arrived: those of their tensors that the calling thread has copied to devices.

        Returns:
            Whether the calling thread becomes a consumer.
        """
        with self._lock:
            for arrival in arrivals:
                send = arrival[0]
                if send not in self._seen and not self._abandoned:
                    self._seen.add(send)
                    self._waiting.append(arrival)
                    if arrived.events:
                        self._on_devices[send] = arrived
            if self._consumers or not self._waiting:
                return False
            self._consumers = 1
            return True

    def needs_help(self) -> bool:
        """Whether arrivals wait, and there may be more consumers."""
        return bool(self._waiting) and 0 < self._consumers < MAX_CONSUMERS

    def request_help(self) -> bool:
        """Returns whether the caller is to start a thread that calls :meth:`help`.

        It counts as a consumer only then: it may have to wait for the thread pool, and arrivals must not wait
        for it.
        """
        with self._lock:
            if not self.needs_help() or self._consumers + self._requested >= MAX_CONSUMERS:
                return False
            self._requested += 1
            return True

    def help(self, *, requested: bool = False) -> bool:
        """Make the calling thread a consumer. Returns False if no help is needed.

        Args:
            requested: whether the thread was started because of :meth:`request_help`.
        """
        with self._lock:
            if requested:
                self._requested -= 1
            if not self.needs_help():
                return False
            self._consumers += 1
            return True

    def take(self, count: int) -> list[Arrival]:
        """Remove up to ``count`` arrivals; the thread's current streams wait for their copies to devices."""
        waiting = self._waiting
        taken: list[Arrival] = []
        if not waiting:
            return taken  # what is added from now on is found by finish()
        with self._lock:
            while waiting and len(taken) < count:
                taken.append(waiting.popleft())
            if not self._on_devices:
                return taken
            on_devices = [self._on_devices.pop(send) for send, _ in taken if send in self._on_devices]
        for arrived in {id(arrived): arrived for arrived in on_devices}.values():
            arrived.wait_on_current_stream()
        return taken

    def abandon(self) -> None:
        """Drop what waits, and what will be added; its consumers may still find what is added meanwhile."""
        with self._lock:
            self._abandoned = True
            self._waiting.clear()

    def is_consumed(self) -> bool:
        """Whether any thread is handling arrivals."""
        return self._consumers > 0

    def finish(self) -> bool:
        """Stop consuming if nothing is left. Returns False if the caller has to continue."""
        with self._lock:
            if self._waiting:
                return False
            self._consumers -= 1
            return True
