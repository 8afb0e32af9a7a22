"""What both kinds of group share: making a worker, leaving and closing.

A group of fixed size (:mod:`~zmqgrad.rpc.membership.fixed`) waits for all its workers when it is joined, and
meets at a barrier when they leave. A dynamic group (:mod:`~zmqgrad.rpc.membership.dynamic`) waits for no
worker, and follows joins and losses while it exists.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch

from zmqgrad.errors import RpcError, RpcTimeoutError, StoreError, ZmqgradError
from zmqgrad.rpc.devices import published
from zmqgrad.rpc.hooks import EXTENSIONS, install_extension
from zmqgrad.rpc.membership.membership import LEFT, LEFT_AT_ONCE, Membership
from zmqgrad.rpc.membership.registry import Registry
from zmqgrad.rpc.membership.worker_info import WorkerRecord, program_fingerprint, wait_for_exit
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.rpc.rref.api import install_rrefs
from zmqgrad.rpc.torch_internals import keep_out_of_graphs
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.late_threads import start_thread
from zmqgrad.store import Store, TCPStore
from zmqgrad.transport.base import Mailbox

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_SECONDS = 5.0
"""How long threads may take to end after a worker was closed."""

JOIN_PARTS = 5
"""That time is counted in so many parts, of which a stop of this process, however long, uses up one."""

HURRIED_JOIN_TIMEOUT_SECONDS = 1.0
"""The same while an exception is propagating or the interpreter exits."""

EXIT_GRACE_SECONDS = 3.0
"""How long the process of a failed program may take to end after it closed its sockets."""


def make_worker(
    name: str,
    rank: int,
    world_size: int,
    mailbox: Mailbox,
    options: RpcBackendOptions,
    clock: Clock = MONOTONIC,
) -> Worker:
    """Make a worker with all its extensions, not yet started. ``world_size`` is 0 in a dynamic group."""
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
        world_size,
    )
    worker = Worker(Membership(own, world_size), mailbox, options, clock)
    install_rrefs(worker)
    keep_out_of_graphs()
    for extension in EXTENSIONS:
        install_extension(extension, worker)
    return worker


class Group(ABC):
    """A worker's membership in a group.

    Args:
        worker: not yet started.
        store: the keys of the group; closed together with the worker.
        served: the store beneath ``store``, if this worker serves it.
    """

    def __init__(self, worker: Worker, store: Store, served: TCPStore | None = None) -> None:
        self.worker = worker
        self.store = store
        self._served = served
        worker.directory.store = store
        self._goodbye = ""  # why this worker leaves; empty: its program ends without leaving
        self.leaving = False
        """Whether :meth:`leave` was called."""
        self.has_met = False
        """Whether all workers have joined a group of fixed size."""
        self._hurried: threading.Thread | None = None
        self._registry = Registry(store, worker.membership.own)

    @abstractmethod
    def join(self, deadline: Deadline) -> None:
        """Become a member of the group, and start the worker. It serves no call until ``server.serve()``.

        Raises:
            DuplicateWorkerError: if another worker has this name or rank.
        """

    @abstractmethod
    def _finish(self, deadline: Deadline) -> None:
        """Complete the work in progress, and stop being a member."""

    def _finish_at_once(self, deadline: Deadline) -> None:
        """Stop being a member, without grace."""
        logger.debug("%s leaves at once", self.worker.name)

    def leave(self, graceful: bool, deadline: Deadline) -> None:
        """End the worker. Its threads and sockets are closed afterwards, also if this raises.

        Args:
            graceful: complete the work in progress first: in a group of fixed size that of all workers, after
                all have called this; in a dynamic group that of this worker.
            deadline: of the whole.

        Raises:
            RpcTimeoutError: if others did not arrive or finish by ``deadline``, naming them; if the store
                does not reply.
            RpcError: if threads are left because user code in them does not end.
        """
        if self.worker.closed:  # a signal handler has left a moment ago, at once
            return
        try:
            self.leaving = True
            self.worker.events.stop()
            if graceful:
                self.worker.server.serve()  # Ctrl-C may have ended init_rpc just before it did
            (self._finish if graceful else self._finish_at_once)(deadline)
        except BaseException as e:
            logger.debug("%s: shutdown: %s", self.worker.name, e)
            _to_the_end(partial(close_quietly, self, logger.warning))  # the first error is the one to report
            if self._hurried is not None and isinstance(e, ZmqgradError):
                return  # the wait was ended on purpose
            if isinstance(e, StoreError):  # the refused query explains nothing
                raise RpcTimeoutError(self._explain_lost_store()) from None
            raise
        finally:
            if self._hurried is not None:
                self._hurried.join(JOIN_TIMEOUT_SECONDS)
        self._goodbye = LEFT if graceful else LEFT_AT_ONCE
        _to_the_end(self.close)

    def hurry(self) -> None:
        """End a graceful :meth:`leave` that is under way, which closes the worker and returns. Idempotent.

        Another thread does this: the calling one may be a signal handler, which has interrupted :meth:`leave`
        while it holds a lock.

        Raises:
            RuntimeError: if no thread can be started. The shutdown goes on.
        """
        if self._hurried is None:
            self._goodbye = LEFT_AT_ONCE
            close = partial(close_quietly, self, logger.debug, JOIN_TIMEOUT_SECONDS)
            self._hurried = start_thread(close, f"{self.worker.name}-hurry")

    def wait_for_lost_processes(self) -> None:
        """Wait briefly until the processes of lost workers have ended.

        A failing program closes its sockets a second or two before its process ends, because torch is slow to
        unload. Programs that fail because of it must not end first, or a launcher would blame them.
        """
        deadline = Deadline.after(EXIT_GRACE_SECONDS)
        for lost in list(self.worker.lost):
            record = self.worker.membership.find_known(lost)
            if record is not None:
                wait_for_exit(record, deadline.left())

    def _explain_lost_store(self) -> str:
        text = f"{self.worker.name}: shutdown gave up: the store no longer replies"
        first = self.worker.membership.find_known(0)
        if first is not None and wait_for_exit(first, EXIT_GRACE_SECONDS):  # see wait_for_lost_processes
            return f"{text}: the program of {first.name}, which serves it, has ended without shutdown"
        name = self.worker.membership.name_of(0)
        return f"{text}; {name}, or the launcher that serves it, seems to have ended"

    def close(self, timeout: float = JOIN_TIMEOUT_SECONDS) -> None:
        """End at once. Idempotent.

        Args:
            timeout: seconds that threads have to end.

        Raises:
            RpcError: if threads are left because user code in them does not end.
        """
        self.worker.close(self._goodbye)
        self.store.close()  # ends the queries of threads that wait for the store
        for _ in range(JOIN_PARTS):
            left = self.worker.join(Deadline.after(timeout / JOIN_PARTS))
            if not left:
                return
        raise RpcError(
            f"worker {self.worker.name} was shut down, but user code still runs in {', '.join(left)}; "
            f"it ends with the process"
        )


def _to_the_end(close: Callable[[], None]) -> None:
    """Call ``close`` in another thread than the main one: only that is interrupted by Ctrl-C."""
    closing: threading.Thread | None = None
    try:
        if threading.current_thread() is threading.main_thread():
            closed: Promise[None] = Promise()

            def run() -> None:
                try:
                    close()
                except BaseException as e:
                    closed.set_exception(e)
                else:
                    closed.set_result(None)

            closing = threading.Thread(target=run, name="zmqgrad-close", daemon=True)
            try:
                closing.start()
            except RuntimeError:  # the interpreter is ending
                run()
            closed.wait()
    finally:
        if closing is None or (closing.ident is None and not closed.done()):
            close()  # here: this is another thread, or Ctrl-C came before that one began
        elif closed.wait_done(JOIN_TIMEOUT_SECONDS) and closing.ident is not None:
            closing.join(JOIN_TIMEOUT_SECONDS)


def close_quietly(
    group: Group, log: Callable[..., None] = logger.debug, timeout: float = HURRIED_JOIN_TIMEOUT_SECONDS
) -> None:
    """:meth:`Group.close` that logs errors, for use at exit or while another exception propagates."""
    try:
        group.close(timeout)
    except (RpcError, StoreError) as e:
        log("%s", e)
