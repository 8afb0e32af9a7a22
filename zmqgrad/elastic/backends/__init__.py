"""Where the state of a rendezvous is kept."""

from __future__ import annotations

from zmqgrad.elastic.backends.etcd import EtcdBackend
from zmqgrad.elastic.backends.store import StoreBackend
from zmqgrad.store.etcd.cluster import EtcdOptions

__all__ = ["EtcdBackend", "EtcdOptions", "StoreBackend"]
