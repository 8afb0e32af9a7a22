"""What is late, and what is lost."""

from __future__ import annotations

import random


class Faults:
    """Faults of the network, by a seed.

    Args:
        rng: of the simulation.
        latency: the longest time that a packet takes between hosts; each is drawn.
        io_seconds: the longest time that an I/O thread of libzmq takes to act.
    """

    def __init__(self, rng: random.Random, latency: float = 0.0, io_seconds: float = 0.0) -> None:
        self.rng = rng
        self.latency = latency
        self.io_seconds = io_seconds
        self.cut: set[tuple[str, str]] = set()
        """Pairs of hosts from the first of which nothing reaches the second."""

    def delay(self, source: str, target: str) -> float:
        """Returns how long the next packet takes."""
        return self.rng.random() * self.latency if self.latency and source != target else 0.0

    def io_delay(self) -> float:
        """Returns how long the I/O thread takes until it acts."""
        return self.rng.random() * self.io_seconds if self.io_seconds else 0.0

    def is_cut(self, source: str, target: str) -> bool:
        """Returns whether nothing passes from host ``source`` to ``target``."""
        return (source, target) in self.cut
