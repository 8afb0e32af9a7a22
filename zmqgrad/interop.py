"""Our stores for ``torch.distributed``: process groups (gloo, NCCL, ...) that meet over zmqgrad.

    import torch.distributed as dist
    import zmqgrad.interop

    dist.init_process_group("gloo", init_method="zmq://10.0.0.1:29500", rank=rank, world_size=4)
    dist.init_process_group("gloo", store=zmqgrad.interop.as_torch_store(store), rank=rank, world_size=4)

Loading this registers ``zmq://`` with torch; ``import zmqgrad`` after torch does as much, and so does
``import zmqgrad.rpc``. It is a module of its own because it loads torch, which no store needs.

torch keeps a store of ours by its C++ half alone: a Python half that nobody else holds would die, and with it
all the calls. So :func:`as_torch_store` keeps what it makes, until it is closed. What ``zmq://`` makes
ends with the process group that was made of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import register_rendezvous_handler

from zmqgrad import rendezvous as meeting
from zmqgrad.errors import ConfigurationError
from zmqgrad.store import Store
from zmqgrad.store.sidecar import set_agent_connector

SCHEME = "zmq"

# The stubs of torch do not tell all of its stores.
CStore: Any = distributed_c10d.Store
CTCPStore: Any = torch_distributed.TCPStore  # type: ignore[attr-defined]
register: Any = register_rendezvous_handler

_kept: set[TorchStore] = set()


class TorchStore(CStore):  # type: ignore[misc]
    """``store`` as one of torch's. Made by :func:`as_torch_store`, which you should call.

    The methods are those that torch's C++ looks for, by the names by which it does, and those of torch's
    stores that it answers without looking.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._clones: list[TorchStore] = []
        super().set_timeout(store.timeout)
        self._timeout = store.timeout

    @property
    def underlying(self) -> Store:
        """The store that does the work."""
        return self._store

    def _timed(self) -> Store:
        """The store, with the timeout that torch has set, perhaps in its C++ half."""
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
        self._clones.append(clone)  # see the module: it lives as long as this
        return clone

    def close(self) -> None:
        """Close the store beneath and the clones of this; torch must use them no more. Idempotent."""
        _kept.discard(self)
        for clone in self._clones:
            clone.close()
        self._store.close()

    def __repr__(self) -> str:
        return f"<TorchStore of {self._store!r}>"


def as_torch_store(store: Store) -> TorchStore:
    """``store`` for ``torch.distributed.init_process_group(store=..)`` and whatever else takes torch's.

    You should close it, or ``store``, when torch uses it no more: after ``destroy_process_group``.
    """
    if isinstance(store, TorchStore):
        return store
    if not isinstance(store, Store):
        raise TypeError(f"expected a store of zmqgrad.store, not {type(store).__name__}")
    made = TorchStore(store)
    _kept.add(made)
    return made


def meet(url: str, timeout: timedelta = meeting.DEFAULT_TIMEOUT, **options: Any) -> Iterator[Any]:
    """torch's handler of ``zmq://host:port?rank=..&world_size=..``: yields ``(store, rank, world_size)``.

    Rank 0 serves the store. It is closed when the process group is destroyed for which it was made; if it
    was made for something else, close it yourself. As with torch's ``tcp://``: who wants to meet again at
    the same address must see to it that rank 0 has destroyed its group before.
    """
    if options:
        raise ConfigurationError(f"{SCHEME}:// does not take {', '.join(sorted(options))}")
    found, rank, world_size = next(iter(meeting.rendezvous(url, timeout=timeout)))
    store = as_torch_store(found)
    before = _default_group()
    try:
        yield store, rank, world_size
    finally:
        # init_process_group has returned and dropped this generator: with a new group, or in vain.
        group = _default_group()
        if group is not None and group is not before:
            weakref.finalize(group, _kept.discard, store)


def _default_group() -> Any:
    return distributed_c10d.GroupMember.WORLD


def register_with_torch() -> None:
    """Let torch meet by ``zmq://``. Harmless if it does already."""
    try:
        register(SCHEME, meet)
    except RuntimeError:
        pass  # by zmqgrad/__init__, which sends them here


def connect_to_agent(host: str, port: int, timeout: timedelta) -> Any:
    """torch's store at ``host:port``, that torchrun's agent serves."""
    return CTCPStore(host, port, None, False, timeout)


register_with_torch()
set_agent_connector(connect_to_agent)
