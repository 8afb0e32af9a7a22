"""What may still arrive in a backward pass that stands still, or has not begun. Pure: reports in, sets out.

A send gets a gradient if the recv at its other end is reached. So from where the pass stands one walks to
the recvs that can be reached, from there to the sends at their other ends, and on through the groups that
those enter, until nothing new is found. What has not been found then will never arrive.

No graph travels for that. Each worker says once which of its entries lead to which recvs
(:class:`~zmqgrad.wire.messages.Reach`), and the root of the pass walks over all of them by itself: one round
of small messages, and one more where it leads to workers that had not been asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqgrad.autograd.graph.plan import bits
from zmqgrad.wire.messages import Reach


@dataclass(slots=True)
class _Group:
    mask: int
    recvs: tuple[tuple[int, int], ...]
    reached: bool = False


class _Known:
    """A worker that has answered."""

    def __init__(self, reach: Reach) -> None:
        self.sends = reach.sends
        self.bit_of = {send[0]: 2 << i for i, send in enumerate(reach.sends)}
        self.live = int.from_bytes(reach.arrived, "little")
        self.groups = [_Group(int.from_bytes(mask, "little"), recvs) for mask, recvs in reach.groups]
        self.of_entry: dict[int, list[_Group]] = {}
        for group in self.groups:
            for entry in bits(group.mask):
                self.of_entry.setdefault(entry, []).append(group)

    def missing(self) -> int:
        """Entries that hold up groups which are reached, and will never arrive."""
        held = 0
        for group in self.groups:
            if group.mask & self.live:
                held |= group.mask
        return held & ~self.live


class Discovery:
    """One walk. Ask the workers of :meth:`unknown`, :meth:`learn` what they say, until there are none."""

    def __init__(self, workers: set[int]) -> None:
        self._unknown = set(workers)
        self._known: dict[int, _Known] = {}
        self._early: dict[int, set[int]] = {}  # sends found on workers that have not answered

    def unknown(self) -> set[int]:
        """Workers that have to be asked."""
        return set(self._unknown)

    def learn(self, reach: Reach) -> None:
        """A worker has answered."""
        known = self._known[reach.worker] = _Known(reach)
        self._unknown.discard(reach.worker)
        todo = [(send, reach.worker) for send in self._early.pop(reach.worker, ())]
        todo += self._enter(known, known.live)
        while todo:
            send, worker = todo.pop()
            if worker in self._known:
                todo += self._arrive(self._known[worker], send)
            else:
                self._unknown.add(worker)
                self._early.setdefault(worker, set()).add(send)

    def _arrive(self, known: _Known, send: int) -> list[tuple[int, int]]:
        bit = known.bit_of.get(send, 0)
        if known.live & bit:
            return []
        known.live |= bit
        return self._enter(known, bit)

    def _enter(self, known: _Known, entries: int) -> list[tuple[int, int]]:
        """The recvs that ``entries`` lead to and nothing before them did."""
        found: list[tuple[int, int]] = []
        for entry in bits(entries):
            for group in known.of_entry.get(entry, ()):
                if not group.reached:
                    group.reached = True
                    found += group.recvs
        return found

    def never(self) -> dict[int, list[tuple[int, int, str]]]:
        """By worker, the sends that something waits for and that will never arrive, as it named them."""
        found: dict[int, list[tuple[int, int, str]]] = {}
        for worker, known in self._known.items():
            missing = known.missing() >> 1
            if missing:
                found[worker] = [send for i, send in enumerate(known.sends) if missing >> i & 1]
        return found
