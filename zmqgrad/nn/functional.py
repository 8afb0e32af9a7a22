"""The differentiable collectives of ``torch.distributed.nn.functional``: torch's own, loaded on first use.

They run over a process group, not over RPC.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [  # noqa: F822  found by __getattr__
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torch.distributed.nn.functional"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
