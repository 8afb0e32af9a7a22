"""Rendezvous backends by name, and handlers from a command's or a URL's settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from zmqgrad import environment
from zmqgrad.elastic.backends import EtcdBackend, StoreBackend
from zmqgrad.elastic.backends.store import store_is_lost
from zmqgrad.elastic.endpoint import open_endpoint, parse_endpoint
from zmqgrad.elastic.handler import RendezvousHandler
from zmqgrad.elastic.round_stores import RoundStores, ServedByRankZero, SharedStore
from zmqgrad.elastic.settings import RendezvousSettings, RendezvousTimeout
from zmqgrad.elastic.state import new_node
from zmqgrad.elastic.state_holder import RendezvousBackend
from zmqgrad.errors import ArgumentTypeError, ConfigurationError, RendezvousConnectionError, StoreError
from zmqgrad.store import TCPStore
from zmqgrad.store.etcd.cluster import SETTINGS, read_options
from zmqgrad.store.etcd.store import parse_members
from zmqgrad.transport.bind_policy import check_bind_address, tcp_address
from zmqgrad.transport.host_address import choose_address
from zmqgrad.transport.security import load_keys

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_TIMEOUT_SECONDS = 60.0
"""Default timeout of stores."""

_SERVED_BY = "zmqgrad/served-by"
"""Key of a store that a node serves: the id of its job."""

_NOBODY = "\0"

_TIMEOUTS = {f"{name}_timeout": name for name in ("join", "last_call", "close", "heartbeat")}
_COMMON = (*_TIMEOUTS, "keep_alive_interval", "keep_alive_max_attempt")


class Parameters(NamedTuple):
    """What the function that creates a backend may use."""

    endpoint: str
    settings: RendezvousSettings
    local_addr: str | None
    """Name or address of this host for other nodes; None: the backend finds it out."""
    serve_rounds: bool
    """Rank 0 has to serve the store of each round, whatever the backend would do."""
    conf: Mapping[str, Any]

    def get(self, name: str, convert: Callable[[Any], T], default: T) -> T:
        """The value of setting ``name``, converted, or ``default`` if it is not set.

        Raises:
            ConfigurationError: if ``convert`` raises ValueError or TypeError.
        """
        return _converted(self.conf, name, convert, default)


Create = Callable[[Parameters], tuple[RendezvousBackend, RoundStores]]


class _Backend(NamedTuple):
    create: Create
    options: Collection[str]


_backends: dict[str, _Backend] = {}


def register_backend(name: str, create: Create, options: Collection[str] = ()) -> None:
    """Register a backend for :func:`create_handler`.

    Args:
        name: for ``--rdzv-backend`` and :func:`create_handler`.
        create: returns the backend, which owns its connections, and what opens the stores of rounds.
        options: names of the settings that ``create`` reads from ``Parameters.conf``.

    Raises:
        ConfigurationError: if the name is taken.

    Example:
        >>> register_backend("mine", MyBackend.create, options=["token"])  # doctest: +SKIP
    """
    if name in _backends:
        raise ConfigurationError(f"there is a rendezvous backend {name!r} already")
    _backends[name] = _Backend(create, frozenset(options))


def create_handler(
    backend: str,
    endpoint: str,
    run_id: str,
    min_nodes: int,
    max_nodes: int,
    *,
    local_addr: str | None = None,
    serve_rounds: bool = False,
    **conf: Any,
) -> RendezvousHandler:
    """Create the rendezvous handler of a node. Close it when done.

    Args:
        backend: ``zmqgrad``, ``etcd``, or a name of :func:`register_backend`.
        endpoint: ``host[:port]``; with etcd one for each member, separated by commas.
        run_id: identifies the job.
        min_nodes, max_nodes: how many nodes take part.
        local_addr: the name or address of this host for the other nodes; None: its address on the route to
            the endpoint.
        serve_rounds: rank 0 serves the store of each round, as always with etcd.
        conf: settings as numbers or as text. All backends: ``join_timeout``, ``last_call_timeout``,
            ``close_timeout``, ``heartbeat_timeout``, ``keep_alive_interval``, ``keep_alive_max_attempt``.
            See docs/elastic.md for those of each backend.

    Returns:
        the handler, which has not joined a round yet.

    Raises:
        ConfigurationError: if an argument or a setting is invalid or unknown.
        RendezvousConnectionError: if the endpoint cannot be used.

    Example:
        >>> handler = create_handler("zmqgrad", "host0:29400", "job", 2, 4)  # doctest: +SKIP
        >>> store, rank, world_size, number = handler.next_rendezvous()  # doctest: +SKIP
    """
    for value in (endpoint, "" if local_addr is None else local_addr):
        if not isinstance(value, str):
            raise ArgumentTypeError(f"the endpoint and local_addr must be text, not {value!r}")
    if local_addr and not environment.is_host(local_addr):
        raise ConfigurationError(f"local_addr is {local_addr!r}, which is not a host name or address")
    known = _backends.get(backend) if isinstance(backend, str) else None
    if known is None:
        raise ConfigurationError(
            f"there is no rendezvous backend {backend!r}; the names are {', '.join(sorted(_backends))}"
        )
    names = sorted({*_COMMON, *known.options})
    for name in conf:
        if name not in names:
            raise ConfigurationError(
                f"the rendezvous backend {backend!r} has no setting {name!r}; it has {', '.join(names)}"
            )
    settings = _settings(run_id, min_nodes, max_nodes, conf)
    parameters = Parameters(endpoint, settings, local_addr, serve_rounds, conf)
    shared, stores = known.create(parameters)
    return RendezvousHandler(settings, shared, stores, new_node(local_addr))


def _settings(run_id: str, min_nodes: int, max_nodes: int, conf: Mapping[str, Any]) -> RendezvousSettings:
    timeouts = {
        field: _converted(conf, name, float, 0.0) for name, field in _TIMEOUTS.items() if name in conf
    }
    return RendezvousSettings(
        run_id,
        min_nodes,
        max_nodes,
        RendezvousTimeout(**timeouts),
        _converted(conf, "keep_alive_interval", float, RendezvousSettings.keep_alive_interval),
        _converted(conf, "keep_alive_max_attempt", int, RendezvousSettings.keep_alive_max_attempt),
    )


def _converted(conf: Mapping[str, Any], name: str, convert: Callable[[Any], T], default: T) -> T:
    if name not in conf:
        return default
    try:
        return convert(conf[name])
    except (ValueError, TypeError, OverflowError) as e:
        raise ConfigurationError(f"the setting {name!r} of the rendezvous is {conf[name]!r}: {e}") from None


def parse_bool(value: object) -> bool:
    """The truth value of ``value``, which is a bool or text, as in torchelastic.

    Raises:
        ValueError: if it is neither.
    """
    text = str(value).lower()
    if text not in ("1", "t", "true", "y", "yes", "0", "f", "false", "n", "no"):
        raise ValueError("it must be true or false")
    return text[0] in "1ty"


def serving_host(host: str, port: int, local_addr: str | None) -> str:
    """Where this node may serve a store: ``local_addr``, or its address on the route to ``host``.

    Raises:
        RendezvousConnectionError: if there is no route.
        ConfigurationError: if other hosts could reach it without a secret.
    """
    secured = load_keys() is not None
    try:
        address = local_addr or choose_address(host.strip("[]"), port, secured=secured).advertise
    except OSError as e:
        raise RendezvousConnectionError(f"no route to the rendezvous endpoint {host}:{port}: {e}") from e
    check_bind_address(tcp_address(address, 0), secured)
    return address


def _create_store_backend(parameters: Parameters) -> tuple[RendezvousBackend, RoundStores]:
    read = parameters.get("read_timeout", float, READ_TIMEOUT_SECONDS)
    is_host = parameters.get("is_host", parse_bool, None)
    host, port = parse_endpoint(parameters.endpoint)
    store = open_endpoint(parameters.endpoint, parameters.get("connect_timeout", float, read), is_host)
    try:
        # Only now: before, the name of the host may have been unknown here, or no route may have led there.
        address = serving_host(host, port, parameters.local_addr) if parameters.serve_rounds else ""
        backend = StoreBackend(store, parameters.settings.run_id, owned=True, may_restart=is_host is False)
        store.set_timeout(read)
        _check_owner(store, parameters)
    except BaseException:
        store.close()
        raise
    return backend, ServedByRankZero(address, read) if parameters.serve_rounds else SharedStore(store)


def _check_owner(store: TCPStore, parameters: Parameters) -> None:
    """Warn if ``store`` ends with another job: a process of that serves it."""
    own = parameters.settings.run_id
    try:
        if store.is_master:
            store.set(_SERVED_BY, own)
            return
        owner = store.compare_set(_SERVED_BY, _NOBODY, _NOBODY).decode()  # writes nothing
    except StoreError as e:
        raise store_is_lost(e) from e
    if owner not in (own, _NOBODY):
        logger.warning(
            "the store at %s is served by a process of another job, %r: this job (%r) fails when that "
            "process ends. Give each job an endpoint of its own, or let `zmqgrad store serve` serve one for "
            "all",
            parameters.endpoint,
            owner,
            own,
        )


def _create_etcd_backend(parameters: Parameters) -> tuple[RendezvousBackend, RoundStores]:
    members = parse_members(parameters.endpoint)
    options = read_options({name: parameters.conf[name] for name in SETTINGS if name in parameters.conf})
    address = serving_host(*members[0], parameters.local_addr)
    backend = EtcdBackend(members, parameters.settings.run_id, options)
    return backend, ServedByRankZero(address, READ_TIMEOUT_SECONDS)


register_backend("zmqgrad", _create_store_backend, ("read_timeout", "connect_timeout", "is_host"))
register_backend("etcd", _create_etcd_backend, SETTINGS)
