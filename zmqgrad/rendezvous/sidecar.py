"""Sidecar stores: a store of ours beside one of torch's, at the address that process groups use, too.

``init_process_group`` and ``init_rpc`` may share one MASTER_ADDR:MASTER_PORT, as they do with torch. For a
process group, that port belongs to a store of torch's, which rank 0 or the agent of ``torchrun`` serves. So
rank 0 serves ours at a port that the system picks, and publishes it there: in torch's store if there is one,
otherwise by a :mod:`port mapper <zmqgrad.rendezvous.port_mapper>`. Nothing else is read from there, because
neither authenticates: a forged address leads to a store that fails the handshake.

Accessing torch's store requires torch, which this layer must not import: an upper layer supplies the opener
(:func:`set_torch_store_opener`), which importing ``zmqgrad.rpc`` or ``zmqgrad.interop`` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from zmqgrad.errors import ConfigurationError, StoreError, StoreTimeoutError
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.arguments import Timeout, seconds_of
from zmqgrad.store.base import Store
from zmqgrad.store.client import TCPStore

MAX_TIMEOUT_SECONDS = 1e8
"""Limit of the timeouts that torch's stores accept."""

STALE_ADDRESS_SECONDS = 3.0
"""How long a worker tries an address before it reads it again, in case rank 0 was restarted."""

MAX_PATIENCE_SECONDS = 15.0
"""The same for one that it has read again and again: its host may be far away, or the network congested."""

RIVAL_GRACE_SECONDS = 1.0
"""How long a group may take to end after the first of its workers has left for the next one."""

_POLL_SECONDS = (0.02, 0.5)
_RIVAL = "!"
"""Prefix of the port that rank 0 publishes for the rival of its group."""


class TorchStore(Protocol):
    """The part of torch's store interface that is used here. Methods raise ``RuntimeError`` on failure."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def set_timeout(self, timeout: timedelta) -> None: ...


@runtime_checkable
class Withdrawing(Protocol):
    """What must be told when a store has closed that was published there."""

    def withdraw(self, *keys: str) -> None: ...


class Rival(NamedTuple):
    """A group that must not exist beside another one at the same address.

    Attributes:
        group: names it, as ``group`` of :func:`open_sidecar`.
        check: called with its store; raises an error if it exists, and returns if it has ended.
    """

    group: str
    check: Callable[[Store], None]


Opener = Callable[[str, int, bool, Deadline], TorchStore | None]
"""Opens torch's store, or a port mapper, at a host and port; serves one there if the third argument is True.

Returns None if a store of ours listens there. Raises StoreError, naming what listens there, or
StoreTimeoutError.
"""

_open: Opener | None = None


def set_torch_store_opener(opener: Opener | None) -> Opener | None:
    """Use ``opener`` to reach torch's stores from now on. Returns the previous one."""
    global _open
    previous, _open = _open, opener
    return previous


def open_sidecar(
    host: str,
    port: int,
    rank: int,
    world_size: int | None,
    timeout: Timeout,
    group: str,
    attempt: int | None = None,
    rival: Rival | None = None,
) -> TCPStore:
    """Open the store of a group beside torch's at ``host:port``. Rank 0 serves it on ``host``.

    Args:
        host, port: where torch's store is, or is to be served.
        rank: of this worker.
        world_size: of the group; None: the group is dynamic.
        timeout: for connecting, and of the store.
        group: names the group among those that use this address; equal on all its workers.
        attempt: number of restarts of the workers by the agent that serves torch's store; addresses of
            earlier attempts are not read. None: rank 0 serves torch's store.
        rival: a group that rank 0 may have opened instead of ``group``.

    Raises:
        ConfigurationError: if no opener was set; if the store would be reachable without a secret; if the
            address is link-local, at each worker.
        StoreTimeoutError: if rank 0 does not publish its address in time.
        StoreError, TransportError: if a foreign server listens there, or rank 0 cannot listen.
        Exception: what ``rival.check`` raised.
    """
    if _open is None:
        raise ConfigurationError(
            f"{host}:{port} is served by torch's store, and reaching it requires torch: import "
            f"zmqgrad.interop (or zmqgrad.rpc) first"
        )
    if attempt is None and host.strip("[]").lower().startswith("fe80:"):
        raise ConfigurationError(
            f"{host} is link-local: it counts at one interface of each host, and rank 0 cannot listen there "
            f"for others; set MASTER_ADDR (or the URL) to another address of its host, or to its name"
        )
    prefix = f"zmqgrad/attempt_{attempt or 0}/"
    deadline = Deadline.after(seconds_of(timeout))
    address = _Address(
        _open, host, port, attempt is not None, prefix, group, rival, world_size, timeout, deadline
    )
    return _serve(address) if rank == 0 else _connect(address)


class _Address(NamedTuple):
    """Where the store of a group is published, and what it is opened with."""

    open_torch_store: Opener
    host: str
    port: int
    by_agent: bool
    prefix: str
    group: str
    rival: Rival | None
    world_size: int | None
    timeout: Timeout
    deadline: Deadline

    def __str__(self) -> str:
        return (
            f"{'the agent of torchrun' if self.by_agent else 'the store of torch'} at {self.host}:{self.port}"
        )

    def serve(self) -> TCPStore:
        return TCPStore(
            self.host, 0, self.world_size, is_master=True, timeout=self.timeout, wait_for_workers=False
        )

    def connect(self, port: int, timeout: Timeout) -> TCPStore:
        return TCPStore(self.host, port, self.world_size, timeout=timeout, wait_for_workers=False)

    def error(self, problem: str, cause: Exception) -> StoreError:
        kind = StoreTimeoutError if self.deadline.passed() else StoreError
        return kind(f"{self} {problem}: {cause}")


def _serve(address: _Address) -> TCPStore:
    # First, because it is refused where it would be reachable without a secret; torch's store never is.
    store = address.serve()
    if store.port == address.port:  # the system has chosen the one that the workers know
        with closing(store):  # it is taken until there is another
            store = address.serve()
    try:
        published = address.open_torch_store(
            address.host, address.port, not address.by_agent, address.deadline
        )
        if published is None:
            raise StoreError(
                f"{address.host}:{address.port} is in use by another store of zmqgrad, or two workers of "
                f"this job have rank 0"
            )
        told = {address.prefix + address.group: str(store.port)}
        if address.rival is not None:
            told = {address.prefix + address.rival.group: f"{_RIVAL}{store.port}", **told}
        if isinstance(published, Withdrawing):
            store.close_also(partial(published.withdraw, *told))
        try:
            for key, value in told.items():
                published.set(key, value)
        except RuntimeError as e:
            raise address.error("refused the port of rank 0", e) from e
    except BaseException:
        store.close()
        raise
    return store


def _connect(address: _Address) -> TCPStore:
    published = address.open_torch_store(address.host, address.port, False, address.deadline)
    if published is None:
        if address.world_size is None:  # served by zmqgrad store serve, for example
            return address.connect(address.port, address.timeout)
        raise StoreError(
            f"a store of zmqgrad, or another ZeroMQ socket, listens at {address.host}:{address.port}, where "
            f"rank 0 of this group should listen; choose another port, or end that program"
        )
    patience = Backoff(STALE_ADDRESS_SECONDS, MAX_PATIENCE_SECONDS)
    while True:
        port = _published_port(published, address)
        try:
            store = address.connect(port, patience.pause(address.deadline.left()))
        except StoreTimeoutError:
            if address.deadline.passed():
                raise
        else:
            store.set_timeout(address.timeout)
            store.expect_no_restart()
            return store


def _published_port(published: TorchStore, address: _Address) -> int:
    """The port of the group's store. Waits until rank 0 has published it."""
    value = _read_address(published, address)
    grace, backoff = Deadline.after(RIVAL_GRACE_SECONDS), Backoff(*_POLL_SECONDS)
    while address.rival is not None and value.startswith(_RIVAL):
        if grace.passed():
            _check_rival(address, address.rival, int(value.removeprefix(_RIVAL)))
        if address.deadline.passed():
            raise StoreTimeoutError(
                f"{address} has no address of {address.group}, but one of {address.rival.group}"
            )
        threading.Event().wait(backoff.pause(address.deadline.left()))  # torch's store cannot notify
        value = _read_address(published, address)
    return int(value)


def _read_address(published: TorchStore, address: _Address) -> str:
    published.set_timeout(timedelta(seconds=min(address.deadline.left(), MAX_TIMEOUT_SECONDS)))
    try:
        value = published.get(address.prefix + address.group).decode()
        int(value.removeprefix(_RIVAL))
    except (RuntimeError, ValueError) as e:
        raise address.error(
            "has no address of a store by rank 0, which must use zmqgrad, and pass a "
            "world size if and only if the others do",
            e,
        ) from e
    return value


def _check_rival(address: _Address, rival: Rival, port: int) -> None:
    """Let ``rival`` raise an error if its store is served at ``port``."""
    try:
        store = address.connect(port, min(RIVAL_GRACE_SECONDS, address.deadline.left()))
    except StoreTimeoutError:
        return  # it has ended
    try:
        rival.check(store)
    except StoreError:
        pass  # it has ended just now
    finally:
        store.close()
