"""``torch.distributed.rpc.backend_registry``: the backends by name, and how a program adds one of its own.

There is one way to carry messages here, which goes by our name and by torch's. A backend of a program's own
can do something before and after it joins, or choose the options, and leaves the rest to ``init_backend``:

    def join(store, name, rank, world_size, rpc_backend_options):
        audit.note(name)
        return init_backend(BackendType.ZMQ, store=store, name=name, rank=rank, world_size=world_size,
                            rpc_backend_options=rpc_backend_options)

    mine = register_backend("AUDITED", options_for, join)
    rpc.init_rpc("worker0", backend=mine, ...)
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from zmqgrad.errors import ArgumentTypeError, RpcError
from zmqgrad.rpc import options
from zmqgrad.rpc.membership.bootstrap import join_group
from zmqgrad.rpc.membership.group import Group
from zmqgrad.rpc.options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_RPC_TIMEOUT_SEC,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
)
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]

BackendType: Any = options.BackendType
"""Replaced by an enumeration with one more member at each ``register_backend``."""


class BackendValue(NamedTuple):
    """How a backend makes its options, from ``rpc_timeout``, ``init_method`` and others, and how it joins."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def backend_registered(backend_name: str) -> bool:
    """Is there a backend of this name?"""
    return backend_name in _backends


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend; gives the member of ``BackendType`` that ``init_rpc`` takes.

    Args:
        backend_name: by which nobody else is registered.
        construct_rpc_backend_options_handler: is called with ``rpc_timeout``, ``init_method`` and what else
            ``construct_rpc_backend_options`` is given; gives the options.
        init_backend_handler: is called by ``init_rpc`` with ``store``, ``name``, ``rank``, ``world_size``
            (None: of no fixed size) and ``rpc_backend_options``; gives what ``init_backend`` of ours does.

    Raises:
        RpcError: if the name is taken.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RpcError(f"RPC backend {backend_name}: already registered")
    _backends[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = enum.Enum("BackendType", {name: name for name in _backends}, type=_Named)  # type: ignore[misc]
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Options for ``init_rpc``; ``kwargs`` are further ones."""
    handler = _value_of(backend).construct_rpc_backend_options_handler
    return handler(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Join a group through ``backend``, whose handler takes the arguments; gives this worker's place in it.

    Raises:
        ArgumentTypeError: if ``backend`` is none, or its handler gives something else.
        Others: as its handler does.
    """
    place = _value_of(backend).init_backend_handler(*args, **kwargs)
    if not callable(getattr(place, "leave", None)):
        raise ArgumentTypeError(
            f"the init_backend_handler of {backend!r} gave {place!r}: it must give what init_backend gives "
            f"for BackendType.ZMQ"
        )
    return place


def is_own(backend: Any) -> bool:
    """Is it the backend of this library?

    Raises:
        ArgumentTypeError: if it is none at all.
    """
    return backend is None or _value_of(backend) is _OWN


def _value_of(backend: Any) -> BackendValue:
    name = backend.name if isinstance(backend, enum.Enum) else None  # torch's own enumeration will do
    if name not in _backends:
        raise ArgumentTypeError(f"Argument backend must be a member of BackendType, not {backend!r}")
    return _backends[name]


class _Named:
    name: str

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def _join(
    store: Store, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> Group:
    deadline = Deadline.after(rpc_backend_options.rpc_timeout or None)
    return join_group(store, name, rank, world_size, rpc_backend_options, deadline)


_OWN = BackendValue(TensorPipeRpcBackendOptions, _join)
_backends = dict.fromkeys(options.BackendType.__members__, _OWN)
