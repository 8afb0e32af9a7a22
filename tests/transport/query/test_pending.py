"""The query under way on a channel, without sockets: repetition, and which messages answer it."""

from __future__ import annotations

import pytest

from zmqgrad.errors import ProtocolError
from zmqgrad.transport.query.pending import PING_ID, REPEAT_SECONDS, PendingQuery
from zmqgrad.wire.messages import Message, Refusal, StoreDone, StorePong, StoreRefused

LIMIT = StoreRefused(Refusal.LIMIT, "")


@pytest.fixture
def query() -> PendingQuery:
    return PendingQuery(7, bytearray(b"query"), 100.0, 1000.0)


def test_a_query_is_repeated_at_growing_intervals(query: PendingQuery) -> None:
    now = 100.0
    for seconds in (*REPEAT_SECONDS, REPEAT_SECONDS[-1], REPEAT_SECONDS[-1]):
        assert query.seconds_to_wait(now) == seconds
        assert not query.must_repeat(now + seconds - 0.1)
        now += seconds
        assert query.must_repeat(now)


def test_no_wait_exceeds_the_deadline() -> None:
    assert PendingQuery(7, bytearray(), 100.0, 100.25).seconds_to_wait(100.0) == 0.25


def test_the_last_call_comes_once() -> None:
    query = PendingQuery(7, bytearray(), 100.0, 100.5, last_call_at=100.25)
    assert query.seconds_to_wait(100.0) == 0.25
    assert not query.must_end(100.2)
    assert not query.is_over(100.3)
    assert query.must_end(100.3)
    assert not query.must_end(100.4)
    assert query.seconds_to_wait(100.3) == pytest.approx(0.25)


def test_the_time_that_a_process_is_stopped_does_not_count() -> None:
    query = PendingQuery(7, bytearray(), 100.0, 105.0)
    assert query.seconds_to_wait(100.0) == 1.0
    assert not query.is_over(109.0)  # 8 s later than it wanted to wake
    assert query.must_repeat(109.0)
    assert query.seconds_to_wait(109.0) == 2.0
    assert not query.is_over(111.0)
    assert query.must_repeat(111.0)
    assert query.seconds_to_wait(111.0) == 2.0
    assert query.is_over(113.0)


@pytest.mark.parametrize(
    ("number", "message", "is_reply"),
    [
        (7, StoreDone(), True),
        (7, LIMIT, True),
        (6, StoreDone(), False),
        (PING_ID, StorePong("", ""), False),
        (PING_ID, LIMIT, True),
    ],
)
def test_classification_of_received_messages(
    query: PendingQuery, number: int, message: Message, is_reply: bool
) -> None:
    query.peer_responded = False
    assert query.receive(number, message) is is_reply
    assert query.peer_responded


def test_a_reply_to_a_query_that_was_never_sent(query: PendingQuery) -> None:
    with pytest.raises(ProtocolError, match="query 8"):
        query.receive(8, StoreDone())
