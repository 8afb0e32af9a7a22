"""The user's callbacks on workers that join or are lost: in engine threads, one event after another."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from zmqgrad.errors import ClosedError
from zmqgrad.rpc.groups.identity import WorkerInfo
from zmqgrad.runtime.thread_pool import Task

logger = logging.getLogger(__name__)

JoinCallback = Callable[[WorkerInfo], None]
LossCallback = Callable[[WorkerInfo, str], None]
"""Called with the worker, and why it is gone."""


class Events:
    """Who wants to hear what of the group; ``submit`` runs a task in an engine thread, for this worker."""

    def __init__(self, submit: Callable[[Task], None]) -> None:
        self._submit = submit
        self._lock = threading.Lock()  # guards all below
        self._on_join: list[JoinCallback] = []
        self._on_loss: list[LossCallback] = []
        self._waiting: deque[Callable[[], None]] = deque()
        self._telling = False
        self._stopped = False

    def on_join(self, callback: JoinCallback) -> None:
        """Call it with every worker that joins from now on."""
        with self._lock:
            self._on_join.append(callback)

    def on_loss(self, callback: LossCallback) -> None:
        """Call it with every worker that leaves or dies from now on."""
        with self._lock:
            self._on_loss.append(callback)

    def joined(self, info: WorkerInfo) -> None:
        """A worker has joined."""
        with self._lock:
            for callback in self._on_join:
                self._waiting.append(lambda callback=callback: callback(info))  # type: ignore[misc]
        self._tell()

    def lost(self, info: WorkerInfo, why: str) -> None:
        """A worker is gone."""
        with self._lock:
            for callback in self._on_loss:
                self._waiting.append(lambda callback=callback: callback(info, why))  # type: ignore[misc]
        self._tell()

    def stop(self) -> None:
        """Tell of nothing more: this worker leaves, and so may others, in good order."""
        self._stopped = True

    def _tell(self) -> None:
        with self._lock:
            if self._telling or self._stopped or not self._waiting:
                return
            self._telling = True
        try:
            self._submit(self._run)
        except ClosedError:
            logger.debug("nobody is told of what happens while this worker closes")

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopped or not self._waiting:
                    self._telling = False
                    return
                tell = self._waiting.popleft()
            try:
                tell()
            except Exception:  # user code
                logger.exception("a callback on joining or losing workers failed")
