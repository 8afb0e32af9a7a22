"""The discovery: finds exactly the sends that can be reached, however the answers come."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.autograd.engine.discovery import Discovery
from zmqgrad.wire.messages import GroupReport, ReachabilityReport

WORKERS = 3


@st.composite
def reaches(draw: st.DrawFn) -> list[ReachabilityReport]:
    """Up to eight sends, anywhere; groups of a worker are entered by some of its sends, and lead to some."""
    homes = draw(st.lists(st.integers(0, WORKERS - 1), min_size=1, max_size=8))
    recvs = st.lists(st.sampled_from([(100 + i, home) for i, home in enumerate(homes)]), max_size=3)
    found = []
    for worker in range(WORKERS):
        mine = tuple((100 + i, 9, f"call {i}") for i, home in enumerate(homes) if home == worker)
        entry = st.integers(0, len(mine))
        arrived = draw(st.sets(entry)) if draw(st.booleans()) else set()
        count = draw(st.integers(0, 4))
        groups = []
        for i in range(count):
            behind = st.sets(st.integers(i + 1, count - 1)) if i + 1 < count else st.just(set[int]())
            starts = tuple(sorted(draw(st.sets(entry, max_size=3))))
            # Part of the entries before a group may have been reported as a group that has run.
            reached = bool(arrived.intersection(starts)) or draw(st.integers(0, 9)) == 0
            groups.append(GroupReport(starts, tuple(sorted(draw(behind))), tuple(draw(recvs)), reached))
        mask = sum(1 << i for i in arrived).to_bytes(2, "little")
        found.append(ReachabilityReport(worker, mine, mask, tuple(groups)))
    return found


def entries_of(reach: ReachabilityReport) -> list[set[int]]:
    """For each group, the entries that reach it: those that start in it or in a group before it."""
    found = [set(group.starts) for group in reach.groups]
    for i, group in enumerate(reach.groups):
        for dependent in group.dependents:
            found[dependent] |= found[i]
    return found


def expected(all_reaches: list[ReachabilityReport], asked: set[int]) -> dict[int, set[int]]:
    """By definition: repeat over everything until nothing changes."""
    numbers = [[0, *(send[0] for send in reach.sends)] for reach in all_reaches]
    live: set[tuple[int, int]] = set()
    reached: set[tuple[int, int]] = set()
    known = set(asked)
    while True:
        before = len(live), len(known), len(reached)
        for worker, reach in enumerate(all_reaches):
            if worker not in known:
                continue
            arrived = int.from_bytes(reach.arrived, "little")
            live |= {(worker, n) for i, n in enumerate(numbers[worker]) if arrived >> i & 1}
            entries = entries_of(reach)
            for i, group in enumerate(reach.groups):
                before_it = (worker, i) in reached or group.reached
                if before_it or any((worker, numbers[worker][e]) in live for e in entries[i]):
                    reached |= {(worker, i), *((worker, dependent) for dependent in group.dependents)}
                    live |= {(home, n) for n, home in group.recvs}
                    known |= {home for _, home in group.recvs}
        if before == (len(live), len(known), len(reached)):
            break
    found: dict[int, set[int]] = {}
    for worker, i in reached:
        missing = {numbers[worker][entry] for entry in entries_of(all_reaches[worker])[i] if entry}
        found.setdefault(worker, set()).update(n for n in missing if (worker, n) not in live)
    return {worker: sends for worker, sends in found.items() if sends}


@given(reaches(), st.sets(st.integers(0, WORKERS - 1), min_size=1), st.randoms(use_true_random=False))
def test_discovery_equals_a_repeated_search(
    all_reaches: list[ReachabilityReport], asked: set[int], shuffle: random.Random
) -> None:
    discovery = Discovery(asked)
    while unknown := discovery.unknown():
        discovery.learn(all_reaches[shuffle.choice(sorted(unknown))])
    never = {worker: {number for number, *_ in sends} for worker, sends in discovery.never().items()}
    assert never == expected(all_reaches, asked)


def test_never_returns_sends_without_gradients() -> None:
    discovery = Discovery({0})
    sends = ((7, 1, "used"), (8, 1, "unused"))
    groups = (GroupReport((0,), (1,), ((70, 1),), True), GroupReport((1, 2), (), (), False))
    discovery.learn(ReachabilityReport(0, sends, b"\x01", groups))
    assert discovery.unknown() == {1}
    there = GroupReport((1,), (), ((7, 0),), False)
    discovery.learn(ReachabilityReport(1, ((70, 0, "answer"),), b"\x00", (there,)))
    assert discovery.unknown() == set()
    assert discovery.never() == {0: [(8, 1, "unused")]}
