"""The store of a rendezvous, at an endpoint that all nodes know: one serves it, the others connect."""

from __future__ import annotations

import os
import socket

from zmqgrad.errors import AddressInUseError, ConfigurationError, RendezvousConnectionError, StoreError
from zmqgrad.store import TCPStore

DEFAULT_PORT = 29400
"""As torchelastic's c10d backend."""


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
    if not 0 <= number < 1 << 16:
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


_left_open: dict[tuple[int, str, int], TCPStore] = {}
"""Stores that this process serves for others, by process id, host and port."""


def leave_open(store: TCPStore) -> None:
    """Go on to serve ``store`` until this process opens its endpoint again, or ends."""
    _left_open[os.getpid(), store.host, store.port] = store


def open_endpoint(endpoint: str, timeout: float, is_host: bool | None = None) -> TCPStore:
    """Open the store at ``endpoint``; the first node on its host serves it.

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
    try:
        if is_host or (is_host is None and is_this_host(host)):
            try:
                return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)
            except AddressInUseError:
                if is_host:
                    raise
        return TCPStore(host, port, timeout=timeout, wait_for_workers=False)
    except (StoreError, AddressInUseError) as e:
        raise RendezvousConnectionError(f"the rendezvous endpoint {host}:{port} cannot be used: {e}") from e
