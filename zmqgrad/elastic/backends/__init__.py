"""Where the state of a rendezvous is kept."""

from __future__ import annotations

from zmqgrad.elastic.backends.etcd import EtcdBackend, EtcdOptions
from zmqgrad.elastic.backends.store import StoreBackend

__all__ = ["EtcdBackend", "EtcdOptions", "StoreBackend"]
