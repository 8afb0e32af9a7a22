"""The store of a rendezvous, at an endpoint that all nodes know: one serves it, the others connect."""

from __future__ import annotations

import os
import socket

from zmqgrad.environment import is_host
from zmqgrad.errors import (
    AddressInUseError,
    ConfigurationError,
    RendezvousConnectionError,
    StoreError,
    StoreTimeoutError,
)
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import TCPStore
from zmqgrad.store.addresses import why_unknown

DEFAULT_PORT = 29400
"""As torchelastic's c10d backend."""

PROBE_SECONDS = 0.5
"""How long a server at the endpoint, from which no store has replied, may take to show what it is."""

LOOK_SECONDS = 3.0
"""How long a process that may serve the store connects, before it looks whether the port is free by now."""


def parse_endpoint(endpoint: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Split ``host[:port]``. An empty endpoint is this host.

    Raises:
        ConfigurationError: if it is malformed.
    """
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint.strip(), ""
    try:
        number = int(port) if port else default_port
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 16 or (host and not is_host(host)):
        raise ConfigurationError(f"the rendezvous endpoint is {endpoint!r}; it must be host or host:port")
    return host or "localhost", number


def is_this_host(host: str) -> bool:
    """Whether ``host`` is a name or an address of this machine."""
    try:
        address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], address[1]) as probe:
            probe.bind(address[4])  # only addresses of this machine can be bound
    except socket.gaierror:
        return f"{socket.getfqdn()}.".startswith(f"{host}.")  # a pod starts before its name is in the DNS
    except OSError:
        return False
    return True


def _what_listens(host: str, port: int) -> str:
    """The beginning of an error message: what listens there, if it is no ZeroMQ socket; otherwise empty."""
    try:
        with socket.create_connection((host.strip("[]"), port), PROBE_SECONDS) as probe:
            try:
                greeting = probe.recv(1)  # ZeroMQ sends it at once
            except TimeoutError:
                probe.sendall(b"GET / HTTP/1.0\r\n\r\n")
                greeting = probe.recv(5)
    except TimeoutError:
        return "a server that sends nothing, and so is no store of zmqgrad, listens there; "
    except OSError:
        return ""
    if greeting == b"\xff":
        return ""
    return f"{'a web server' if greeting == b'HTTP/' else 'a server of another protocol'} listens there; "


_left_open: dict[tuple[int, str, int], TCPStore] = {}
"""Stores that this process serves for others, by process id, host and port."""


def leave_open(store: TCPStore) -> None:
    """Go on to serve ``store`` until this process opens its endpoint again, or ends."""
    _left_open[os.getpid(), store.host, store.port] = store


def open_endpoint(endpoint: str, timeout: float, is_host: bool | None = None) -> TCPStore:
    """Open the store at ``endpoint``; the first node on its host serves it, and another one once that left.

    Args:
        endpoint: ``host[:port]``.
        timeout: seconds to wait for it, and the store's timeout.
        is_host: whether this process serves the store. None: if ``endpoint`` is on this host and no other
            process serves it yet.

    Raises:
        ConfigurationError: if ``endpoint`` is malformed, or would be reachable without a secret.
        RendezvousConnectionError: if no store replies there.
    """
    host, port = parse_endpoint(endpoint)
    served = _left_open.pop((os.getpid(), host, port), None)
    if served is not None:
        served.set_timeout(timeout)
        return served
    deadline = Deadline.after(timeout)
    while True:
        may_serve = is_host or (is_host is None and is_this_host(host))
        # A name that is not known yet may turn out to be that of this host.
        may_serve_later = may_serve or (is_host is None and bool(why_unknown(host)))
        try:
            if may_serve:
                try:
                    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)
                except AddressInUseError:
                    if is_host:
                        raise
            patience = min(LOOK_SECONDS, deadline.left()) if may_serve_later else deadline.left()
            store = TCPStore(host, port, timeout=patience, wait_for_workers=False)
            store.set_timeout(timeout)
            return store
        except (StoreError, AddressInUseError) as e:
            if may_serve_later and isinstance(e, StoreTimeoutError) and not deadline.passed():
                continue
            other = _what_listens(host, port) if isinstance(e, StoreTimeoutError) else ""
            text = f"the rendezvous endpoint {host}:{port} cannot be used: {other}{e}"
            raise RendezvousConnectionError(text) from e
