"""Waits are logged after a while, then at intervals."""

from __future__ import annotations

import logging

import pytest

from zmqgrad.runtime.clock import ManualClock
from zmqgrad.runtime.wait_log import FIRST_SECONDS, INTERVAL_SECONDS, WaitLog


def test_a_wait_is_logged_first_after_a_while_and_then_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = WaitLog(logging.getLogger("zmqgrad.test"), clock)
    logged = []
    for second in range(1, 41):
        clock.advance(1)
        log.warning("waits for %s", "rank 1")
        if caplog.messages:
            logged.append(second)
            assert caplog.messages == ["waits for rank 1"]
            caplog.clear()
    assert logged == [FIRST_SECONDS, FIRST_SECONDS + INTERVAL_SECONDS, FIRST_SECONDS + 2 * INTERVAL_SECONDS]


def test_the_time_left_ends_at_the_next_line() -> None:
    clock = ManualClock()
    log = WaitLog(logging.getLogger("zmqgrad.test"), clock)
    clock.advance(2)
    assert log.left() == FIRST_SECONDS - 2
    clock.advance(10)
    log.warning("waits")
    assert log.left() == INTERVAL_SECONDS
