"""Backends by name, as in ``torch.distributed.rpc.backend_registry``, and registration of further backends.

The library has one transport, registered as ``ZMQ`` and as ``TENSORPIPE``. A program can register a backend
that acts before and after joining, or chooses the options, and calls ``init_backend`` for the rest:

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

from zmqgrad.errors import ArgumentTypeError, ConfigurationError, RpcError
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
    """The two functions of a backend; see :func:`register_backend`."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def backend_registered(backend_name: str) -> bool:
    """Whether a backend ``backend_name`` is registered.

    Example:
        >>> rpc.backend_registered("TENSORPIPE")
        True
    """
    return backend_name in _backends


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Register a backend.

    Args:
        backend_name: a name that no registered backend has.
        construct_rpc_backend_options_handler: returns the options. It gets the arguments of
            :func:`construct_rpc_backend_options`: ``rpc_timeout``, ``init_method`` and further ones.
        init_backend_handler: joins the group, and returns the result of :func:`init_backend` for
            ``BackendType.ZMQ``. ``init_rpc`` calls it with ``store``, ``name``, ``rank``, ``world_size``
            (None: not fixed) and ``rpc_backend_options``.

    Returns:
        The new member of ``BackendType``, an argument of ``init_rpc``.

    Raises:
        RpcError: if the name is registered already.
        ConfigurationError: if it cannot be the name of a member of ``BackendType``.

    Example:
        >>> backend = rpc.register_backend("AUDITED", rpc.RpcBackendOptions, rpc.init_backend)
        >>> rpc.backend_registered("AUDITED")
        True
    """
    global BackendType
    if not isinstance(backend_name, str):
        raise ArgumentTypeError(f"the name of a backend must be a string, not {backend_name!r}")
    if backend_registered(backend_name):
        raise RpcError(f"RPC backend {backend_name}: already registered")
    names = [*_backends, backend_name]
    try:
        BackendType = options.NamedBackend("BackendType", {name: name for name in names})  # type: ignore[call-arg]
    except ValueError as e:  # names such as "mro", which enumerations do not accept
        raise ConfigurationError(f"RPC backend {backend_name!r}: {e}") from e
    _backends[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Return options for ``init_rpc``, made by the backend.

    Args:
        backend: a member of ``BackendType``.
        rpc_timeout, init_method, kwargs: passed to the backend.

    Raises:
        ArgumentTypeError: if ``backend`` is not a member of ``BackendType``.

    Example:
        >>> rpc.construct_rpc_backend_options(rpc.BackendType.TENSORPIPE, rpc_timeout=10).rpc_timeout
        10.0
    """
    handler = _value_of(backend).construct_rpc_backend_options_handler
    return handler(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Join a group through ``backend``.

    Args:
        backend: a member of ``BackendType``.
        args, kwargs: passed to the ``init_backend_handler`` of the backend.

    Returns:
        This worker's membership in the group, for ``init_rpc``.

    Raises:
        ArgumentTypeError: if ``backend`` is not a member of ``BackendType``, or returns something else.
        Exception: what the handler raised.

    Example:
        >>> def join(**settings):  # the init_backend_handler of a backend that writes down who joins
        ...     print(settings["name"], "joins")
        ...     return rpc.init_backend(rpc.BackendType.ZMQ, **settings)
    """
    group = _value_of(backend).init_backend_handler(*args, **kwargs)
    if not callable(getattr(group, "leave", None)):
        raise ArgumentTypeError(
            f"the init_backend_handler of {backend!r} returned {group!r}: it must return the result of "
            f"init_backend for BackendType.ZMQ"
        )
    return group


def is_own(backend: Any) -> bool:
    """Whether ``backend`` is the one of this library (also None).

    Raises:
        ArgumentTypeError: if it is neither None nor a member of ``BackendType``.
    """
    return backend is None or _value_of(backend) is _OWN


def _value_of(backend: Any) -> BackendValue:
    name = (
        backend.name if isinstance(backend, enum.Enum) else None
    )  # members of torch's enumeration are accepted
    if name not in _backends:
        raise ArgumentTypeError(f"Argument backend must be a member of BackendType, not {backend!r}")
    return _backends[name]


def _join(
    store: Store, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> Group:
    deadline = Deadline.after(rpc_backend_options.join_timeout or None)
    return join_group(store, name, rank, world_size, rpc_backend_options, deadline)


_OWN = BackendValue(TensorPipeRpcBackendOptions, _join)
_backends = dict.fromkeys(options.BackendType.__members__, _OWN)
