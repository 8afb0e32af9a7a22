"""The records of a group's members in a store, for both kinds of group.

    id/<id>        the worker that has the id; the first to write the key gets it
    name/<name>    the record of the worker that has the name; empty once the name was released
    size           the record of the first worker of a group of fixed size, with the world size it passed
    worker/<id>    the record of a member; in a group of fixed size also why it was refused. Members of a
                   dynamic group watch these keys, so that a join costs each of them a notification, no query
    gone/<id>      why a worker is no longer a member
    joined/<id>    written by a worker of a group of fixed size when it has read all records

All keys are under the prefix of the group. The two kinds differ in when an id or a name can be claimed again:

- Fixed size: never while the group exists. A second claim is refused, and the refusal is published, because
  the group can never be complete. A worker whose join fails withdraws its claims, so that it can try again.
- Dynamic: an id is never claimed twice, so a restarted worker is a different worker. A name can be claimed
  again once its holder has left or is dead.

All methods query the store and raise ``StoreError`` if it does not reply.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from zmqgrad.environment import read_launch
from zmqgrad.errors import (
    ConfigurationError,
    DuplicateWorkerError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreError,
    StoreTimeoutError,
    WorldSizeError,
)
from zmqgrad.rpc.membership.worker_info import WorkerRecord
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.wait_log import WaitLog
from zmqgrad.store import PrefixStore, Store
from zmqgrad.transport.heartbeat.failure_detector import REFUSED_SECONDS, is_reachable
from zmqgrad.wire.ids import MAX_WORKER

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval at which a worker that waits for others checks who is missing; it grows up to the next."""

MAX_POLL_SECONDS = 8.0
"""The longest such interval: each check reads a list as long as the group is large."""

READ_TIMEOUT_SECONDS = 0.5
"""Timeout for reading records that were just listed. A record is missing if its worker left in between."""

IsAlive = Callable[[WorkerRecord], bool]

_REFUSED = b"!"
"""Prefix of the reason that a refused worker publishes instead of its record."""

_MIXED = b"#"
"""The same for a worker that passed no world size."""

_UNEQUAL = b"%"
"""The same for a worker that passed another world size than the first."""

_REASONS: dict[bytes, type[RendezvousError]] = {
    _REFUSED: DuplicateWorkerError,
    _MIXED: RendezvousError,
    _UNEQUAL: WorldSizeError,
}

MAX_LISTED_RANKS = 16
"""How many missing ranks a message lists."""

_DYNAMIC_PREFIX = "rpc/dynamic"
_FIXED_RECORD = re.compile(r"rpc/\d+/worker/\d+")


def fixed_store(store: Store, generation: int) -> PrefixStore:
    """The keys of this process's group number ``generation`` of fixed size; closing it closes ``store``.

    The number distinguishes groups that use one store, such as a launcher's, one after the other.

    Raises:
        RendezvousError: if a dynamic group uses the store.
    """
    check_no_dynamic_group(store)
    return PrefixStore(f"rpc/{generation}", store, owned=True)


def dynamic_store(store: Store, rank: int | None) -> PrefixStore:
    """The keys of the dynamic group that uses ``store``; closing it closes ``store``.

    Raises:
        RendezvousError: if a group of fixed size uses the store.
    """
    check_no_fixed_group(store, rank)
    return PrefixStore(_DYNAMIC_PREFIX, store, owned=True)


def check_no_dynamic_group(store: Store) -> None:
    """Check that no dynamic group uses ``store``.

    Raises:
        RendezvousError: if one does.
    """
    error = _mixed(store, store.list_keys(f"{_DYNAMIC_PREFIX}/worker/"), "of no fixed size")
    if error is not None:
        raise error


def check_no_fixed_group(store: Store, rank: int | None) -> None:
    """Check that no group of fixed size uses ``store``.

    Args:
        store: of the workers.
        rank: of this worker. A group that still waits for this rank is told why it does not join.

    Raises:
        RendezvousError: if one does.
    """
    keys = [key for key in store.list_keys("rpc/") if _FIXED_RECORD.fullmatch(key)]
    error = _mixed(store, keys, "of a fixed size")
    if error is None:
        return
    if rank is not None:
        for group in {key.rpartition("/")[0] for key in keys}:
            store.compare_set(f"{group}/{rank}", "", _MIXED + f"rank {rank}: {error}".encode())
    raise error


def _mixed(store: Store, keys: list[str], kind: str) -> RendezvousError | None:
    """The error if a worker whose record is at one of ``keys`` is alive."""
    for key in keys:
        try:
            (raw,) = store.multi_get([key], READ_TIMEOUT_SECONDS)
        except StoreTimeoutError:
            continue  # the worker has left since the keys were listed
        if raw[:1] in _REASONS:
            continue
        other = msgspec.json.decode(raw, type=WorkerRecord)
        if is_alive(other):
            return RendezvousError(
                f"RPC group mixes statically and dynamically initialized members which is not supported: "
                f"{other.name} (process {other.pid} of {other.host}) is in a group {kind}; let all workers "
                f"pass the same world size, or none of them"
            )
    return None


def allocate_id(store: Store, name: str, rank: int | None) -> int:
    """Claim an id of a dynamic group: ``rank`` if it was never used, or else the next free one.

    Raises:
        ConfigurationError: if ``rank`` is not a valid id.
        RendezvousError: if all ids have been used.
    """
    if rank is not None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= MAX_WORKER:
            raise ConfigurationError(f"rank must be 0 to {MAX_WORKER}, not {rank!r}")
        if _claim_id(store, rank):
            return rank
        logger.info("%s: rank %d belonged to another worker before, so this one gets a new id", name, rank)
    while True:
        number = store.add("next_id", 1) - 1
        if number > MAX_WORKER:
            raise RendezvousError(
                f"{name}: all {MAX_WORKER + 1} worker ids have been used: start a new group"
            )
        if _claim_id(store, number):
            return number


def _claim_id(store: Store, number: int) -> bool:
    return store.add(f"id/{number}", 1) == 1


def is_alive(record: WorkerRecord) -> bool:
    """Whether the worker is alive. Also True if that cannot be determined."""
    return any(is_reachable(endpoint, REFUSED_SECONDS) for endpoint in record.endpoints)


def _assume_alive(_: WorkerRecord) -> bool:
    return True


class Registry:
    """The members of one group, in a store.

    Args:
        store: the keys of the group; see :func:`fixed_store` and :func:`dynamic_store`.
        own: the record of this worker.
    """

    def __init__(self, store: Store, own: WorkerRecord) -> None:
        self._store = store
        self._own = own
        self._encoded = msgspec.json.encode(own)  # unique: it contains the incarnation

    # ---- this worker ------------------------------------------------------------------------------------

    def claim_name_and_rank(self) -> None:
        """Claim name and rank in a group of fixed size.

        Raises:
            DuplicateWorkerError: if another worker has either.
        """
        own = self._own
        try:
            self.claim_name()
            self._claim(f"id/{own.id}", f"rank {own.id}")
        except DuplicateWorkerError as e:
            if not self._store.check([f"id/{own.id}"]):  # no other worker will publish under this rank
                self._store.set(f"worker/{own.id}", _REFUSED + str(e).encode())
            raise

    def check_world_size(self) -> None:
        """Check that the workers before this one passed the same world size.

        Otherwise a worker that waits for a rank without a worker is told the reason, too.

        Raises:
            WorldSizeError: if they did not.
        """
        own = self._own
        raw = self._store.compare_set("size", "", self._encoded)
        first = msgspec.json.decode(raw, type=WorkerRecord)
        if first.world_size == own.world_size:
            return
        error = WorldSizeError(
            f"the workers passed different world sizes: {_describe(first)} passed {first.world_size}, and "
            f"{_describe(own)} passed {own.world_size}; pass the same world_size to all workers"
        )
        claimed = set(self._store.list_keys("id/")) - {f"id/{own.id}"}
        for rank in range(first.world_size):
            if f"id/{rank}" not in claimed:
                self._store.compare_set(f"worker/{rank}", "", _UNEQUAL + str(error).encode())
        raise error

    def claim_name(self, is_alive: IsAlive = _assume_alive) -> None:
        """Claim this worker's name, and remove its holder from the group if that is dead.

        Args:
            is_alive: returns whether the holder is, or may be, alive.

        Raises:
            DuplicateWorkerError: if a worker that is or may be alive has the name.
        """
        self._claim(f"name/{self._own.name}", f"name {self._own.name!r}", is_alive)

    def _claim(self, key: str, what: str, is_alive: IsAlive = _assume_alive) -> None:
        expected = b""
        while True:
            raw = self._store.compare_set(key, expected, self._encoded)
            if raw == self._encoded:
                return
            if raw:
                holder = msgspec.json.decode(raw, type=WorkerRecord)
                if is_alive(holder):
                    raise DuplicateWorkerError(
                        f"{what} is not unique: worker {holder.id} (process {holder.pid} of {holder.host}) "
                        f"has it and has not left; each worker needs a name and a rank of its own, and each "
                        f"job a port of its own"
                    )
                logger.warning("%s claims the name of worker %d, which has died", self._own.name, holder.id)
                self.remove(holder.id, "its process has ended, and another worker claimed its name")
            expected = raw  # empty if the holder has left since

    def publish(self) -> None:
        """Make this worker a member: others can find its record."""
        self._store.set(f"worker/{self._own.id}", self._encoded)

    def unpublish(self) -> None:
        """Undo :meth:`publish`, where no other worker needs to know."""
        self._store.delete_key(f"worker/{self._own.id}")

    def withdraw(self) -> None:
        """Delete everything that this worker wrote to join a group of fixed size."""
        name, rank = f"name/{self._own.name}", f"id/{self._own.id}"
        for key in (name, rank, "size"):
            if self._store.check([key]) and self._store.get(key) == self._encoded:
                if key == rank:
                    self.unpublish()
                self._store.delete_key(key)

    def release_name(self) -> None:
        """Let another worker claim this worker's name."""
        self._store.compare_set(f"name/{self._own.name}", self._encoded, b"")

    # ---- members of a group of fixed size ---------------------------------------------------------------

    def wait_for_records(
        self, world_size: int, deadline: Deadline, check: Callable[[], None]
    ) -> list[WorkerRecord]:
        """Wait until all workers have published their records.

        Args:
            world_size: number of workers.
            deadline: for the last of them.
            check: called now and then; raises an error if waiting is useless.

        Returns:
            the records, by rank.

        Raises:
            RendezvousTimeoutError: naming the ranks that did not join by ``deadline``.
            DuplicateWorkerError: if one of the workers was refused.
            WorldSizeError: if one of them passed another world size.
            RendezvousError: if one of them passed no world size.
        """
        keys = [f"worker/{rank}" for rank in range(world_size)]
        missing = [rank for rank in range(world_size) if rank != self._own.id]
        backoff, log = Backoff(POLL_SECONDS, MAX_POLL_SECONDS), WaitLog(logger)
        while True:
            pause = backoff.pause(min(deadline.left(), log.left()))
            try:
                try:
                    # One query both waits and reads: between two, a worker that has all records might leave,
                    # and the store with it.
                    records = self._store.multi_get(keys, pause)
                    break
                except StoreTimeoutError:
                    missing = self._absent(keys, missing)
                    if not deadline.passed():
                        check()
            except StoreError as e:  # rank 0, which serves the store, timed out earlier, or was killed
                raise self._did_not_join(world_size, missing, f" [{e}]") from e
            if not missing:  # the last of them has joined since
                continue
            if deadline.passed():
                raise self._did_not_join(world_size, missing)
            log.warning("%s waits: %s", self._own.name, _describe_missing(world_size, missing))
        for raw in records:
            if raw[:1] in _REASONS:
                raise _REASONS[raw[:1]](raw[1:].decode())
        return [msgspec.json.decode(raw, type=WorkerRecord) for raw in records]

    def _absent(self, keys: list[str], before: list[int]) -> list[int]:
        """The ranks whose ``keys`` do not exist; ``before`` if the store does not reply."""
        try:
            present = set(self._store.list_keys("worker/"))
        except StoreError:
            return before
        return [rank for rank, key in enumerate(keys) if key not in present]

    def _did_not_join(self, world_size: int, ranks: list[int], why: str = "") -> RendezvousTimeoutError:
        if not ranks:
            return RendezvousTimeoutError(
                f"{self._own.name}: all {world_size} workers have joined, but the store that has their "
                f"addresses no longer replies: the process that serves it has ended{why}"
            )
        return RendezvousTimeoutError(
            f"{self._own.name}: {_describe_missing(world_size, ranks)}, or allow more "
            f"time: init_rpc waits for RpcBackendOptions(join_timeout=SECONDS), 1800 if not set{why}"
        )

    def mark_joined(self) -> None:
        """Note that this worker has read all records, and no longer needs the store to join."""
        self._store.set(f"joined/{self._own.id}", b"")

    def wait_joined(self, others: set[int], seconds: float) -> set[int]:
        """Wait until ``others`` have called :meth:`mark_joined`; returns those that have not in time."""
        try:
            self._store.wait([f"joined/{n}" for n in others], seconds)
            return set()
        except StoreTimeoutError:
            return {n for n in others if not self._store.check([f"joined/{n}"])}

    # ---- members of a dynamic group ---------------------------------------------------------------------

    def watch(self, on_change: Callable[[int, WorkerRecord | None], None]) -> None:
        """Call ``on_change`` with the id and record of each worker that joins; None: it has left or died."""
        self._store.watch_prefix("worker/", _RecordCallback(on_change))

    def unwatch(self, on_change: Callable[[int, WorkerRecord | None], None]) -> None:
        """Undo :meth:`watch`."""
        self._store.unwatch_prefix("worker/", _RecordCallback(on_change))

    def ids(self) -> list[int]:
        """The ids of all members."""
        return [int(key.partition("/")[2]) for key in self._store.list_keys("worker/")]

    def read(self, known: Iterable[int]) -> tuple[set[int], list[WorkerRecord]]:
        """The ids of all members, and the records of those that are not among ``known``."""
        while True:
            present = set(self.ids())
            unknown = sorted(present.difference(known))
            if not unknown:
                return present, []
            try:
                found = self._store.multi_get([f"worker/{n}" for n in unknown], READ_TIMEOUT_SECONDS)
            except StoreTimeoutError:
                continue  # one of them has left between the two queries
            return present, [msgspec.json.decode(raw, type=WorkerRecord) for raw in found]

    def reason(self, worker_id: int) -> str:
        """Why a worker is no longer a member; :meth:`remove` wrote it before it deleted the record."""
        try:
            return self._store.get(f"gone/{worker_id}").decode()
        except StoreTimeoutError:
            return "it is no longer a member of the group"

    def evict(self, record: WorkerRecord, reason: str) -> None:
        """Remove a dead worker, and release its name."""
        if self._store.check([f"worker/{record.id}"]):
            self.remove(record.id, reason)
            self._store.compare_set(f"name/{record.name}", msgspec.json.encode(record), b"")

    def remove(self, worker_id: int, reason: str) -> None:
        """End the membership of a worker, and notify all members."""
        self._store.set(f"gone/{worker_id}", reason)
        try:
            self._store.delete_key(f"worker/{worker_id}")
        except StoreError as e:
            if worker_id != self._own.id:
                raise
            logger.debug("%s: the store closed after its last member left: %s", self._own.name, e)


@dataclass(frozen=True)
class _RecordCallback:
    """Decodes what the watch of all records reports. Equal for equal callbacks, so that it can be removed."""

    callback: Callable[[int, WorkerRecord | None], None]

    def __call__(self, key: str, old: bytes | None, new: bytes | None) -> None:
        record = None if new is None else msgspec.json.decode(new, type=WorkerRecord)
        self.callback(int(key.rpartition("/")[2]), record)


def _describe(record: WorkerRecord) -> str:
    return f"rank {record.id} ({record.name}, process {record.pid} of {record.host})"


def _describe_missing(world_size: int, ranks: list[int]) -> str:
    """Which ``ranks`` have not joined, and the likely reasons."""
    listed, more = ranks[:MAX_LISTED_RANKS], len(ranks) - MAX_LISTED_RANKS
    text = f"of {world_size} workers, these ranks have not joined: {listed}"
    text += f" and {more} more" if more > 0 else ""
    launched = read_launch()
    if launched.world_size not in (None, world_size):
        text += (
            f". The launcher set {launched.world_size_from}={launched.world_size}, but init_rpc got "
            f"world_size={world_size}: pass the launcher's, or leave it out"
        )
    return (
        f"{text}. They have not started or have ended, or they use torch.distributed.rpc: start them with "
        f"the same MASTER_ADDR, MASTER_PORT and world size"
    )
