"""The holder: what it gives to write to, what it keeps, and when it waits."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from zmqgrad.elastic.commits.agreement import REPLICATED, Choice, Inventory
from zmqgrad.elastic.commits.holder import Alone, Holder, Segment
from zmqgrad.errors import CommitError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.wire.messages import CommitId, PartId

NOW = Deadline.after(0.0)
WAIT = 20.0


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.close()


def soon() -> Deadline:
    return Deadline.after(WAIT)


def write(holder: Holder, rank: int, number: int, data: bytes, shards: int = 0) -> Segment:
    """One rank makes a commit, whose part is ``data``: rank 0 the replicated one, each the sharded one."""
    segment = holder.begin(rank, number, len(data), NOW)
    segment.map[: len(data)] = data
    owners = [REPLICATED] * (rank == 0) + [rank] * bool(shards)
    holder.commit(rank, number, shards, [(owner, 0, len(data)) for owner in owners])
    holder.spread(rank, number, shards)
    return segment


def restore(holder: Holder) -> Choice:
    """What rank 0 restores, without the random number."""
    choice = holder.restore(0, (), NOW)
    assert choice.origin
    return msgspec.structs.replace(choice, origin=0)


def read(holder: Holder, rank: int = REPLICATED) -> bytes:
    segment, offset, size = holder.open(rank, NOW)
    return segment.map[offset : offset + size]


def test_the_newest_commit_is_restored_in_the_next_round(holder: Holder) -> None:
    holder.begin_round(0, [0], Alone(holder))
    assert restore(holder) == Choice()
    write(holder, 0, 1, b"one")
    write(holder, 0, 2, b"two")
    holder.begin_round(1, [0], Alone(holder))
    assert holder.restore(0, (), NOW).number == 2
    assert read(holder) == b"two"


def test_a_commit_that_is_spread_when_its_round_has_ended_is_none_of_the_next(holder: Holder) -> None:
    """Its worker dies as soon as it has made it, and the thread that serves it is late."""
    holder.begin_round(0, [0], Alone(holder))
    holder.restore(0, (), NOW)
    holder.begin(0, 1, 3, NOW).map[:3] = b"one"
    holder.commit(0, 1, 0, [(REPLICATED, 0, 3)])
    holder.begin_round(1, [0], Alone(holder))
    holder.spread(0, 1, 0)
    assert holder.restore(0, (), NOW).number == 1
    assert read(holder) == b"one"


def test_a_worker_that_dies_while_it_writes_has_not_committed(holder: Holder) -> None:
    holder.begin_round(0, [0], Alone(holder))
    holder.restore(0, (), NOW)
    write(holder, 0, 1, b"one")
    holder.begin(0, 2, 3, NOW).map[:3] = b"xxx"
    holder.begin_round(1, [0], Alone(holder))
    assert holder.restore(0, (), NOW).number == 1
    assert read(holder) == b"one"


def test_two_commits_take_two_segments_however_many_are_made(holder: Holder) -> None:
    holder.begin_round(0, [0], Alone(holder))
    holder.restore(0, (), NOW)
    used = {write(holder, 0, number, b"x" * 4096).id for number in range(1, 10)}
    assert len(used) == 2
    assert holder.held_bytes() == 4096, "the one before is dropped as soon as the next is whole"


def test_a_part_that_has_grown_gets_other_memory(holder: Holder) -> None:
    holder.begin_round(0, [0], Alone(holder))
    holder.restore(0, (), NOW)
    for number in range(1, 5):
        write(holder, 0, number, b"x" * 4096 * 10**number)
    holder.restore(0, (), NOW)
    assert len(read(holder)) == 4096 * 10**4


def test_no_rank_is_two_commits_ahead(holder: Holder) -> None:
    holder.begin_round(0, [0, 1], Alone(holder))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: holder.restore(rank, (), soon()), [0, 1])
        assert first == second
        assert (first.number, first.commit) == (0, None)
        write(holder, 0, 1, b"a1", shards=2)
        with pytest.raises(CommitError, match="commit 1 is not whole"):
            holder.begin(0, 2, 2, NOW)
        ahead = pool.submit(holder.begin, 0, 2, 2, soon())
        write(holder, 1, 1, b"b1", shards=2)
        assert ahead.result(WAIT)


def test_ranks_restore_the_newest_that_all_have_made(holder: Holder) -> None:
    """Rank 0 has made one more, which goes."""
    holder.begin_round(0, [0, 1], Alone(holder))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: holder.restore(rank, (), soon()), [0, 1]))
        for rank in (0, 1):
            write(holder, rank, 1, b"%d1" % rank, shards=2)
        write(holder, 0, 2, b"02", shards=2)
        holder.begin_round(1, [0, 1], Alone(holder))
        choices = list(pool.map(lambda rank: holder.restore(rank, (), soon()), [0, 1]))
    assert [choice.number for choice in choices] == [1, 1]
    assert [read(holder, rank) for rank in (0, 1)] == [b"01", b"11"]
    with pytest.raises(CommitError, match="not whole"):
        holder.begin(0, 3, 2, NOW)
    write(holder, 0, 2, b"o2", shards=2)


def test_a_restore_names_the_ranks_that_do_not_call_it(holder: Holder) -> None:
    holder.begin_round(0, [0, 1], Alone(holder))
    with pytest.raises(CommitError, match=r"rank \[1\] has not called restore"):
        holder.restore(0, (), NOW)


def test_a_restore_that_is_repeated_has_the_same_origin(holder: Holder) -> None:
    """Another node has restored by what this one told it before it gave up."""

    class Late(Nodes):
        def exchange(self, restores: int, own: Inventory, deadline: Deadline) -> Sequence[Inventory]:
            told.append(own.origin)
            if len(told) == 1:
                raise CommitError("the ranks of node 1 have not called restore()")
            return [own, self.other]

    told: list[int] = []
    holder.begin_round(0, [0], Late(holder))
    with pytest.raises(CommitError, match="node 1"):
        holder.restore(0, (), NOW)
    assert holder.restore(0, (), NOW).origin == told[0]
    assert holder.restore(0, (), NOW).origin != told[0]


def test_commit_before_restore(holder: Holder) -> None:
    holder.begin_round(0, [0], Alone(holder))
    with pytest.raises(CommitError, match="call restore"):
        holder.begin(0, 1, 1, NOW)


def test_what_waits_fails_when_the_round_ends(holder: Holder) -> None:
    holder.begin_round(0, [0, 1], Alone(holder))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(holder.restore, 0, (), soon())
        holder.end_round()
        with pytest.raises(CommitError, match="the round has ended"):
            waiting.result(WAIT)


class Nodes(Alone):
    """Another node, whose inventory is given, and which keeps the copies."""

    def __init__(self, holder: Holder, other: Inventory | None = None) -> None:
        super().__init__(holder)
        self.other = other or Inventory()
        self.copies: dict[PartId, bytes] = {}
        self.exchanging = threading.Event()
        self.copying = threading.Event()
        self.may_copy = threading.Event()
        self.may_copy.set()

    def exchange(self, restores: int, own: Inventory, deadline: Deadline) -> Sequence[Inventory]:
        self.exchanging.set()
        return [own, self.other]

    def copy(self, part: PartId, data: memoryview) -> None:
        self.copying.set()
        assert self.may_copy.wait(WAIT)
        self.copies[part] = bytes(data)

    def fetch(self, node: int, part: PartId) -> memoryview:
        assert node == 1
        return memoryview(b"part of %d" % part.rank)


def test_a_commit_is_whole_when_its_shard_is_on_another_host(holder: Holder) -> None:
    nodes = Nodes(holder)
    holder.begin_round(0, [0], nodes)
    holder.restore(0, (), NOW)
    nodes.may_copy.clear()
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write, holder, 0, 1, b"one", 1)
        assert nodes.copying.wait(WAIT)
        with pytest.raises(CommitError, match="not whole"):
            holder.begin(0, 2, 3, NOW)
        nodes.may_copy.set()
        written.result(WAIT)
    assert nodes.copies == {PartId(CommitId(0, 1, 1), 0, 1): b"one"}
    holder.begin(0, 2, 3, NOW)


def test_parts_are_fetched_from_the_node_that_has_them(holder: Holder) -> None:
    commit = CommitId(3, 1, 7)
    there = Inventory(tuple(PartId(commit, rank, 2) for rank in (REPLICATED, 0, 1)))
    holder.begin_round(4, [0], Nodes(holder, there))
    assert restore(holder) == Choice(7, 2, commit)
    assert [read(holder, rank) for rank in (REPLICATED, 0, 1)] == [b"part of -1", b"part of 0", b"part of 1"]
    write(holder, 0, 8, b"eight", shards=1)
    assert holder.held_bytes() == 2 * 5, "what was restored is dropped with the next commit"


def test_a_copy_of_another_node_is_kept_and_restored(holder: Holder) -> None:
    holder.begin_round(0, [0], Nodes(holder))
    holder.restore(0, (), NOW)
    write(holder, 0, 1, b"own", shards=2)
    commit = CommitId(0, 1, 1)
    assert holder.keep(PartId(commit, 1, 2), memoryview(b"other"))
    holder.begin_round(1, [0], Alone(holder))
    assert restore(holder) == Choice(1, 2, commit)
    assert [read(holder, rank) for rank in (REPLICATED, 0, 1)] == [b"own", b"own", b"other"]


def test_a_commit_whose_other_shard_is_not_here_waits_for_the_node_that_has_it(holder: Holder) -> None:
    """To begin anew without a word would lose it, though that node may only be late."""
    holder.begin_round(0, [0], Nodes(holder))
    holder.restore(0, (), NOW)
    write(holder, 0, 1, b"own", shards=2)
    commit = CommitId(0, 1, 1)
    nodes = Nodes(holder)
    holder.begin_round(1, [0], nodes)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(holder.restore, 0, (), soon())
        assert nodes.exchanging.wait(WAIT)
        holder.begin_round(2, [0], Nodes(holder, Inventory((PartId(commit, 1, 2),), whole=commit)))
        with pytest.raises(CommitError, match="the round has ended"):
            waiting.result(WAIT)
    assert restore(holder) == Choice(1, 2, commit)
    assert [read(holder, rank) for rank in (0, 1)] == [b"own", b"part of 1"]


def test_ranks_that_catch_the_loss_of_a_commit_begin_anew(holder: Holder) -> None:
    holder.begin_round(0, [0], Nodes(holder))
    holder.restore(0, (), NOW)
    write(holder, 0, 1, b"own", shards=2)
    holder.begin_round(1, [0], Nodes(holder))
    with pytest.raises(CommitError, match=r"no host of this round has the part of rank 1: those that had it"):
        holder.restore(0, (), NOW)
    write(holder, 0, 1, b"new", shards=1)
    holder.begin_round(2, [0], Nodes(holder))
    assert restore(holder) == Choice(1, 1, CommitId(1, 1, 1))
    assert read(holder) == b"new"


class Ending(Nodes):
    """Nodes whose round ends while they copy the second commit, so that it does not become whole."""

    def copy(self, part: PartId, data: memoryview) -> None:
        if part.commit.number > 1:
            raise CommitError("the round has ended")


def test_a_whole_commit_is_held_though_a_newer_one_is_restored_that_is_not_whole(holder: Holder) -> None:
    """Workers fail while the newer one is copied; then a host is lost, before another one is whole."""
    whole, newer = (CommitId(0, 1, number) for number in (1, 2))
    holder.begin_round(0, [0], Ending(holder))
    holder.restore(0, (), NOW)
    write(holder, 0, 1, b"whole", shards=2)
    assert holder.keep(PartId(whole, 1, 2), memoryview(b"copy"))
    with pytest.raises(CommitError, match="the round has ended"):
        write(holder, 0, 2, b"newer", shards=2)
    holder.begin_round(1, [0], Nodes(holder, Inventory((PartId(newer, 1, 2),))))
    assert restore(holder) == Choice(2, 2, newer)
    assert read(holder, 0) == b"newer"
    holder.begin_round(2, [0], Alone(holder))
    assert restore(holder) == Choice(1, 2, whole)
    assert [read(holder, rank) for rank in (0, 1)] == [b"whole", b"copy"]
    write(holder, 0, 2, b"again", shards=1)
    assert holder.held_bytes() == 2 * len(b"again"), "all older ones are dropped with the next whole one"


def test_a_copy_of_an_earlier_round_is_of_no_use(holder: Holder) -> None:
    holder.begin_round(2, [0], Nodes(holder))
    holder.restore(0, (), NOW)
    assert not holder.keep(PartId(CommitId(1, 1, 5), 1, 2), memoryview(b"late"))


def test_a_copy_of_a_node_that_is_ahead_survives_the_restore(holder: Holder) -> None:
    """It has learned the choice sooner, and has committed since."""
    part = PartId(CommitId(0, 1, 1), 1, 2)

    class Ahead(Nodes):
        def exchange(self, restores: int, own: Inventory, deadline: Deadline) -> Sequence[Inventory]:
            assert holder.keep(part, memoryview(b"ahead"))
            return [own]

    holder.begin_round(0, [0], Ahead(holder))
    holder.restore(0, (), NOW)
    with holder.reading(part) as data:
        assert data == b"ahead"


class Counting(Nodes):
    """Nodes that keep what is reported."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder)
        self.reported: list[CommitId] = []

    def report(self, commit: CommitId) -> None:
        self.reported.append(commit)


def test_a_commit_that_is_made_again_counts_once(holder: Holder) -> None:
    """The call of a rank was interrupted after the holder had it. Others must make it before it is whole."""
    peers = Counting(holder)
    holder.begin_round(0, [0, 1], peers)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: holder.restore(rank, (), soon()), [0, 1]))
    for rank in (0, 1, 0, 0):
        write(holder, rank, 1, b"one")
    assert [commit.number for commit in peers.reported] == [1]
    holder.on_whole(peers.reported[0])
    write(holder, 1, 2, b"two")
    assert [commit.number for commit in peers.reported] == [1], "rank 0 has not made commit 2"


@pytest.mark.parametrize(("size", "file_limit"), [(1 << 21, 1 << 20), (1 << 62, resource.RLIM_INFINITY)])
def test_a_part_without_memory_takes_no_descriptor(size: int, file_limit: int) -> None:
    """The limit of ``ulimit -f`` holds for shared memory, too; the other is too large to be mapped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = os.listdir("/dev/fd")
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, hard))
    try:
        with pytest.raises(CommitError, match=f"no shared memory for a part of {size} bytes"):
            Segment(size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()
    assert os.listdir("/dev/fd") == before
