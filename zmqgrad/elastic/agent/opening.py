"""Opens the rendezvous of a job, from its configuration."""

from __future__ import annotations

from zmqgrad.elastic.agent.rendezvoused import OpenRendezvous
from zmqgrad.elastic.backends import StoreBackend
from zmqgrad.elastic.endpoint import open_endpoint
from zmqgrad.elastic.handler import RendezvousHandler
from zmqgrad.elastic.launch_config import LaunchConfig
from zmqgrad.elastic.settings import RendezvousSettings, RendezvousTimeout
from zmqgrad.elastic.state import NodeDescGenerator
from zmqgrad.errors import ConfigurationError, RendezvousConnectionError

STORE_TIMEOUT_SECONDS = 60.0
"""How long to wait for the endpoint; the option ``read_timeout`` changes it."""

LEAST_REPLY_SECONDS = 5.0
"""A store that does not reply for this long, and for longer than a node may live without, is lost."""

_nodes = NodeDescGenerator()


def open_rendezvous(config: LaunchConfig) -> OpenRendezvous:
    """Open the rendezvous of ``config`` at its endpoint.

    Raises:
        ConfigurationError: if an option is invalid.
        RendezvousConnectionError: if the endpoint cannot be used.
    """
    options = dict(config.rdzv_configs)
    settings = _settings(config, options)
    connect = _seconds(options, "read_timeout", STORE_TIMEOUT_SECONDS)
    store = open_endpoint(config.rdzv_endpoint, connect, _is_host(config, options))
    if options:
        store.close()
        raise ConfigurationError(f"--rdzv-conf: unknown options {', '.join(sorted(options))}")
    store.set_timeout(min(connect, max(settings.expiry_seconds, LEAST_REPLY_SECONDS)))
    try:
        backend = StoreBackend(store, settings.run_id)
    except RendezvousConnectionError:
        store.close()
        raise
    handler = RendezvousHandler(settings, backend, store, _nodes.generate(config.local_addr))

    def close() -> None:
        try:
            backend.close()
        finally:
            store.close()

    return OpenRendezvous(handler, close, store.is_master, settings.timeout.join)


def _settings(config: LaunchConfig, options: dict[str, str]) -> RendezvousSettings:
    default = RendezvousTimeout()
    timeout = RendezvousTimeout(
        _seconds(options, "join_timeout", default.join),
        _seconds(options, "last_call_timeout", default.last_call),
        _seconds(options, "close_timeout", default.close),
        _seconds(options, "heartbeat_timeout", default.heartbeat),
    )
    interval = _seconds(options, "keep_alive_interval", 5.0)
    attempts = int(_seconds(options, "keep_alive_max_attempt", 3))
    return RendezvousSettings(
        config.run_id or "none", config.min_nodes, config.max_nodes, timeout, interval, attempts
    )


def _seconds(options: dict[str, str], name: str, default: float) -> float:
    text = options.pop(name, None)
    try:
        return default if text is None else float(text)
    except ValueError as e:
        raise ConfigurationError(f"--rdzv-conf: {name} is {text!r}; it must be a number") from e


def _is_host(config: LaunchConfig, options: dict[str, str]) -> bool | None:
    text = options.pop("is_host", None)
    if text is None:
        return None
    return text.lower() in ("1", "true", "t", "yes", "y")
