"""Key-value stores that processes share, with the interface of ``torch.distributed``'s, and watches.

``TCPStore`` is a client of a :class:`StoreServer`; ``FileStore`` is an SQLite file; ``EtcdStore`` is an etcd
cluster; ``HashStore`` serves the threads of one process; ``PrefixStore`` is a view of another store.

Guarantees: importing this does not import torch. Calls are linearizable. Every wait has a deadline. Clients
reconnect to a restarted server. P8 and P9 of docs/guarantees.md.

Start with :mod:`~zmqgrad.store.state`, the pure machine, driven by :mod:`~zmqgrad.store.service` (server) and
:mod:`~zmqgrad.store.local`. Threads: one for a server; with watches, a pool that receives and runs callbacks.
"""

from __future__ import annotations

from zmqgrad.errors import QueueEmptyError, StoreError, TransportError, ZmqgradError
from zmqgrad.store.base import Store
from zmqgrad.store.client import TCPStore
from zmqgrad.store.etcd.cluster import EtcdOptions
from zmqgrad.store.etcd.store import EtcdStore
from zmqgrad.store.events import PrefixCallback, WatchCallback, WatchEvent
from zmqgrad.store.file import FileStore
from zmqgrad.store.local import HashStore
from zmqgrad.store.prefix import PrefixStore
from zmqgrad.store.server import StoreServer
from zmqgrad.store.watch_iterator import Watch

# torch's names for the errors of a store, so that an `except` written for torch works.
DistError = ZmqgradError
DistNetworkError = TransportError
DistStoreError = StoreError

__all__ = [
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "EtcdOptions",
    "EtcdStore",
    "FileStore",
    "HashStore",
    "PrefixCallback",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "StoreServer",
    "TCPStore",
    "Watch",
    "WatchCallback",
    "WatchEvent",
]
