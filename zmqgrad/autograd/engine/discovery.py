"""Discovery of the gradients that will never arrive in a stalled pass, or one not started. Pure.

A send gets a gradient if the recv at its other end is reached. So the discovery starts at the entries that
have arrived, follows their groups to recvs, continues at the sends on the other ends, and so on. Sends that
it does not find will never get a gradient.

No graphs are sent for that. Each worker reports once which of its entries lead to which recvs
(:class:`~zmqgrad.wire.messages.ReachabilityReport`), and the coordinator searches all reports: one round of
small messages, and another one if that leads to workers that have not reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqgrad.autograd.graph.plan import bits
from zmqgrad.wire.messages import ReachabilityReport


@dataclass(slots=True)
class _Group:
    mask: int
    recvs: tuple[tuple[int, int], ...]
    reached: bool = False


class _ReportedWorker:
    """A worker that has reported."""

    def __init__(self, reach: ReachabilityReport) -> None:
        self.sends = reach.sends
        self.bit_of = {send[0]: 2 << i for i, send in enumerate(reach.sends)}
        self.live = int.from_bytes(reach.arrived, "little")
        self.groups = [_Group(int.from_bytes(mask, "little"), recvs) for mask, recvs in reach.groups]
        self.of_entry: dict[int, list[_Group]] = {}
        for group in self.groups:
            for entry in bits(group.mask):
                self.of_entry.setdefault(entry, []).append(group)

    def missing(self) -> int:
        """Return the entries that will never arrive and that a reached group waits for."""
        held = 0
        for group in self.groups:
            if group.mask & self.live:
                held |= group.mask
        return held & ~self.live


class Discovery:
    """One search. Call :meth:`learn` with the reports of :meth:`unknown` workers until there are none."""

    def __init__(self, workers: set[int]) -> None:
        self._unknown = set(workers)
        self._known: dict[int, _ReportedWorker] = {}
        self._early: dict[int, set[int]] = {}  # sends found on workers that have not reported

    def unknown(self) -> set[int]:
        """Return the workers that have to report."""
        return set(self._unknown)

    def learn(self, reach: ReachabilityReport) -> None:
        """Add the report of a worker."""
        known = self._known[reach.worker] = _ReportedWorker(reach)
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

    def _arrive(self, known: _ReportedWorker, send: int) -> list[tuple[int, int]]:
        bit = known.bit_of.get(send, 0)
        if known.live & bit:
            return []
        known.live |= bit
        return self._enter(known, bit)

    def _enter(self, known: _ReportedWorker, entries: int) -> list[tuple[int, int]]:
        """Return the recvs that ``entries`` lead to and that were not found before."""
        found: list[tuple[int, int]] = []
        for entry in bits(entries):
            for group in known.of_entry.get(entry, ()):
                if not group.reached:
                    group.reached = True
                    found += group.recvs
        return found

    def never(self) -> dict[int, list[tuple[int, int, str]]]:
        """Return for each worker its sends whose gradients will never arrive, as it reported them."""
        found: dict[int, list[tuple[int, int, str]]] = {}
        for worker, known in self._known.items():
            missing = known.missing() >> 1
            if missing:
                found[worker] = [send for i, send in enumerate(known.sends) if missing >> i & 1]
        return found
