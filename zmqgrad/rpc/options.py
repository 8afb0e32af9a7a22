"""Settings of a worker, validated on creation. Names and defaults are those of ``torch.distributed.rpc``."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from zmqgrad import environment
from zmqgrad.errors import ArgumentTypeError, ConfigurationError, OptionError
from zmqgrad.rpc.devices import check_present, to_device_map, to_devices
from zmqgrad.runtime.spinning import SPIN_SECONDS
from zmqgrad.transport.flow_control import DEFAULT_INFLIGHT_BYTES
from zmqgrad.transport.heartbeat.failure_detector import LivenessTimeouts
from zmqgrad.transport.shared_memory.settings import THRESHOLD_BYTES, ArenaSettings, default_limit

DEFAULT_RPC_TIMEOUT_SEC = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_SHUTDOWN_TIMEOUT = 0.0
DEFAULT_JOIN_TIMEOUT_SEC = 1800.0  # torch's default_pg_timeout
MAX_IO_THREADS = 64
MAX_SPIN_US = 1_000_000
UNSET_RPC_TIMEOUT = -1.0
"""The ``timeout`` argument that means the worker's default."""


class RemovedNameError(ConfigurationError, AttributeError):
    """A name of earlier torch releases that neither torch nor this library has."""


def removed(name: str) -> RemovedNameError:
    """The error for ``name``, which torch has removed together with its process group backend."""
    return RemovedNameError(
        f"{name}: torch has removed the process group backend for RPC, and zmqgrad does not have it. "
        "Leave the argument `backend` out, and use TensorPipeRpcBackendOptions"
    )


class _BackendMeta(enum.EnumMeta):
    def __getattr__(cls, name: str) -> Any:
        if name == "PROCESS_GROUP":
            raise removed("BackendType.PROCESS_GROUP")
        raise AttributeError(f"BackendType has no member {name}")


class NamedBackend(enum.Enum, metaclass=_BackendMeta):
    """Base of the enumerations of backends."""

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


class BackendType(NamedBackend):
    """Backends by name. There is one; torch's name for its own is accepted and means the same."""

    ZMQ = "ZMQ"
    TENSORPIPE = "TENSORPIPE"


@dataclass
class RpcBackendOptions:
    """Settings of one worker.

    Args:
        rpc_timeout: default timeout of calls in seconds (or a timedelta); 0 for no limit.
        init_method: URL where the workers meet (see :mod:`zmqgrad.rendezvous`).
        num_worker_threads: the maximum number of engine threads that run at a time.
        device_maps: for each callee, the map from devices of this worker to devices of the callee where its
            tensors arrive; see :meth:`set_device_map`. Replies use the inverse map.
        devices: CUDA devices of this worker that RPC uses; if empty, those of the maps.
        arena_limit: bytes of shared memory that this worker may lease to peers of its host at a time; beyond
            it, tensors go through sockets, which is slower. 0 disables shared memory. None: the environment
            variable ZMQGRAD_ARENA_LIMIT, or else a quarter of the machine's (or container's) memory.
            Memory is allocated on use, and freed when it has not been used for a while.
        arena_threshold: the size in bytes from which tensors of a message go through shared memory. None:
            ZMQGRAD_ARENA_THRESHOLD, or else the default, which was measured to be best.
        inflight_bytes: how many bytes of frames (large parts of messages that go through sockets) may be in
            flight to each peer; senders wait for credit beyond it. 0: no limit. None:
            ZMQGRAD_INFLIGHT_BYTES, or else 256 MB.
        io_threads: libzmq threads that read and write its sockets: more than one if several hosts send large
            data to this worker at a time. One more serves small messages. (Messages of one host use few.)
        spin_us: how long (µs) a thread that waits for a message of this host spins before it blocks: quick
            replies take half the time, at the cost of a core. 0 disables spinning. None: ZMQGRAD_SPIN_US, or
            else 8000.
        local_fast_path: send messages between workers of one host through Unix sockets instead of
            libzmq, and tensors by shared memory. None: ZMQGRAD_LOCAL_FAST_PATH, or else True
            (on Linux; elsewhere it is not available).
        liveness_timeout: seconds after which a silent peer of this host is suspected, and one of another host
            that is out of reach is lost; None: 3 and 10.
        refused_timeout: seconds after which a peer of another host is lost that refuses connections: its
            process may have ended, or a firewall may have reset them.
        frozen_timeout: seconds after which a peer is lost whose process exists but is silent; 0: never. Use
            at least the time that a process may be stalled on a loaded machine.
        join_timeout: how long ``init_rpc`` waits for the store and for the other workers, in seconds (or a
            timedelta); 0 for no limit. None: by ``ZMQGRAD_JOIN_TIMEOUT``, or 1800. As with torch,
            ``rpc_timeout`` does not bound it.

    Raises:
        ConfigurationError: if a value is invalid.

    Example:
        >>> options = rpc.RpcBackendOptions(rpc_timeout=10, num_worker_threads=4)
        >>> rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        >>> rpc.get_rpc_timeout()
        10.0
        >>> rpc.shutdown()
    """

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC
    init_method: str = DEFAULT_INIT_METHOD
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS
    device_maps: Mapping[str, Any] = field(default_factory=dict)
    devices: Sequence[Any] = ()
    arena_limit: int | None = None
    arena_threshold: int | None = None
    inflight_bytes: int | None = None
    io_threads: int = 1
    spin_us: int | None = None
    local_fast_path: bool | None = None
    liveness_timeout: float | None = None
    frozen_timeout: float = LivenessTimeouts().frozen
    refused_timeout: float = LivenessTimeouts().refused
    join_timeout: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.init_method, str):
            raise ArgumentTypeError(f"init_method must be a URL, such as 'env://', not {self.init_method!r}")
        for name in ("liveness_timeout", "frozen_timeout", "refused_timeout"):
            if name != "liveness_timeout" or self.liveness_timeout is not None:
                setattr(self, name, check_timeout(getattr(self, name), name))
        self.limits.check()
        self.rpc_timeout = check_timeout(self.rpc_timeout, "rpc_timeout")
        self.join_timeout = check_timeout(
            self._setting("join_timeout", DEFAULT_JOIN_TIMEOUT_SEC), "join_timeout"
        )
        if not isinstance(self.num_worker_threads, int):
            raise ArgumentTypeError(f"num_worker_threads must be a number, not {self.num_worker_threads!r}")
        if self.num_worker_threads < 1:
            raise OptionError(f"num_worker_threads must be positive, not {self.num_worker_threads!r}")
        self.device_maps = {to: to_device_map(each) for to, each in _as_dict(self.device_maps).items()}
        self.devices = to_devices(() if self.devices is None else self.devices)
        if not _is_integer(self.io_threads, 1, MAX_IO_THREADS):
            raise ConfigurationError(
                f"io_threads must be a number from 1 to {MAX_IO_THREADS}, not {self.io_threads!r}"
            )
        for check in self.arena, self.inflight, self.spin_seconds, self.uses_fast_path:
            check()  # raises now, not later

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Add to the device map for worker ``to``.

        Args:
            to: the name of the callee.
            device_map: from devices of this worker to devices of the callee: ``cpu``, or CUDA devices as
                numbers, names or ``torch.device``.

        Raises:
            ConfigurationError: if a key or value is not a device, or if the map is not one-to-one.
        """
        if not isinstance(to, str):
            raise ArgumentTypeError(f"a device map is for the name of a worker, not for {to!r}")
        maps = dict(self.device_maps)
        maps[to] = to_device_map(device_map, maps.get(to))
        self.device_maps = maps

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Set the CUDA devices of this worker that RPC uses.

        Args:
            devices: numbers, names or ``torch.device``.

        Raises:
            ConfigurationError: if one of them is not a CUDA device, or is a duplicate.
        """
        self.devices = to_devices(devices)

    def check_devices(self) -> None:
        """Check that this process has the configured devices.

        Raises:
            ConfigurationError: if it does not.
        """
        named = [(f"the device map for {to}", each.keys()) for to, each in self.device_maps.items()]
        if not named and not self.devices:
            return
        count = torch.cuda.device_count()
        check_present(self.devices, count, "this process", "devices")
        for what, devices in named:
            check_present(devices, count, "this process", f"source devices with invalid indices: {what}")
            if self.devices and not {d for d in devices if d.type == "cuda"} <= set(self.devices):
                raise ConfigurationError(f"{what} names devices that are not among `devices`")

    def arena(self) -> ArenaSettings:
        """The settings of this worker's arena.

        Raises:
            ConfigurationError: if they are invalid.
        """
        return ArenaSettings(
            self._setting("arena_limit", default_limit()), self._setting("arena_threshold", THRESHOLD_BYTES)
        )

    def inflight(self) -> int:
        """Bytes that may be in flight to each peer; 0: no limit.

        Raises:
            ConfigurationError: if the value is invalid.
        """
        value: int = self._setting("inflight_bytes", DEFAULT_INFLIGHT_BYTES)
        if not _is_integer(value, 0):
            raise ConfigurationError(f"inflight_bytes must be a number of bytes, at least 0, not {value!r}")
        return value

    def spin_seconds(self) -> float:
        """Seconds for which a thread spins before it blocks.

        Raises:
            ConfigurationError: if the value is invalid.
        """
        value: int = self._setting("spin_us", round(SPIN_SECONDS * 1e6))
        if not _is_integer(value, 0, MAX_SPIN_US):
            raise ConfigurationError(
                f"spin_us must be a number of microseconds from 0 to {MAX_SPIN_US}, not {value!r}"
            )
        return value / 1e6

    def uses_fast_path(self) -> bool:
        """Whether to use the local fast path.

        Raises:
            ConfigurationError: if the value is invalid.
        """
        value: bool = self._setting("local_fast_path", True)
        if value not in (True, False):
            raise ArgumentTypeError(f"local_fast_path must be a bool, not {value!r}")
        return value

    def _setting(self, name: str, default: Any) -> Any:
        """The option ``name``; if None, the setting of that name in the environment, or else ``default``."""
        value = getattr(self, name)
        if value is None:
            value = getattr(environment, name)()
        return default if value is None else value

    @property
    def limits(self) -> LivenessTimeouts:
        """The timeouts of the failure detector."""
        if self.liveness_timeout is None:
            return LivenessTimeouts(frozen=self.frozen_timeout, refused=self.refused_timeout)
        return LivenessTimeouts(
            self.liveness_timeout, self.liveness_timeout, self.frozen_timeout, self.refused_timeout
        )


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """The name of these settings in torch, with torch's order of arguments.

    Example:
        >>> rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=0).num_worker_threads
        8
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
        _transports: Any = None,  # ignored, as is the next
        _channels: Any = None,
        **others: Any,  # options that torch does not have
    ) -> None:
        if not hasattr(type(rpc_timeout), "__float__"):  # the base takes a timedelta as well
            raise ArgumentTypeError(
                f"incompatible constructor arguments: rpc_timeout must be seconds here, not {rpc_timeout!r}"
            )
        super().__init__(
            rpc_timeout, init_method, num_worker_threads, device_maps or {}, devices or (), **others
        )


def _as_dict(device_maps: Any) -> dict[str, Any]:
    try:
        return dict(device_maps or {})
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"device_maps must be a dict from names of workers to device maps, not {device_maps!r}"
        ) from None


def _is_integer(value: object, lowest: int, highest: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def check_timeout(value: Any, name: str = "timeout", default: float = math.nan) -> float:
    """Seconds as a float, 0 for no limit.

    Args:
        default: for UNSET_RPC_TIMEOUT; NaN: there is none.

    Raises:
        ArgumentTypeError: unless ``value`` is a number of seconds or a timedelta.
        OptionError: if it is below 0.
    """
    if isinstance(value, timedelta):
        value, default = value.total_seconds(), math.nan
    if isinstance(value, bool) or not hasattr(type(value), "__float__"):
        raise ArgumentTypeError(f"{name} must be seconds or a timedelta, not {value!r}")
    try:
        seconds = float(value)
    except (OverflowError, RuntimeError, TypeError, ValueError) as e:  # too large; several elements
        raise OptionError(f"{name} must be a number of seconds: {e}") from None
    if seconds == UNSET_RPC_TIMEOUT:
        seconds = default
    if not seconds >= 0:
        raise OptionError(f"{name} must be at least 0 seconds (0: no limit), not {value!r}")
    return seconds
