"""Who takes part: each worker publishes a record in the store and reads those of the others.

Two workers of one name or one rank are refused: name and rank are claimed with ``compare_set`` before
anything else is said.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from zmqgrad.errors import (
    ConfigurationError,
    DuplicateWorkerError,
    NotInitializedError,
    RendezvousTimeoutError,
    RpcTimeoutError,
    StoreError,
    StoreTimeoutError,
    UnknownWorkerError,
    WorkerNameError,
)
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store
from zmqgrad.wire.ids import MAX_WORKER

MAX_NAME = 128

REFUSED = "!"
"""What a worker that was refused publishes instead of its record, before it says why."""

LOOK_SECONDS = 1.0
"""While workers are waited for, who is missing is looked up so often."""


class WorkerInfo(msgspec.Struct, frozen=True):
    """Name and id (rank) of a worker; what a call can be addressed to."""

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class WorkerRecord(msgspec.Struct, frozen=True):
    """What a worker publishes of itself. ``program`` tells which ``__main__`` it runs.

    ``device_maps``: by the name of a worker that it calls, where tensors of its devices arrive there.
    ``device_count``: its CUDA devices; -1 where it did not look.
    """

    name: str
    id: int
    incarnation: int
    endpoints: tuple[str, ...]
    host: str
    pid: int
    program: str
    device_maps: dict[str, dict[str, str]] = {}
    device_count: int = -1

    @property
    def info(self) -> WorkerInfo:
        """Its public part."""
        return WorkerInfo(self.name, self.id)


def check_name(name: object) -> str:
    """``name`` if a worker can be called so.

    Raises:
        WorkerNameError: otherwise, saying why.
    """
    if not isinstance(name, str):
        raise WorkerNameError(f"a worker's name must be a string, not {name!r}")
    if not 0 < len(name) < MAX_NAME or not all(c.isalnum() or c in "_-:." for c in name):
        raise WorkerNameError(
            f"Worker name must match ^[A-Za-z0-9-_:.]*$, and must be non-empty and shorter than {MAX_NAME} "
            f"characters, not {name!r}"
        )
    return name


def check_rank(rank: object, world_size: object) -> tuple[int, int]:
    """Rank and world size if they fit each other.

    Raises:
        ConfigurationError: otherwise, saying why.
    """
    if (
        isinstance(world_size, bool)
        or not isinstance(world_size, int)
        or not 1 <= world_size <= MAX_WORKER + 1
    ):
        raise ConfigurationError(f"world_size must be 1 to {MAX_WORKER + 1}, not {world_size!r}")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank must be 0 to {world_size - 1} (world_size {world_size}), not {rank!r}"
        )
    return rank, world_size


def program_fingerprint() -> str:
    """Which program ``__main__`` is: equal in workers that run the same file, unique where there is none."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        source = Path(path).read_bytes() if path else None
    except OSError:
        source = None
    if source is None:
        return f"{socket.gethostname()}/{os.getpid()}"
    return hashlib.sha256(source).hexdigest()[:16]


class Membership:
    """The workers of one group, as this one knows them."""

    def __init__(self, own: WorkerRecord, world_size: int) -> None:
        self.own = own
        self.world_size = world_size
        self.look_up: Callable[[float | None], bool] | None = None
        """Where workers come and go: asks the store who takes part; False if no answer comes within so many
        seconds (None: as long as that takes). Called for those that are not known.
        """
        self._lock = threading.Lock()  # guards all below
        self._changed = threading.Condition(self._lock)
        self._by_id: dict[int, WorkerRecord] = {own.id: own}
        self._by_name: dict[str, WorkerRecord] = {own.name: own}
        self._former: set[int] = set()  # of those, who is gone
        self._closed = False

    def claim(self, store: Store) -> None:
        """Take name and rank, and publish the record.

        Raises:
            DuplicateWorkerError: if another worker has either.
        """
        own = self.own
        mine = f"{own.id}/{own.incarnation}"
        for key, what in ((f"name/{own.name}", f"name {own.name!r}"), (f"rank/{own.id}", f"rank {own.id}")):
            holder = store.compare_set(key, "", mine).decode()
            if holder != mine:
                said = (
                    f"{what} is not unique: another worker already has it (worker {holder.split('/')[0]}); "
                    f"give each of the {self.world_size} workers a name and rank of its own"
                )
                if not store.check([f"rank/{own.id}"]):
                    store.set(f"worker/{own.id}", REFUSED + said)  # nobody else will come for this rank
                raise DuplicateWorkerError(said)
        store.set(f"worker/{own.id}", msgspec.json.encode(own))

    def meet(self, store: Store, deadline: Deadline) -> None:
        """Wait until all workers have published, and learn their records.

        Raises:
            RendezvousTimeoutError: naming the ranks that did not come.
            DuplicateWorkerError: if one of them was refused, so that the group will never be whole.
        """
        keys = [f"worker/{i}" for i in range(self.world_size)]
        missing = [i for i in range(self.world_size) if i != self.own.id]
        while True:
            try:
                # One query waits and reads. Between two, whoever has met all might be gone, store and all.
                records = read_all(store, keys, min(deadline.left(), LOOK_SECONDS))
                break
            except StoreTimeoutError as e:
                missing = _absent(store, keys, missing)
                if deadline.passed():
                    raise self._did_not_come(missing) from e
            except StoreError as e:  # rank 0 gave up before us, and took its store along
                raise self._did_not_come(missing) from e
        for raw in records:
            if raw.startswith(REFUSED.encode()):
                raise DuplicateWorkerError(raw.decode().removeprefix(REFUSED))
            self.learn(msgspec.json.decode(raw, type=WorkerRecord))

    def _did_not_come(self, ranks: list[int]) -> RendezvousTimeoutError:
        return RendezvousTimeoutError(
            f"{self.own.name}: of {self.world_size} workers, these ranks did not come in time: {ranks}; "
            f"start them with the same MASTER_ADDR, MASTER_PORT and world size, or allow more time"
        )

    def learn(self, record: WorkerRecord) -> bool:
        """Note a worker. Is it a new one?"""
        with self._lock:
            new = record.id not in self._by_id
            self._by_id[record.id] = record
            self._by_name[record.name] = record
            self._changed.notify_all()
            return new

    def depart(self, worker_id: int) -> None:
        """A worker is gone; it is remembered, but takes part no more."""
        with self._lock:
            self._former.add(worker_id)

    def close(self) -> None:
        """Nobody waits for others any more."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def wait_for(self, names: Sequence[str], deadline: Deadline) -> list[WorkerRecord]:
        """Wait until all ``names`` take part; gives their records.

        Raises:
            RpcTimeoutError: naming those that did not come by ``deadline``.
            NotInitializedError: if this worker is shut down meanwhile.
        """

        def missing() -> list[str]:
            return [n for n in names if n not in self._by_name or self._by_name[n].id in self._former]

        with self._lock:
            came = self._changed.wait_for(lambda: self._closed or not missing(), deadline.left_or_none())
            if self._closed:
                raise NotInitializedError(f"worker {self.own.name} was shut down while it waited for others")
            if not came:
                raise RpcTimeoutError(
                    f"{self.own.name}: these workers did not come in time: {', '.join(missing())}"
                )
            return [self._by_name[name] for name in names]

    def find_here(self, to: object) -> WorkerRecord | None:
        """The worker that ``to`` means, if nobody need be asked: else None, and :meth:`find` asks."""
        found = self._find(to)
        if found is not None and self.look_up is not None and found.id in self._former:
            return None  # its name may have another holder by now
        return found

    def find(self, to: object, seconds: float | None = None) -> WorkerRecord:
        """The worker that ``to`` (a name, an id or a WorkerInfo) means.

        Args:
            seconds: how long others may be asked for it; None: as long as that takes.

        Raises:
            UnknownWorkerError: if there is none. RpcTimeoutError: if that could not be found out in time.
        """
        found = self.find_here(to)
        if found is None and self.look_up is not None:
            if not self.look_up(seconds):
                raise RpcTimeoutError(
                    f"RPC ran for more than set timeout ({(seconds or 0.0) * 1000:.0f} ms) and will now be "
                    f"marked with an error: {self.own.name} does not know {to!r}, and the store, asked for "
                    f"it, did not answer in time"
                )
            found = self._find(to)
        if found is None:
            known = ", ".join(f"{r.name} ({r.id})" for r in sorted(self.all(), key=lambda r: r.id))
            raise UnknownWorkerError(
                f"name:{self.own.name},rank:{self.own.id} could not find destination {to!r}; "
                f"the workers are {known}"
            )
        return found

    def _find(self, to: object) -> WorkerRecord | None:
        if isinstance(to, str):
            return self._by_name.get(to)
        if isinstance(to, int):
            return self._by_id.get(to)
        if hasattr(to, "id"):
            return self._by_id.get(to.id)
        raise UnknownWorkerError(f"a worker is a name, a rank or a WorkerInfo, not {to!r}")

    def record(self, worker_id: int) -> WorkerRecord:
        """The worker of that id, whether or not it still takes part; others are asked only if it is new here.

        Raises:
            UnknownWorkerError: if there is none.
        """
        return self._by_id.get(worker_id) or self.find(worker_id)

    def find_former(self, worker_id: int) -> WorkerRecord | None:
        """The worker of that id, whether or not it still takes part; None if it was never known."""
        return self._by_id.get(worker_id)

    def known(self) -> set[int]:
        """The ids of all that were ever known."""
        with self._lock:
            return set(self._by_id)

    def name_of(self, worker_id: int) -> str:
        """The name of a worker, or its number where the name is not known."""
        found = self._by_id.get(worker_id)
        return found.name if found else f"worker {worker_id}"

    def successor(self, worker_id: int) -> WorkerRecord | None:
        """The worker that has the name of ``worker_id`` now, if that is another one."""
        before = self._by_id.get(worker_id)
        now = None if before is None else self._by_name.get(before.name)
        return None if now is None or now.id == worker_id else now

    def everybody(self) -> list[WorkerRecord]:
        """All workers that were ever known."""
        with self._lock:
            return list(self._by_id.values())

    def all(self) -> list[WorkerRecord]:
        """All workers that take part, as far as known."""
        with self._lock:
            return [record for number, record in self._by_id.items() if number not in self._former]


def _absent(store: Store, keys: list[str], before: list[int]) -> list[int]:
    """The numbers of those ``keys`` that are not there; as ``before`` if the store has gone meanwhile."""
    try:
        there = set(store.list_keys("worker/"))
    except StoreError:
        return before
    return [i for i, key in enumerate(keys) if key not in there]


def read_all(store: Store, keys: list[str], seconds: float) -> list[bytes]:
    """The values of ``keys``, once they are there; waits up to ``seconds``."""
    patience = store.timeout
    store.set_timeout(seconds)
    try:
        return store.multi_get(keys)
    finally:
        store.set_timeout(patience)
