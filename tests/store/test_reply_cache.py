"""What was answered last on each line, within bounds."""

from __future__ import annotations

from zmqgrad.store.reply_cache import ReplyCache
from zmqgrad.wire.messages import StoreDone, StoreNumber, StoreValue


def test_the_last_reply_to_each_client_is_cached() -> None:
    answers = ReplyCache()
    answers.remember(1, 4, StoreNumber(7))
    answers.remember(2, 9, StoreDone())
    assert answers.last[1] == (4, StoreNumber(7))
    answers.remember(1, 5, StoreDone())
    assert list(answers.last.items()) == [(2, (9, StoreDone())), (1, (5, StoreDone()))], "the latest last"


def test_the_client_with_the_oldest_change_is_evicted() -> None:
    answers = ReplyCache(max_clients=2)
    for line in (1, 2, 1, 3):
        answers.remember(line, 1, StoreDone())
    assert list(answers.last) == [1, 3]


def test_their_bytes_are_bounded() -> None:
    answers = ReplyCache(max_bytes=10)
    answers.remember(1, 1, StoreValue(b"x" * 6))
    answers.remember(2, 1, StoreValue(b"x" * 4))
    assert len(answers) == 2
    answers.remember(1, 2, StoreDone())
    answers.remember(3, 1, StoreValue(b"x" * 6))
    assert len(answers) == 3
    answers.remember(4, 1, StoreValue(b"x"))
    assert list(answers.last) == [1, 3, 4]
    answers.remember(5, 1, StoreValue(b"x" * 100))
    assert list(answers.last) == [5], "the last one is always there"
