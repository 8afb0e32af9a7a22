"""Which worker the calling thread acts for.

Engine threads carry theirs in a context variable, so that several workers can live in one process; every
other thread acts for the worker that ``init_rpc`` made.
"""

from __future__ import annotations

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


def act_for(worker: Worker | None) -> Token[Worker | None]:
    """The calling thread acts for ``worker`` until :func:`act_again` is given the token."""
    return _acting.set(worker)


def act_again(token: Token[Worker | None]) -> None:
    """Back to whom the thread acted for before."""
    _acting.reset(token)


def set_default_worker(worker: Worker | None) -> None:
    """The worker of this process (``init_rpc`` and ``shutdown`` call this)."""
    global _default
    _default = worker
