"""Who a worker is: its name and id, and what it publishes of itself for others to find it by."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import sys
from pathlib import Path

import msgspec

from zmqgrad.errors import ConfigurationError, WorkerNameError
from zmqgrad.wire.ids import MAX_WORKER

MAX_NAME = 128


class WorkerInfo(msgspec.Struct, frozen=True):
    """Name and id (rank) of a worker; what a call can be addressed to."""

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class WorkerRecord(msgspec.Struct, frozen=True):
    """What a worker publishes of itself. ``program`` tells which ``__main__`` it runs.

    ``device_maps``: by the name of a worker that it calls, where tensors of its devices arrive there.
    ``device_count``: its CUDA devices; -1 where it did not look.
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

    @property
    def info(self) -> WorkerInfo:
        """Its public part."""
        return WorkerInfo(self.name, self.id)


def check_name(name: object) -> str:
    """``name`` if a worker can be called so.

    Raises:
        WorkerNameError: otherwise, saying why.
    """
    if not isinstance(name, str):
        raise WorkerNameError(f"a worker's name must be a string, not {name!r}")
    if not 0 < len(name) < MAX_NAME or not all(c.isalnum() or c in "_-:." for c in name):
        raise WorkerNameError(
            f"Worker name must match ^[A-Za-z0-9-_:.]*$, and must be non-empty and shorter than {MAX_NAME} "
            f"characters, not {name!r}"
        )
    return name


def check_rank(rank: object, world_size: object) -> tuple[int, int]:
    """Rank and world size if they fit each other.

    Raises:
        ConfigurationError: otherwise, saying why.
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
    """Which program ``__main__`` is: equal in workers that run the same file, unique where there is none."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        source = Path(path).read_bytes() if path else None
    except OSError:
        source = None
    if source is None:
        return f"{socket.gethostname()}/{os.getpid()}"
    return hashlib.sha256(source).hexdigest()[:16]


def wait_for_exit(record: WorkerRecord, seconds: float) -> bool:
    """Wait up to ``seconds`` for the process of ``record`` to be gone.

    False: it is still there, or cannot be watched from here (another host, or a system without pidfd).
    """
    if sys.platform != "linux" or record.host != socket.gethostname() or record.pid == os.getpid():
        return False
    try:
        descriptor = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return True
    except OSError:  # another user's, too many open files, or a kernel that cannot
        return False
    try:
        watched = select.poll()
        watched.register(descriptor, select.POLLIN)
        return bool(watched.poll(seconds * 1000))
    finally:
        os.close(descriptor)
