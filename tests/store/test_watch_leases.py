"""Who watches what at a server: against a dict of leases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.store.leases import WATCH_SECONDS, WatchLeases
from zmqgrad.store.watch_targets import Prefix, Target

TARGETS: list[Target] = ["a", "b", Prefix("a")]
STEPS = st.tuples(
    st.sampled_from(["add", "renew", "remove", "expire"]),
    st.integers(0, 2),
    st.sampled_from(TARGETS),
    st.floats(0, WATCH_SECONDS),
)


@given(st.lists(STEPS, max_size=40))
def test_watch_leases_equal_a_dict_with_expiry(steps: list[tuple[str, int, Target, float]]) -> None:
    table, leases, now = WatchLeases(), dict[tuple[Target, int], float](), 0.0
    for step, watcher, target, seconds in steps:
        now += seconds
        if step == "add":
            table.add(target, watcher, now)
            leases[target, watcher] = now + WATCH_SECONDS
        elif step == "renew":
            assert table.renew(target, watcher, now) == ((target, watcher) in leases)
            if (target, watcher) in leases:
                leases[target, watcher] = now + WATCH_SECONDS
        elif step == "remove":
            was_last = {w for t, w in leases if t == target} == {watcher}
            assert table.remove(target, watcher) == was_last
            leases.pop((target, watcher), None)
        else:
            before = {t for t, _ in leases}
            leases = {which: end for which, end in leases.items() if end > now}
            assert set(table.expire(now)) == before - {t for t, _ in leases}
        assert len(table) == len({t for t, _ in leases})
