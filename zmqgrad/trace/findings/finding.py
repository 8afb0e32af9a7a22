"""A finding, and the words that several of them share."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

SHOWN = 5
"""How many calls, waits and functions are named."""


class Severity(str, enum.Enum):
    """How much a finding matters; the most severe first."""

    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"


class Finding(msgspec.Struct, frozen=True):
    """One finding.

    ``evidence`` has its numbers, for scripts; ``time`` is where to look in the trace, and ``message`` the
    requester and the message id of a request that shows it.
    """

    kind: str
    severity: Severity
    title: str
    detail: str
    workers: tuple[str, ...] = ()
    time: int | None = None
    evidence: dict[str, Any] = {}
    message: tuple[int, int] | None = None


def most_common(counts: Mapping[str, int]) -> str:
    """The largest of these counts as text."""
    most = Counter(counts).most_common(SHOWN)
    rest = len(counts) - len(most)
    return ", ".join(f"{name} ({count})" for name, count in most) + (f", and {rest} more" if rest else "")


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural if need be."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
