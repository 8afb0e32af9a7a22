"""Repeated log lines are counted, not repeated."""

from __future__ import annotations

import logging

import pytest

from zmqgrad.runtime import repeat_log
from zmqgrad.runtime.repeat_log import RepeatLog


def test_the_first_in_full_then_counts_and_the_total(caplog: pytest.LogCaptureFixture) -> None:
    log = RepeatLog(logging.getLogger("zmqgrad.test"), "worker0")
    for _ in range(2500):
        log.warning("a trace\nValueError: x")
    log.warning("another")
    log.close()
    log.close()
    head = "worker0: logged once, happened"
    assert caplog.messages == [
        "a trace\nValueError: x",
        f"{head} 10 times so far: ValueError: x",
        f"{head} 100 times so far: ValueError: x",
        f"{head} 1000 times so far: ValueError: x",
        "another",
        f"{head} 2500 times in total: ValueError: x",
    ]


def test_the_oldest_texts_are_forgotten(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat_log, "MAX_TEXTS", 2)
    log = RepeatLog(logging.getLogger("zmqgrad.test"), "worker0")
    for text in ("a", "a", "b", "c"):
        log.warning(text)
    assert caplog.messages == ["a", "b", "worker0: logged once, happened 2 times in total: a", "c"]
