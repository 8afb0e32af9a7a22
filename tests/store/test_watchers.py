"""Who hears what at a server: against a set of pairs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.store.topics import Prefix, Target
from zmqgrad.store.watchers import Watchers

TARGETS: list[Target] = ["a", "b", Prefix("a")]
STEPS = st.tuples(
    st.sampled_from(["introduce", "add", "remove", "forget"]), st.integers(0, 2), st.sampled_from(TARGETS)
)


@given(st.lists(STEPS, max_size=40))
def test_it_is_a_set_of_pairs(steps: list[tuple[str, int, Target]]) -> None:
    watchers: Watchers[int] = Watchers()
    pairs: set[tuple[Target, int]] = set()
    names: dict[int, str] = {}
    for n, (step, ear, target) in enumerate(steps):
        if step == "introduce":
            names[ear] = f"name{n}"
            watchers.introduce(ear, names[ear])
        elif step == "add":
            watchers.add(target, ear)
            pairs.add((target, ear))
        elif step == "remove":
            last = {e for t, e in pairs if t == target} == {ear}
            assert watchers.remove(target, ear) == last
            pairs.discard((target, ear))
        else:
            alone = {t for t, e in pairs if e == ear and {o for u, o in pairs if u == t} == {ear}}
            assert set(watchers.forget(ear)) == alone
            pairs = {(t, e) for t, e in pairs if e != ear}
            names.pop(ear, None)
        for each in TARGETS:
            assert set(watchers.of(each)) == {e for t, e in pairs if t == each}
        assert {e: watchers.known(name) for e, name in names.items()} == {e: e for e in names}
        assert all(
            watchers.known(f"name{k}") is None for k in range(n + 1) if f"name{k}" not in names.values()
        )
