"""What a store holds of a group that workers join, leave and rejoin as they like; all under one prefix.

    id/<id>        who was given the id. Ids are never given twice: a restarted worker is another one
    name/<name>    the record of the worker that has the name; empty once it has left
    worker/<id>    the records of those that take part
    gone/<id>      why a worker no longer does
    changes        counts joins and losses; every worker watches this key

A name is taken over from a worker that is certainly dead, and refused while it lives or cannot be told. All
methods ask the store, and raise ``StoreError`` if it does not answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from zmqgrad.errors import (
    ConfigurationError,
    DuplicateWorkerError,
    RendezvousError,
    StoreError,
    StoreTimeoutError,
)
from zmqgrad.rpc.groups.identity import WorkerRecord
from zmqgrad.rpc.groups.joining import read_all
from zmqgrad.store import Store, WatchCallback
from zmqgrad.transport.heartbeat.failure_detector import REFUSED_SECONDS, is_reachable
from zmqgrad.wire.ids import MAX_WORKER

logger = logging.getLogger(__name__)

PREFIX = "rpc/dynamic"

READ_SECONDS = 0.5
"""How long records that were just listed may take to be read; one whose worker has left does not come."""


def allot_id(store: Store, name: str, rank: int | None) -> int:
    """An id that no worker of the group has, or had: ``rank`` if it is free, or the next.

    Raises:
        ConfigurationError: if ``rank`` can be none. RendezvousError: if all ids have been used up.
    """
    if rank is not None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= MAX_WORKER:
            raise ConfigurationError(f"rank must be 0 to {MAX_WORKER}, not {rank!r}")
        if _take_id(store, rank, name):
            return rank
        logger.info("%s: rank %d was another worker's before, so this one gets a new id", name, rank)
    while True:
        number = store.add("next_id", 1) - 1
        if number > MAX_WORKER:
            raise RendezvousError(
                f"{name}: all {MAX_WORKER + 1} worker ids have been used: start a new group"
            )
        if _take_id(store, number, name):
            return number


def _take_id(store: Store, number: int, name: str) -> bool:
    # What is written is unlike what anybody else would write only by chance, so only the first set counts.
    return store.add(f"id/{number}", 1) == 1


def lives(record: WorkerRecord) -> bool:
    """Does that worker live, or can that not be told?"""
    return any(is_reachable(endpoint, REFUSED_SECONDS) for endpoint in record.endpoints)


class Roster:
    """Who takes part, in ``store`` (under the prefix); ``own`` is this worker's record."""

    def __init__(self, store: Store, own: WorkerRecord) -> None:
        self._store = store
        self._own = own
        self._claim = msgspec.json.encode(own)

    # ---- this worker ------------------------------------------------------------------------------------

    def take_name(self, is_alive: Callable[[WorkerRecord], bool]) -> None:
        """Take this worker's name, if need be from one that is dead.

        Raises:
            DuplicateWorkerError: if a worker that lives, or may, has it.
        """
        own = self._own
        key, expected = f"name/{own.name}", b""
        while True:
            holder = self._store.compare_set(key, expected, self._claim)
            if holder == self._claim:
                return
            if holder == b"":  # it left at this very moment
                expected = b""
                continue
            other = msgspec.json.decode(holder, type=WorkerRecord)
            if is_alive(other):
                raise DuplicateWorkerError(
                    f"name {own.name!r} is not unique: worker {other.id} (process {other.pid} of "
                    f"{other.host}) has it and has not left; give each worker a name of its own"
                )
            logger.warning("%s takes the place of worker %d, which has died", own.name, other.id)
            self._publish_loss(other.id, "its process has ended, and another took its name")
            expected = holder

    def give_name_back(self) -> None:
        """Another may take this worker's name."""
        self._store.compare_set(f"name/{self._own.name}", self._claim, b"")

    def enter(self) -> None:
        """This worker takes part."""
        self._store.set(f"worker/{self._own.id}", self._claim)

    def leave(self, why: str) -> None:
        """It takes part no more. Whoever serves the store may go then."""
        self._publish_loss(self._own.id, why)

    # ---- all --------------------------------------------------------------------------------------------

    def watch(self, changed: WatchCallback) -> None:
        """Call ``changed`` after each change."""
        self._store.watch_key("changes", changed)

    def unwatch(self, changed: WatchCallback) -> None:
        """Call it no more."""
        self._store.unwatch_key("changes", changed)

    def say_changed(self) -> None:
        """Have all look who takes part."""
        self._store.add("changes", 1)

    def ids(self) -> list[int]:
        """The ids of all that take part."""
        return [int(key.partition("/")[2]) for key in self._store.list_keys("worker/")]

    def read(self, known: set[int]) -> tuple[set[int], list[WorkerRecord]]:
        """The ids of all that take part, and the records of those that are not among the ``known``."""
        while True:
            there = set(self.ids())
            unknown = sorted(there - known)
            if not unknown:
                return there, []
            try:
                found = read_all(self._store, [f"worker/{n}" for n in unknown], READ_SECONDS)
            except StoreTimeoutError:
                continue  # one of them has left between the two queries
            return there, [msgspec.json.decode(raw, type=WorkerRecord) for raw in found]

    def reason(self, worker_id: int) -> str:
        """Why that worker takes part no more."""
        key = f"gone/{worker_id}"
        return self._store.get(key).decode() if self._store.check([key]) else "it takes part no more"

    def strike_off(self, record: WorkerRecord, why: str) -> None:
        """That worker is dead, for all; another may take its name."""
        if self._store.check([f"worker/{record.id}"]):
            self._publish_loss(record.id, why)
            self._store.compare_set(f"name/{record.name}", msgspec.json.encode(record), b"")

    def _publish_loss(self, worker_id: int, why: str) -> None:
        self._store.set(f"gone/{worker_id}", why)
        self._store.delete_key(f"worker/{worker_id}")
        try:
            self.say_changed()
        except StoreError as e:
            if worker_id != self._own.id:
                raise
            logger.debug("%s was the last that the store waited for: %s", self._own.name, e)
