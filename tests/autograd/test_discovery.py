"""The discovery: finds exactly the sends that can be reached, however the answers come."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.autograd.engine.discovery import Discovery
from zmqgrad.wire.messages import ReachabilityReport

WORKERS = 3


@st.composite
def reaches(draw: st.DrawFn) -> list[ReachabilityReport]:
    """Up to eight sends, anywhere; groups of a worker are entered by some of its sends, and lead to some."""
    homes = draw(st.lists(st.integers(0, WORKERS - 1), min_size=1, max_size=8))
    found = []
    for worker in range(WORKERS):
        mine = tuple((100 + i, 9, f"call {i}") for i, home in enumerate(homes) if home == worker)
        mask = st.integers(0, (2 << len(mine)) - 1).map(lambda m: m.to_bytes(2, "little"))
        arrived = draw(mask) if draw(st.booleans()) else bytes(2)
        recvs = st.lists(st.sampled_from([(100 + i, home) for i, home in enumerate(homes)]), max_size=3)
        groups = draw(st.lists(st.tuples(mask, recvs.map(tuple)), max_size=4))
        found.append(ReachabilityReport(worker, mine, arrived, tuple(groups)))
    return found


def entries(mask: bytes, reach: ReachabilityReport) -> set[int]:
    """The sends of a mask; 0 stands for the roots."""
    bits = int.from_bytes(mask, "little")
    return {number for i, number in enumerate([0, *(s[0] for s in reach.sends)]) if bits >> i & 1}


def expected(all_reaches: list[ReachabilityReport], asked: set[int]) -> dict[int, set[int]]:
    """By definition: repeat over everything until nothing changes."""
    live = {(r.worker, n) for r in all_reaches if r.worker in asked for n in entries(r.arrived, r)}
    known = set(asked)
    while True:
        before = len(live), len(known)
        for reach in all_reaches:
            if reach.worker not in known:
                continue
            live |= {(reach.worker, n) for n in entries(reach.arrived, reach)}
            for mask, recvs in reach.groups:
                if any((reach.worker, n) in live for n in entries(mask, reach)):
                    live |= {(home, n) for n, home in recvs}
                    known |= {home for _, home in recvs}
        if before == (len(live), len(known)):
            break
    found: dict[int, set[int]] = {}
    for reach in all_reaches:
        for mask, _ in reach.groups:
            here = entries(mask, reach)
            if reach.worker in known and any((reach.worker, n) in live for n in here):
                found.setdefault(reach.worker, set()).update(
                    n for n in here if n and (reach.worker, n) not in live
                )
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
    discovery.learn(ReachabilityReport(0, sends, b"\x01", ((b"\x01", ((70, 1),)), (b"\x07", ()))))
    assert discovery.unknown() == {1}
    discovery.learn(ReachabilityReport(1, ((70, 0, "answer"),), b"\x00", ((b"\x02", ((7, 0),)),)))
    assert discovery.unknown() == set()
    assert discovery.never() == {0: [(8, 1, "unused")]}
