"""Opens the rendezvous of a job, from its configuration."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from zmqgrad.elastic.handler import RendezvousHandler
from zmqgrad.elastic.launch_config import LaunchConfig
from zmqgrad.elastic.registry import READ_TIMEOUT_SECONDS, create_handler
from zmqgrad.elastic.settings import RendezvousSettings

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


def _shorten_timeout(options: dict[str, Any]) -> None:
    """Wait as long as the options say for the store, but not much longer than a node may live for a reply."""
    with suppress(ValueError):  # create_handler names the option
        connect = float(options.get("read_timeout", READ_TIMEOUT_SECONDS))
        interval = float(options.get("keep_alive_interval", RendezvousSettings.keep_alive_interval))
        attempts = float(options.get("keep_alive_max_attempt", RendezvousSettings.keep_alive_max_attempt))
        options.setdefault("connect_timeout", str(connect))
        options["read_timeout"] = str(min(connect, max(interval * attempts, LEAST_REPLY_SECONDS)))
