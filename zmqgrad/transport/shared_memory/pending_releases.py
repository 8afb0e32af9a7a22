"""What borrowers of memory owe its owners: blocks that are done with, until their owners have been told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from zmqgrad.wire.messages import MAX_TENSORS


class PendingReleases:
    """Blocks to give back, by peer. From any thread; who notices that one is done with only enqueues."""

    def __init__(self) -> None:
        self._dead: dict[int, deque[int]] = {}
        self.owed: Callable[[int], object] = self._dead.get
        """Is there a block to give back to that peer?"""

    def to(self, peer: int) -> deque[int]:
        """Where finalizers put what is to go back to ``peer``."""
        return self._dead.setdefault(peer, deque())

    def take(self, peer: int) -> tuple[int, ...]:
        """The blocks to give back to ``peer``; whoever takes them must tell it."""
        dead = self._dead.get(peer)
        if not dead:
            return ()
        taken: list[int] = []
        while dead and len(taken) < MAX_TENSORS:
            try:
                taken.append(dead.popleft())
            except IndexError:  # another thread took the last one
                break
        return tuple(taken)

    def untake(self, peer: int, blocks: Sequence[int]) -> None:
        """They could not be told."""
        dead = self._dead.get(peer)
        if dead is not None:
            dead.extend(blocks)

    def creditors(self) -> list[int]:
        """The peers that have blocks to get back."""
        return [peer for peer, dead in list(self._dead.items()) if dead]

    def forget(self, peer: int) -> None:
        """``peer`` is gone: nothing is owed to it."""
        self._dead.pop(peer, None)

    def clear(self) -> None:
        """Nothing is owed to anybody."""
        self._dead.clear()
