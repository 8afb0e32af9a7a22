"""What all parts of a worker share: identity, transport, clock, threads, hooks and the peers that are lost.

:class:`WorkerCore` is the base of :class:`~zmqgrad.rpc.worker.Worker`. The parts (client, server, references)
depend on it and on each other in one direction; only the worker knows all of them.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from functools import partial

from zmqgrad.errors import ClosedError, NotInitializedError, PeerLostError
from zmqgrad.rpc.hooks import Hooks
from zmqgrad.rpc.membership.events import Events
from zmqgrad.rpc.membership.membership import Membership
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.runtime.clock import Clock
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.runtime.thread_pool import Task, ThreadPool
from zmqgrad.transport.base import Mailbox
from zmqgrad.transport.tap import WORKER, Identity, Tracer, Usage
from zmqgrad.wire.ids import IdSource

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""When :meth:`WorkerCore.retry` runs its task."""


class WorkerCore(ABC):
    """The shared base of one worker.

    Args:
        membership: the known members of the group, this worker included.
        mailbox: this worker's end of the transport, not yet started.
        options: timeouts and threads.
        clock: the source of time.
    """

    def __init__(
        self, membership: Membership, mailbox: Mailbox, options: RpcBackendOptions, clock: Clock
    ) -> None:
        self.name = membership.own.name
        self.id = membership.own.id
        self.membership = membership
        self.mailbox = mailbox
        self.options = options
        self.clock = clock
        self.default_timeout = options.rpc_timeout
        self.closed = False  # written by close() and close_in_fork() only
        self.lost: dict[int, str] = {}  # lost peers, with the reason
        self.silent: dict[int, float] = {}  # suspected peers, with the time of their last heartbeat
        self._pid = os.getpid()
        self.ids = IdSource(self.id)
        self.timer = ServiceThread(self.name, clock)
        self.pool = ThreadPool(self.name, options.num_worker_threads, self._prepare_thread)
        self.submit = self.pool.submit
        self.hooks = Hooks()
        self.events = Events(self.submit)

    @property
    def tracer(self) -> Tracer | None:
        """As :class:`~zmqgrad.transport.tap.Traced`."""
        return self.hooks.tracer

    @tracer.setter
    def tracer(self, tracer: Tracer | None) -> None:
        self.hooks.tracer = tracer
        self.mailbox.tap = self.mailbox.on_heartbeat = None
        if tracer is not None:
            self.mailbox.tap = tracer.tap
            tracer.watch_usage(self._usage)
            if tracer.records_heartbeats:
                self.mailbox.on_heartbeat = tracer.heartbeat

    def _usage(self) -> Usage:
        threads, arena = self.pool.statistics(), self.mailbox.statistics().get("arena", {})
        limits = self.options.num_worker_threads, arena.get("limit", 0)
        return Usage(
            threads["threads"], threads["blocked"], limits[0], arena.get("bytes_leased", 0), limits[1]
        )

    def identity(self) -> Identity:
        """As :class:`~zmqgrad.transport.tap.Traced`."""
        job: bytes = getattr(self.mailbox, "job", b"")
        endpoints = " ".join(self.mailbox.endpoints)
        return Identity(WORKER, self.name, self.id, self.mailbox.incarnation, job.decode(), endpoints)

    def retry(self, task: Task) -> None:
        """Run ``task`` again in ``RETRY_SECONDS``, unless this worker has closed by then.

        For what no event tells: that there is a free descriptor again, or that the store replies.
        """
        self.timer.call_later(RETRY_SECONDS, partial(self.submit_if_open, task))

    def submit_if_open(self, task: Task) -> None:
        """Run ``task`` in an engine thread, unless this worker is closed."""
        try:
            self.submit(task)
        except ClosedError:
            logger.debug("%s is closed: a task is dropped", self.name)

    @abstractmethod
    def _prepare_thread(self) -> None:
        """Initializes a new engine thread."""

    @abstractmethod
    def lose(self, peer: int, reason: str) -> None:
        """Declare ``peer`` lost: fail what waits for it and cancel what it requested."""

    def loss_of(self, peer: int, description: str, reason: str = "") -> PeerLostError:
        """The error for a request described by ``description`` to a lost peer; by default with its reason."""
        return PeerLostError(
            f"{self.membership.name_of(peer)} (worker {peer}) is gone: {reason or self.lost[peer]}; "
            f"{description} gets no reply"
        )

    def closed_error(self) -> NotInitializedError:
        """The error for a call after shutdown, or in a forked child."""
        if self._pid == os.getpid():
            return NotInitializedError(f"worker {self.name} has been shut down; call init_rpc again")
        return NotInitializedError(
            f"this process is a fork of process {self._pid}, in which worker {self.name} runs: a fork cannot "
            f"use its connections. Call init_rpc here for a worker of its own, or start processes by spawn "
            f"or forkserver"
        )

    def check_process(self) -> None:
        """Check that this process has the threads of this worker.

        Raises:
            NotInitializedError: if it is a fork.
        """
        if self.closed and self._pid != os.getpid():
            raise self.closed_error()

    def close_in_fork(self) -> None:
        """Mark this worker closed in a forked child, which does not have its threads."""
        self.closed = True
