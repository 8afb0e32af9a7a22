"""Which commit all nodes of a round can have. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

REPLICATED = -1
"""Stands for a rank: the part of a commit that is the same on all."""


class CommitId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A commit. Later ones are greater: each round, and each restore within it, begins with the greatest."""

    round: int
    restores: int
    number: int


class PartId(msgspec.Struct, frozen=True, array_like=True):
    """The part of ``commit`` that ``rank`` has made, of ``shards`` in all; 0: nothing of it is sharded."""

    commit: CommitId
    rank: int
    shards: int


class Inventory(msgspec.Struct, frozen=True):
    """What a node has.

    Args:
        parts: in its memory.
        saved: numbers of the commits that all of its ranks find on disk.
        endpoints, incarnation: where its parts can be fetched.
        host: on which it is.
    """

    parts: tuple[PartId, ...] = ()
    saved: tuple[int, ...] = ()
    endpoints: tuple[str, ...] = ()
    incarnation: int = 0
    host: str = ""


class Choice(msgspec.Struct, frozen=True):
    """What all ranks go on from.

    Args:
        number: of the commit; 0: there is none.
        shards: how many sharded parts it has.
        commit: where it is in memory; None: it is on disk, or there is none.
    """

    number: int = 0
    shards: int = 0
    commit: CommitId | None = None


def choose(inventories: Sequence[Inventory]) -> Choice:
    """The newest commit of which all parts are with some node; else the newest that all find on disk."""
    ranks: dict[CommitId, set[int]] = defaultdict(set)
    shards: dict[CommitId, int] = {}
    for inventory in inventories:
        for part in inventory.parts:
            ranks[part.commit].add(part.rank)
            shards[part.commit] = part.shards
    for commit in sorted(ranks, reverse=True):
        if ranks[commit].issuperset([REPLICATED, *range(shards[commit])]):
            return Choice(commit.number, shards[commit], commit)
    saved = set.intersection(*(set(inventory.saved) for inventory in inventories))
    return Choice(max(saved, default=0))
