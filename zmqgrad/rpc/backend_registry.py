"""``torch.distributed.rpc.backend_registry``, as far as programs use it: there is one backend here."""

from __future__ import annotations

from typing import Any

from zmqgrad.rpc.options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_RPC_TIMEOUT_SEC,
    BackendType,
    TensorPipeRpcBackendOptions,
)

__all__ = ["BackendType", "backend_registered", "construct_rpc_backend_options"]


def backend_registered(backend_name: str) -> bool:
    """Is there a backend of this name?"""
    return backend_name in BackendType.__members__


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> TensorPipeRpcBackendOptions:
    """Options for ``init_rpc``; ``kwargs`` are further ones."""
    del backend
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)
