"""The user's callbacks on joins and losses, called in engine threads, one after another."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zmqgrad.errors import ClosedError
from zmqgrad.rpc.membership.worker_info import WorkerInfo
from zmqgrad.runtime.thread_pool import Task

logger = logging.getLogger(__name__)

JoinCallback = Callable[[WorkerInfo], None]
LossCallback = Callable[[WorkerInfo, str], None]
"""Called with the lost worker and the reason."""


class Events:
    """The callbacks of one worker.

    Args:
        submit: runs a task in an engine thread of the worker.
    """

    def __init__(self, submit: Callable[[Task], None]) -> None:
        self._submit = submit
        self._lock = threading.Lock()  # guards all below
        self._on_join: list[JoinCallback] = []
        self._on_loss: list[LossCallback] = []
        self._queue: deque[Callable[[], None]] = deque()
        self._lost: set[int] = set()
        self._joining: set[int] = set()  # workers of whose loss nobody is notified, as nobody knows them
        self._held: dict[int, WorkerInfo] = {}  # joins of the next holders of names, by the former one
        self._running = False
        self._stopped = False

    def on_join(self, callback: JoinCallback) -> None:
        """Call ``callback`` with each worker that joins from now on."""
        with self._lock:
            self._on_join.append(callback)

    def on_loss(self, callback: LossCallback) -> None:
        """Call ``callback`` with each worker that leaves or dies from now on."""
        with self._lock:
            self._on_loss.append(callback)

    def joining(self, worker: int) -> None:
        """Note that :meth:`joined` is called next, when the worker is known here."""
        with self._lock:
            self._joining.add(worker)

    def joined(self, info: WorkerInfo, former: int | None) -> None:
        """Notify the callbacks that a worker has joined; of one that was lost before, of neither.

        Args:
            former: the worker that had its name before, whose loss comes first.
        """
        with self._lock:
            self._joining.discard(info.id)
            if info.id in self._lost:
                return
            if former is not None and former not in self._lost:
                self._held[former] = info
                return
            self._enqueue(self._on_join, info)
        self._run_soon()

    def lost(self, worker: int, info: WorkerInfo | None, reason: str) -> None:
        """Notify the callbacks that a worker has left or died.

        Args:
            info: None if it is not known here to have joined: then nobody is notified.
        """
        with self._lock:
            self._lost.add(worker)
            following = self._held.pop(worker, None)
            if worker in self._joining:
                info = None
            for former in [f for f, held in self._held.items() if held.id == worker]:
                del self._held[former]  # nobody has heard of it
                info = None
            # With the lock that decides on it held: else a join that needs not wait would overtake this.
            if info is not None:
                self._enqueue(self._on_loss, info, reason)
            if following is not None:
                self._enqueue(self._on_join, following)
        self._run_soon()

    def stop(self) -> None:
        """Call no more callbacks: this worker leaves, and the others may leave, too."""
        self._stopped = True

    def _enqueue(self, callbacks: Sequence[Callable[..., None]], *args: Any) -> None:
        """Let the callbacks be called next. The caller holds the lock, and calls :meth:`_run_soon` then."""
        self._queue.extend(partial(callback, *args) for callback in callbacks)

    def _run_soon(self) -> None:
        with self._lock:
            if self._running or self._stopped or not self._queue:
                return
            self._running = True
        try:
            self._submit(self._run)
        except ClosedError:
            logger.debug("callbacks are not called while this worker closes")

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopped or not self._queue:
                    self._running = False
                    return
                call = self._queue.popleft()
            try:
                call()
            except BaseException:  # user code; after SystemExit, too, the others are to be called
                logger.exception("a callback on joining or losing workers failed")
