"""The current worker of the calling thread.

Engine threads have theirs in a context variable, so that several workers can live in one process; the current
worker of every other thread is the one that ``init_rpc`` made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

from zmqgrad.errors import NotInitializedError

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

_current: ContextVar[Worker | None] = ContextVar("zmqgrad_worker", default=None)
_default: Worker | None = None


def current_worker() -> Worker:
    """The current worker of the calling thread.

    Raises:
        NotInitializedError: if RPC has not been initialized.
    """
    worker = _current.get() or _default
    if worker is None:
        raise NotInitializedError("RPC has not been initialized. Call zmqgrad.rpc.init_rpc first.")
    return worker


def current_worker_or_none() -> Worker | None:
    """The current worker of the calling thread, or None."""
    return _current.get() or _default


# Bound methods of the variable, not functions: each served call uses them.

set_current_worker: Callable[[Worker | None], Token[Worker | None]] = _current.set
"""Sets the current worker of the calling thread, until :func:`reset_current_worker` gets the token."""

reset_current_worker: Callable[[Token[Worker | None]], None] = _current.reset
"""Restores the previous current worker of the calling thread."""


def set_default_worker(worker: Worker | None) -> None:
    """Set the worker of this process; called by ``init_rpc`` and ``shutdown``."""
    global _default
    _default = worker
