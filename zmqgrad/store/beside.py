"""A store of ours beside one of torch's: under ``torchrun``, whose agent serves MASTER_ADDR:MASTER_PORT.

That store speaks torch's protocol, so rank 0 serves one of ours at a port that the system picks, and leaves
the port with the agent. Talking to the agent takes torch, which no store may load: a floor above says how
(:func:`speak_to_agents`); loading ``zmqgrad.rpc`` or ``zmqgrad.interop`` does so.
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
    """What is needed of torch's store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


Connect = Callable[[str, int, timedelta], Agent]
"""Gives the agent's store at a host and port, with a timeout. Raises ``RuntimeError`` if it cannot."""

_connect: Connect | None = None

# All workers open their stores in the same order, as they must form their groups in the same order.
_opened = itertools.count()


def speak_to_agents(connect: Connect) -> None:
    """Use ``connect`` from now on."""
    global _connect
    _connect = connect


def open_beside(
    host: str, port: int, rank: int, world_size: int | None, timeout: Timeout, attempt: int
) -> TCPStore:
    """The store of the group, beside the agent's at ``host:port``; rank 0 serves it on ``host``.

    ``attempt`` says how often the agent has started the workers: what it kept of earlier ones is not read.

    Raises:
        ConfigurationError: if nobody has said how to speak to agents.
        StoreTimeoutError: if rank 0 does not come in time.
        StoreError, TransportError: if the agent or the store cannot be reached, or not be served.
    """
    if _connect is None:
        raise ConfigurationError(
            f"{host}:{port} is served by the agent of torchrun, which takes torch to talk to: import "
            f"zmqgrad.interop (or zmqgrad.rpc) first"
        )
    deadline = Deadline.after(seconds_of(timeout))
    key = f"zmqgrad/attempt_{attempt}/{next(_opened)}"
    limit = timedelta(seconds=min(deadline.left(), timedelta.max.total_seconds() / 2))
    try:
        agent = _connect(host, port, limit)
        if rank != 0:
            ours = int(agent.get(key))
            return TCPStore(host, ours, world_size, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as e:
        if isinstance(e, StoreError):
            raise
        kind = StoreTimeoutError if deadline.passed() else StoreError
        raise kind(f"the agent of torchrun at {host}:{port} did not tell where rank 0 is: {e}") from e
    store = TCPStore(host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
    try:
        agent.set(key, str(store.port))
    except RuntimeError as e:
        store.close()
        raise StoreError(f"the agent of torchrun at {host}:{port} did not take a word: {e}") from e
    return store
