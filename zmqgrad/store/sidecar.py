"""Sidecar stores, for programs under ``torchrun``.

The agent of torchrun serves a store at MASTER_ADDR:MASTER_PORT, which uses torch's protocol. So rank 0 serves
a store of ours at a port that the system picks, and publishes the port in the agent's store. Accessing that
requires torch, which this layer must not import: an upper layer supplies the connector
(:func:`set_agent_connector`), which importing ``zmqgrad.rpc`` or ``zmqgrad.interop`` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from zmqgrad.errors import ConfigurationError, StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.arguments import Timeout, seconds_of
from zmqgrad.store.client import TCPStore


class Agent(Protocol):
    """The part of torch's store interface that is used here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


Connect = Callable[[str, int, timedelta], Agent]
"""Connects to the agent's store at a host and port, with a timeout. Raises ``RuntimeError`` on failure."""

_connect: Connect | None = None

# All workers form their groups in the same order, so they open their stores in the same order too.
_opened = itertools.count()


def set_agent_connector(connect: Connect) -> None:
    """Use ``connect`` to reach the stores of agents from now on."""
    global _connect
    _connect = connect


def open_sidecar(
    host: str, port: int, rank: int, world_size: int | None, timeout: Timeout, attempt: int
) -> TCPStore:
    """Open the store of the group next to the agent's at ``host:port``; rank 0 serves it on ``host``.

    ``attempt`` counts restarts of the workers by the agent: entries of earlier attempts are not read.

    Raises:
        ConfigurationError: if no connector was set.
        StoreTimeoutError: if rank 0 does not publish its port in time.
        StoreError, TransportError: if the agent or the store cannot be reached, or rank 0 cannot listen.
    """
    if _connect is None:
        raise ConfigurationError(
            f"{host}:{port} is served by the agent of torchrun, and reaching it requires torch: import "
            f"zmqgrad.interop (or zmqgrad.rpc) first"
        )
    deadline = Deadline.after(seconds_of(timeout))
    key = f"zmqgrad/attempt_{attempt}/{next(_opened)}"
    limit = timedelta(seconds=min(deadline.left(), timedelta.max.total_seconds() / 2))
    try:
        agent = _connect(host, port, limit)
        if rank != 0:
            store_port = int(agent.get(key))
            return TCPStore(host, store_port, world_size, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as e:
        if isinstance(e, StoreError):
            raise
        kind = StoreTimeoutError if deadline.passed() else StoreError
        raise kind(f"the agent of torchrun at {host}:{port} did not provide the port of rank 0: {e}") from e
    store = TCPStore(host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
    try:
        agent.set(key, str(store.port))
    except RuntimeError as e:
        store.close()
        raise StoreError(
            f"the agent of torchrun at {host}:{port} did not accept the port of rank 0: {e}"
        ) from e
    return store
