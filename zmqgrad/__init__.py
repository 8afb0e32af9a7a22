"""PyTorch RPC and distributed autograd over ZeroMQ.

    import zmqgrad.rpc as rpc                       # was torch.distributed.rpc
    import zmqgrad.autograd as dist_autograd        # was torch.distributed.autograd
    from zmqgrad.optim import DistributedOptimizer  # was torch.distributed.optim
    from zmqgrad.nn import RemoteModule             # was torch.distributed.nn

This module imports no submodule that loads torch, so that programs that only use ``zmqgrad.store`` start
without it. Submodules are imported on first access (``zmqgrad.rpc``, ``zmqgrad.store``, ...).

Programs whose imports cannot be changed call :func:`install`, or run with ZMQGRAD_REPLACE_TORCH_RPC=1: then
this replaces ``torch.distributed.rpc`` as soon as torch has been imported.

If torch is loaded already, this registers ``zmq://host:port`` URLs for its ``init_process_group``. If torch
is loaded later, import :mod:`zmqgrad.interop` to register them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

from zmqgrad.environment import replaces_torch_rpc
from zmqgrad.import_hooks import AfterImport

__version__ = "1.0.0"

_SUBMODULES = ("autograd", "errors", "interop", "nn", "optim", "rendezvous", "rpc", "store", "testing")

_FUNCTIONS = {
    "init_process_group": "zmqgrad.interop",
    "install": "zmqgrad.replacement",
    "uninstall": "zmqgrad.replacement",
}
"""Functions of submodules that are offered here."""

__all__ = ["__version__", *_FUNCTIONS, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"zmqgrad.{name}")
    raise AttributeError(f"module 'zmqgrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_with_torch() -> None:
    """Register ``zmq://`` URLs with torch, if it is loaded. The handler is imported on first use."""
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    if rendezvous is None:
        return
    try:
        rendezvous.register_rendezvous_handler("zmq", _rendezvous)
    except RuntimeError:
        pass  # registered before this module was reloaded


def _rendezvous(url: str, **options: Any) -> Iterator[Any]:
    results: Iterator[Any] = importlib.import_module("zmqgrad.interop").rendezvous_handler(url, **options)
    return results


_register_with_torch()


def _install_after_torch() -> None:
    """Call :func:`install`, now or when torch and all modules of this library that import it are loaded."""

    def install_if_loaded() -> None:
        if "torch" in sys.modules:
            hook.remove()
            if replaces_torch_rpc():
                importlib.import_module("zmqgrad.replacement").install()

    hook = AfterImport(lambda name: name == "torch" or name.startswith("zmqgrad."), install_if_loaded)
    hook.install()
    install_if_loaded()


if replaces_torch_rpc.is_set():  # read with torch: the command, which reports a wrong value, can be loaded
    _install_after_torch()
