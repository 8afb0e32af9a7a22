"""The address that a group shares with process groups of torch, and where it finds its own store.

torch's process groups meet by a store of torch's, which anybody may fill, and which limits nobody. So rank 0
of an RPC group does not serve one as long as no process group needs it: a
:mod:`port mapper <zmqgrad.rendezvous.port_mapper>` listens there. Before torch serves or seeks its store at
that port in a process of the group, it asks here (:func:`_yield_ports_to_torch`). Then rank 0 hands its
listening socket over to torch, and the others wait for that. If torch's store is there first, because a
process group or the agent of ``torchrun`` serves it, the port of the group's store is published in that.
"""

from __future__ import annotations

import errno
import functools
import importlib
import logging
import os
import socket
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as torch_distributed

from zmqgrad import environment
from zmqgrad.errors import StoreError, StoreTimeoutError
from zmqgrad.interop.probe import HTTP_REQUEST, Probe, Server
from zmqgrad.rendezvous.port_mapper import REQUEST, PortMapper, PortMapperClient
from zmqgrad.rendezvous.sidecar import MAX_TIMEOUT_SECONDS
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.wait_log import WaitLog
from zmqgrad.store.addresses import doctor_hint, listening_address
from zmqgrad.transport.security import load_keys

CTCPStore: Any = torch_distributed.TCPStore  # type: ignore[attr-defined]  # torch's stubs lack it

torch_rendezvous = importlib.import_module(
    "torch.distributed.rendezvous"
)  # torch has a function of this name

logger = logging.getLogger(__name__)

ACCEPT_BACKLOG = 4096
"""Connections that may wait to be accepted; the system may allow fewer."""

IDENTIFY_AFTER_SECONDS = 1.0
"""How long a server may be silent before it is probed otherwise."""

MAX_PATIENCE_SECONDS = 15.0
"""The same for one that has been silent before: it may be busy."""

NAME_WITHIN_SECONDS = 5.0
"""How long an error waits for the name of what has taken a port, whose host may have more to do."""

_POLL_SECONDS = (0.002, 0.05)

OWN_CONNECTION = timedelta(seconds=30)
"""How long torch's client may take to connect to the server that listens in this process."""

_ASKS = "_create_c10d_store"
"""The function of torch that serves and seeks the store of a process group, for ``env://`` and ``tcp://``."""

_served: dict[int, Any] = {}
"""Stores of torch's that this process serves as rank 0, by port.

They are kept, as torch's RPC keeps its own: other workers may still use them when this one has shut down.
"""

_lock = threading.RLock()
"""Guards what follows."""

_shared: dict[int, SharedPort] = {}
"""Ports at which this process has a port mapper."""

_mapped: set[int] = set()
"""Ports at which this process has met a port mapper of another one."""


def open_torch_store(host: str, port: int, serve: bool, deadline: Deadline) -> Any:
    """Open what tells at ``host:port`` where stores of groups are.

    Args:
        host, port: the address.
        serve: serve it here, or share the store of torch's that a process group of this process serves.
        deadline: how long to wait for a server.

    Returns:
        torch's TCPStore, or what stands for a port mapper; None if a ZeroMQ socket listens there.

    Raises:
        StoreError: if another kind of server listens there, naming it; if it cannot be served there.
        StoreTimeoutError: if nothing listens there, or no store of torch's replies.
    """
    _yield_ports_to_torch()
    return _serve(host, port, deadline) if serve else _connect(host, port, deadline)


def _yield_ports_to_torch() -> None:
    """Let torch ask here before it serves or seeks a store. Idempotent."""
    create = getattr(torch_rendezvous, _ASKS, None)
    if create is None or hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_later(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *args: Any, **options: Any
    ) -> Any:
        deadline = Deadline.after(timeout.total_seconds())
        if not _yield_port(hostname, port, rank == 0, deadline):
            return create(hostname, port, rank, world_size, timeout, *args, **options)
        left = max(timedelta(seconds=deadline.left()), OWN_CONNECTION)
        store = create(hostname, port, rank, world_size, left, *args, **options)
        store.set_timeout(timeout)
        return store

    setattr(torch_rendezvous, _ASKS, create_later)


def _yield_port(host: str, port: int, serve: bool, deadline: Deadline) -> bool:
    """Returns whether this process has waited for another one to yield it."""
    with _lock:
        shared, is_mapped = _shared.get(port), port in _mapped
        if serve:
            if shared is not None:
                shared.hand_over()
            return False
    while is_mapped and not deadline.passed():
        mapper = _find_port_mapper(host, port, deadline)
        if mapper is None:
            break
        mapper.wait_closed(deadline)
        mapper.close()
    return is_mapped


def _find_port_mapper(host: str, port: int, deadline: Deadline) -> PortMapperClient | None:
    """Returns None if none is there."""
    try:
        with Probe(host, port, deadline) as probe:
            server = probe.identify(min(IDENTIFY_AFTER_SECONDS, deadline.left()), REQUEST)
            return probe.connect_port_mapper() if server is Server.PORT_MAPPER else None
    except OSError:
        return None


class SharedPort:
    """A port at which this process, as rank 0, tells where stores are. :func:`open_torch_store` makes one."""

    def __init__(self, host: str, port: int, listening: socket.socket) -> None:
        self._host = host
        self._port = port
        self._listening = listening
        self._mapper = PortMapper(listening)
        self._users = 0
        self._store: Any = None  # torch's, after hand_over()

    def set(self, key: str, value: str) -> None:
        """Publish ``value``."""
        with _lock:
            if self._store is None:
                self._mapper.publish(key, value)
            else:
                self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """What is published."""
        with _lock:
            return self._mapper.published()[key].encode() if self._store is None else self._store.get(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing, as nothing here waits."""

    def share(self) -> SharedPort:
        """Count one more user, and serve the first. Each must call :meth:`withdraw`, unless this raises."""
        try:
            self._users += 1
            if self._users == 1:
                self._mapper.start()
                if not hasattr(torch_rendezvous, _ASKS):
                    self.hand_over()
        except BaseException:
            self.withdraw()
            raise
        return self

    def withdraw(self, *keys: str) -> None:
        """Forget ``keys`` and their user; with the last one, give up the port. torch's store keeps all."""
        with _lock:
            self._users -= 1
            if self._store is None and _shared.get(self._port) is self:  # otherwise this is a fork
                self._mapper.withdraw(keys)
                if not self._users:
                    del _shared[self._port]
                    self._mapper.close()

    def hand_over(self) -> None:
        """Let a store of torch's listen at the port from now on, with all that is published."""
        with _lock:
            listening = self._listening.dup()  # connections wait there meanwhile
            self._mapper.close()
            del _shared[self._port]
            self._store = _torch_store(self._host, self._port, listening)
            for key, value in self._mapper.published().items():
                self._store.set(key, value)


def _in_child() -> None:
    """A fork has no port mapper."""
    global _lock
    _lock = threading.RLock()
    _shared.clear()


os.register_at_fork(after_in_child=_in_child)


def _serve(host: str, port: int, deadline: Deadline) -> Any:
    with _lock:
        if port in _shared:
            return _shared[port].share()
        try:
            listening = listen(host, port)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise StoreError(f"rank 0 cannot listen on {host}:{port}: {e.strerror or e}") from e
            # A process group of this process may have the port. Then torch shares its server.
            return _torch_store(
                host, port, None, timedelta(seconds=min(deadline.left(), MAX_TIMEOUT_SECONDS))
            )
        _shared[port] = SharedPort(host, port, listening)
        return _shared[port].share()


def _torch_store(
    host: str, port: int, listening: socket.socket | None, timeout: timedelta = OWN_CONNECTION
) -> Any:
    """Serve torch's store on a socket of ours, because torch would listen on all interfaces.

    Args:
        listening: None: share the one that this process serves already.
        timeout: of its client.
    """
    options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
    if listening is not None:
        options["master_listen_fd"] = listening.detach()
    if host == environment.advertise_address():  # not every NAT leads a host back to itself
        host = "127.0.0.1"
    try:
        # It has not begun to wait for others.
        _served[port] = CTCPStore(host, port, None, True, max(timeout, OWN_CONNECTION), **options)
    except RuntimeError as e:
        raise StoreError(f"rank 0 cannot listen on {host}:{port}: {_listener(host, port)}") from e
    return _served[port]


def _listener(host: str, port: int) -> str:
    """Describe what listens at ``host:port``."""
    try:
        server, mapper = _identify(host, port, Deadline.after(NAME_WITHIN_SECONDS))
    except OSError:
        server = mapper = None
    if mapper is not None:
        mapper.close()
    what = "another process" if server is None else server.value
    return (
        f"the port is in use by {what}. Choose another port, or end that process; or two workers of this "
        f"job have rank 0"
    )


class MappedPorts:
    """What the port mapper of rank 0 tells, or torch's store, if that takes its place.

    Args:
        host, port: where the port mapper is.
        mapper: a connection to it.
    """

    def __init__(self, host: str, port: int, mapper: PortMapperClient) -> None:
        self._host = host
        self._port = port
        self._mapper: PortMapperClient | None = mapper
        self._seconds = MAX_TIMEOUT_SECONDS

    def set_timeout(self, timeout: timedelta) -> None:
        """How long :meth:`get` waits."""
        self._seconds = timeout.total_seconds()

    def get(self, key: str) -> bytes:
        """Wait for ``key``.

        Raises:
            StoreError: if it does not appear in time; if another server listens there.
        """
        deadline = Deadline.after(self._seconds)
        while True:
            mapper, self._mapper = self._mapper, None
            if mapper is None:
                found = _connect(self._host, self._port, deadline)
                if not isinstance(found, MappedPorts):
                    return _get(found, key, deadline)
                mapper = found._mapper
            assert mapper is not None
            value = mapper.read(key, deadline)
            mapper.close()
            if value is not None:
                return value.encode()
            if deadline.passed():
                raise StoreTimeoutError(f"no {key}")

    def set(self, key: str, value: str) -> None:
        """Refused: only rank 0 publishes."""
        if self._mapper is not None:
            self._mapper.close()
        raise StoreError(f"{self._host}:{self._port} is served by another process, which has rank 0, too")


def _get(store: Any, key: str, deadline: Deadline) -> bytes:
    if store is None:
        raise StoreError("a ZeroMQ socket listens there now")
    store.set_timeout(timedelta(seconds=min(deadline.left(), MAX_TIMEOUT_SECONDS)))
    value: bytes = store.get(key)
    return value


def _connect(host: str, port: int, deadline: Deadline) -> Any:
    try:
        server, mapper = _identify(host, port, deadline)
        if mapper is not None:
            _mapped.add(port)
            return MappedPorts(host, port, mapper)
        if server is Server.ZEROMQ:
            return None
        if server is None:
            raise StoreTimeoutError(f"a server at {host}:{port} accepts connections, but does not reply")
        if server is not Server.TORCH:
            raise StoreError(f"{server.value} listens at {host}:{port}, not rank 0 of this group")
    except OSError as e:
        seen = "no answer (a firewall drops packets, or the host is down)"
        if isinstance(e, ConnectionRefusedError):
            seen = "nothing listens, or a firewall rejects"
        elif isinstance(e, socket.gaierror):
            seen = "its name cannot be resolved here"
        elif e.errno == errno.ENETUNREACH:
            seen = "this host has no route there"
        raise StoreTimeoutError(f"{host}:{port}: {seen}: {e}{doctor_hint(host, port)}") from e
    connected = _connect_in_thread(host, port, deadline)
    if not connected.wait_done(deadline.left()):
        raise StoreTimeoutError(f"a store of torch at {host}:{port} accepts connections, but does not reply")
    try:
        return connected.result()
    except RuntimeError as e:
        raise StoreError(f"no store of torch replies at {host}:{port}: {e}") from e


def _identify(host: str, port: int, deadline: Deadline) -> tuple[Server | None, PortMapperClient | None]:
    """What listens there; if it is a port mapper, a connection to it. None if it has not replied in time.

    A server that is about to end closes connections without a reply, and one that is busy is late.
    """
    patience, pause = Backoff(IDENTIFY_AFTER_SECONDS, MAX_PATIENCE_SECONDS), Backoff(*_POLL_SECONDS)
    log = WaitLog(logger)
    while True:
        for request, seconds in (
            (REQUEST, patience.pause(deadline.left())),
            (HTTP_REQUEST, min(IDENTIFY_AFTER_SECONDS, deadline.left())),
        ):
            with Probe(host, port, deadline) as probe:
                server = probe.identify(seconds, request)
                if server is not None:
                    return server, probe.connect_port_mapper() if server is Server.PORT_MAPPER else None
        if deadline.passed():
            return None, None
        log.warning(
            "waiting for %s:%d, where rank 0 should listen: a server there does not reply", host, port
        )
        threading.Event().wait(pause.pause(deadline.left()))  # nothing notifies of the next server


def _connect_in_thread(host: str, port: int, deadline: Deadline) -> Promise[Any]:
    """Connect torch's client in a thread of its own: it ignores its timeout if a server never replies."""
    connected: Promise[Any] = Promise()
    timeout = timedelta(seconds=min(deadline.left(), MAX_TIMEOUT_SECONDS))

    def connect() -> None:
        try:
            connected.set_result(CTCPStore(host, port, None, False, timeout))
        except Exception as e:
            connected.set_exception(e)

    threading.Thread(target=connect, name="zmqgrad-torch-store", daemon=True).start()
    return connected


def listen(host: str, port: int) -> socket.socket:
    """Listen where a store of ours would that ``host`` serves.

    Raises:
        OSError: if another socket listens there.
    """
    address = listening_address(host, port, load_keys() is not None)
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "*":
        return _listen_everywhere(port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=ACCEPT_BACKLOG)
    except OSError as e:
        if e.errno != errno.EADDRNOTAVAIL:
            raise
        return _listen_everywhere(port)  # behind address translation


def _listen_everywhere(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=ACCEPT_BACKLOG, dualstack_ipv6=both)
