"""torch's process groups, with our stores for their rendezvous."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import register_rendezvous_handler

from zmqgrad.errors import ConfigurationError
from zmqgrad.interop.stores import TorchStore, as_torch_store, forget
from zmqgrad.rendezvous import DEFAULT_TIMEOUT, Group, meeting_place, rendezvous, rendezvous_beside
from zmqgrad.store import PrefixStore, Store

SCHEME = "zmq"

register: Any = register_rendezvous_handler  # torch's stubs lack its types


_joined: Counter[str | None] = Counter()
"""Default process groups that :func:`init_process_group` has joined, by where they met; equal on all."""


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Join torch's default process group, with a store of ours for its rendezvous.

    Collectives are torch's own. With a secret, workers without it are kept out of the rendezvous. The store
    is closed when the group is destroyed.

    Args:
        backend, world_size, rank, group_name, pg_options, device_id: as for
            ``torch.distributed.init_process_group``.
        init_method: a URL of :func:`zmqgrad.rendezvous.rendezvous`, which RPC may use, too; None: ``env://``,
            unless ``store`` is given.
        timeout: of the rendezvous and of collectives; None: torch's default for the backend.
        store: a store of :mod:`zmqgrad.store` or of torch, instead of ``init_method``; yours to close.

    Raises:
        RendezvousError, RendezvousTimeoutError, ConfigurationError: as :func:`zmqgrad.rendezvous.rendezvous`.
        ValueError, RuntimeError: as torch's function, for example if there is a default group already.

    Example:
        >>> zmqgrad.init_process_group("gloo", rank=0, world_size=1)
        >>> torch.distributed.get_world_size()
        1
        >>> torch.distributed.destroy_process_group()
    """
    options = {"timeout": timeout, "pg_options": pg_options, "device_id": device_id, "group_name": group_name}
    if store is not None:
        shared = as_torch_store(store) if isinstance(store, Store) else store
        torch_distributed.init_process_group(
            backend, init_method, world_size=world_size, rank=rank, store=shared, **options
        )
        return
    if torch_distributed.is_initialized():
        raise ValueError("trying to initialize the default process group twice!")
    init_method = init_method or "env://"
    place = meeting_place(init_method)
    number = _joined[place]
    found, rank, world_size = rendezvous_beside(
        init_method,
        rank,
        world_size,
        timeout or DEFAULT_TIMEOUT,
        group=Group("process_group", number),
    )
    own = as_torch_store(PrefixStore(f"group_{number}", found, owned=True))  # a file may outlive a group
    try:
        torch_distributed.init_process_group(backend, world_size=world_size, rank=rank, store=own, **options)
    except BaseException:
        own.close()
        raise
    _joined[place] += place is not None
    forget_with_group(own)


def forget_with_group(store: TorchStore) -> None:
    """Let ``store`` end with the default process group."""
    weakref.finalize(_default_group(), forget, store)


def rendezvous_handler(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **options: Any) -> Iterator[Any]:
    """Rendezvous handler for torch: yields ``(store, rank, world_size)`` for ``zmq://host:port?rank=..``.

    Rank 0 serves the store. It is closed when its process group is destroyed; otherwise you must
    close it. As with torch's ``tcp://``, a rendezvous at the same address works only after rank 0 has
    destroyed its previous group.

    Args:
        url: the address, with the rank and the world size.
        timeout: how long to wait for the store.
        options: none; torch passes those of its own handlers.

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
            forget_with_group(store)


def _default_group() -> Any:
    return distributed_c10d.GroupMember.WORLD


def register_with_torch() -> None:
    """Register ``zmq://`` with torch, unless that was done before.

    Example:
        >>> register_with_torch()  # after "import torch" that came later than "import zmqgrad"
    """
    try:
        register(SCHEME, rendezvous_handler)
    except RuntimeError:
        pass  # zmqgrad/__init__ has registered a handler that forwards to rendezvous_handler()
