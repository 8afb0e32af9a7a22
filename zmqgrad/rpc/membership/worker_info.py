"""The identity of a worker, and the record by which others find it."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from zmqgrad.errors import ArgumentTypeError, ConfigurationError, WorkerNameError
from zmqgrad.runtime.arguments import as_list
from zmqgrad.wire.ids import MAX_WORKER

MAX_NAME = 128


class WorkerInfo(msgspec.Struct, frozen=True):
    """Name and id (rank) of a worker. Calls can be addressed to it.

    Example:
        >>> there = rpc.get_worker_info("worker1")
        >>> rpc.rpc_sync(there, pow, args=(2, 3))
        8
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


_info = lru_cache(maxsize=4096)(WorkerInfo)
"""As the class. To check a name takes longer than all else that a group call does for one member."""


class WorkerRecord(msgspec.Struct, frozen=True):
    """What a worker publishes about itself.

    Attributes:
        program: fingerprint of its ``__main__``; see :func:`program_fingerprint`.
        device_maps: by the name of a callee, the callee's device for each device of this worker.
        device_count: number of its CUDA devices; -1 if not determined.
        world_size: the number of workers that it expects; 0 in a dynamic group.
    """

    name: str
    id: int
    incarnation: int
    endpoints: tuple[str, ...]
    host: str
    pid: int
    program: str
    device_maps: dict[str, dict[str, str]] = {}
    device_count: int = -1
    world_size: int = 0

    @property
    def info(self) -> WorkerInfo:
        """The public part."""
        return _info(self.name, self.id)


def check_name(name: object) -> str:
    """Return ``name`` as a plain string if it is a valid name for a worker.

    Records hold no other kind of string, such as a member of an enumeration.

    Raises:
        WorkerNameError: if it is not.
    """
    if not isinstance(name, str):
        raise WorkerNameError(f"a worker's name must be a string, not {name!r}")
    if not 0 < len(name) < MAX_NAME or not all(c.isascii() and (c.isalnum() or c in "_-:.") for c in name):
        raise WorkerNameError(
            f"Worker name must match ^[A-Za-z0-9-_:.]*$, and must be non-empty and shorter than {MAX_NAME} "
            f"characters, not {name!r}"
        )
    return str.__str__(name)


def check_names(names: Any, argument: str, of: str = "workers") -> list[str]:
    """Return the ``names`` of ``of``, which were passed as ``argument``, as a list.

    Raises:
        ArgumentTypeError: if it is no list of names.
    """
    expected = f"{argument} must be a list of names of {of}"
    found = as_list(names, expected)
    if not all(isinstance(name, str) for name in found):
        raise ArgumentTypeError(f"{expected}, not {names!r}")
    return found


def check_rank(rank: object, world_size: object) -> tuple[int, int]:
    """Return rank and world size if both are valid.

    Raises:
        ConfigurationError: if they are not.
    """
    if (
        isinstance(world_size, bool)
        or not isinstance(world_size, int)
        or not 1 <= world_size <= MAX_WORKER + 1
    ):
        raise ConfigurationError(f"world_size must be 1 to {MAX_WORKER + 1}, not {world_size!r}")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank must be 0 to {world_size - 1} (world_size {world_size}), not {rank!r}"
        )
    return rank, world_size


def program_fingerprint() -> str:
    """Hash of the source of ``__main__``; unique to the process if there is no source file."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        source = Path(path).read_bytes() if path else None
    except OSError:
        source = None
    if source is None:
        return f"{socket.gethostname()}/{os.getpid()}"
    return hashlib.sha256(source).hexdigest()[:16]


def wait_for_exit(record: WorkerRecord, seconds: float) -> bool:
    """Wait up to ``seconds`` until the process of ``record`` has ended.

    Returns:
        False if it has not, or cannot be watched from here (another host, or a system without pidfd).
    """
    if sys.platform != "linux" or record.host != socket.gethostname() or record.pid == os.getpid():
        return False
    try:
        descriptor = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process, too many open files, or an old kernel
        return False
    try:
        watched = select.poll()
        watched.register(descriptor, select.POLLIN)
        return bool(watched.poll(seconds * 1000))
    finally:
        os.close(descriptor)
