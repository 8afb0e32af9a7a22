"""The messages of a simulated job, in the order in which they were sent and received."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class MessageLog:
    """What the workers of a job told each other: the recorder of :mod:`zmqgrad.transport.tap` per process.

    Args:
        now: the simulated time.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.lines: list[str] = []
        self._now = now

    def attach(self, identity: Any) -> Any:
        """Returns the tracer of an object."""
        return _Tracer(self, identity)

    def note(self, text: str) -> None:
        """Adds a line."""
        self.lines.append(f"{self._now():12.6f} {text}")


class _Tracer:
    """Notes messages. Whatever else can be traced is not."""

    records_arguments = False
    records_heartbeats = False

    def __init__(self, log: MessageLog, identity: Any) -> None:
        self._note = log.note
        self._who = f"{identity.name or identity.role}"

    def tap(self, outgoing: bool, peer: int, envelope: Sequence[Any], message: Any, *rest: object) -> None:
        arrow = "->" if outgoing else "<-"
        kind = type(message).__name__
        self._note(f"{self._who} {arrow} {peer & 0xFFFF:x} {kind} {' '.join(f'{v:x}' for v in envelope[:4])}")

    def peer_lost(self, peer: int, reason: str) -> None:
        self._note(f"{self._who} lost {peer & 0xFFFF:x}: {reason}")

    def locate(self, peer: int, message_id: int, context: int = 0) -> str:
        return ""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: object) -> None:
    return None
