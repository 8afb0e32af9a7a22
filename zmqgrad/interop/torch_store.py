"""torch's own TCPStore, at the address that a group shares with process groups.

:mod:`~zmqgrad.rendezvous.sidecar` publishes the address of the group's store in it.
"""

from __future__ import annotations

import errno
import socket
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as torch_distributed

from zmqgrad import environment
from zmqgrad.errors import StoreError, StoreTimeoutError
from zmqgrad.interop.probe import Probe, Server
from zmqgrad.rendezvous.sidecar import MAX_TIMEOUT_SECONDS
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.store.addresses import doctor_hint, listening_address
from zmqgrad.transport.security import load_keys

CTCPStore: Any = torch_distributed.TCPStore  # type: ignore[attr-defined]  # torch's stubs lack it

ACCEPT_BACKLOG = 4096
"""Connections that may wait to be accepted; the system may allow fewer."""

GREETING_SECONDS = 0.005
"""How long a ZeroMQ socket on this host may take to greet; on others, in addition, three round trips."""

IDENTIFY_AFTER_SECONDS = 1.0
"""How long torch's client may be silent before the server is probed for its kind."""

OWN_CONNECTION = timedelta(seconds=30)
"""How long torch's client may take to connect to the server that listens in this process."""

_served: dict[int, Any] = {}
"""Stores of torch's that this process serves as rank 0, by port.

They are kept, as torch's RPC keeps its own: other workers may still use them when this one has shut down.
"""


def open_torch_store(host: str, port: int, serve: bool, deadline: Deadline) -> Any:
    """Open torch's TCPStore at ``host:port``.

    Args:
        host, port: its address.
        serve: serve it here, or share the one that a process group of this process serves.
        deadline: how long to wait for a server.

    Returns:
        The store; None if a ZeroMQ socket listens there.

    Raises:
        StoreError: if another kind of server listens there, naming it; if it cannot be served there.
        StoreTimeoutError: if nothing listens there, or no store of torch's replies.
    """
    timeout = timedelta(seconds=min(deadline.left(), MAX_TIMEOUT_SECONDS))
    return _serve_torch_store(host, port, timeout) if serve else _connect_torch_store(host, port, deadline)


def _serve_torch_store(host: str, port: int, timeout: timedelta) -> Any:
    """Serve torch's store on a socket of ours, because torch would listen on all interfaces."""
    options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
    try:
        options["master_listen_fd"] = listen(host, port).detach()
        timeout = max(timeout, OWN_CONNECTION)  # it has not begun to wait for others
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            raise StoreError(f"rank 0 cannot listen on {host}:{port}: {e.strerror or e}") from e
        # A process group of this process may have the port. Then torch shares its server.
    if host == environment.advertise_address():  # not every NAT leads a host back to itself
        host = "127.0.0.1"
    try:
        _served[port] = CTCPStore(host, port, None, True, timeout, **options)
    except RuntimeError as e:
        raise StoreError(f"rank 0 cannot listen on {host}:{port}: {_listener(host, port)}") from e
    return _served[port]


def _listener(host: str, port: int) -> str:
    """Describe what listens at ``host:port``."""
    try:
        with Probe(host, port, Deadline.after(IDENTIFY_AFTER_SECONDS)) as probe:
            server = probe.identify(GREETING_SECONDS) or probe.identify(IDENTIFY_AFTER_SECONDS, request=True)
    except OSError:
        server = None
    what = "another process" if server is None else server.value
    return (
        f"the port is in use by {what}. Choose another port, or end that process; or two workers of this "
        f"job have rank 0"
    )


def _connect_torch_store(host: str, port: int, deadline: Deadline) -> Any:
    try:
        with Probe(host, port, deadline) as probe:
            patience = min(GREETING_SECONDS + 3 * probe.connect_seconds, IDENTIFY_AFTER_SECONDS)
            if probe.identify(patience) is Server.ZEROMQ:
                return None
            connected = _connect_in_thread(host, port, deadline)
            if not connected.wait_done(min(IDENTIFY_AFTER_SECONDS, deadline.left())):
                server = probe.identify(IDENTIFY_AFTER_SECONDS, request=True)
                if server is Server.ZEROMQ:
                    return None
                if server is not None:
                    raise StoreError(f"{server.value} listens at {host}:{port}, not rank 0 of this group")
                connected.wait_done(deadline.left())
    except OSError as e:
        seen = "no answer (a firewall drops packets, or the host is down)"
        if isinstance(e, ConnectionRefusedError):
            seen = "nothing listens, or a firewall rejects"
        raise StoreTimeoutError(f"{host}:{port}: {seen}: {e}{doctor_hint(host, port)}") from e
    if not connected.done():
        raise StoreTimeoutError(f"a server at {host}:{port} accepts connections, but does not reply")
    try:
        return connected.result()
    except RuntimeError as e:
        raise StoreError(f"no store of torch replies at {host}:{port}: {e}") from e


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
