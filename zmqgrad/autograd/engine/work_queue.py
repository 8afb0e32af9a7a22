"""The gradients that have arrived for one pass on one worker: a FIFO queue with one consumer at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from zmqgrad.autograd.graph.node import Gradient
from zmqgrad.wire.tensors.streams import NO_COPIES, DeviceCopies

Arrival = tuple[int, Sequence[Gradient]]
"""An entry of the local graph (the autograd id of a send), and the gradients that arrived for it."""


class WorkQueue:
    """Queues each arrival once.

    The thread that adds to an idle queue becomes its consumer. It calls :meth:`take` until nothing is left
    and :meth:`finish` returns True. So gradients that arrive meanwhile run together and can travel together.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._waiting: deque[Arrival] = deque()
        self._on_devices: dict[int, DeviceCopies] = {}  # of the arrivals that wait, by autograd id
        self._seen: set[int] = set()
        self._consumed = False  # whether a thread is the consumer

    def add(self, arrivals: Sequence[Arrival], arrived: DeviceCopies = NO_COPIES) -> bool:
        """Add arrivals, except those that were added before.

        Args:
            arrivals: what has arrived.
            arrived: those of their tensors that the calling thread has copied to devices.

        Returns:
            Whether the calling thread becomes the consumer.
        """
        with self._lock:
            for arrival in arrivals:
                send = arrival[0]
                if send not in self._seen:
                    self._seen.add(send)
                    self._waiting.append(arrival)
                    if arrived.events:
                        self._on_devices[send] = arrived
            if self._consumed or not self._waiting:
                return False
            self._consumed = True
            return True

    def take(self, count: int) -> list[Arrival]:
        """Remove up to ``count`` arrivals; the thread's current streams wait for their copies to devices."""
        with self._lock:
            waiting = self._waiting
            taken: list[Arrival] = []
            while waiting and len(taken) < count:
                taken.append(waiting.popleft())
            if not self._on_devices:
                return taken
            on_devices = [self._on_devices.pop(send) for send, _ in taken if send in self._on_devices]
        for arrived in {id(arrived): arrived for arrived in on_devices}.values():
            arrived.wait_on_current_stream()
        return taken

    def is_consumed(self) -> bool:
        """Whether a thread is handling arrivals."""
        return self._consumed

    def finish(self) -> bool:
        """Stop consuming if nothing is left. Returns False if the caller has to continue."""
        with self._lock:
            self._consumed = bool(self._waiting)
            return not self._consumed
