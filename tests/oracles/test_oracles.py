"""Compares the results of all scenarios with torch's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.oracles.differences import DIFFERENCES
from tests.oracles.implementation import VARIABLE
from tests.oracles.outcome import Raised, compare
from tests.oracles.scenario import WORKERS, names, run_family
from tests.support.processes import run_processes

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FAMILIES = ("calls", "rrefs", "gradients", "optimizers")

SAME = [(f, name) for f in FAMILIES for name in names(f) if name not in DIFFERENCES.get(f, {})]
DIFFERENT = [(f, name) for f, entries in DIFFERENCES.items() for name in entries]


@cache
def results(family: str, implementation: str) -> dict[str, Any]:
    """Return the results of a family, by scenario. The first test that needs them runs the workers."""
    found: dict[str, Any] = run_processes(
        run_family, WORKERS, args=(family,), env={VARIABLE: implementation}, timeout=90.0
    )[0]
    return found


@pytest.mark.parametrize(("family", "name"), SAME)
def test_a_program_written_for_torch_finds_the_same(family: str, name: str) -> None:
    theirs, ours = results(family, "torch")[name], results(family, "zmqgrad")[name]
    assert compare(theirs, ours) == []


@pytest.mark.parametrize(("family", "name"), DIFFERENT)
def test_a_difference_still_exists(family: str, name: str) -> None:
    difference = DIFFERENCES[family][name]
    theirs, ours = results(family, "torch")[name], results(family, "zmqgrad")[name]
    assert repr(theirs) == difference.torch
    assert repr(ours) == difference.here
    assert compare(theirs, ours) != []
    assert difference.reason


@pytest.mark.parametrize(
    ("theirs", "ours", "agree"),
    [
        (Raised.of(ValueError("a")), Raised.of(UnicodeError("b")), True),
        (Raised.of(UnicodeError("a")), Raised.of(ValueError("a")), False),
        (Raised.of(ValueError("a b"), ("a",)), Raised.of(ValueError("c"), ("a",)), False),
        (Raised.of(ValueError("a"), ("x",)), Raised.of(ValueError("x"), ("x",)), False),
        (Raised.of(ValueError()), 5, False),
        (5, Raised.of(ValueError()), False),
        (1, True, False),
        ((1, 2), (1,), False),
        ((1, {"a": 2}), (1, {"a": 2}), True),
        ({"a": 1}, {"b": 1}, False),
    ],
)
def test_outcomes_are_compared_as_programs_see_them(theirs: Any, ours: Any, agree: bool) -> None:
    assert (compare(theirs, ours) == []) is agree
