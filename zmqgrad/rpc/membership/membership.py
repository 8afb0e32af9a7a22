"""The workers of a group, as one of them knows them: by name and by id, present and former.

Ids are never reused; a name can be. Former workers stay known, so that errors can name them. In a dynamic
group a worker that is unknown here may have joined a moment ago, so the store is queried.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from zmqgrad.errors import NotInitializedError, RpcTimeoutError, UnknownWorkerError
from zmqgrad.rpc.membership.worker_info import WorkerInfo, WorkerRecord
from zmqgrad.runtime.clock import Deadline

__all__ = ["LEFT", "LEFT_AT_ONCE", "Membership", "WorkerInfo", "WorkerRecord"]

LEFT = "it has left the group"
LEFT_AT_ONCE = "it has left the group without finishing its calls"


class Membership:
    """The workers of one group, as this one knows them.

    Args:
        own: the record of this worker.
        world_size: of a group of fixed size; 0 in a dynamic group.

    Attributes:
        update_from_store: in a dynamic group, reads the members from the store, for workers that are unknown
            here. Called with a limit in seconds (None: no limit); returns False if the store did not reply in
            time.
        is_current: whether the store has replied when it was last queried for such workers.
    """

    def __init__(self, own: WorkerRecord, world_size: int) -> None:
        self.own = own
        self.world_size = world_size
        self.update_from_store: Callable[[float | None], bool] | None = None
        self.is_current: Callable[[], bool] = lambda: True
        self._lock = threading.Lock()  # guards all below
        self._changed = threading.Condition(self._lock)
        self._by_id: dict[int, WorkerRecord] = {own.id: own}
        self.find_known: Callable[[int], WorkerRecord | None] = self._by_id.get
        """The record of a worker, present or former; None if the id is unknown here."""
        self._by_name: dict[str, WorkerRecord] = {own.name: own}
        self._former: set[int] = set()  # ids of those that have left or died
        self._closed = False

    def learn(self, record: WorkerRecord) -> bool:
        """Add a worker. Returns whether its id is new here."""
        with self._lock:
            new = record.id not in self._by_id
            self._by_id[record.id] = record
            self._by_name[record.name] = record
            self._changed.notify_all()
            return new

    def mark_left(self, worker_id: int) -> None:
        """Mark a worker as having left or died."""
        with self._lock:
            self._former.add(worker_id)

    def close(self) -> None:
        """End :meth:`wait_for` in all threads."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def wait_for(self, names: Sequence[str], deadline: Deadline) -> list[WorkerRecord]:
        """Wait until workers of all ``names`` have joined.

        Returns:
            their records, in the order of ``names``.

        Raises:
            RpcTimeoutError: naming those that did not join by ``deadline``.
            NotInitializedError: if this worker is shut down meanwhile.
        """

        def missing() -> list[str]:
            return [n for n in names if n not in self._by_name or self._by_name[n].id in self._former]

        with self._lock:
            joined = self._changed.wait_for(lambda: self._closed or not missing(), deadline.timeout())
            if self._closed:
                raise NotInitializedError(f"worker {self.own.name} was shut down while it waited for others")
            if not joined:
                raise RpcTimeoutError(
                    f"{self.own.name}: these workers did not join in time: {', '.join(missing())}"
                )
            return [self._by_name[name] for name in names]

    def find_here(self, to: object) -> WorkerRecord | None:
        """As :meth:`find`, but returns None if the store has to be queried."""
        found = self._by_name.get(to) if type(to) is str else self._find(to)
        if found is not None and self.update_from_store is not None and found.id in self._former:
            return None  # another worker may have its name by now
        return found

    def find(self, to: object, seconds: float | None = None) -> WorkerRecord:
        """The record of a worker.

        Args:
            to: a name, an id or a WorkerInfo.
            seconds: how long to wait for the store; None: no limit.

        Raises:
            UnknownWorkerError: if no worker matches.
            RpcTimeoutError: if the store did not reply in time.
        """
        found = self.find_here(to)
        if found is None and self.update_from_store is not None:
            if not self.update_from_store(seconds):
                raise RpcTimeoutError(
                    f"RPC ran for more than set timeout ({(seconds or 0.0) * 1000:.0f} ms) and will now be "
                    f"marked with an error: {self.own.name} does not know {to!r}, and the store "
                    f"did not reply in time"
                )
            found = self._find(to)
        if found is None:
            known = ", ".join(f"{r.name} ({r.id})" for r in sorted(self.all(), key=lambda r: r.id))
            what = f"name {to}" if isinstance(to, str) else f"id {getattr(to, 'id', to)}"
            raise UnknownWorkerError(
                f"name:{self.own.name},rank:{self.own.id} could not find destination {what}; "
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
        raise UnknownWorkerError(
            f"Cannot get WorkerInfo from name {to!r}: a worker is a name, a rank or a WorkerInfo"
        )

    def record(self, worker_id: int, seconds: float | None = None) -> WorkerRecord:
        """The record of a worker, present or former. The store is queried only if the id is unknown here.

        Raises:
            UnknownWorkerError: if no worker has the id.
            RpcTimeoutError: if the store did not reply in ``seconds`` (None: no limit).
        """
        return self._by_id.get(worker_id) or self.find(worker_id, seconds)

    def runs_the_same(self, worker_id: int) -> bool:
        """Whether a worker runs the same ``__main__`` as this one. False if the id is unknown here."""
        other = self.find_known(worker_id)
        return other is not None and other.program == self.own.program

    def known(self) -> set[int]:
        """The ids of all workers, present and former."""
        with self._lock:
            return set(self._by_id)

    def name_of(self, worker_id: int) -> str:
        """The name of a worker, or a text with its id if that is unknown here."""
        found = self._by_id.get(worker_id)
        return found.name if found else f"worker {worker_id}"

    def successor(self, worker_id: int) -> WorkerRecord | None:
        """The other worker that has the name of ``worker_id`` now, if any."""
        before = self._by_id.get(worker_id)
        now = None if before is None else self._by_name.get(before.name)
        return None if now is None or now.id == worker_id else now

    def last_holder(self, name: str) -> int | None:
        """The worker that has, or had last, a name."""
        record = self._by_name.get(name)
        return None if record is None else record.id

    def all_known(self) -> list[WorkerRecord]:
        """All workers, present and former."""
        with self._lock:
            return list(self._by_id.values())

    def all(self) -> list[WorkerRecord]:
        """All present workers."""
        with self._lock:
            return [record for number, record in self._by_id.items() if number not in self._former]
