"""The only module that reads ``os.environ``.

A setting that is missing or malformed names itself, says where it was looked for, and what to do.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from zmqgrad.errors import ConfigurationError, RendezvousError

ALLOW_INSECURE = "ZMQGRAD_ALLOW_INSECURE"
"""Set to 1 to listen beyond this host without encryption."""

ALLOW_NETWORK_FILE_SYSTEM = "ZMQGRAD_ALLOW_NETWORK_FILE_SYSTEM"
"""Set to 1 to keep store files on network file systems, whose locks must then be trusted."""

SECRET = "ZMQGRAD_SECRET"
"""The job's secret."""

SECRET_FILE = "ZMQGRAD_SECRET_FILE"
"""Where it stands, for those who do not want it in the environment."""

ARENA_LIMIT = "ZMQGRAD_ARENA_LIMIT"
"""Bytes of shared memory that a worker may lend to others of its host at a time (512M, 4G; 0: off)."""

ARENA_THRESHOLD = "ZMQGRAD_ARENA_THRESHOLD"
"""Bytes of tensors in a message from which on they go through shared memory."""

INFLIGHT_BYTES = "ZMQGRAD_INFLIGHT_BYTES"
"""Bytes that may be on their way through sockets to each peer before a sender waits (256M; 0: no limit)."""

SPIN_US = "ZMQGRAD_SPIN_US"
"""Microseconds that a thread looks for a message before it sleeps (1000; 0: it sleeps at once)."""

LOCAL_FAST_PATH = "ZMQGRAD_LOCAL_FAST_PATH"
"""Set to 0 to send everything through ZeroMQ, also between processes of one host."""

MAX_PORT = 65535

_MEANINGS = {
    "MASTER_ADDR": "the host on which rank 0 runs",
    "MASTER_PORT": "the port at which rank 0 serves the store",
    "RANK": "the rank of this worker, from 0 to WORLD_SIZE - 1",
    "WORLD_SIZE": "how many workers there are",
    "LOCAL_RANK": "the rank of this worker on its host",
    "TORCHELASTIC_RESTART_COUNT": "how often the workers were restarted",
}


@dataclass(frozen=True)
class Launch:
    """What a launcher (torchrun, ``zmqgrad run``, a shell script) said of this worker; None where nothing."""

    master_addr: str | None = None
    master_port: int | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    rank_from: str = "RANK"
    world_size_from: str = "WORLD_SIZE"


class _Launcher(NamedTuple):
    """A launcher that has variables of its own; it has started us if ``present`` is set."""

    name: str
    present: str
    rank: str
    world_size: str
    local_rank: str


_OPEN_MPI = _Launcher(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
)
# A batch script has most of Slurm's variables, too; only what srun starts has a step.
_SLURM = _Launcher("Slurm", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")

# mpirun inside a Slurm job leaves Slurm's variables of its own daemons to what it starts.
_LAUNCHERS = (_OPEN_MPI, _SLURM)

_PORTS = (20000, 30000)
"""From where to (exclusive) where ports are made up from the number of a job."""


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launcher's variables.

    RANK, WORLD_SIZE and LOCAL_RANK, as torchrun and ``zmqgrad run`` set them, count if one of the first two
    is there; otherwise those of Open MPI's ``mpirun``, or of Slurm's ``srun``. MASTER_ADDR and MASTER_PORT
    always count. Where they are missing, they follow from the launcher: under Slurm, the first host of the
    step, and a port made of the numbers of job and step; under Open MPI, if all workers are on one host,
    this one, and a port made of the name of the job.

    Raises:
        RendezvousError: if one is there and malformed.
    """
    plain = _Launcher("", "", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    launcher = plain
    if not _text(environ, "RANK") and not _text(environ, "WORLD_SIZE"):
        launcher = next((each for each in _LAUNCHERS if _text(environ, each.present)), plain)
    address, port = _text(environ, "MASTER_ADDR"), _number(environ, "MASTER_PORT", 0, MAX_PORT)
    return Launch(
        master_addr=_master_of(environ, launcher) if address is None else address,
        master_port=_port_of(environ, launcher) if port is None else port,
        rank=_number(environ, launcher.rank, 0),
        world_size=_number(environ, launcher.world_size, 1),
        local_rank=_number(environ, launcher.local_rank, 0),
        rank_from=launcher.rank,
        world_size_from=launcher.world_size,
    )


def _text(environ: Mapping[str, str], name: str) -> str | None:
    return environ.get(name, "").strip() or None


def _master_of(environ: Mapping[str, str], launcher: _Launcher) -> str | None:
    """Where rank 0 runs, if ``launcher`` lets us know."""
    if launcher is _SLURM:
        nodes = _text(environ, "SLURM_STEP_NODELIST") or _text(environ, "SLURM_JOB_NODELIST")
        return nodes and first_node(nodes)
    return "127.0.0.1" if _on_one_host(environ, launcher) else None


def _port_of(environ: Mapping[str, str], launcher: _Launcher) -> int | None:
    """A port that all workers of this job, and of few others, come to."""
    job = None
    if launcher is _SLURM:
        job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    elif _on_one_host(environ, launcher):
        job = _text(environ, "PMIX_NAMESPACE")
    return None if job is None else _PORTS[0] + zlib.crc32(job.encode()) % (_PORTS[1] - _PORTS[0])


def _on_one_host(environ: Mapping[str, str], launcher: _Launcher) -> bool:
    size = _text(environ, "OMPI_COMM_WORLD_SIZE")
    return launcher is _OPEN_MPI and size is not None and size == _text(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")


def first_node(nodes: str) -> str:
    """The first host of a list as Slurm writes it: ``gpu[03-05,9],login`` begins with ``gpu03``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else nodes).strip()


def agent_serves_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Does the launcher serve the store itself (TORCHELASTIC_USE_AGENT_STORE), so that no worker must?

    Raises:
        ConfigurationError: if the variable is malformed.
    """
    return _switch(environ, "TORCHELASTIC_USE_AGENT_STORE")


def torchrun_attempt(environ: Mapping[str, str] = os.environ) -> int | None:
    """How often torchrun has restarted the workers, if its agent serves a store (one of torch's); else None.

    Raises:
        RendezvousError: if a variable is malformed.
    """
    if not agent_serves_store(environ) or _text(environ, "TORCHELASTIC_RUN_ID") is None:
        return None
    return _number(environ, "TORCHELASTIC_RESTART_COUNT", 0) or 0


def _number(environ: Mapping[str, str], name: str, least: int, most: int | None = None) -> int | None:
    text = _text(environ, name)
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise RendezvousError(
            f"the environment variable {name} ({_meaning(name)}) is {text!r}; it must be a number {bounds}"
        )
    return number


def _meaning(name: str) -> str:
    for launcher in _LAUNCHERS:
        for field in ("rank", "world_size", "local_rank"):
            if getattr(launcher, field) == name:
                return _MEANINGS[field.upper()]
    return _MEANINGS[name]


def missing(name: str, also: str | None = None) -> RendezvousError:
    """The error to raise where variable ``name`` is needed and not set; ``also``: where else it may stand."""
    places = f"the environment{f' and {also}' if also else ''}"
    others = [
        f"{getattr(launcher, name.lower())} ({launcher.name})"
        for launcher in _LAUNCHERS
        if hasattr(launcher, name.lower())
    ]
    nor = f", nor was {' or '.join(others)}" if others else ""
    ways = f"set {name}{f', give it as {also}' if also else ''}, or start this program by a launcher"
    said = f"environment variable {name} expected, but not set: {name} ({_MEANINGS[name]})"
    return RendezvousError(f"{said} was not found in {places}{nor}; {ways}")


def allows_insecure(environ: Mapping[str, str] = os.environ) -> bool:
    """May sockets be opened to the network without encryption?

    Raises:
        ConfigurationError: if the variable is malformed.
    """
    return _switch(environ, ALLOW_INSECURE)


def allows_network_file_system(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether store files may lie on network file systems.

    Raises:
        ConfigurationError: if the variable is malformed.
    """
    return _switch(environ, ALLOW_NETWORK_FILE_SYSTEM)


def has_secret(environ: Mapping[str, str] = os.environ) -> bool:
    """Was this job given a secret?"""
    return secret(environ) is not None or secret_file(environ) is not None


def secret(environ: Mapping[str, str] = os.environ) -> str | None:
    """The job's secret; None if it was not given one so."""
    return environ.get(SECRET) or None


def secret_file(environ: Mapping[str, str] = os.environ) -> str | None:
    """The file that it stands in; None if none was named."""
    return environ.get(SECRET_FILE) or None


def arena_limit(environ: Mapping[str, str] = os.environ) -> int | None:
    """What ZMQGRAD_ARENA_LIMIT says, in bytes; None where nothing.

    Raises:
        ConfigurationError: if it is malformed.
    """
    return _bytes(environ, ARENA_LIMIT)


def arena_threshold(environ: Mapping[str, str] = os.environ) -> int | None:
    """What ZMQGRAD_ARENA_THRESHOLD says, in bytes; None where nothing.

    Raises:
        ConfigurationError: if it is malformed.
    """
    return _bytes(environ, ARENA_THRESHOLD)


def inflight_bytes(environ: Mapping[str, str] = os.environ) -> int | None:
    """What ZMQGRAD_INFLIGHT_BYTES says, in bytes; None where nothing.

    Raises:
        ConfigurationError: if it is malformed.
    """
    return _bytes(environ, INFLIGHT_BYTES)


def spin_us(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns ZMQGRAD_SPIN_US, in microseconds; None if it is not set.

    Raises:
        ConfigurationError: if it is malformed.
    """
    text = environ.get(SPIN_US, "").strip()
    if text and not (text.isascii() and text.isdigit()):
        raise ConfigurationError(
            f"the environment variable {SPIN_US} is {text!r}; it must be a number of microseconds: 0, 1000"
        )
    return int(text) if text else None


def local_fast_path(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether small messages between processes of one host go past libzmq; true unless switched off.

    Raises:
        ConfigurationError: if the variable is malformed.
    """
    return not environ.get(LOCAL_FAST_PATH, "").strip() or _switch(environ, LOCAL_FAST_PATH)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip().upper()
    if not text:
        return None
    digits = text.rstrip("KMG")
    unit = _UNITS.get(text[len(digits) :])
    if unit is None or not (digits.isascii() and digits.isdigit()):
        raise ConfigurationError(
            f"the environment variable {name} is {text!r}; it must be a number of bytes: 65536, 64K, 2G"
        )
    return int(digits) * unit


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
