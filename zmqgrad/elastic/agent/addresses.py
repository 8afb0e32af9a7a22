"""Where the workers of a round meet: an address of the node of worker rank 0, and a free port there."""

from __future__ import annotations

import socket

from zmqgrad import environment
from zmqgrad.elastic.launch_config import LaunchConfig
from zmqgrad.errors import ConfigurationError, RendezvousConnectionError

LOOPBACK = "127.0.0.1"


def master_address(config: LaunchConfig) -> str:
    """The address of this node for the workers of all nodes.

    ``config.master_addr`` counts if it is known which node has worker rank 0: one host, or fixed ranks.

    Raises:
        ConfigurationError: if the environment chooses an address that cannot be used.
        RendezvousConnectionError: if no route leads to the endpoint of the rendezvous, or it has no address.
    """
    if config.node_rank is not None or not config.rdzv_endpoint:
        return config.master_addr or config.local_addr or LOOPBACK
    if config.local_addr:
        return config.local_addr
    from zmqgrad.elastic.endpoint import parse_endpoint  # loads the store, which a single node does not need
    from zmqgrad.transport.host_address import choose_address
    from zmqgrad.transport.security import load_keys

    host, port = parse_endpoint(config.rdzv_endpoint.split(",")[0])  # etcd: the first of its members
    try:
        return choose_address(host.strip("[]"), port, secured=load_keys() is not None).advertise
    except OSError as error:
        raise RendezvousConnectionError(f"no route to the rendezvous endpoint {host}: {error}") from error


def worker_port(config: LaunchConfig) -> int:
    """Where worker rank 0 listens; 0: at any free port, as the agents meet at the one that is configured."""
    return 0 if config.rdzv_endpoint.endswith(f":{config.master_port}") else config.master_port


def usable_port(host: str, port: int) -> int:
    """As :func:`reserve_port`, for a port that need not be kept. Returns its number."""
    with reserve_port(host, port) as reserved:
        return int(reserved.getsockname()[1])


def reserve_port(host: str, port: int) -> socket.socket:
    """Check that ``port`` can be bound on ``host``; for 0, a free one is chosen, of the range if any.

    Returns:
        A socket that is bound to it and does not listen. While it is open, worker rank 0 can listen there,
        and the system gives the port to no socket that asks for any free one.

    Raises:
        ConfigurationError: if ``host`` is not an address of this machine, or the port is in use.
    """
    ports = environment.port_range() if port == 0 else None
    if host == environment.advertise_address():  # another host's, such as that of a NAT
        host = ""
    for candidate in ports or (port,):
        try:
            return _bind_once(host or None, candidate)
        except OSError as e:
            error = e
    raise ConfigurationError(
        f"cannot listen on {host}:{port}: {error.strerror or error}. --master-addr must be an address of"
        f" this host (or {environment.ADVERTISE_ADDRESS}), and --master-port free (0 finds a free one)"
    ) from error


def _bind_once(host: str | None, port: int) -> socket.socket:
    flags = socket.AI_PASSIVE  # without a host: all interfaces
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[
        0
    ]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else nobody could listen beside it
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound
