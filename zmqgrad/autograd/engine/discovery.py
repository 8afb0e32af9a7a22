"""Discovery of the gradients that will never arrive in a stalled pass, or one not started. Pure.

A send gets a gradient if the recv at its other end is reached. So the discovery starts at the entries that
have arrived, follows their groups to recvs, continues at the sends on the other ends, and so on. Sends that
it does not find will never get a gradient.

No graphs are sent for that. Each worker reports once which of its entries lead to which recvs
(:class:`~zmqgrad.wire.messages.ReachabilityReport`), and the coordinator searches all reports: one round of
small messages, and another one if that leads to workers that have not reported.
"""

from __future__ import annotations

from collections.abc import Iterable

from zmqgrad.wire.messages import ReachabilityReport


class _ReportedWorker:
    """A worker that has reported. Groups are given by their indices."""

    def __init__(self, reach: ReachabilityReport) -> None:
        self.sends = reach.sends
        self.entry_of = {send[0]: i for i, send in enumerate(reach.sends, 1)}
        arrived = int.from_bytes(reach.arrived, "little")
        self.live = {i for i in range(len(reach.sends) + 1) if arrived >> i & 1}
        self.groups = reach.groups
        self.reached: set[int] = set()
        self.starting_in: dict[int, list[int]] = {}
        for i, group in enumerate(reach.groups):
            for entry in group.starts:
                self.starting_in.setdefault(entry, []).append(i)

    def reach(self, groups: Iterable[int]) -> list[tuple[int, int]]:
        """Mark ``groups`` and those behind them as reached. Returns the recvs that this reaches first."""
        found: list[tuple[int, int]] = []
        todo = list(groups)
        while todo:
            index = todo.pop()
            if index not in self.reached:
                self.reached.add(index)
                found += self.groups[index].recvs
                todo += self.groups[index].dependents
        return found

    def missing(self) -> list[int]:
        """Return the entries, in order, that will never arrive and that a reached group waits for."""
        sources: dict[int, list[int]] = {}
        for i, group in enumerate(self.groups):
            for dependent in group.dependents:
                sources.setdefault(dependent, []).append(i)
        waited_for, todo = set(self.reached), list(self.reached)
        while todo:
            fresh = [i for i in sources.get(todo.pop(), ()) if i not in waited_for]
            waited_for.update(fresh)
            todo += fresh
        return sorted({entry for i in waited_for for entry in self.groups[i].starts} - self.live)


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
        todo += known.reach([i for i, group in enumerate(known.groups) if group.reached])
        todo += self._enter(known, known.live)
        while todo:
            send, worker = todo.pop()
            if worker in self._known:
                todo += self._arrive(self._known[worker], send)
            else:
                self._unknown.add(worker)
                self._early.setdefault(worker, set()).add(send)

    def _arrive(self, known: _ReportedWorker, send: int) -> list[tuple[int, int]]:
        entry = known.entry_of.get(send)
        if entry is None or entry in known.live:
            return []
        known.live.add(entry)
        return self._enter(known, (entry,))

    def _enter(self, known: _ReportedWorker, entries: Iterable[int]) -> list[tuple[int, int]]:
        """Return the recvs that ``entries`` lead to and that were not found before."""
        return known.reach(i for entry in entries for i in known.starting_in.get(entry, ()))

    def never(self) -> dict[int, list[tuple[int, int, str]]]:
        """Return for each worker its sends whose gradients will never arrive, as it reported them."""
        found: dict[int, list[tuple[int, int, str]]] = {}
        for worker, known in self._known.items():
            missing = [known.sends[entry - 1] for entry in known.missing() if entry]
            if missing:
                found[worker] = missing
        return found
