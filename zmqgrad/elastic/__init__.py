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
"""

from __future__ import annotations

from zmqgrad.elastic.backends import EtcdBackend, EtcdOptions, StoreBackend
from zmqgrad.elastic.executor import OperatorExecutor
from zmqgrad.elastic.handler import Rendezvous, RendezvousHandler
from zmqgrad.elastic.registry import Parameters, create_handler, register_backend
from zmqgrad.elastic.round_stores import RoundStores, ServedByRankZero, SharedStore
from zmqgrad.elastic.settings import RendezvousSettings, RendezvousTimeout
from zmqgrad.elastic.state import NodeDesc, RendezvousState
from zmqgrad.elastic.state_holder import RendezvousBackend, StateHolder

__all__ = [
    "EtcdBackend",
    "EtcdOptions",
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
    "SharedStore",
    "StateHolder",
    "StoreBackend",
    "create_handler",
    "register_backend",
]
