"""Which worker the calling thread acts for.

Engine threads carry theirs in a context variable, so that several workers can live in one process; every
other thread acts for the worker that ``init_rpc`` made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

from zmqgrad.errors import NotInitializedError

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

_acting: ContextVar[Worker | None] = ContextVar("zmqgrad_worker", default=None)
_default: Worker | None = None


def current_worker() -> Worker:
    """The worker that the calling thread acts for.

    Raises:
        NotInitializedError: if there is none.
    """
    worker = _acting.get() or _default
    if worker is None:
        raise NotInitializedError("RPC has not been initialized. Call zmqgrad.rpc.init_rpc first.")
    return worker


def current_worker_or_none() -> Worker | None:
    """The worker that the calling thread acts for, if there is one."""
    return _acting.get() or _default


# The variable's own methods: every call that is served needs them.

act_for: Callable[[Worker | None], Token[Worker | None]] = _acting.set
"""The calling thread acts for that worker until :func:`act_again` is given the token."""

act_again: Callable[[Token[Worker | None]], None] = _acting.reset
"""Back to whom the thread acted for before."""


def set_default_worker(worker: Worker | None) -> None:
    """The worker of this process (``init_rpc`` and ``shutdown`` call this)."""
    global _default
    _default = worker
