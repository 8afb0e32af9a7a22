"""The word by which a thread says that it is about to wait.

A thread of an :class:`~zmqgrad.runtime.engine_pool.EnginePool` that waits for another call does not
count as working; the pool may put another in its place. So nested calls of any depth cannot eat all
threads. Every wait of ours goes through :func:`about_to_block`.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Blockable(Protocol):
    """A pool that wants to hear of waits in its threads."""

    def blocked(self) -> Any:
        """A context manager around the wait."""
        ...


class _Here(threading.local):
    pool: Blockable | None = None
    """Whom the calling thread works for."""

    def __init__(self) -> None:
        self.pause = threading.RLock()
        """A context manager that does nothing, as no other thread has it; quicker than one in Python."""


here = _Here()
"""For who waits so briefly that :func:`about_to_block` would show."""

anybody = False
"""Has any thread of this process ever worked for a pool? Costs a third of a look at ``here``."""


def belong_to(pool: Blockable | None) -> None:
    """The calling thread now works for ``pool``."""
    global anybody
    anybody = True
    here.pool = pool


def about_to_block() -> Any:
    """A context manager for a wait in the calling thread."""
    pool = here.pool
    return here.pause if pool is None else pool.blocked()
