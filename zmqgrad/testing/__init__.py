"""Clusters of workers in one process, over a transport in memory, for tests.

    with cluster(3) as c:
        with c.acting(0):
            assert rpc.rpc_sync("worker1", torch.add, args=(1, 2)) == 3
        with c.network.drop(MessageType.RREF_ACK, times=2):
            ...

Messages are encoded and decoded as over sockets, so workers share no objects by accident. They do share the
process: module globals, and the number of threads. :class:`~zmqgrad.testing.network.MemoryNetwork` keeps a
log of messages, and injects faults by message type (:mod:`~zmqgrad.testing.faults`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from zmqgrad.rpc.current import reset_current_worker, set_current_worker
from zmqgrad.rpc.membership.group import JOIN_TIMEOUT_SECONDS, make_worker
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.store import HashStore
from zmqgrad.testing.mailbox import MemoryMailbox
from zmqgrad.testing.network import MemoryNetwork

__all__ = ["Cluster", "cluster"]


class Cluster:
    """``workers`` named ``worker0``, ``worker1``, ... on one ``network``, timed by ``clock``.

    Example:
        >>> with cluster(2) as workers, workers.acting(1):
        ...     rpc.get_worker_info().name
        'worker1'
    """

    def __init__(
        self,
        size: int,
        options: RpcBackendOptions | None = None,
        clock: Clock = MONOTONIC,
        hosts: Sequence[str] = (),
    ) -> None:
        if size < 1:
            raise ValueError(f"a cluster has at least one worker, not {size}")
        self.network = MemoryNetwork()
        self.workers: list[Worker] = []
        self.store = HashStore()
        options = options or RpcBackendOptions(rpc_timeout=20.0)
        for rank in range(size):
            mailbox = MemoryMailbox(self.network, f"worker{rank}", rank, hosts)
            self.workers.append(make_worker(f"worker{rank}", rank, size, mailbox, options, clock))
        records = [worker.membership.own for worker in self.workers]
        if hosts:
            records = [replace(r, host=host) for r, host in zip(records, hosts, strict=True)]
        for worker in self.workers:
            for record in records:
                worker.membership.learn(record)
            worker.directory.store = self.store.clone()
            worker.start()

    @contextmanager
    def acting(self, rank: int) -> Iterator[Worker]:
        """Context manager that makes worker ``rank`` the current worker of the calling thread."""
        token = set_current_worker(self.workers[rank])
        try:
            yield self.workers[rank]
        finally:
            reset_current_worker(token)

    def close(self) -> None:
        """Close all workers.

        Raises:
            TimeoutError: if threads do not end in time; the message names them.
        """
        for worker in self.workers:
            worker.close()
        deadline = Deadline.after(JOIN_TIMEOUT_SECONDS)
        for worker in self.workers:
            worker.directory.shared().close()
        self.store.close()
        left = [name for worker in self.workers for name in worker.join(deadline)]
        if left:
            raise TimeoutError(f"these threads have not ended: {', '.join(left)}")


@contextmanager
def cluster(
    size: int,
    options: RpcBackendOptions | None = None,
    clock: Clock = MONOTONIC,
    hosts: Sequence[str] = (),
) -> Iterator[Cluster]:
    """Context manager of a cluster of ``size`` workers; worker 0 is the current worker of the block.

    Args:
        size: how many workers.
        options: of all workers; None: the defaults, with a timeout of 20 s.
        clock: with a ``ManualClock``, the test controls when calls time out.
        hosts: the name of the host of each worker; empty: all are on one.

    Example:
        >>> with cluster(3) as workers:
        ...     print(rpc.rpc_sync("worker2", torch.add, args=(1, 2)))
        tensor(3)
    """
    workers = Cluster(size, options, clock, hosts)
    try:
        with workers.acting(0):
            yield workers
    finally:
        workers.close()
