"""PyTorch RPC and distributed autograd over ZeroMQ.

    import zmqgrad.rpc as rpc                       # was torch.distributed.rpc
    import zmqgrad.autograd as dist_autograd        # was torch.distributed.autograd
    from zmqgrad.optim import DistributedOptimizer  # was torch.distributed.optim
    from zmqgrad.nn import RemoteModule             # was torch.distributed.nn

This module imports nothing of the package by itself: whoever wants only ``zmqgrad.store`` must not load
torch for it (DESIGN 16.2). Its submodules are there at first use (``zmqgrad.rpc``, ``zmqgrad.store``, ...).
"""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.1.0"

_ROOMS = ("autograd", "errors", "nn", "optim", "rendezvous", "rpc", "store", "testing")

__all__ = ["__version__", *_ROOMS]


def __getattr__(name: str) -> ModuleType:
    if name in _ROOMS:
        return importlib.import_module(f"zmqgrad.{name}")
    raise AttributeError(f"module 'zmqgrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
