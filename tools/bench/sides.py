"""The two sides that are compared, under the same names."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

OURS, TORCH = "zmqgrad", "torch"


@dataclass(frozen=True)
class Side:
    """The modules of one side: the same program runs with either."""

    name: str
    rpc: Any
    autograd: Any
    optim: Any
    store: Any


_MODULES = {
    OURS: ("zmqgrad.rpc", "zmqgrad.autograd", "zmqgrad.optim", "zmqgrad.store"),
    TORCH: (
        "torch.distributed.rpc",
        "torch.distributed.autograd",
        "torch.distributed.optim",
        "torch.distributed",
    ),
}

_here: Side | None = None


def take(name: str) -> Side:
    """Load a side; it is then the one that :func:`here` gives in this process."""
    global _here
    _here = Side(name, *map(importlib.import_module, _MODULES[name]))
    return _here


def store_of(name: str) -> Any:
    """The store of a side, without loading the rest."""
    return importlib.import_module(_MODULES[name][-1])


def here() -> Side:
    """The side that this process has taken: what runs on a worker because another called it asks for it."""
    assert _here is not None, "take() comes first"
    return _here
