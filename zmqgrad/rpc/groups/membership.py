"""The workers of a group, as one of them knows them: by name and by id, there or gone.

Ids are never given twice; a name can have another holder later. Who is gone stays known, so that errors can
name him. Where workers come and go, somebody who is not known may have joined a moment ago: then the store is
asked, by :attr:`Membership.look_up`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from zmqgrad.errors import NotInitializedError, RpcTimeoutError, UnknownWorkerError
from zmqgrad.rpc.groups.identity import WorkerInfo, WorkerRecord
from zmqgrad.runtime.clock import Deadline

__all__ = ["Membership", "WorkerInfo", "WorkerRecord"]


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
            came = self._changed.wait_for(lambda: self._closed or not missing(), deadline.timeout())
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

    def record(self, worker_id: int) -> WorkerRecord:
        """The worker of that id, whether or not it still takes part; others are asked only if it is new here.

        Raises:
            UnknownWorkerError: if there is none.
        """
        return self._by_id.get(worker_id) or self.find(worker_id)

    def find_former(self, worker_id: int) -> WorkerRecord | None:
        """The worker of that id, whether or not it still takes part; None if it was never known."""
        return self._by_id.get(worker_id)

    def runs_the_same(self, worker_id: int) -> bool:
        """Does the worker of that id run the same ``__main__`` as this one? False if it was never known."""
        other = self.find_former(worker_id)
        return other is not None and other.program == self.own.program

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
