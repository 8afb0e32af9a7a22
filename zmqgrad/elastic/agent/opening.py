"""Opens the rendezvous of a job, from its configuration."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from zmqgrad import environment
from zmqgrad.elastic.endpoint import parse_endpoint
from zmqgrad.elastic.handler import RendezvousHandler
from zmqgrad.elastic.launch_config import LaunchConfig
from zmqgrad.elastic.registry import READ_TIMEOUT_SECONDS, create_handler
from zmqgrad.elastic.settings import RendezvousSettings
from zmqgrad.errors import ConfigurationError
from zmqgrad.transport.bind_policy import is_loopback, may_bind_publicly
from zmqgrad.transport.security import load_keys

LEAST_REPLY_SECONDS = 5.0
"""A store that does not reply for this long, and for longer than a node may live without, is lost."""


def open_rendezvous(config: LaunchConfig) -> RendezvousHandler:
    """Open the rendezvous of ``config`` at its endpoint. Close it when done.

    Raises:
        ConfigurationError: if an option is invalid.
        RendezvousConnectionError: if the endpoint cannot be used.
    """
    options: dict[str, Any] = dict(config.rdzv_configs)
    if config.rdzv_backend == "zmqgrad":
        _shorten_timeout(options)
    return create_handler(
        config.rdzv_backend,
        config.rdzv_endpoint,
        config.run_id or "none",
        config.min_nodes,
        config.max_nodes,
        local_addr=config.local_addr,
        **options,
    )


def check_secret(endpoint: str) -> None:
    """Refuse to meet other hosts without a secret, on all hosts: otherwise those that connect wait in vain.

    Raises:
        ConfigurationError: if the job has no secret and needs one, or the secret is invalid.
    """
    host, port = parse_endpoint(endpoint)
    if is_loopback(host) or may_bind_publicly(load_keys() is not None):
        return
    raise ConfigurationError(
        f"hosts that meet at {host}:{port} need a secret: without one, anybody who reaches it could run code "
        f"in the job. `zmqgrad secret --write FILE` makes one: give each host a copy of the file, and set "
        f"{environment.SECRET_FILE}=FILE there. On a network where you trust every machine, "
        f"{environment.ALLOW_INSECURE}=1 does without"
    )


def reply_seconds(expiry_seconds: float) -> float:
    """How long agents wait for a store to reply: not much longer than a node may live without it."""
    return max(expiry_seconds, LEAST_REPLY_SECONDS)


def _shorten_timeout(options: dict[str, Any]) -> None:
    """Wait as long as the options say for the store, but not much longer than a node may live for a reply."""
    with suppress(ValueError):  # create_handler names the option
        connect = float(options.get("read_timeout", READ_TIMEOUT_SECONDS))
        interval = float(options.get("keep_alive_interval", RendezvousSettings.keep_alive_interval))
        attempts = float(options.get("keep_alive_max_attempt", RendezvousSettings.keep_alive_max_attempt))
        options.setdefault("connect_timeout", str(connect))
        options["read_timeout"] = str(min(connect, reply_seconds(interval * attempts)))
