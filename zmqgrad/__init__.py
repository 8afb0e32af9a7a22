"""PyTorch RPC and distributed autograd over ZeroMQ.

    import zmqgrad.rpc as rpc                       # was torch.distributed.rpc
    import zmqgrad.autograd as dist_autograd        # was torch.distributed.autograd
    from zmqgrad.optim import DistributedOptimizer  # was torch.distributed.optim
    from zmqgrad.nn import RemoteModule             # was torch.distributed.nn

This module imports nothing of the package by itself: whoever wants only ``zmqgrad.store`` must not load
torch for it (DESIGN 16.2). Its submodules are there at first use (``zmqgrad.rpc``, ``zmqgrad.store``, ...).

If torch is loaded already, its ``init_process_group`` meets by ``zmq://host:port`` from now on; see
:mod:`zmqgrad.interop`, which is to be imported if torch is loaded later.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_ROOMS = ("autograd", "errors", "interop", "nn", "optim", "rendezvous", "rpc", "store", "testing")

__all__ = ["__version__", *_ROOMS]


def __getattr__(name: str) -> ModuleType:
    if name in _ROOMS:
        return importlib.import_module(f"zmqgrad.{name}")
    raise AttributeError(f"module 'zmqgrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _offer_to_torch() -> None:
    """Let torch, if it is there, meet by ``zmq://``; what serves it is loaded when it is asked for."""
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    if rendezvous is None:
        return
    try:
        rendezvous.register_rendezvous_handler("zmq", _meet)
    except RuntimeError:
        pass  # registered before, and this module loaded anew


def _meet(url: str, **options: Any) -> Iterator[Any]:
    meetings: Iterator[Any] = importlib.import_module("zmqgrad.interop").meet(url, **options)
    return meetings


_offer_to_torch()
