"""Two workers of this process, over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zmqgrad.rpc.current import reset_current_worker, set_current_worker
from zmqgrad.rpc.membership.group import make_worker
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.base import Mailbox
from zmqgrad.transport.mailbox import ZmqMailbox

WAIT = 20.0
"""Seconds that anything may take."""


@contextmanager
def two_workers(make_mailbox: Callable[[str, int], Mailbox] = ZmqMailbox) -> Iterator[list[Worker]]:
    """Workers that know each other. The calling thread acts for the first."""
    options = RpcBackendOptions(rpc_timeout=WAIT, num_worker_threads=2)
    workers = [make_worker(f"worker{n}", n, 2, make_mailbox(f"worker{n}", n), options) for n in range(2)]
    for worker in workers:
        for other in workers:
            worker.membership.learn(other.membership.own)
        worker.start()
    token = set_current_worker(workers[0])
    try:
        yield workers
    finally:
        reset_current_worker(token)
        for worker in workers:
            worker.close()
        for worker in workers:
            assert worker.join(Deadline.after(WAIT)) == []
