"""Holds the parts of commits in shared memory, for the workers of one node. Its threads are its callers'.

A commit is made in two steps: :meth:`Holder.begin` gives a rank memory to write to, which holds no commit
that may be needed, and :meth:`Holder.commit` says that it is written. So a worker may die at any moment.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import secrets
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from zmqgrad.elastic.commits.agreement import REPLICATED, Choice, Inventory, choose, newest_whole
from zmqgrad.errors import CommitError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.wire.messages import CommitId, PartId

_SPARE_FRACTION = 8
"""A segment is larger than its part by this fraction, as the next may be: memory is only taken as written."""


class Segment:
    """Shared memory, whose descriptor ``fd`` can be passed to a worker. Not used by others if ``users`` is 0.

    Raises:
        CommitError: if there is no memory, or no descriptor.
    """

    _ids = itertools.count(1)
    fd = -1

    def __init__(self, size: int) -> None:
        self.id = next(self._ids)
        self.size = -(-(size + size // _SPARE_FRACTION + 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.users = 0
        try:
            self.fd, self.map = _new_memory(self.size)
        except OSError as e:
            raise CommitError(f"no shared memory for a part of {size} bytes: {e.strerror}") from e

    def close(self) -> None:
        """Free the memory, once no worker maps it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        os.close(fd)
        with suppress(BufferError):  # it is being sent: freed after that
            self.map.close()

    def __del__(self) -> None:
        self.close()


def _new_memory(size: int) -> tuple[int, mmap.mmap]:
    sealed = hasattr(os, "memfd_create")
    if sealed:
        fd = os.memfd_create("zmqgrad-commit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
        if sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise


class Place(NamedTuple):
    """Bytes of a segment."""

    segment: Segment
    offset: int
    size: int


class Peers(Protocol):
    """The other nodes of a round."""

    def exchange(self, restores: int, own: Inventory, deadline: Deadline) -> Sequence[Inventory]:
        """What all nodes have, in the order of their ranks, once each of them has restored so often."""

    def copy(self, part: PartId, data: memoryview) -> None:
        """Copy a part to another host, and wait until it is there. Nothing, without another."""

    def fetch(self, node: int, part: PartId) -> memoryview:
        """The bytes of a part that ``node`` has."""

    def report(self, commit: CommitId) -> None:
        """This node has made ``commit``. Calls :meth:`Holder.on_whole` when all have, perhaps later."""

    def close(self) -> None:
        """Give up what waits, with an error. Idempotent."""


class Alone:
    """No other nodes."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder

    def exchange(self, restores: int, own: Inventory, deadline: Deadline) -> Sequence[Inventory]:
        return [own]

    def copy(self, part: PartId, data: memoryview) -> None:
        pass

    def fetch(self, node: int, part: PartId) -> memoryview:
        raise CommitError(f"node {node} is not known")

    def report(self, commit: CommitId) -> None:
        self._holder.on_whole(commit)

    def close(self) -> None:
        pass


def _explain_loss(missing: Sequence[int]) -> str:
    parts = ", ".join("what is replicated" if rank == REPLICATED else f"rank {rank}" for rank in missing)
    return (
        f"there was a whole commit, and no host of this round has the part of {parts}: those that had it "
        "were lost, or have not joined. Pass a directory of saved commits to restore(), or catch this on all "
        "ranks to begin anew"
    )


@dataclass
class _Round:
    number: int
    ranks: frozenset[int]
    peers: Peers
    restores: int = 0
    origin: int = field(default_factory=partial(secrets.randbits, 62))  # of the first restore
    whole: int = 0  # number of the newest whole commit
    choice: Choice | None = None
    saved: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by the ranks that restore now
    attempts: int = 0  # to restore
    error: CommitError | None = None  # of the last one
    lost: str = ""  # why the newest whole commit cannot be restored
    nodes: dict[PartId, int] = field(default_factory=dict)  # where the parts of the choice are
    written: set[tuple[int, int]] = field(default_factory=set)  # rank and number of commits to be spread
    made: set[int] = field(default_factory=set)  # ranks that have made the commit after ``reported``
    reported: int = 0  # number of the newest commit that all ranks of this node have made
    ended: bool = False

    def commit(self, number: int) -> CommitId:
        return CommitId(self.number, self.restores, number)


class Holder:
    """The parts that one node has. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards all below
        self._changed = threading.Condition(self._lock)
        self._segments: list[Segment] = []
        self._parts: dict[PartId, Place | memoryview] = {}
        self._writing: dict[int, Segment] = {}  # by rank
        self._fetching: set[PartId] = set()
        self._round: _Round | None = None
        self._whole: CommitId | None = None  # nothing older may be restored: it was whole, or all there was

    # ---- rounds -----------------------------------------------------------------------------------------

    def begin_round(self, number: int, ranks: Sequence[int], peers: Peers) -> None:
        """The workers ``ranks`` of this node begin round ``number``; those before have ended."""
        self.end_round()
        with self._lock:
            self._writing.clear()
            self._round = _Round(number, frozenset(ranks), peers)

    def end_round(self) -> None:
        """Fail what waits. What is held stays. Idempotent."""
        with self._lock:
            round, self._round = self._round, None
            if round is not None:
                round.ended = True
                self._changed.notify_all()
        if round is not None:
            round.peers.close()

    def close(self) -> None:
        """Free all memory. Idempotent."""
        self.end_round()
        with self._lock:
            self._parts.clear()
            for segment in self._segments:
                segment.close()
            self._segments.clear()

    def _current(self) -> _Round:
        if self._round is None:
            raise CommitError("the round has ended")
        return self._round

    def _wait(self, round: _Round, ready: Any, deadline: Deadline, explain: Any) -> None:
        """Wait for ``ready``, with the lock held."""
        self._changed.wait_for(lambda: round.ended or ready(), deadline.timeout())
        if round.ended:
            raise CommitError("the round has ended")
        if not ready():
            raise CommitError(explain())

    # ---- restoring --------------------------------------------------------------------------------------

    def restore(self, rank: int, saved: tuple[int, ...], deadline: Deadline) -> Choice:
        """Agree with all ranks on a commit.

        Args:
            rank: that asks; each one of the job does.
            saved: numbers of the commits that it finds on disk.

        Raises:
            CommitError: if not all ranks ask by ``deadline``, or the round ends; or if there was a commit,
                and no node of the round has all of it until then.
        """
        with self._lock:
            round = self._current()
            attempts, restores = round.attempts, round.restores
            round.saved[rank] = saved
            if round.ranks.difference(round.saved):
                try:
                    self._wait(
                        round,
                        lambda: round.attempts > attempts,
                        deadline,
                        lambda: (
                            round.lost
                            or f"rank {sorted(round.ranks.difference(round.saved))} has not called "
                            "restore(): all ranks must do so equally often"
                        ),
                    )
                except CommitError:
                    round.saved.pop(rank, None)
                    raise
                if round.error is not None:
                    raise round.error
                assert round.choice is not None
                return round.choice
            saved_here = set.intersection(*map(set, round.saved.values()))
            # Not drawn again if this fails here: another node may have got it already.
            origin = round.origin + restores
            own = Inventory(tuple(self._parts), tuple(saved_here), self._whole, origin=origin)
        try:
            inventories = round.peers.exchange(restores, own, deadline)
        except CommitError as error:
            with self._lock:
                round.attempts, round.error, round.saved = attempts + 1, error, {}
                self._changed.notify_all()
            raise
        choice = choose(inventories)
        with self._lock:
            if round.ended:
                raise CommitError("the round has ended")
            if choice.missing:
                round.lost = _explain_loss(choice.missing)
                try:
                    # A node that has it may live, and join: that ends the round.
                    self._wait(round, lambda: False, deadline, lambda: round.lost)
                finally:
                    round.attempts, round.restores, round.saved = attempts + 1, restores + 1, {}
                    round.error = CommitError(round.lost)
                    self._changed.notify_all()
            round.choice, round.whole = choice, choice.number
            # One that was whole is held until another one is: what is newer may be lost with a single host.
            self._whole = choice.commit and (newest_whole(inventories) or choice.commit)
            round.nodes = {part: node for node, each in enumerate(inventories) for part in each.parts}
            round.attempts, round.error, round.restores = attempts + 1, None, restores + 1
            round.lost = ""
            round.saved, round.made, round.reported = {}, set(), choice.number
            kept = (choice.commit, self._whole)
            # Not those that a node which is ahead has made since.
            self._drop(lambda part: part.commit not in kept and part.commit < round.commit(0))
            self._changed.notify_all()
        return choice

    def open(self, rank: int, deadline: Deadline) -> Place:
        """Where a part of the chosen commit is, here, from wherever it was.

        Raises:
            CommitError: if it cannot be had any more.
        """
        with self._lock:
            round = self._current()
            if round.choice is None or round.choice.commit is None:
                raise CommitError("no commit was restored")
            part = PartId(round.choice.commit, rank, round.choice.shards)
            self._wait(round, lambda: part not in self._fetching, deadline, lambda: f"{part} does not arrive")
            found = self._parts.get(part)
            if isinstance(found, Place):
                return found
            node = round.nodes.get(part)
            if found is None and node is None:
                raise CommitError(f"commit {part.commit.number} has no part of rank {rank}")
            self._fetching.add(part)
        try:
            data = found if found is not None else round.peers.fetch(node or 0, part)
            segment = Segment(len(data))
            segment.map[: len(data)] = data
            with self._lock:
                place = self._parts[part] = Place(segment, 0, len(data))
                self._segments.append(segment)
                return place
        finally:
            with self._lock:
                self._fetching.discard(part)
                self._changed.notify_all()

    # ---- committing -------------------------------------------------------------------------------------

    def begin(self, rank: int, number: int, size: int, deadline: Deadline) -> Segment:
        """Memory for ``size`` bytes of commit ``number`` of ``rank``, when the commit before is whole.

        Raises:
            CommitError: if that takes longer than ``deadline``, or the round ends.
        """
        with self._lock:
            round = self._current()
            if not round.restores:
                raise CommitError("call restore() before the first commit(), on all ranks")
            self._wait_whole(round, number - 1, deadline)
            self._writing.pop(rank, None)  # it has failed to write it
            held = {place.segment for place in self._parts.values() if isinstance(place, Place)}
            held.update(self._writing.values())
            free = [each for each in self._segments if each not in held and not each.users]
            fitting = [each for each in free if each.size >= size]
            segment = min(fitting, key=lambda each: each.size, default=None)
            if segment is None:
                for each in free:  # the parts have grown
                    self._segments.remove(each)
                    each.close()
                segment = Segment(size)
                self._segments.append(segment)
            self._writing[rank] = segment
            return segment

    def wait_whole(self, number: int, deadline: Deadline) -> None:
        """Wait until all ranks have made commit ``number``, and its shards are on two hosts.

        Raises:
            CommitError: if that takes longer than ``deadline``, or the round ends.
        """
        with self._lock:
            self._wait_whole(self._current(), number, deadline)

    def _wait_whole(self, round: _Round, number: int, deadline: Deadline) -> None:
        self._wait(
            round,
            lambda: round.whole >= number,
            deadline,
            lambda: (
                f"commit {number} is not whole yet: not all ranks have made it (all must commit equally "
                "often), or its copy has not reached the other host"
            ),
        )

    def commit(self, rank: int, number: int, shards: int, parts: Sequence[tuple[int, int, int]]) -> None:
        """``rank`` has written commit ``number``.

        Args:
            shards: how many sharded parts it has in all.
            parts: rank (or REPLICATED), offset and size of each part in the memory of :meth:`begin`.
        """
        with self._lock:
            round = self._current()
            segment = self._writing.pop(rank, None)
            if segment is None:
                raise CommitError(f"rank {rank} was given no memory for commit {number}")
            for owner, offset, size in parts:
                part = PartId(round.commit(number), owner, shards)
                self._parts[part] = Place(segment, offset, size)
            round.written.add((rank, number))

    def spread(self, rank: int, number: int, shards: int) -> None:
        """Copy the sharded part of ``rank`` to another host, and report the commit once all ranks have."""
        with self._lock:
            round = self._current()
            if (rank, number) not in round.written:
                return  # the round in which it was made has ended
            round.written.remove((rank, number))
            commit = round.commit(number)
        if shards:
            with self.reading(PartId(commit, rank, shards)) as data:
                if data is not None:
                    round.peers.copy(PartId(commit, rank, shards), data)
        with self._lock:
            if round.commit(number) != commit or number <= round.reported:
                return  # a rank whose commit() was interrupted makes the same one again
            round.made.add(rank)
            done = round.made == round.ranks
            if done:
                round.made, round.reported = set(), number
        if done:
            round.peers.report(commit)

    def on_whole(self, commit: CommitId) -> None:
        """All nodes have made ``commit``: those before are not needed any more."""
        with self._lock:
            round = self._round
            if round is None or commit.number <= round.whole or commit != round.commit(commit.number):
                return
            round.whole, self._whole = commit.number, commit
            self._drop(lambda part: part.commit < commit)
            self._changed.notify_all()

    def make_whole(self, number: int) -> None:
        """Commit ``number`` is whole, as this is the only rank. Idempotent."""
        with self._lock:
            self.on_whole(self._current().commit(number))

    def _drop(self, which: Any) -> None:
        for part in [part for part in self._parts if which(part)]:
            del self._parts[part]

    # ---- for other nodes --------------------------------------------------------------------------------

    def keep(self, part: PartId, data: memoryview) -> bool:
        """Keep a part that another node has made. Returns False if it is of no use."""
        before = CommitId(part.commit.round, part.commit.restores, part.commit.number - 1)
        self.on_whole(before)  # else its rank could not have made this one
        with self._lock:
            round = self._round
            if round is None or part.commit.round != round.number or part.commit < round.commit(0):
                return False
            self._parts[part] = data
            return True

    @contextmanager
    def reading(self, part: PartId) -> Iterator[memoryview | None]:
        """The bytes of a part, which do not change meanwhile; None if it is not here."""
        with self._lock:
            found = self._parts.get(part)
            if isinstance(found, Place):
                found.segment.users += 1
        try:
            if isinstance(found, Place):
                yield memoryview(found.segment.map)[found.offset : found.offset + found.size]
            else:
                yield found
        finally:
            with self._lock:
                if isinstance(found, Place):
                    found.segment.users -= 1

    def held_bytes(self) -> int:
        """The size of all parts that are held."""
        with self._lock:
            return sum(x.size if isinstance(x, Place) else len(x) for x in self._parts.values())
