"""Which commit all nodes can have."""

from __future__ import annotations

from zmqgrad.elastic.commits.agreement import (
    REPLICATED,
    Choice,
    Inventory,
    choose,
)
from zmqgrad.wire.messages import CommitId, PartId

FIRST, SECOND = CommitId(0, 1, 1), CommitId(0, 1, 2)


def inventory(*parts: tuple[CommitId, int], shards: int = 0, saved: tuple[int, ...] = ()) -> Inventory:
    return Inventory(tuple(PartId(commit, rank, shards) for commit, rank in parts), saved)


def test_nothing_was_committed() -> None:
    assert choose([inventory(), inventory()]) == Choice()


def test_what_is_replicated_is_taken_from_any_node() -> None:
    """The one that was made by a single node is as good: its values are the same on all."""
    assert choose([inventory((FIRST, REPLICATED)), inventory((SECOND, REPLICATED)), inventory()]) == Choice(
        2, 0, SECOND
    )


def test_a_commit_of_which_a_shard_is_missing_is_not_chosen() -> None:
    nodes = [
        inventory((FIRST, REPLICATED), (FIRST, 0), (SECOND, REPLICATED), (SECOND, 0), shards=2),
        inventory((FIRST, REPLICATED), (FIRST, 1), (SECOND, REPLICATED), shards=2),
    ]
    assert choose(nodes) == Choice(1, 2, FIRST)


def test_a_copy_at_another_node_stands_for_a_lost_one() -> None:
    assert choose([inventory((FIRST, REPLICATED), (FIRST, 0), (FIRST, 1), shards=2)]) == Choice(1, 2, FIRST)


def test_a_later_round_counts_more_than_a_larger_number() -> None:
    """It has gone on from a commit that was chosen; what a frozen node has made since is not part of that."""
    later = CommitId(1, 1, 2)
    nodes = [inventory((CommitId(0, 1, 9), REPLICATED)), inventory((later, REPLICATED))]
    assert choose(nodes) == Choice(2, 0, later)


def test_the_newest_on_the_disks_of_all_is_chosen_if_none_is_in_memory() -> None:
    assert choose([inventory(saved=(3, 5)), inventory(saved=(3, 4))]) == Choice(3)
    assert choose([inventory(saved=(3,)), inventory()]) == Choice()


def test_nothing_older_than_what_is_on_disk_is_chosen_from_memory() -> None:
    """A host was lost when all had saved the second commit, and its shard of that was not copied yet."""
    parts = ((FIRST, REPLICATED), (FIRST, 0), (FIRST, 1), (SECOND, REPLICATED), (SECOND, 0))
    assert choose([inventory(*parts, shards=2, saved=(2,)), inventory(saved=(2,))]) == Choice(2)
    assert choose([inventory(*parts, shards=2, saved=(1, 2)), inventory(saved=(1,))]) == Choice(1, 2, FIRST)


def test_nothing_older_than_a_whole_commit_is_chosen_from_memory() -> None:
    """All have gone on from it, and the node that had a part of it is not among these."""
    nodes = [inventory((FIRST, REPLICATED), (FIRST, 0), (SECOND, REPLICATED), shards=1)]
    assert choose([*nodes, Inventory(whole=FIRST)]) == Choice(1, 1, FIRST)
    assert choose([*nodes, Inventory(whole=SECOND)]) == Choice(missing=(0,))
    assert choose([Inventory(nodes[0].parts, saved=(1,), whole=SECOND)]) == Choice(1), "the disk counts"
    assert choose([Inventory(whole=SECOND)]) == Choice(missing=(REPLICATED,))
