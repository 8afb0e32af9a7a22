"""One time for all clocks: estimates their offsets from messages, with an error bound that holds. Pure.

A message that leaves at time s of clock u and arrives at time r of clock v shows that the offset of v from u
is at most r - s, for no message arrives before it left; one in the other direction bounds it from below.
(NTP's request and reply with the minimal round trip are the special case of one message each way.) A clock
drifts by at most ``MAX_DRIFT``, so a message also bounds the offset at other times, by that much less
tightly.

Time is divided into bins. In each, the bounds form a system of difference constraints: the shortest path from
the reference to a clock is the upper bound of its offset, that back to the reference the negated lower bound
(Cormen et al., "Introduction to Algorithms", 24.4). The estimate is the middle of both, for which no message
of the bin arrives before it left (by the triangle inequality); the error bound is half the width. Where the
bounds contradict each other a clock has jumped, and the alignment starts anew.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Clock = str
"""Identifies a clock; processes that share one have equal times."""

MAX_DRIFT = 1e-4
"""How fast a clock may gain or lose against the reference, as a share: 100 ppm. Crystals have up to 50."""

MIN_BIN_NANOSECONDS = 100_000_000
MAX_BINS = 2000
"""A longer trace has longer bins, and by that wider bounds: 1 h has 1.8 s, which adds up to 0.4 ms."""

_Pair = tuple[Clock, Clock]


class _Sample(NamedTuple):
    """The quickest message of a pair in a short time; times of the sender's and the receiver's clock."""

    delay: int
    sent: int
    received: int


@dataclass
class _Knots:
    """The offset of a clock from the reference at the centers of the bins.

    ``times`` are of the clock itself, in order. Where the clock has jumped, there are two of one time.
    """

    times: list[float] = field(default_factory=list)
    offsets: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    segment: int = 0

    def add(self, time: float, offset: float, bound: float, segment: int) -> None:
        if self.times and segment != self.segment:
            middle = (self.times[-1] + time) / 2
            self.times += [middle, middle]
            self.offsets += [self.offsets[-1], offset]
            self.bounds += [self.bounds[-1], bound]
        self.times.append(time)
        self.offsets.append(offset)
        self.bounds.append(bound)
        self.segment = segment


class Alignment:
    """Converts times of all clocks to those of one, the reference. Made by :meth:`OffsetEstimator.solve`."""

    def __init__(
        self, reference: Clock, knots: Mapping[Clock, _Knots], slack: float, jumps: Sequence[int]
    ) -> None:
        self.reference = reference
        self.jumps = tuple(jumps)
        """Times of the reference at which a clock jumped, to within a bin."""
        self._knots = knots
        self._slack = slack

    def clocks(self) -> list[Clock]:
        """The clocks that messages connect with the reference; itself first."""
        return [self.reference, *self._knots]

    def converter(self, clock: Clock) -> Callable[[int], int]:
        """A function from times of ``clock`` to times of the reference.

        Raises:
            KeyError: if no messages connect the clock with the reference.
        """
        if clock == self.reference:
            return lambda time: time
        times, offsets = self._knots[clock].times, self._knots[clock].offsets

        def convert(time: int) -> int:
            i = bisect.bisect_right(times, time)
            if not 0 < i < len(times):
                return time - round(offsets[min(i, len(times) - 1)])
            slope = (offsets[i] - offsets[i - 1]) / (times[i] - times[i - 1])
            return time - round(offsets[i - 1] + slope * (time - times[i - 1]))

        return convert

    def bound(self, clock: Clock, time: int) -> float:
        """The largest error of a converted ``time`` (ns); infinite if messages went one way only."""
        if clock == self.reference:
            return 0.0
        knots = self._knots[clock]
        i = bisect.bisect_right(knots.times, time) - 1
        near = knots.bounds[max(i, 0) : i + 2]
        first, last = knots.times[0], knots.times[-1]
        outside = max(0.0, first - time, time - last)
        return max(near) + self._slack + 2 * MAX_DRIFT * outside


class OffsetEstimator:
    """Collects messages between clocks; :meth:`solve` aligns the clocks."""

    def __init__(self) -> None:
        self._best: defaultdict[_Pair, dict[int, _Sample]] = defaultdict(dict)

    def add(self, source: Clock, target: Clock, sent: int, received: int) -> None:
        """Adds a message, with its times (nanoseconds) by the clocks of its sender and its receiver."""
        best = self._best[source, target]
        number = sent // MIN_BIN_NANOSECONDS
        known = best.get(number)
        if known is None or received - sent < known.delay:
            best[number] = _Sample(received - sent, sent, received)

    def solve(self, reference: Clock) -> Alignment | None:
        """Aligns all clocks that messages connect with ``reference``.

        Returns:
            None if there is no message between different clocks.
        """
        if not self._best:
            return None
        coarse = self._coarse(reference)
        return _Solver(reference, coarse, self._best).solve()

    def _coarse(self, reference: Clock) -> dict[Clock, float]:
        """One offset for each clock, by the quickest messages of all times: good enough to sort into bins."""
        least = {pair: min(samples.values()).delay for pair, samples in self._best.items()}
        neighbours: defaultdict[Clock, set[Clock]] = defaultdict(set)
        for source, target in least:
            neighbours[source].add(target)
            neighbours[target].add(source)
        offsets, queue = {reference: 0.0}, [reference]
        for u in queue:
            for v in sorted(neighbours[u] - offsets.keys()):
                high, low = least.get((u, v)), least.get((v, u))
                if high is None or low is None:
                    offsets[v] = offsets[u] + (high if high is not None else -(low or 0))
                else:
                    offsets[v] = offsets[u] + (high - low) / 2
                queue.append(v)
        return offsets


class _Solver:
    """Solves the constraints of all bins; ``coarse`` has the clocks to align."""

    def __init__(
        self, reference: Clock, coarse: Mapping[Clock, float], best: Mapping[_Pair, Mapping[int, _Sample]]
    ) -> None:
        self._reference = reference
        self._coarse = coarse
        depth = {clock: i for i, clock in enumerate(coarse)}
        samples: list[tuple[float, _Pair, int]] = []
        for pair, each in best.items():
            if pair[0] in coarse:
                # The time by the clock next to the reference: the other one may be what jumps.
                by_sender = depth[pair[0]] < depth[pair[1]]
                offset = coarse[pair[0] if by_sender else pair[1]]
                samples += ((s[1 if by_sender else 2] - offset, pair, s.delay) for s in each.values())
        self._start = min(samples)[0]
        self._width = max(MIN_BIN_NANOSECONDS, (max(samples)[0] - self._start) / MAX_BINS)
        self._step = 2 * MAX_DRIFT * self._width  # how much less a bin says about the next one
        self._bins = self._constraints(samples)
        self._segments = self._find_segments()
        self._propagate()

    def _center(self, number: int) -> float:
        return self._start + (number + 0.5) * self._width

    def _constraints(self, samples: Iterable[tuple[float, _Pair, int]]) -> list[dict[_Pair, float]]:
        """By bin: the most that the offset of the second clock from the first can be at its center."""
        found: defaultdict[int, dict[_Pair, float]] = defaultdict(dict)
        for time, pair, delay in samples:
            number = int((time - self._start) // self._width)
            # Both clocks drift between then and the center; what the message took outweighs its own drift.
            most = delay + 2 * MAX_DRIFT * abs(time - self._center(number))
            found[number][pair] = min(found[number].get(pair, math.inf), most)
        return [found[number] for number in range(max(found) + 1)]

    def _find_segments(self) -> list[int]:
        """Numbers the times between jumps, by bin; carries the bounds of earlier bins on to later ones."""
        segments: list[int] = []
        running: dict[_Pair, float] = {}
        segment = 0
        for constraints in self._bins:
            _reconcile(constraints)
            carried = {pair: most + self._step for pair, most in running.items()}
            for pair, most in constraints.items():
                carried[pair] = min(most, carried.get(pair, math.inf))
            if any(most + carried.get((v, u), math.inf) < 0 for (u, v), most in carried.items()):
                segment += 1
                carried = dict(constraints)
            constraints.clear()
            constraints.update(carried)
            running = constraints
            segments.append(segment)
        return segments

    def _propagate(self) -> None:
        """Carries the bounds of later bins back to earlier ones of their segment."""
        for number in range(len(self._bins) - 2, -1, -1):
            if self._segments[number] == self._segments[number + 1]:
                here = self._bins[number]
                for pair, most in self._bins[number + 1].items():
                    here[pair] = min(here.get(pair, math.inf), most + self._step)

    def solve(self) -> Alignment:
        knots = {clock: _Knots() for clock in self._coarse if clock != self._reference}
        for number, constraints in enumerate(self._bins):
            highest = _shortest_paths(self._reference, constraints)
            reversed_ = {(v, u): most for (u, v), most in constraints.items()}
            lowest = _shortest_paths(self._reference, reversed_)
            for clock, each in knots.items():
                high, low = highest.get(clock, math.inf), -lowest.get(clock, math.inf)
                if math.isinf(high) and math.isinf(low):
                    continue  # a later segment that this clock has no part in
                offset = (high + low) / 2 if high - low < math.inf else high if low == -math.inf else low
                each.add(self._center(number) + offset, offset, (high - low) / 2, self._segments[number])
        firsts = [i for i in range(1, len(self._bins)) if self._segments[i] != self._segments[i - 1]]
        jumps = [round(self._center(number)) for number in firsts]
        return Alignment(self._reference, knots, MAX_DRIFT * self._width, jumps)


def _reconcile(constraints: dict[_Pair, float]) -> None:
    """Widens bounds of one bin that contradict each other (a clock jumped in it) to cover both values."""
    for (u, v), most in list(constraints.items()):
        back = constraints.get((v, u))
        if back is not None and most + back < 0:
            constraints[u, v], constraints[v, u] = -back, -most


def _shortest_paths(source: Clock, lengths: Mapping[_Pair, float]) -> dict[Clock, float]:
    """Bellman and Ford's algorithm; lengths may be negative. Contradictory cycles end it after n rounds."""
    found = {source: 0.0}
    for _ in range(len(lengths) + 1):
        changed = False
        for (u, v), length in lengths.items():
            if u in found and found[u] + length < found.get(v, math.inf):
                found[v] = found[u] + length
                changed = v != source
        if not changed:
            break
    return found
