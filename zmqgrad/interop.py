"""Our stores for ``torch.distributed``: process groups (gloo, NCCL, ...) that use them for rendezvous.

    import torch.distributed as dist
    import zmqgrad.interop

    dist.init_process_group("gloo", init_method="zmq://10.0.0.1:29500", rank=rank, world_size=4)
    dist.init_process_group("gloo", store=zmqgrad.interop.as_torch_store(store), rank=rank, world_size=4)

Importing this registers ``zmq://`` with torch; so do ``import zmqgrad.rpc``, and ``import zmqgrad`` after
torch. It is a separate module because it imports torch, which the stores do not need.

torch refers only to the C++ part of a store. If the Python part were collected, all calls would fail, so
:func:`as_torch_store` keeps its stores alive until they are closed. A store made by ``zmq://`` is closed with
its process group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import register_rendezvous_handler

from zmqgrad.errors import ConfigurationError
from zmqgrad.rendezvous import DEFAULT_TIMEOUT, rendezvous
from zmqgrad.store import Store
from zmqgrad.store.sidecar import set_agent_connector

SCHEME = "zmq"

# The stubs of torch lack some of its stores.
CStore: Any = distributed_c10d.Store
CTCPStore: Any = torch_distributed.TCPStore  # type: ignore[attr-defined]
register: Any = register_rendezvous_handler

_kept: set[TorchStore] = set()


class TorchStore(CStore):  # type: ignore[misc]
    """A store of ours that torch can use. Call :func:`as_torch_store` to make one.

    It defines the methods that torch's C++ code looks up by name, and those that the C++ base class would
    otherwise implement itself.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._clones: list[TorchStore] = []
        super().set_timeout(store.timeout)
        self._timeout = store.timeout

    @property
    def underlying(self) -> Store:
        """The store that this wraps."""
        return self._store

    def _timed(self) -> Store:
        """The store, with the timeout that torch has set, possibly in the C++ part."""
        timeout: timedelta = self.timeout
        if timeout != self._timeout:
            self._store.set_timeout(timeout)
            self._timeout = timeout
        return self._store

    def set(self, key: str, value: str | bytes) -> None:
        self._timed().set(key, value)

    def get(self, key: str) -> bytes:
        return self._timed().get(key)

    def add(self, key: str, value: int) -> int:
        return self._timed().add(key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._timed().compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        return self._timed().check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._timed().wait(keys, timeout)

    def append(self, key: str, value: str | bytes) -> None:
        self._timed().append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._timed().multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._timed().multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def num_keys(self) -> int:
        return self._timed().num_keys()

    def delete_key(self, key: str) -> bool:
        return self._timed().delete_key(key)

    getNumKeys = num_keys
    deleteKey = delete_key

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._timed().queue_push(key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._timed().queue_pop(key, block)

    def queue_len(self, key: str) -> int:
        return self._timed().queue_len(key)

    def list_keys(self) -> list[str]:
        return self._timed().list_keys()

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        self._timed().barrier(key, world_size, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._timed()

    def clone(self) -> TorchStore:
        clone = TorchStore(self._timed().clone())
        self._clones.append(clone)  # keeps its Python part alive; see the module
        return clone

    def close(self) -> None:
        """Close the wrapped store and all clones; torch must not use them any more. Idempotent."""
        _kept.discard(self)
        for clone in self._clones:
            clone.close()
        self._store.close()

    def __repr__(self) -> str:
        return f"<TorchStore of {self._store!r}>"


def as_torch_store(store: Store) -> TorchStore:
    """Wrap ``store`` for ``torch.distributed.init_process_group(store=..)`` and the like.

    You should close it, or ``store``, when torch no longer uses it: after ``destroy_process_group``.

    Raises:
        TypeError: if ``store`` is not a store of :mod:`zmqgrad.store`.
    """
    if isinstance(store, TorchStore):
        return store
    if not isinstance(store, Store):
        raise TypeError(f"expected a store of zmqgrad.store, not {type(store).__name__}")
    wrapped = TorchStore(store)
    _kept.add(wrapped)
    return wrapped


def rendezvous_handler(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **options: Any) -> Iterator[Any]:
    """Rendezvous handler for torch: yields ``(store, rank, world_size)`` for ``zmq://host:port?rank=..``.

    Rank 0 serves the store. It is closed when its process group is destroyed; otherwise you must
    close it. As with torch's ``tcp://``, a rendezvous at the same address works only after rank 0 has
    destroyed its previous group.

    Raises:
        ConfigurationError: for options other than ``timeout``.
        RendezvousError, RendezvousTimeoutError: as :func:`zmqgrad.rendezvous.rendezvous`.
    """
    if options:
        raise ConfigurationError(f"{SCHEME}:// does not take {', '.join(sorted(options))}")
    found, rank, world_size = next(rendezvous(url, timeout=timeout))
    store = as_torch_store(found)
    before = _default_group()
    try:
        yield store, rank, world_size
    finally:
        # init_process_group has returned and dropped this generator: with a new group, or after a failure.
        group = _default_group()
        if group is not None and group is not before:
            weakref.finalize(group, _kept.discard, store)


def _default_group() -> Any:
    return distributed_c10d.GroupMember.WORLD


def register_with_torch() -> None:
    """Register ``zmq://`` with torch, unless that was done before."""
    try:
        register(SCHEME, rendezvous_handler)
    except RuntimeError:
        pass  # zmqgrad/__init__ has registered a handler that forwards to rendezvous_handler()


def connect_to_agent(host: str, port: int, timeout: timedelta) -> Any:
    """Connect to the store of torch that the agent of torchrun serves at ``host:port``."""
    return CTCPStore(host, port, None, False, timeout)


register_with_torch()
set_agent_connector(connect_to_agent)
