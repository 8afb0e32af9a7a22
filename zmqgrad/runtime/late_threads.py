"""Threads that can also be started while the interpreter ends.

Python 3.12 starts no thread any more when the functions of ``atexit`` run; older and newer versions do.
``rpc.shutdown`` may be one of them, and has to serve calls of others until these shut down, too. So some
threads are started ahead, at the last moment at which that is possible: when the main thread has ended.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

SPARE_THREADS = 32
"""How many are started ahead: those of a pool of the default size, and as many whose tasks wait."""


class _Spare(threading.Thread):
    """A thread that waits for its target."""

    def __init__(self) -> None:
        super().__init__(name="zmqgrad-spare", daemon=True)
        self.targets: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def run(self) -> None:
        self.targets.get()()


_spares: list[_Spare] = []
_used = False  # a thread was started
_late = False  # the spare threads are all that there will be


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Run ``target`` in a new daemon thread, or, while the interpreter ends, in a spare one.

    Raises:
        RuntimeError: if the system refuses to start more threads, or the spare ones are used up.
    """
    global _used
    _used = True
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        if not _spares:
            raise
        spare = _spares.pop()
        spare.name = name
        spare.targets.put(target)
        return spare
    return thread


def are_scarce() -> bool:
    """Whether no more threads can be started than the spare ones, so that none should end."""
    return _late


def _start_spares() -> None:
    global _late
    try:
        for _ in range(SPARE_THREADS if _used else 0):
            spare = _Spare()
            spare.start()
            _spares.append(spare)
    except RuntimeError:
        # 3.12.0 and 3.12.1 start none already, in programs that multiprocessing did not start.
        logger.debug("the interpreter ends, and starts no thread any more")
    _late = True


if sys.version_info[:2] == (3, 12):
    threading._register_atexit(_start_spares)  # type: ignore[attr-defined]  # as concurrent.futures does
