"""Key-value stores that processes share, with the calls of ``torch.distributed``'s, and ``watch_key``.

    from zmqgrad.store import TCPStore

    store = TCPStore("127.0.0.1", 29500, is_master=True)
    store.watch_key("epoch", lambda old, new: print(old, "->", new))
    store.set("epoch", "1")

Guarantees: loading this loads no torch (DESIGN 16.2). Calls are linearizable: what one call has done is
seen by every call that begins after it has returned. Every wait has a deadline, and a server that is gone
costs the timeout, no more; one that comes back within it costs nothing. A watch callback sees the last
value (P8).

Start with :mod:`~zmqgrad.store.state`, the pure machine. :mod:`~zmqgrad.store.service` and
:mod:`~zmqgrad.store.local` drive it; :mod:`~zmqgrad.store.watch` follows keys at the client's end.
Threads: the server's one; with watches, those that receive notifications and run callbacks, by turns.
"""

from __future__ import annotations

from zmqgrad.errors import QueueEmptyError, StoreError, TransportError, ZmqgradError
from zmqgrad.store.base import Store
from zmqgrad.store.client import TCPStore
from zmqgrad.store.events import PrefixCallback, WatchCallback, WatchEvent
from zmqgrad.store.file import FileStore
from zmqgrad.store.local import HashStore
from zmqgrad.store.prefix import PrefixStore
from zmqgrad.store.server import StoreServer
from zmqgrad.store.watch_iterator import Watch

# torch's names for the errors of a store, so that its "except" goes on working with the import swapped.
DistError = ZmqgradError
DistNetworkError = TransportError
DistStoreError = StoreError

__all__ = [
    "DistError",
    "DistNetworkError",
    "DistStoreError",
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
