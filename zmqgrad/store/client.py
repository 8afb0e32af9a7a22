"""``TCPStore``: a client, which on the master also starts the server."""

from __future__ import annotations

import os
from collections.abc import Callable

from zmqgrad import environment
from zmqgrad.errors import ArgumentTypeError, ConfigurationError, StoreTimeoutError
from zmqgrad.runtime.arguments import as_integer
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.addresses import check_port, connecting_address, listening_address
from zmqgrad.store.arguments import DEFAULT_TIMEOUT, Timeout
from zmqgrad.store.base import Store
from zmqgrad.store.connection import Connection
from zmqgrad.store.events import EventHandler
from zmqgrad.store.finalizer import Finalizer
from zmqgrad.store.server import ServerHolder, servers
from zmqgrad.store.watch_targets import INTERNAL_PREFIX, Target
from zmqgrad.transport.security import load_keys
from zmqgrad.wire.messages import StoreAdd, StoreNumber, StoreSet, StoreWait

_JOINED = f"{INTERNAL_PREFIX}workers/joined"
_COMPLETE = f"{INTERNAL_PREFIX}workers/complete"


class TCPStore(Store):
    """A store served by one process, the master, over TCP. Arguments as in ``torch.distributed.TCPStore``.

    Args:
        host_name: where the master runs. The master listens there, or on all interfaces for a name.
        port: where it listens; 0 on the master lets the system pick (see :attr:`port`).
        world_size: number of clients, including the master's own; None: unknown.
        is_master: serve the store.
        timeout: how long connecting and the calls wait.
        wait_for_workers: on the master, wait until ``world_size`` clients have connected.
        multi_tenant: on the master: share the server with another master of this process at that port.
        master_listen_fd: on the master: the file descriptor of a socket that is bound to ``port`` already, so
            that no other process can bind it meanwhile. The store takes ownership of it.
        use_libuv: for compatibility with torch; has no effect.
        journal: on the master: file that keeps the contents for the next master.
        secret: clients without the same secret are refused, and traffic is encrypted. None: from the
            environment (ZMQGRAD_SECRET, or the file ZMQGRAD_SECRET_FILE), if set.
        watch_port: on the master: the tcp port of the watch channel, to be opened in a firewall; 0: the
            system picks one at the first watch.
        fast_path: send small queries within a host past ZeroMQ (see :mod:`~zmqgrad.transport.local`); None:
            from the environment (ZMQGRAD_LOCAL_FAST_PATH).

    Raises:
        AddressInUseError, ConfigurationError, TransportError: if the master cannot listen.
        JournalError: if the journal is damaged, in use, or cannot be opened.
        StoreTimeoutError: if no store replies, or too few workers connect, within ``timeout``.
        StoreError: if the two ends have different secrets, or only one of them has a secret.

    Example:
        >>> store = TCPStore("127.0.0.1", 0, is_master=True)  # port 0: the system picks one
        >>> with TCPStore("127.0.0.1", store.port) as client:
        ...     client.set("step", "7")
        >>> store.get("step")
        b'7'
        >>> store.close()
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        journal: str | os.PathLike[str] | None = None,
        secret: str | bytes | None = None,
        watch_port: int = 0,
        fast_path: bool | None = None,
    ) -> None:
        super().__init__(timeout)
        if not isinstance(host_name, str):
            raise ArgumentTypeError(f"the host name must be a str, not {type(host_name).__name__}")
        world_size = 0 if world_size is None else max(0, as_integer(world_size, "the world size"))
        connecting_address(host_name, check_port(port))
        if port == 0 and not is_master:
            raise ConfigurationError("a client needs the port of its master, not 0")
        keyed = load_keys(secret) is not None
        self._host = host_name
        self._secret = secret
        self._closing = _Closing()
        self._finalizer = Finalizer(self, self._closing)
        try:
            if is_master:
                servers.acquire(
                    self._closing,
                    listening_address(host_name, port, keyed),
                    multi_tenant,
                    journal=journal,
                    secret=secret,
                    listen_fd=master_listen_fd,
                    watch_port=watch_port,
                    fast_path=fast_path,
                )
            self._server = self._closing.server
            self._port = port if self._server is None else self._server.port
            self._fast_path = fast_path
            # Not every NAT leads a host back to itself.
            reached = "127.0.0.1" if is_master and host_name == environment.advertise_address() else host_name
            local = None if self._server is None else self._server.local
            self._connection = Connection(reached, self._port, self._timeout, secret, fast_path, local)
            self._closing.connection = self._connection
            self._request, self._registry = self._connection.request, self._connection.watches
            self._connection.ping()
            if world_size:
                self._count_worker(world_size, wait=is_master and wait_for_workers)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        """The host on which the store listens, as given."""
        return self._host

    @property
    def port(self) -> int:
        """The port at which the store listens."""
        return self._port

    @property
    def is_master(self) -> bool:
        """Whether this store serves the others."""
        return self._server is not None

    def statistics(self) -> dict[str, int]:
        """Counters of :meth:`~zmqgrad.store.StoreServer.statistics`; empty unless this is the master."""
        return {} if self._server is None else self._server.statistics()

    def expect_no_restart(self) -> None:
        """Let calls raise an error once the server has ended, instead of waiting for another one there."""
        self._connection.expect_no_restart()

    def admit_newcomers(self, admit: bool) -> None:
        """On the master: whether clients are served that are not connected yet.

        Args:
            admit: False if this store may be about to close: they wait, for the next store at this address,
                or until this one admits them after all.
        """
        if self._server is not None:
            self._server.admit_newcomers(admit)

    def refuse_newcomers(self) -> None:
        """On the master: ignore clients that are not connected yet, because this store is about to close.

        Clients of the next store at this address then wait for that one, also if they have only just
        connected, and watch nothing yet.
        """
        if self._server is not None:
            self._server.refuse_newcomers()

    def close_drained(self, seconds: float) -> None:
        """As :meth:`close`; on the master, first serve the clients that are connected until they disconnect.

        Args:
            seconds: how long to wait for them. New clients wait for the next store at this address.
        """
        if self._server is not None:
            self._server.drain_seconds = seconds
        self.close()

    def close_also(self, close: Callable[[], object]) -> None:
        """Call ``close``, which must not refer to this store, when this store has closed."""
        self._closing.also.append(close)

    def _count_worker(self, world_size: int, wait: bool) -> None:
        """Count this client, and as the master wait until there are ``world_size``."""
        deadline = Deadline.after(self._timeout)
        if self._number(StoreAdd(_JOINED, 1)) == world_size:
            self._request(StoreSet(_COMPLETE, b""), deadline.left())
        if not wait:
            return
        try:
            left = deadline.left()
            self._request(StoreWait((_COMPLETE,), left), left)
        except StoreTimeoutError as e:
            joined = self._request(StoreAdd(_JOINED, 0), self._timeout)
            present = joined.number if type(joined) is StoreNumber else "?"
            raise StoreTimeoutError(
                f"Timed out after {self._timeout:g} s waiting for clients: {present} of {world_size} workers "
                f"have connected to {self._host}:{self._port}"
            ) from e

    def _watch(self, target: Target, handler: EventHandler, present: bool = False) -> None:
        try:
            super()._watch(target, handler, present)
        finally:
            self._connection.unwatch_if_unwatched(target)

    def _on_unwatched(self, target: Target) -> None:
        self._connection.unwatch_if_unwatched(target)

    def clone(self) -> TCPStore:
        return TCPStore(
            self._host, self._port, timeout=self._timeout, secret=self._secret, fast_path=self._fast_path
        )

    def set_timeout(self, timeout: Timeout) -> None:
        super().set_timeout(timeout)
        self._connection.timeout = self._timeout

    def close(self) -> None:
        """Disconnect; on the master, stop serving. Idempotent. Calls under way end with ``StoreError``."""
        self._finalizer.close()

    def __repr__(self) -> str:
        return f"<TCPStore at {self._host}:{self._port}{', master' if self._server is not None else ''}>"


class _Closing(ServerHolder):
    """Closes the resources of a store, without a reference to it (see :mod:`~zmqgrad.store.finalizer`)."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.also: list[Callable[[], object]] = []

    def __call__(self) -> None:
        try:
            if self.connection is not None:
                self.connection.close()
        finally:
            servers.release(self)
        while self.also:
            self.also.pop()()
