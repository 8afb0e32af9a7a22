"""The only module that reads ``os.environ``.

A setting that is missing or malformed names itself, says where it was looked for, and what to do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from zmqgrad.errors import ConfigurationError, RendezvousError

ALLOW_INSECURE = "ZMQGRAD_ALLOW_INSECURE"
"""Set to 1 to listen beyond this host without encryption."""

SECRET = "ZMQGRAD_SECRET"
"""The job's secret."""

MAX_PORT = 65535

_MEANINGS = {
    "MASTER_ADDR": "the host on which rank 0 runs",
    "MASTER_PORT": "the port at which rank 0 serves the store",
    "RANK": "the rank of this worker, from 0 to WORLD_SIZE - 1",
    "WORLD_SIZE": "how many workers there are",
    "LOCAL_RANK": "the rank of this worker on its host",
}


@dataclass(frozen=True)
class Launch:
    """What a launcher (torchrun, ``zmqgrad run``, a shell script) said of this worker; None where nothing."""

    master_addr: str | None = None
    master_port: int | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launcher's variables.

    Raises:
        RendezvousError: if one is there and malformed.
    """
    return Launch(
        master_addr=environ.get("MASTER_ADDR", "").strip() or None,
        master_port=_number(environ, "MASTER_PORT", 0, MAX_PORT),
        rank=_number(environ, "RANK", 0),
        world_size=_number(environ, "WORLD_SIZE", 1),
        local_rank=_number(environ, "LOCAL_RANK", 0),
    )


def agent_serves_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Does the launcher serve the store itself (TORCHELASTIC_USE_AGENT_STORE), so that no worker must?

    Raises:
        ConfigurationError: if the variable is malformed.
    """
    return _switch(environ, "TORCHELASTIC_USE_AGENT_STORE")


def _number(environ: Mapping[str, str], name: str, least: int, most: int | None = None) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise RendezvousError(
            f"the environment variable {name} ({_MEANINGS[name]}) is {text!r}; it must be a number {bounds}"
        )
    return number


def missing(name: str, also: str | None = None) -> RendezvousError:
    """The error to raise where variable ``name`` is needed and not set; ``also``: where else it may stand."""
    places = f"the environment{f' and {also}' if also else ''}"
    ways = f"set {name}{f', give it as {also}' if also else ''}, or start this program by a launcher"
    return RendezvousError(f"{name} ({_MEANINGS[name]}) was not found in {places}: {ways}")


def allows_insecure(environ: Mapping[str, str] = os.environ) -> bool:
    """May sockets be opened to the network without encryption?

    Raises:
        ConfigurationError: if the variable is malformed.
    """
    return _switch(environ, ALLOW_INSECURE)


def has_secret(environ: Mapping[str, str] = os.environ) -> bool:
    """Was this job given a secret?"""
    return bool(environ.get(SECRET))


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("", "0", "false", "no", "off"):
        return False
    raise ConfigurationError(f"the environment variable {name} is {text!r}; it must be 1 or 0")


def inherited() -> dict[str, str]:
    """A copy of the whole environment, for those who hand one on to the processes they start."""
    return dict(os.environ)
