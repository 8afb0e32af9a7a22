"""What a launcher starts on a host: how many workers, where the hosts meet, what becomes of the output."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zmqgrad.environment import MAX_PORT, is_host
from zmqgrad.errors import ConfigurationError
from zmqgrad.runtime.arguments import check_instance, check_integer, check_seconds

STATIC_PORT = 29500
"""Where nodes meet at ``master_addr``, unless ``master_port`` is set; as with torchrun."""

START_METHODS = ("spawn", "fork", "forkserver")

_STREAMS = re.compile(r"[0-3]|(\d+:[0-3])(,\d+:[0-3])*", re.ASCII)


class Std(enum.IntFlag):
    """Output streams of a worker, with the numbers of torchrun's options ``-r`` and ``-t``.

    Example:
        >>> Streams(Std.ALL).of(local_rank=0)
        <Std.ALL: 3>
    """

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR


@dataclass(frozen=True)
class Streams:
    """Output streams by local rank.

    Args:
        default: of workers that ``by_local_rank`` does not contain.
        by_local_rank: of single workers.

    Example:
        >>> Streams(Std.ALL).by_local_rank
        {}
    """

    default: Std = Std.NONE
    by_local_rank: dict[int, Std] = field(default_factory=dict)

    @classmethod
    def from_str(cls, text: str) -> Streams:
        """Return the streams that ``text`` names, in torchrun's notation.

        Args:
            text: ``3`` (all workers), or ``0:1,1:2`` (by local rank; none for the others).

        Raises:
            ConfigurationError: if it is malformed.
        """
        if not isinstance(text, str) or not _STREAMS.fullmatch(text):
            raise ConfigurationError(
                f"cannot read {text!r} as output streams: write 0 (none), 1 (stdout), 2 (stderr) or 3 (both) "
                "for all workers, or LOCAL_RANK:STREAMS,... such as 0:3,1:2"
            )
        if ":" not in text:
            return cls(Std(int(text)))
        pairs = (pair.split(":") for pair in text.split(","))
        return cls(by_local_rank={int(rank): Std(int(streams)) for rank, streams in pairs})

    def of(self, local_rank: int) -> Std:
        """The streams of the worker with this ``local_rank``."""
        return self.by_local_rank.get(local_rank, self.default)

    def __bool__(self) -> bool:
        """Whether any stream of any worker is meant."""
        return any((self.default, *self.by_local_rank.values()))


@dataclass(frozen=True)
class LaunchConfig:
    """Configuration of the workers of one host. All hosts of a job have equal ones, except where noted.

    Args:
        min_nodes, max_nodes: how many hosts take part.
        nproc_per_node: number of workers on this host.
        run_id: identifies the job. Empty: the launcher generates one, which suits a job of one host.
        role: a name for the workers, passed on to them.
        rdzv_backend: name of the rendezvous backend.
        rdzv_endpoint: ``host[:port]`` at which the hosts meet. Empty: no other host takes part, or the hosts
            meet at ``master_addr`` and ``master_port``.
        rdzv_configs: options of the backend, by name.
        node_rank: the rank of this host, in a job whose hosts have fixed ranks. None: the rendezvous
            assigns ranks.
        max_restarts: how often the group of workers is restarted before the job fails.
        monitor_interval: seconds between two looks at the workers, where a launcher polls.
        start_method: of workers that run a function: ``spawn``, ``fork`` or ``forkserver``.
        log_dir: directory for copies of the output, as a path or a string.
        redirects: output streams that go to files in ``log_dir`` and are not displayed.
        tee: output streams that go to files in ``log_dir`` and are displayed.
        local_addr: address of this host for the others. None: found by the launcher.
        master_addr: address of the host of rank 0; for one host, or with fixed ranks. Empty: found by the
            launcher.
        master_port: port of the workers' own rendezvous; if the hosts meet there, of theirs. 0: any free one.
        env: environment variables of the workers, which override inherited ones.

    Raises:
        ConfigurationError: if a value is invalid.

    Example:
        >>> config = LaunchConfig(min_nodes=2, max_nodes=4, nproc_per_node=8, rdzv_endpoint="host0:29400")
        >>> config.max_restarts
        0
    """

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    run_id: str = ""
    role: str = "default_role"
    rdzv_backend: str = "zmqgrad"
    rdzv_endpoint: str = ""
    rdzv_configs: dict[str, str] = field(default_factory=dict)
    node_rank: int | None = None
    max_restarts: int = 0
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_dir: Path | None = None
    redirects: Streams = field(default_factory=Streams)
    tee: Streams = field(default_factory=Streams)
    local_addr: str | None = None
    master_addr: str = ""
    master_port: int = 0
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integer("min_nodes", self.min_nodes, 1)
        check_integer("max_nodes", self.max_nodes, 1)
        check_integer("nproc_per_node", self.nproc_per_node, 1)
        check_integer("max_restarts", self.max_restarts, 0)
        check_integer("master_port", self.master_port, 0, MAX_PORT)
        if self.node_rank is not None:
            check_integer("node_rank", self.node_rank, 0, self.max_nodes - 1)
        for name in ("local_addr", "master_addr"):
            if (host := getattr(self, name)) and not (isinstance(host, str) and is_host(host)):
                raise ConfigurationError(f"{name} is {host!r}, which is not a host name or address")
        check_instance("rdzv_endpoint", self.rdzv_endpoint, str, "text")
        check_instance("env", self.env, Mapping, "a dict of texts")
        for name, text in (("role", self.role), ("run_id", self.run_id or ""), *self.env.items()):
            _check_variable(name, text)
        if self.max_nodes > 1 and self.master_addr and not self.rdzv_endpoint:
            meeting = f"{self.master_addr}:{self.master_port or STATIC_PORT}"
            object.__setattr__(self, "rdzv_endpoint", meeting)
        self._check_nodes()
        check_seconds("monitor_interval", self.monitor_interval)
        if self.start_method not in START_METHODS:
            raise ConfigurationError(
                f"start_method is {self.start_method!r}; it must be one of {', '.join(START_METHODS)}"
            )
        for name in ("redirects", "tee"):
            if not isinstance(value := getattr(self, name), Streams):
                raise ConfigurationError(
                    f"{name} is {value!r}; it must be Streams: Streams(Std.ALL) for all workers, or "
                    f"Streams.from_str('0:3,1:2') by local rank"
                )
        if self.log_dir is not None:
            object.__setattr__(self, "log_dir", _as_path("log_dir", self.log_dir))
        if self.redirects and self.log_dir is None:
            raise ConfigurationError(
                "redirects writes output to files, but log_dir is not set: set it to a directory, or use no "
                "redirects"
            )

    def _check_nodes(self) -> None:
        nodes = f"{self.min_nodes}:{self.max_nodes}"
        if self.min_nodes > self.max_nodes:
            raise ConfigurationError(f"nnodes is {nodes}; the minimum must not exceed the maximum")
        if self.node_rank is not None and self.min_nodes != self.max_nodes:
            raise ConfigurationError(
                f"node_rank is {self.node_rank}, but nnodes is {nodes}: hosts with fixed ranks need a fixed "
                "number of nodes. Set one number, or leave node_rank out"
            )
        if self.max_nodes > 1 and not (self.rdzv_endpoint or self.master_addr):
            raise ConfigurationError(
                f"nnodes is {nodes}, but the nodes have no place to meet: set rdzv_endpoint "
                "(--rdzv-endpoint) to the HOST:PORT of one of them, the same on all"
            )


def _check_variable(name: object, text: object) -> None:
    """Raise ConfigurationError unless the environment of a process can hold ``text`` as ``name``."""
    try:
        valid = isinstance(name, str) and isinstance(text, str) and name and "=" not in name
        valid = valid and b"\0" not in os.fsencode(f"{name}{text}")
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise ConfigurationError(f"the environment of workers cannot hold {text!r} as {name!r}")


def make_log_dir(path: Path | None) -> Path | None:
    """Create the directory ``path`` for logs if it is missing, and return it.

    Raises:
        ConfigurationError: if that fails.
    """
    if path is not None:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, ValueError) as e:  # the latter for what no file system has as a name
            why = e.strerror if isinstance(e, OSError) else e
            raise ConfigurationError(f"log_dir (--log-dir) {str(path)!r} cannot be created: {why}") from e
    return path


def _as_path(name: str, value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"{name} is {value!r}; it must be a path")
    return Path(value)
