"""Modules on other workers, with the public names of ``torch.distributed.nn``.

:mod:`~zmqgrad.nn.api.remote_module` has RemoteModule. The differentiable collectives have nothing to do with
RPC: they are torch's own, loaded on first use (:mod:`~zmqgrad.nn.functional`).
"""

from __future__ import annotations

from typing import Any

from zmqgrad.nn import functional
from zmqgrad.nn.api.remote_module import RemoteModule

__all__ = ["RemoteModule", *functional.__all__]


def __getattr__(name: str) -> Any:
    if name in functional.__all__ or name in ("ReduceOp", "group"):
        return getattr(functional, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
