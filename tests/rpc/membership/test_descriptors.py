"""The limit on open files follows the size of the group."""

from __future__ import annotations

import logging
import resource

import pytest

from zmqgrad.rpc.membership import descriptors
from zmqgrad.rpc.membership.descriptors import reserve_descriptors

INFINITE = resource.RLIM_INFINITY


class System:
    """A system with these limits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, refuses: bool = False) -> None:
        self.limits, self.refuses = (soft, hard), refuses
        monkeypatch.setattr(resource, "getrlimit", lambda which: self.limits)
        monkeypatch.setattr(resource, "setrlimit", self.set)
        descriptors._warn.cache_clear()

    def set(self, which: int, limits: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_NOFILE
        if self.refuses:
            raise ValueError("current limit exceeds maximum limit")
        self.limits = limits


@pytest.mark.parametrize(
    ("soft", "hard", "raised"), [(1024, 524288, True), (1024, INFINITE, True), (20000, 20000, False),
                                 (INFINITE, INFINITE, False)]
)  # fmt: skip
def test_enough_for_a_thousand_workers(
    soft: int, hard: int, raised: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    system = System(monkeypatch, soft, hard)
    reserve_descriptors(64)
    if raised:
        assert soft < system.limits[0] < 5000, (
            "64 workers fit the limit that most systems have; strangers not"
        )
    reserve_descriptors(1000)
    assert system.limits[1] == hard
    assert (system.limits[0] > 7 * 1000) if raised else (system.limits[0] == soft)
    assert not caplog.records


@pytest.mark.parametrize("refuses", [False, True])
def test_a_limit_that_cannot_be_raised_is_logged_once(
    refuses: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    system = System(monkeypatch, 4096, INFINITE if refuses else 4096, refuses)
    for _ in range(2):
        reserve_descriptors(1000)
    assert system.limits[0] == 4096
    (record,) = caplog.records
    assert "480 workers" in record.getMessage()
