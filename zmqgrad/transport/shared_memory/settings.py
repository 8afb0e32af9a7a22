"""How much memory an arena may take, and from where on it is used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from zmqgrad.errors import ConfigurationError

THRESHOLD = 16 << 10
"""Messages whose frames have fewer bytes go through the socket.

A message without frames of its own can use the same-host fast path, so with shared memory a round trip of
20 KB takes four fifths of the time, and one of 96 KB seven tenths.
"""

SHARE = 4
"""An arena may grow to one part in so many of the memory that this process may use."""

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class ArenaSettings:
    """Settings of the arena of one worker.

    Args:
        limit: bytes that it may lend at a time; 0: the arena is off. Memory is taken as it is used.
        threshold: a message whose tensors (and other large parts) have at least so many bytes goes by it.

    Raises:
        ConfigurationError: if a value cannot be right.
    """

    limit: int
    threshold: int = THRESHOLD

    def __post_init__(self) -> None:
        for name in ("limit", "threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"arena_{name} must be a number of bytes, at least 0, not {value!r}")


OFF = ArenaSettings(0)


def default_limit() -> int:
    """A quarter of the machine's memory, or of what this container may use."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 30
    for path in _LIMITS:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():  # cgroup v2 says "max" for no limit, v1 a huge number
            memory = min(memory, int(text))
    return max(0, memory // SHARE)
