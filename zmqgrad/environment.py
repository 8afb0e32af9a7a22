"""The only module that reads ``os.environ``.

Errors about a missing or malformed variable name it, the places that were searched, and the remedy.
"""

from __future__ import annotations

import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from zmqgrad.errors import ConfigurationError, RendezvousError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Setting(Generic[_T]):
    """An environment variable that sets an option, and its parser. Call it to read the variable.

    Args:
        variable: the environment variable.
        parse: called with the name and the text of the variable; raises ``ConfigurationError``.
        default: the value while the variable is unset or blank. None: the user of the setting decides.
    """

    variable: str
    parse: Callable[[str, str], _T]
    default: _T

    def __call__(self, environ: Mapping[str, str] = os.environ) -> _T:
        """The value of the variable, or the default.

        Raises:
            ConfigurationError: if the variable is malformed.
        """
        text = environ.get(self.variable, "").strip()
        return self.parse(self.variable, text) if text else self.default

    def is_set(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether the variable is set, and not blank."""
        return bool(environ.get(self.variable, "").strip())

    def resolve(self, argument: _T | None) -> _T:
        """``argument`` if it is not None, otherwise the value from the environment.

        Raises:
            ConfigurationError: if the variable is read and malformed.
        """
        return self() if argument is None else argument


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _invalid(variable: str, text: str, expected: str) -> ConfigurationError:
    return ConfigurationError(f"the environment variable {variable} is {text!r}; it must be {expected}")


_MAX_DIGITS = 20
"""Of a number, as 64 bits have. ``int`` raises another error for those of more than 4300."""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def _parse_bytes(variable: str, text: str) -> int:
    digits = text.rstrip("KMGkmg")
    unit = _UNITS.get(text[len(digits) :].upper())
    if unit is None or not _is_number(digits):
        raise _invalid(variable, text, "a number of bytes: 65536, 64K, 2G")
    return int(digits) * unit


def _parse_microseconds(variable: str, text: str) -> int:
    if not _is_number(text):
        raise _invalid(variable, text, "a number of microseconds: 0, 1000")
    return int(text)


def _parse_seconds(variable: str, text: str) -> float:
    with suppress(ValueError):
        if (seconds := float(text)) >= 0:  # not NaN either
            return seconds
    raise _invalid(variable, text, "a number of seconds: 60, 0.5")


def _parse_switch(variable: str, text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise _invalid(variable, text, "1 or 0")


def _parse_ports(variable: str, text: str) -> range:
    first, _, last = text.partition("-")
    if not (_is_number(first) and _is_number(last) and 0 < int(first) <= int(last) <= MAX_PORT):
        raise _invalid(variable, text, "two ports, the first and the last: 30000-30031")
    return range(int(first), int(last) + 1)


def is_host(text: str) -> bool:
    """Whether ``text`` can be a host name or an address. The resolver raises no ``OSError`` for others."""
    try:
        return bool(text.encode("idna")) and "/" not in text and not any(c.isspace() for c in text)
    except UnicodeError:  # an empty or long label, or bytes that are no text
        return False


def _parse_host(variable: str, text: str) -> str:
    if not is_host(text):
        raise _invalid(variable, text, "a name or an address: 192.0.2.7")
    return text


def _parse_etcd_url(variable: str, text: str) -> str:
    if not text.startswith("etcd://"):
        raise _invalid(variable, text, "the URL of a store in etcd: etcd://host1,host2/job")
    return text


ALLOW_INSECURE = "ZMQGRAD_ALLOW_INSECURE"
ALLOW_NETWORK_FILE_SYSTEM = "ZMQGRAD_ALLOW_NETWORK_FILE_SYSTEM"

SECRET = "ZMQGRAD_SECRET"
"""The job's secret."""

SECRET_FILE = "ZMQGRAD_SECRET_FILE"
"""The file that holds the secret."""

SOCKET_IFNAME = "ZMQGRAD_SOCKET_IFNAME"

ADVERTISE_ADDRESS = "ZMQGRAD_ADVERTISE_ADDRESS"
STORE = "ZMQGRAD_STORE"

PORT_RANGE = "ZMQGRAD_PORT_RANGE"

allows_insecure = Setting(ALLOW_INSECURE, _parse_switch, False)
"""Whether sockets may listen beyond this host without encryption."""

allows_network_file_system = Setting(ALLOW_NETWORK_FILE_SYSTEM, _parse_switch, False)
"""Whether store files may be on network file systems, whose locks must then be trusted."""

socket_ifname = Setting[str | None](SOCKET_IFNAME, lambda _, text: text, None)
"""Prefixes of the names of the interfaces that may be used, as in ``NCCL_SOCKET_IFNAME``."""

store_url = Setting[str | None](STORE, _parse_etcd_url, None)
"""The store of the job, ``etcd://host1,host2/prefix``, in the place of one that worker rank 0 serves."""

advertise_address = Setting[str | None](ADVERTISE_ADDRESS, _parse_host, None)
"""The address at which other hosts reach this process, if that is not the one at which it listens (NAT)."""

port_range = Setting[range | None](PORT_RANGE, _parse_ports, None)
"""Where sockets listen that would otherwise let the system choose a port (30000-30031)."""

join_timeout = Setting[float | None]("ZMQGRAD_JOIN_TIMEOUT", _parse_seconds, None)
"""How many seconds ``init_rpc`` waits for the store and the other workers (1800; 0: no limit)."""

arena_limit = Setting[int | None]("ZMQGRAD_ARENA_LIMIT", _parse_bytes, None)
"""Bytes of shared memory that a worker may lease to others of its host (512M, 4G; 0: off)."""

arena_threshold = Setting[int | None]("ZMQGRAD_ARENA_THRESHOLD", _parse_bytes, None)
"""Messages with at least this many bytes of tensors use shared memory."""

inflight_bytes = Setting[int | None]("ZMQGRAD_INFLIGHT_BYTES", _parse_bytes, None)
"""Bytes in flight to each peer through sockets before a sender waits (256M; 0: no limit)."""

spin_us = Setting[int | None]("ZMQGRAD_SPIN_US", _parse_microseconds, None)
"""How long (µs) a thread spins for a message before it blocks (8000; 0: it does not spin)."""

local_fast_path = Setting("ZMQGRAD_LOCAL_FAST_PATH", _parse_switch, True)
"""Whether messages between processes of one host bypass libzmq."""

TRACE = "ZMQGRAD_TRACE"

TRACE_JOB = "ZMQGRAD_TRACE_JOB"

trace_directory = Setting[str | None](TRACE, lambda _, text: text, None)
"""The directory of the trace logs; unset: nothing is traced."""

trace_job = Setting(TRACE_JOB, lambda _, text: text, "")
"""Set by a launcher, the same for all processes of a job: tells jobs apart that share a directory."""

trace_arguments = Setting("ZMQGRAD_TRACE_ARGS", _parse_switch, False)
"""Whether traces contain the ``repr`` of the arguments of calls, cut to a bounded length."""

trace_heartbeats = Setting("ZMQGRAD_TRACE_HEARTBEATS", _parse_switch, False)
"""Whether traces contain heartbeats."""

reports_waits = Setting("ZMQGRAD_DEBUG", _parse_switch, False)
"""Whether what waits for half of its timeout is reported on stderr."""

COMMITS = "ZMQGRAD_COMMITS"


def _parse_commits(variable: str, text: str) -> tuple[int, str]:
    round, colon, path = text.partition(":")
    if not (colon and _is_number(round) and path):
        raise _invalid(variable, text, "set by zmqgrad run")
    return int(round), path


commits_address = Setting[tuple[int, str] | None](COMMITS, _parse_commits, None)
"""Set by an agent for its workers: the number of the round, and the unix socket of the holder of commits."""

REPLACE_TORCH_RPC = "ZMQGRAD_REPLACE_TORCH_RPC"

replaces_torch_rpc = Setting(REPLACE_TORCH_RPC, _parse_switch, False)
"""Whether this library replaces ``torch.distributed.rpc`` in processes that import both."""

state_home = Setting("XDG_STATE_HOME", lambda _, text: text, "")
"""The directory of what this user's programs keep on this host (XDG Base Directory Specification)."""

OPTIONS: Mapping[str, Setting[Any]] = {
    "arena_limit": arena_limit,
    "join_timeout": join_timeout,
    "arena_threshold": arena_threshold,
    "inflight_bytes": inflight_bytes,
    "spin_us": spin_us,
    "local_fast_path": local_fast_path,
}
"""Fields of ``RpcBackendOptions`` that the environment sets while they are None."""

agent_serves_store = Setting("TORCHELASTIC_USE_AGENT_STORE", _parse_switch, False)
"""Whether the launcher serves the store itself, instead of a worker."""

MAX_PORT = 65535

_MEANINGS = {
    "MASTER_ADDR": "the host on which rank 0 runs",
    "MASTER_PORT": "the port at which rank 0 serves the store",
    "RANK": "the rank of this worker, from 0 to WORLD_SIZE - 1",
    "WORLD_SIZE": "the number of workers",
    "LOCAL_RANK": "the rank of this worker on its host",
    "TORCHELASTIC_RESTART_COUNT": "the number of restarts of the workers",
}


@dataclass(frozen=True)
class LauncherInfo:
    """Variables of this worker, set by a launcher (torchrun, ``zmqgrad run``, a script); None where unset."""

    master_addr: str | None = None
    master_port: int | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    rank_from: str = "RANK"
    world_size_from: str = "WORLD_SIZE"


class _Launcher(NamedTuple):
    """Variables of a launcher. It started this process if the variable ``present`` is set."""

    name: str
    present: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str = ""


_OPEN_MPI = _Launcher(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# Slurm's srun sets PMI_RANK, too, for programs that use PMI; only Hydra numbers the processes of a host.
_MPICH = _Launcher(
    "MPICH or Intel MPI", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
)
# An Indexed Job numbers its pods. How many there are, and their names, the manifest has to pass on.
_KUBERNETES = _Launcher(
    "Kubernetes", "JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX", "WORLD_SIZE", "LOCAL_RANK"
)
# A batch script has most of Slurm's variables too; only processes started by srun have a step.
_SLURM = _Launcher("Slurm", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")

# Processes started by mpirun inside a Slurm job inherit the Slurm variables of mpirun's daemons.
_LAUNCHERS = (_OPEN_MPI, _MPICH, _KUBERNETES, _SLURM)

_MAX_SLURM_STEP = 0xFFFFFFF0
"""Steps from here on are not started by srun: the shell of an interactive allocation, for one."""

_PORTS = (20000, 30000)
"""Range (end exclusive) of the ports derived from job numbers."""

_POD_PORT = 29500
"""The port in a pod, which has a network of its own; torch's default."""


def read_launch(environ: Mapping[str, str] = os.environ) -> LauncherInfo:
    """The launcher's variables.

    RANK, WORLD_SIZE and LOCAL_RANK, as set by torchrun and ``zmqgrad run``, are used if RANK or WORLD_SIZE is
    set; otherwise those of Open MPI's ``mpirun``, of MPICH's ``mpiexec`` (also Intel MPI's), or of Slurm's
    ``srun``. In a pod of a Kubernetes Indexed Job, the rank is its index, and the manifest sets WORLD_SIZE.
    MASTER_ADDR and MASTER_PORT take precedence. While unset, they are derived where possible:

    - ``srun``: the first host of the step; a port from the numbers of job and step;
    - ``mpirun``, ``mpiexec``: this host if it has all workers, otherwise the first host of the Slurm job; a
      port from the name (Open MPI) or the number (MPICH, in a Slurm job) of the job;
    - Kubernetes: the port 29500.

    Raises:
        RendezvousError: if a variable is malformed.
    """
    launcher = _launcher_of(environ)
    address, port = _text(environ, "MASTER_ADDR"), _number(environ, "MASTER_PORT", 0, MAX_PORT)
    return LauncherInfo(
        master_addr=_master_of(environ, launcher) if address is None else address.strip("[]"),
        master_port=_port_of(environ, launcher) if port is None else port,
        rank=_number(environ, launcher.rank, 0),
        world_size=_number(environ, launcher.world_size, 1),
        local_rank=_number(environ, launcher.local_rank, 0),
        rank_from=launcher.rank,
        world_size_from=launcher.world_size,
    )


def _launcher_of(environ: Mapping[str, str]) -> _Launcher:
    candidates: tuple[_Launcher, ...] = _LAUNCHERS
    if _text(environ, "RANK"):
        candidates = ()
    elif _text(environ, "WORLD_SIZE"):
        candidates = (_KUBERNETES,)
    step = _text(environ, _SLURM.present) or ""
    if _is_number(step) and int(step) >= _MAX_SLURM_STEP:
        candidates = tuple(each for each in candidates if each is not _SLURM)
    plain = _Launcher("", "", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    return next((each for each in candidates if _text(environ, each.present)), plain)


def _text(environ: Mapping[str, str], name: str) -> str | None:
    return environ.get(name, "").strip() or None


def _master_of(environ: Mapping[str, str], launcher: _Launcher) -> str | None:
    """The host of rank 0, if ``launcher`` provides it."""
    nodes = None
    if launcher is _SLURM:
        nodes = _text(environ, "SLURM_STEP_NODELIST") or _text(environ, "SLURM_JOB_NODELIST")
    elif _on_one_host(environ, launcher):
        return "127.0.0.1"
    elif launcher in (_OPEN_MPI, _MPICH):  # they begin with the first host of their allocation
        nodes = _text(environ, "SLURM_JOB_NODELIST")
    return nodes and first_node(nodes)


def _port_of(environ: Mapping[str, str], launcher: _Launcher) -> int | None:
    """A port derived from the job, the same for all its workers."""
    job = None
    if launcher is _KUBERNETES:
        return _POD_PORT
    if launcher is _SLURM:
        job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    elif _master_of(environ, launcher) is not None:
        job = _text(environ, "PMIX_NAMESPACE" if launcher is _OPEN_MPI else "SLURM_JOB_ID")
    return None if job is None else _PORTS[0] + zlib.crc32(job.encode()) % (_PORTS[1] - _PORTS[0])


def _on_one_host(environ: Mapping[str, str], launcher: _Launcher) -> bool:
    size = _text(environ, launcher.world_size)
    return size is not None and size == _text(environ, launcher.local_world_size)


def first_node(nodes: str) -> str:
    """The first host of a Slurm host list: ``gpu03`` in ``gpu[03-05,9],login``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else nodes).strip()


def torchrun_attempt(environ: Mapping[str, str] = os.environ) -> int | None:
    """Number of restarts by torchrun, if its agent serves a store (one of torch's); otherwise None.

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


def torchrun_default(option: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The default of a launcher's option, from ``PET_<OPTION>`` as torchrun reads it; None if unset."""
    return _text(environ, f"PET_{option.upper()}")


def missing_variable(name: str, also: str | None = None) -> RendezvousError:
    """The error for a required variable ``name`` that is unset.

    Args:
        name: the variable.
        also: another place that may set the value, such as an argument.
    """
    places = f"the environment{f' and {also}' if also else ''}"
    others = [
        f"{getattr(launcher, name.lower())} ({launcher.name})"
        for launcher in _LAUNCHERS
        if getattr(launcher, name.lower(), name) != name
    ]
    nor = f", nor was {' or '.join(others)}" if others else ""
    remedy = f"set {name}{f', give it as {also}' if also else ''}, or start this program by a launcher"
    problem = f"environment variable {name} expected, but not set: {name} ({_MEANINGS[name]})"
    return RendezvousError(f"{problem} was not found in {places}{nor}; {remedy}")


class SocketInterfaces(NamedTuple):
    """A variable that selects network interfaces, its text, and the same as a list like NCCL's."""

    variable: str
    text: str
    interfaces: str


_FOREIGN_IFNAMES = {"GLOO_SOCKET_IFNAME": "=", "TP_SOCKET_IFNAME": "=", "NCCL_SOCKET_IFNAME": ""}
"""Variables of others that select interfaces; ``=``: they hold whole names, not prefixes."""


def socket_interfaces(environ: Mapping[str, str] = os.environ) -> SocketInterfaces | None:
    """The interfaces to use, from ``ZMQGRAD_SOCKET_IFNAME`` or the variables of Gloo, TensorPipe and NCCL."""
    own = socket_ifname(environ)
    if own is not None:
        return SocketInterfaces(SOCKET_IFNAME, own, own)
    for name, prefix in _FOREIGN_IFNAMES.items():
        text = _text(environ, name)
        if text is not None:
            return SocketInterfaces(name, text, prefix + text)
    return None


def has_secret(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this job has a secret."""
    return secret(environ) is not None or secret_file(environ) is not None


def secret(environ: Mapping[str, str] = os.environ) -> str | None:
    """The job's secret from the environment, or None.

    Raises:
        ConfigurationError: if it is set and empty.
    """
    return _set_and_not_empty(SECRET, environ)


def secret_file(environ: Mapping[str, str] = os.environ) -> str | None:
    """The file that holds the job's secret, or None. Raises as :func:`secret`."""
    return _set_and_not_empty(SECRET_FILE, environ)


def _set_and_not_empty(variable: str, environ: Mapping[str, str]) -> str | None:
    value = environ.get(variable)
    if value == "":  # whoever has set it, by a command that failed perhaps, expects to be protected
        raise ConfigurationError(f"the environment variable {variable} is set, but empty: set or unset it")
    return value


def inherited() -> dict[str, str]:
    """A copy of the whole environment, for child processes."""
    with _replacing:
        return dict(os.environ)


def export(variables: Mapping[str, str], remove: Iterable[str] = ()) -> None:
    """Set variables in this process, for what it imports and starts from now on.

    Args:
        variables: by name.
        remove: names of variables to remove, if they are set.
    """
    for name in remove:
        os.environ.pop(name, None)
    os.environ.update(variables)


def replace_all(environ: Mapping[str, str]) -> None:
    """Replace the environment of this process, a worker that has just started."""
    os.environ.clear()
    os.environ.update(environ)


@contextmanager
def replaced(environ: Mapping[str, str]) -> Iterator[None]:
    """Replace the environment of this process while child processes are started that inherit it."""
    with _replacing:
        before = dict(os.environ)
        replace_all(environ)
        try:
            yield
        finally:
            replace_all(before)


_replacing = threading.RLock()  # held while the environment is that of a worker: others may start some, too


def _renew_lock() -> None:
    global _replacing
    _replacing = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # such a worker
