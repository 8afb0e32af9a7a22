"""A store of ours that torch's C++ code can use.

torch refers only to the C++ part of a store. If the Python part were collected, all calls would fail, so
:func:`as_torch_store` keeps its stores alive until they are closed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import DistStoreError, distributed_c10d

from zmqgrad.errors import ArgumentTypeError, QueueEmptyError, StoreError, StoreTimeoutError
from zmqgrad.store import Store

CStore: Any = distributed_c10d.Store  # torch's stubs lack it

_CQueueEmptyError: Any = getattr(torch.distributed, "QueueEmptyError", DistStoreError)  # since torch 2.8

_MAX_TIMEOUT = timedelta(days=36500)
"""A longer one, such as that of a store without a limit, is negative in torch's C++, which has 64 bits."""

_kept: set[TorchStore] = set()


class TorchStoreError(StoreError, DistStoreError):
    """As its bases."""


class TorchStoreTimeoutError(StoreTimeoutError, DistStoreError):
    """As its bases."""


class TorchQueueEmptyError(QueueEmptyError, _CQueueEmptyError):  # type: ignore[misc]
    """As its bases."""


@contextlib.contextmanager
def _errors_of_torch() -> Iterator[None]:
    """Raise errors that are also those which torch's functions, and programs for its stores, catch."""
    try:
        yield
    except StoreTimeoutError as e:
        raise TorchStoreTimeoutError(*e.args) from e
    except QueueEmptyError as e:
        raise TorchQueueEmptyError(*e.args) from e
    except StoreError as e:
        raise TorchStoreError(*e.args) from e


class TorchStore(CStore):  # type: ignore[misc]
    """A store of ours that torch can use. Call :func:`as_torch_store` to make one.

    It defines the methods that torch's C++ code looks up by name, and those that the C++ base class would
    otherwise implement itself.

    Example:
        >>> isinstance(as_torch_store(HashStore()), TorchStore)
        True
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._clones: list[TorchStore] = []
        super().set_timeout(min(store.timeout, _MAX_TIMEOUT))
        self._timeout: timedelta = self.timeout  # in the C++ part's whole milliseconds

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
        with _errors_of_torch():
            self._timed().set(key, value)

    def get(self, key: str) -> bytes:
        with _errors_of_torch():
            return self._timed().get(key)

    def add(self, key: str, value: int) -> int:
        with _errors_of_torch():
            return self._timed().add(key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        with _errors_of_torch():
            return self._timed().compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        with _errors_of_torch():
            return self._timed().check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with _errors_of_torch():
            self._timed().wait(keys, timeout)

    def append(self, key: str, value: str | bytes) -> None:
        with _errors_of_torch():
            self._timed().append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with _errors_of_torch():
            return self._timed().multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        with _errors_of_torch():
            self._timed().multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def num_keys(self) -> int:
        with _errors_of_torch():
            return self._timed().num_keys()

    def delete_key(self, key: str) -> bool:
        with _errors_of_torch():
            return self._timed().delete_key(key)

    getNumKeys = num_keys
    deleteKey = delete_key

    def queue_push(self, key: str, value: str | bytes) -> None:
        with _errors_of_torch():
            self._timed().queue_push(key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        with _errors_of_torch():
            return self._timed().queue_pop(key, block)

    def queue_len(self, key: str) -> int:
        with _errors_of_torch():
            return self._timed().queue_len(key)

    def list_keys(self) -> list[str]:
        with _errors_of_torch():
            return self._timed().list_keys()

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        with _errors_of_torch():
            self._timed().barrier(key, world_size, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(min(timeout, _MAX_TIMEOUT))
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

    Returns:
        A store for torch's functions. If ``store`` is one already, itself.

    Raises:
        ArgumentTypeError: if ``store`` is not a store of :mod:`zmqgrad.store`.

    Example:
        >>> store = as_torch_store(HashStore())
        >>> store.set("step", "7")
        >>> isinstance(store, torch.distributed.Store), store.get("step")
        (True, b'7')
    """
    if isinstance(store, TorchStore):
        return store
    if not isinstance(store, Store):
        raise ArgumentTypeError(f"expected a store of zmqgrad.store, not {type(store).__name__}")
    wrapped = TorchStore(store)
    _kept.add(wrapped)
    return wrapped


def forget(store: TorchStore) -> None:
    """Stop keeping ``store`` alive; it is closed when torch's last reference to it ends."""
    _kept.discard(store)
