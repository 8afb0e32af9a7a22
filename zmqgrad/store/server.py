"""The store's server: a port, an optional journal, and the thread that handles queries.

:mod:`~zmqgrad.store.service` handles them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from zmqgrad import environment
from zmqgrad.errors import ArgumentTypeError, StoreError
from zmqgrad.runtime.arguments import check_integer
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.store.addresses import check_port
from zmqgrad.store.contents import Contents
from zmqgrad.store.journal import Journal
from zmqgrad.store.leases import MAX_WAITING
from zmqgrad.store.reply_cache import ReplyCache
from zmqgrad.store.service import StoreService
from zmqgrad.transport.query.dealer import LocalAddress
from zmqgrad.transport.query.publisher import Publisher
from zmqgrad.transport.query.server import MAX_CLIENTS, QueryServer
from zmqgrad.transport.security import keys_for_store

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""Time limit of closing, which normally takes milliseconds."""


class StoreServer:
    """Serves a store at ``address`` (see :func:`~zmqgrad.store.addresses.listening_address`).

    Args:
        journal: file that makes the store durable (see :mod:`~zmqgrad.store.journal`); it is loaded first.
        sync: flush each change of it to the disk.
        secret: required of clients; None: from the environment (ZMQGRAD_SECRET).
        listen_fd: a socket that is bound to the port of ``address``; the server takes ownership of it.
        watch_port: the tcp port of the watch channel, to be opened in a firewall; 0: the system picks one at
            the first watch.
        max_clients: limit of clients; a store counts once for each thread that uses it.
        max_waiting: limit of blocked queries, over all clients.
        fast_path: offer the same-host fast path (see :mod:`~zmqgrad.transport.local`); None: from the
            environment (ZMQGRAD_LOCAL_FAST_PATH).
        holder: gets the server before that starts, and closes it.

    Raises:
        AddressInUseError, ConfigurationError, TransportError: if it cannot listen there.
        JournalError: if the journal is damaged, in use, or cannot be opened.

    Example:
        >>> server = StoreServer("tcp://127.0.0.1:0")  # port 0: the system picks one
        >>> with TCPStore("127.0.0.1", server.port) as store:
        ...     store.add("workers", 1)
        1
        >>> server.close()
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "zmqgrad-store",
        journal: str | os.PathLike[str] | None = None,
        sync: bool = False,
        secret: str | bytes | None = None,
        listen_fd: int | None = None,
        watch_port: int = 0,
        max_clients: int = MAX_CLIENTS,
        max_waiting: int = MAX_WAITING,
        fast_path: bool | None = None,
        clock: Clock = MONOTONIC,
        holder: ServerHolder | None = None,
    ) -> None:
        if not isinstance(address, str):
            raise ArgumentTypeError(f"the address of a store must be a str, not {type(address).__name__}")
        check_integer("max_clients", max_clients, 1)
        check_integer("max_waiting", max_waiting, 0)
        self.name = name
        self.drain_seconds = 0.0
        """How long closing waits until the other clients have disconnected; it accepts no new ones then."""
        self._keys = keys_for_store(secret)
        self._watch_port = check_port(watch_port)
        contents, replies = Contents(), ReplyCache()
        self._journal = None if journal is None else Journal(journal, sync=sync)
        with ExitStack() as undo:
            if self._journal is not None:
                undo.callback(self._journal.close)
                self._journal.load(contents, replies)
            self._server = QueryServer(
                name,
                address,
                keys=self._keys,
                listen_fd=listen_fd,
                max_clients=max_clients,
                fast_path=environment.local_fast_path.resolve(fast_path),
                clock=clock,
                undo=undo,
            )
            self._service = StoreService(
                self._server,
                contents,
                replies,
                self._journal,
                max_waiting=max_waiting,
                make_publisher=self._make_publisher,
                clock=clock,
            )
            if watch_port:
                self._service.open_publisher()
            self._thread = threading.Thread(target=self._run, name=f"{name}-server", daemon=True)
            if holder is not None:
                holder.server = self
            self._thread.start()  # Ctrl-C may come when it runs already
            undo.pop_all()

    @property
    def endpoint(self) -> str:
        """The ZeroMQ endpoint of the server."""
        return self._server.endpoint

    @property
    def port(self) -> int:
        """The tcp port of the server."""
        return self._server.port

    @property
    def local(self) -> LocalAddress | None:
        """The address at which clients on this host connect; None: as others do."""
        return self._server.local

    def _make_publisher(self, on_nonce: Callable[[str], None]) -> Publisher:
        host = self.endpoint.rpartition(":")[0]
        address = f"{host}:{self._watch_port or '*'}"
        server = self._server
        return Publisher(server.context, server.incarnation, address, self._keys, on_nonce, server.reader)

    def _run(self) -> None:
        try:
            self._server.serve(self._service)
        except Exception:
            logger.exception("the store at %s failed", self.endpoint)
        finally:
            if self._journal is not None:
                self._journal.close()

    @property
    def serves(self) -> bool:
        """Whether the server runs. It ends when it is closed, or fails."""
        return self._thread.is_alive()

    def admit_newcomers(self, admit: bool) -> None:
        """Stop, or begin again, to reply to pings, the first query of new clients.

        Args:
            admit: whether to reply.
        """
        self._server.refuses_newcomers = not admit

    def refuse_newcomers(self) -> None:
        """Stop replying to pings of new clients, and to requests for the first watch of any."""
        self.admit_newcomers(False)
        self._service.refuses_watches = True

    def close(self) -> None:
        """Stop serving, and refuse blocked queries. Waits for the thread and the sockets. Idempotent.

        Raises:
            StoreError: if the thread does not end in time.
        """
        self._server.stop(self.drain_seconds)
        if self._thread.is_alive():  # else Ctrl-C came as it began, which it will not do any more
            self._thread.join(Deadline.after(self.drain_seconds + CLOSE_SECONDS).timeout())
        if self._thread.is_alive():
            raise StoreError(f"the thread {self._thread.name} has not ended within {CLOSE_SECONDS} s")

    def statistics(self) -> dict[str, int]:
        """Counters and sizes. Read without a lock, so they may belong to slightly different moments."""
        server = self._server
        return {
            **self._service.state.statistics(),
            "clients": server.clients,
            "pending": server.pending,
            "requests": server.requests,
            "malformed": server.malformed,
            "undeliverable": server.undeliverable,
            "published": self._service.published,
        }

    def __repr__(self) -> str:
        return f"<StoreServer at {self.endpoint}: {self._service.state.statistics()}>"


class ServerHolder:
    """Has a server, and releases it: known before the server, so that Ctrl-C behind its start leaves none."""

    server: StoreServer | None = None


class SharedServers:
    """The shared servers of this process by address (``multi_tenant``), with reference counts."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards _shared; a signal handler may close another store
        self._shared: dict[str, tuple[StoreServer, set[ServerHolder]]] = {}  # server and users

    def acquire(self, holder: ServerHolder, address: str, shared: bool, **options: Any) -> None:
        """Give ``holder`` a server at ``address``; with ``shared`` the existing shared one, if any.

        Args:
            options: arguments of :class:`StoreServer` for a new one.
        """
        if not shared or address.endswith(":*"):
            StoreServer(address, holder=holder, **options)
            return
        with self._lock:
            existing = self._shared.get(address)
            holder.server, users = existing or (StoreServer(address, holder=holder, **options), set())
            users.add(holder)
            self._shared[address] = (holder.server, users)

    def release(self, holder: ServerHolder) -> None:
        """Close the server of ``holder``, if any, unless others use it. Once more after Ctrl-C in between."""
        server = holder.server
        if server is None:
            return
        with self._lock:
            for address, (shared, users) in self._shared.items():
                if shared is server:
                    users.discard(holder)
                    if not users:
                        del self._shared[address]
                        server.close()  # the next user of this address waits for it
                    break
            else:
                users = set()
        if not users:
            server.close()  # without the lock: it may wait for its clients, of which some are closing here
        holder.server = None


servers = SharedServers()
