"""Settings of shared memory: how much a worker may lease, and for which messages it is used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from zmqgrad.errors import ConfigurationError

THRESHOLD_BYTES = 16_000
"""Messages with fewer bytes of frames go through the socket.

The rest of such a message is one packet, so with shared memory a call with 16 KB of tensors takes 0.77 of the
time, and one with 48 or 64 KB 0.7. Fewer bytes fit in the header (``wire.tensors.blobs``).
"""

MEMORY_DIVISOR = 4
"""By default an arena may grow to the memory that this process may use, divided by this."""

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class ArenaSettings:
    """Settings of one worker's arena.

    Args:
        limit: bytes that may be leased at a time; 0 disables the arena. Memory is allocated as it is written.
        threshold: size in bytes from which the frames (tensors and other large parts) of a message use it.

    Raises:
        ConfigurationError: if a value is not a number of bytes.
    """

    limit: int
    threshold: int = THRESHOLD_BYTES

    def __post_init__(self) -> None:
        for name in ("limit", "threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"arena_{name} must be a number of bytes, at least 0, not {value!r}")


OFF = ArenaSettings(0)


def default_limit() -> int:
    """Return a quarter of the memory of the machine, or of the limit of this container, in bytes."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 30
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():  # no limit is "max" in cgroup v2, a huge number in v1
            memory = min(memory, int(text))
    return max(0, memory // MEMORY_DIVISOR)
