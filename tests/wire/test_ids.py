"""Ids: 16 bits of worker, 48 of counter, never the same twice, never wrapped."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.wire.ids import MAX_COUNTER, MAX_WORKER, IdSource, join_id, show_id, split_id

workers = st.integers(0, MAX_WORKER)
counters = st.integers(0, MAX_COUNTER)


@given(workers, counters)
def test_what_is_joined_splits_again(worker: int, counter: int) -> None:
    value = join_id(worker, counter)
    assert 0 <= value < 1 << 64
    assert split_id(value) == (worker, counter)
    assert show_id(value) == f"{worker}.{counter}"


@given(workers, counters, workers, counters)
def test_different_pairs_give_different_ids(w1: int, c1: int, w2: int, c2: int) -> None:
    assert (join_id(w1, c1) == join_id(w2, c2)) == ((w1, c1) == (w2, c2))


@pytest.mark.parametrize(
    ("worker", "counter"), [(-1, 0), (MAX_WORKER + 1, 0), (0, -1), (0, MAX_COUNTER + 1), (1 << 64, 1 << 64)]
)
def test_what_does_not_fit_is_an_error(worker: int, counter: int) -> None:
    with pytest.raises(OverflowError, match="bit"):
        join_id(worker, counter)


@pytest.mark.parametrize("worker", [0, 1, MAX_WORKER])
def test_exhausted_ids_raise_from_then_on(worker: int) -> None:
    source = IdSource(worker, first=MAX_COUNTER - 1)
    assert [split_id(source.next()) for _ in range(2)] == [(worker, MAX_COUNTER - 1), (worker, MAX_COUNTER)]
    for _ in range(2):
        with pytest.raises(OverflowError, match=f"worker {worker} has used up"):
            source.next()


def test_counting_begins_at_one() -> None:
    assert [show_id(IdSource(7).next()), show_id(IdSource(7, first=5).next())] == ["7.1", "7.5"]


def test_a_source_for_no_worker_is_refused() -> None:
    with pytest.raises(OverflowError, match="65536"):
        IdSource(65536)


def test_many_threads_never_get_the_same_id() -> None:
    source = IdSource(3)
    start = threading.Barrier(8)
    got: list[list[int]] = [[] for _ in range(8)]

    def draw(mine: list[int]) -> None:
        start.wait(10)
        mine.extend(source.next() for _ in range(5000))

    threads = [threading.Thread(target=draw, args=(mine,)) for mine in got]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert sorted(i for mine in got for i in mine) == [join_id(3, n) for n in range(1, 40_001)]
    assert all(mine == sorted(mine) for mine in got)
