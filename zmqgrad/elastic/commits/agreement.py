"""Which commit all nodes of a round can have. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from zmqgrad.wire.messages import CommitId, PartId

REPLICATED = -1
"""Stands for a rank: the part of a commit that is the same on all."""


class Inventory(msgspec.Struct, frozen=True):
    """What a node has.

    Args:
        parts: in its memory.
        saved: numbers of the commits that all of its ranks find on disk.
        whole: the newest commit that it knows to have been whole, or to have been restored without one.
        endpoints, incarnation: where its parts can be fetched.
        host: on which it is.
        origin: a random number.
    """

    parts: tuple[PartId, ...] = ()
    saved: tuple[int, ...] = ()
    whole: CommitId | None = None
    endpoints: tuple[str, ...] = ()
    incarnation: int = 0
    host: str = ""
    origin: int = 0


class Choice(msgspec.Struct, frozen=True):
    """What all ranks go on from.

    Args:
        number: of the commit; 0: there is none.
        shards: how many sharded parts it has.
        commit: where it is in memory; None: it is on disk, or there is none.
        missing: ranks of which no node has the part. There was a whole commit, and it is not to be had.
        origin: of the commits that follow: a number that only those of this restore have; 0: not known.
    """

    number: int = 0
    shards: int = 0
    commit: CommitId | None = None
    missing: tuple[int, ...] = ()
    origin: int = 0


def choose(inventories: Sequence[Inventory]) -> Choice:
    """The newest commit of which all parts are with some node; else the newest that all find on disk.

    None in memory that is older than one that was whole: the job has gone on from there. Nor one that is
    older than one on disk: the next commit would have the number of that, and overwrite it.
    """
    saved = max(set.intersection(*(set(inventory.saved) for inventory in inventories)), default=0)
    whole = newest_whole(inventories)
    ranks: dict[CommitId, set[int]] = defaultdict(set)
    shards: dict[CommitId, int] = {}
    for inventory in inventories:
        for part in inventory.parts:
            ranks[part.commit].add(part.rank)
            shards[part.commit] = part.shards
    for commit in sorted(ranks, reverse=True):
        if (whole is not None and commit < whole) or commit.number < saved:
            break
        if ranks[commit].issuperset([REPLICATED, *range(shards[commit])]):
            return Choice(commit.number, shards[commit], commit, origin=inventories[0].origin)
    if saved or whole is None:
        return Choice(saved, origin=inventories[0].origin)
    missing = {REPLICATED, *range(shards.get(whole, 0))} - ranks[whole]
    return Choice(missing=tuple(sorted(missing)))


def newest_whole(inventories: Sequence[Inventory]) -> CommitId | None:
    """The newest commit that any node knows to have been whole; None: there was none."""
    return max((each.whole for each in inventories if each.whole is not None), default=None)
