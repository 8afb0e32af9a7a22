"""What a cell of the table is, what happened in it, and what came of it. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

BEFORE_SENDING, AFTER_SENDING, ON_RECEIPT = "before sending", "after sending", "on receipt of"
AT_STEP, ENTERING = "at step", "on entering"
"""Moments of an agent: it has applied an action to its copy of the rendezvous; a phase of its lifecycle."""


class Moment(NamedTuple):
    """When the fault strikes the victim: at a message of this type, or a step of this name."""

    when: str
    message: str

    def __str__(self) -> str:
        return f"{self.when} {self.message}"


class Effect(Enum):
    """What a fault may do to the steps of a role, according to the guarantees."""

    DELAY = "every step succeeds, exactly once, perhaps late"
    REFUSAL = "each step succeeds or raises an error of this library; afterwards all succeed"
    LOSS = "steps that need the victim raise, in time; all others succeed"


@dataclass(frozen=True)
class Cell:
    """One entry of the table; all are names, so that a cell can be stored."""

    role: str
    fault: str
    moment: Moment | None = None

    @property
    def key(self) -> str:
        """Identifies the cell in the results."""
        return f"{self.role} | {self.fault} | {self.moment or '-'}"


class Step(NamedTuple):
    """One operation of a worker from beginning to end. ``error``: empty if it succeeded.

    Args:
        needs_victim: whether it involves the victim; the others must not even notice the fault.
        library_error: whether the exception is one of this library.
    """

    worker: str
    number: int
    needs_victim: bool
    began: float
    ended: float
    error: str = ""
    library_error: bool = True


@dataclass
class History:
    """What happened in one cell. Times are those of the monotonic clock."""

    struck: float | None = None
    over: float | None = None
    """When the fault ended; None: it is for good."""
    restarted: float | None = None
    steps: list[Step] = field(default_factory=list)
    lost: list[tuple[float, str, str, str]] = field(default_factory=list)
    """(time, worker that noticed, worker that was lost, reason)"""
    problems: list[str] = field(default_factory=list)
    """Promises that were seen to be broken by the workers themselves or by the runner."""
    moments: set[Moment] = field(default_factory=set)
    runs: dict[int, int] = field(default_factory=dict)
    """How often each numbered function ran."""


@dataclass(frozen=True)
class Verdict:
    """What is written into the table."""

    promised: str
    seen: str
    broken: Sequence[str]
    notice_seconds: float | None = None
    recovery_seconds: float | None = None
    reached: bool = True

    @property
    def word(self) -> str:
        """``kept``, ``broken``, or ``not reached``: the moment did not occur."""
        return "broken" if self.broken else "kept" if self.reached else "not reached"

    def as_json(self) -> dict[str, Any]:
        """All fields and the word."""
        return {**vars(self), "broken": list(self.broken), "verdict": self.word}
