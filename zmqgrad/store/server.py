"""The store's server: a port, perhaps a journal, and the one thread in which queries are answered.

What is done with them stands in :mod:`~zmqgrad.store.service`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack

from zmqgrad import environment
from zmqgrad.errors import StoreError
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.store.contents import Contents
from zmqgrad.store.journal import Journal
from zmqgrad.store.reply_cache import ReplyCache
from zmqgrad.store.requesters import MAX_WAITING
from zmqgrad.store.service import StoreService
from zmqgrad.transport.query.publisher import Publisher
from zmqgrad.transport.query.server import MAX_CLIENTS, QueryServer
from zmqgrad.transport.security import keys_of

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long closing may take; it is a matter of milliseconds, too."""


class StoreServer:
    """Serves a store at ``address`` (see :func:`~zmqgrad.store.addresses.listening_address`).

    Args:
        journal: the file that makes the store durable (see :mod:`~zmqgrad.store.journal`); it is read first.
        sync: flush each change of it to the disk.
        secret: only who has it is answered; None: as the environment says (ZMQGRAD_SECRET).
        listen_fd: a socket that was bound to the port of ``address`` already; the server's from then on.
        watch_port: the tcp port of the watch channel, so that a firewall can let it through; 0: the system
            picks one when the first client wants to watch a key.
        max_clients: how many clients are served; a store that several threads use is one for each of them.
        max_waiting: how many queries may wait at a time, of all clients together.
        fast_path: let clients of this host use it (see :mod:`~zmqgrad.transport.local`); None: as the
            environment says (ZMQGRAD_LOCAL_FAST_PATH).

    Raises:
        AddressInUseError, ConfigurationError, TransportError: if it cannot listen there.
        JournalError: if the journal is damaged, in use, or cannot be opened.
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
    ) -> None:
        self.name = name
        self._keys = keys_of(secret)
        self._watch_port = watch_port
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
                fast_path=environment.local_fast_path() if fast_path is None else fast_path,
                clock=clock,
            )
            undo.callback(self._server.stop)
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
            undo.pop_all()
        self._thread = threading.Thread(target=self._run, name=f"{name}-server", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where it listens, as ZeroMQ writes it."""
        return self._server.endpoint

    @property
    def port(self) -> int:
        """The tcp port at which it listens."""
        return self._server.port

    def _make_publisher(self, on_nonce: Callable[[str], None]) -> Publisher:
        host = self.endpoint.rpartition(":")[0]
        address = f"{host}:{self._watch_port or '*'}"
        return Publisher(self._server.context, self._server.incarnation, address, self._keys, on_nonce)

    def _run(self) -> None:
        try:
            self._server.serve(self._service)
        except Exception:
            logger.exception("the store at %s is lost", self.endpoint)
        finally:
            if self._journal is not None:
                self._journal.close()

    @property
    def serves(self) -> bool:
        """Does it still? It ends when it is closed, and should it fail."""
        return self._thread.is_alive()

    def refuse_newcomers(self) -> None:
        """Answer no pings from now on: a client's first question, and a new watch's."""
        self._server.refuses_newcomers = True

    def close(self) -> None:
        """Stop serving; who waits is refused. Idempotent; waits for the thread and the sockets.

        Raises:
            StoreError: if the thread does not end in time.
        """
        self._server.stop()
        self._thread.join(Deadline.after(CLOSE_SECONDS).timeout())
        if self._thread.is_alive():
            raise StoreError(f"the thread {self._thread.name} has not ended within {CLOSE_SECONDS} s")

    def statistics(self) -> dict[str, int]:
        """Counters and sizes, read without a lock: each is right, all together perhaps not of one moment."""
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
