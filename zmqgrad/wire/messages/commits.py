"""Commits: parts of committed state that agents copy to each other, or fetch. The frame is the part."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from zmqgrad.wire.messages.base import Id, Message, MessageType, Size, Text, WireStruct


class CommitId(WireStruct, frozen=True, order=True):
    """A commit. Later ones are greater: each round, and each restore within it, begins with the greatest."""

    round: Id
    restores: Id
    number: Id


class PartId(WireStruct, frozen=True):
    """The part of ``commit`` that ``rank`` has made, of ``shards`` in all; 0: nothing of it is sharded.

    ``rank`` -1: it is the same on all ranks.
    """

    commit: CommitId
    rank: Annotated[int, Meta(ge=-1, lt=1 << 31)]
    shards: Size


class CommitCopy(Message, frozen=True):
    """Agent to another: keep this ``part``, which is the frame. Reply: COMMIT_KEPT."""

    TYPE: ClassVar[MessageType] = MessageType.COMMIT_COPY
    part: PartId


class CommitKept(Message, frozen=True):
    """Reply to COMMIT_COPY: the part is here, in memory, unless ``error`` says why not."""

    TYPE: ClassVar[MessageType] = MessageType.COMMIT_KEPT
    error: Text = ""


class CommitFetch(Message, frozen=True):
    """Agent to another: send this ``part``. Reply: COMMIT_FETCHED."""

    TYPE: ClassVar[MessageType] = MessageType.COMMIT_FETCH
    part: PartId


class CommitFetched(Message, frozen=True):
    """Reply to COMMIT_FETCH: the part is the frame; without a frame, ``error`` says why."""

    TYPE: ClassVar[MessageType] = MessageType.COMMIT_FETCHED
    error: Text = ""
