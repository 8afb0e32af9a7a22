"""Elastic rendezvous: nodes join and leave while a job runs, and agree on rounds of participants with ranks.

All nodes share one state in a backend that offers compare-and-set. Each node runs operators (join, exit, keep
alive, close), which are pure functions: they look at the state and return one action. The executor applies
the action to the state and writes it back, until the operator returns FINISH.

Start reading with :mod:`~zmqgrad.elastic.state` (what is shared), then :mod:`~zmqgrad.elastic.operators`
(what a node does next) and :mod:`~zmqgrad.elastic.transitions` (what each action changes).
:mod:`~zmqgrad.elastic.observer` tells dead nodes from slow clocks; :mod:`~zmqgrad.elastic.executor` and
:mod:`~zmqgrad.elastic.state_holder` connect the pure modules with a backend; :func:`create_handler` puts all
together. The algorithm is that of
``torch.distributed.elastic.rendezvous.dynamic_rendezvous``.

:mod:`~zmqgrad.elastic.agent` starts the workers of a host and restarts them in each round. Names are imported
on first access, because an agent of a single host needs no store and starts without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmqgrad.elastic.backends import EtcdBackend, EtcdOptions, StoreBackend
    from zmqgrad.elastic.commits.state import Sharded, State
    from zmqgrad.elastic.executor import OperatorExecutor
    from zmqgrad.elastic.handler import Rendezvous, RendezvousHandler
    from zmqgrad.elastic.launch_config import LaunchConfig, Std, Streams
    from zmqgrad.elastic.launching import launch
    from zmqgrad.elastic.registry import Parameters, create_handler, register_backend
    from zmqgrad.elastic.round_stores import RoundStores, ServedByRankZero, SharedStore
    from zmqgrad.elastic.settings import RendezvousSettings, RendezvousTimeout
    from zmqgrad.elastic.state import NodeDesc, RendezvousState
    from zmqgrad.elastic.state_holder import RendezvousBackend, StateHolder

_NAMES = {
    "backends": ("EtcdBackend", "EtcdOptions", "StoreBackend"),
    "commits.state": ("Sharded", "State"),
    "executor": ("OperatorExecutor",),
    "handler": ("Rendezvous", "RendezvousHandler"),
    "launch_config": ("LaunchConfig", "Std", "Streams"),
    "launching": ("launch",),
    "registry": ("Parameters", "create_handler", "register_backend"),
    "round_stores": ("RoundStores", "ServedByRankZero", "SharedStore"),
    "settings": ("RendezvousSettings", "RendezvousTimeout"),
    "state": ("NodeDesc", "RendezvousState"),
    "state_holder": ("RendezvousBackend", "StateHolder"),
}
"""By module, as above."""


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "EtcdBackend",
    "EtcdOptions",
    "LaunchConfig",
    "NodeDesc",
    "OperatorExecutor",
    "Parameters",
    "Rendezvous",
    "RendezvousBackend",
    "RendezvousHandler",
    "RendezvousSettings",
    "RendezvousState",
    "RendezvousTimeout",
    "RoundStores",
    "ServedByRankZero",
    "Sharded",
    "SharedStore",
    "State",
    "StateHolder",
    "Std",
    "StoreBackend",
    "Streams",
    "create_handler",
    "launch",
    "register_backend",
]
