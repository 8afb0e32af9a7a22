"""A worker's place in a group: it joins through a store, and leaves in good order.

See :mod:`zmqgrad.rpc.groups.joining` and :mod:`zmqgrad.rpc.groups.parting` for how.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

import torch

from zmqgrad.errors import DuplicateWorkerError, RpcError, RpcTimeoutError, StoreError, StoreTimeoutError
from zmqgrad.rpc.devices import check_group, published
from zmqgrad.rpc.groups.identity import WorkerRecord, program_fingerprint, wait_for_end
from zmqgrad.rpc.groups.joining import LOOK_SECONDS, claim, meet, withdraw
from zmqgrad.rpc.groups.membership import Membership
from zmqgrad.rpc.groups.parting import Parting
from zmqgrad.rpc.hooks import EXTENSIONS, install_extension
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.rpc.rref.api import install_rrefs
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.store import Store, TCPStore
from zmqgrad.transport.base import Mailbox

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0
"""How long threads may take to end once told."""

HURRY_SECONDS = 1.0
"""The same where an error, Ctrl-C or the end of the program is waiting to get through."""

LAST_SECONDS = 3.0
"""How long the process of a program that fails may take to end, once it has closed its sockets."""


def make_worker(
    name: str,
    rank: int,
    world_size: int,
    mailbox: Mailbox,
    options: RpcBackendOptions,
    clock: Clock = MONOTONIC,
) -> Worker:
    """A worker with all its floors, not yet started."""
    own = WorkerRecord(
        name,
        rank,
        mailbox.incarnation,
        mailbox.endpoints,
        socket.gethostname(),
        os.getpid(),
        program_fingerprint(),
        published(options.device_maps),
        torch.cuda.device_count() if options.device_maps or options.devices else -1,
    )
    worker = Worker(Membership(own, world_size), mailbox, options, clock)
    install_rrefs(worker)
    for extension in EXTENSIONS:
        install_extension(extension, worker)
    return worker


STAY_SECONDS = 10.0
"""Whoever serves the store waits so long for workers that have joined to read it; one may have died."""


class Group:
    """A worker's place among the others. Closes ``store`` at the end.

    ``served``: the store beneath ``store``, if this worker serves it.
    """

    def __init__(self, worker: Worker, store: Store, served: TCPStore | None = None) -> None:
        self.worker = worker
        self.store = store
        self._served = served
        self._parting = Parting(worker, store, served)

    def join(self, deadline: Deadline) -> None:
        """Claim name and rank, wait for all others, and start.

        Raises:
            DuplicateWorkerError: if another worker has this name or rank.
            RendezvousTimeoutError: naming the ranks that did not come.
            ConfigurationError: if a device map of one of them cannot be right.
        """
        membership = self.worker.membership
        try:
            claim(membership, self.store)
            meet(membership, self.store, deadline)
        except DuplicateWorkerError:
            raise  # what was claimed stays: the others are still to be told
        except BaseException:
            withdraw(membership, self.store)
            raise
        check_group(membership.all())
        # Not before: whoever calls us has met all, and may be ahead; its messages wait in the socket.
        self.worker.start()
        if self._served is None:
            self._say_met()
        else:
            self._stay_for_others(deadline)

    def _say_met(self) -> None:
        try:
            self.store.set(f"met/{self.worker.id}", b"")
        except StoreError as e:  # who serves it has gone on without us; we have read what we need
            logger.debug("%s: nobody to tell that all have been met: %s", self.worker.name, e)

    def _stay_for_others(self, deadline: Deadline) -> None:
        """Let all read the store that is served here: the program may end as soon as it has joined."""
        others = {record.id for record in self.worker.membership.all()} - {self.worker.id}
        until = Deadline.after(min(deadline.left(), STAY_SECONDS))
        while others and not until.passed():
            try:
                self.store.wait([f"met/{i}" for i in others], min(until.left(), LOOK_SECONDS))
                return
            except StoreTimeoutError:
                others = {i for i in others - set(self.worker.lost) if not self.store.check([f"met/{i}"])}

    def leave(self, graceful: bool, deadline: Deadline) -> None:
        """End the worker; with ``graceful``, after all workers have called this and finished their work.

        Whatever happens, threads and sockets of this worker are gone afterwards.

        Raises:
            RpcTimeoutError: if others did not arrive or finish by ``deadline``, naming them; if the store is
                gone.
            RpcError: if threads are left because user code in them does not end.
        """
        self.worker.events.stop()
        try:
            if graceful:
                self._leave_together(deadline)
        except StoreError as e:
            close_quietly(self, logger.warning)
            raise RpcTimeoutError(self._whose_store_is_gone()) from e
        except BaseException:
            close_quietly(self, logger.warning)  # the first error is the one to tell
            raise
        self.close()

    def _leave_together(self, deadline: Deadline) -> None:
        self._parting.run(deadline)

    def let_the_lost_end_first(self) -> None:
        """Wait a moment until the processes of those that this worker has lost are gone.

        A program that fails closes its sockets a second or two before its process ends: torch takes long to
        take itself apart. Those that fail because of it must not be gone first: a launcher would blame them.
        """
        deadline = Deadline.after(LAST_SECONDS)
        for lost in list(self.worker.lost):
            record = self.worker.membership.find_former(lost)
            if record is not None:
                wait_for_end(record, deadline.left())

    def _whose_store_is_gone(self) -> str:
        said = f"{self.worker.name}: shutdown gave up: the store no longer answers"
        first = self.worker.membership.find_former(0)
        if first is not None and wait_for_end(first, LAST_SECONDS):  # first, as above
            return f"{said}: the program of {first.name}, which serves it, has ended without shutdown"
        return (
            f"{said}; {self.worker.membership.name_of(0)}, or the launcher that serves it, seems to be gone"
        )

    def close(self, patience: float = JOIN_SECONDS) -> None:
        """End at once; threads have ``patience`` seconds to end. Idempotent.

        Raises:
            RpcError: if threads are left because user code in them does not end.
        """
        self.worker.close()
        self.store.close()  # a thread that asks it for something ends with that
        left = self.worker.join(Deadline.after(patience))
        if left:
            raise RpcError(
                f"worker {self.worker.name} was shut down, but user code still runs in {', '.join(left)}; "
                f"it ends with the process"
            )


def close_quietly(group: Group, log: Callable[..., None] = logger.debug) -> None:
    """:meth:`Group.close` where there is nobody to tell of an error (at exit, or behind another error)."""
    try:
        group.close(HURRY_SECONDS)
    except (RpcError, StoreError) as e:
        log("%s", e)
