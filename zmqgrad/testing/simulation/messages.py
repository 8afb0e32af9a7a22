"""The messages of a simulated job, in the order in which they were sent and received."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zmqgrad.transport.tap import STORE_CLIENT, STORE_SERVER, WORKER


class _Line(NamedTuple):
    """What ``who`` sent, received or noticed. ``peer`` is a rank, or a channel of the store."""

    seconds: float
    who: str
    verb: str
    peer: int
    text: str
    message_id: int = 0


class MessageLog:
    """What the processes of a job told each other.

    Args:
        now: the simulated time.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._lines: list[_Line] = []
        self._peers: dict[tuple[bool, int], str] = {}
        self._functions: dict[tuple[str, int], str] = {}

    def recorder(self, process: str) -> _Recorder:
        """Returns the recorder of a process, for :func:`zmqgrad.transport.tap.activate`."""
        return _Recorder(self, process)

    def add(self, line: _Line) -> None:
        """Adds a line."""
        self._lines.append(line)

    def name_peer(self, is_worker: bool, peer: int, name: str) -> None:
        """Says who ``peer`` is."""
        self._peers[is_worker, peer] = name

    def name_function(self, who: str, message_id: int, function: str) -> None:
        """Says what a request calls whose message does not name it."""
        self._functions[who, message_id] = function

    def lines(self) -> list[str]:
        """Returns a line for each: when, who, to or from whom, the type, what it calls, the number."""
        return [self._show(line) for line in self._lines]

    def _show(self, line: _Line) -> str:
        if line.who.endswith("/store"):
            peer = "store"
        else:
            peer = self._peers.get((line.who != "store", line.peer), "?")
        text = line.text
        if line.message_id:
            function = self._functions.get((line.who, line.message_id), "")
            text += f"{function and ' '}{function} #{line.message_id:x}"
        return f"{line.seconds:12.6f} {line.who} {line.verb} {peer} {text}"


class _Recorder:
    def __init__(self, log: MessageLog, process: str) -> None:
        self._log = log
        self._process = process

    def attach(self, identity: Any) -> _Tracer:
        """Returns the tracer of an object."""
        who = identity.name
        if identity.role == WORKER:
            self._log.name_peer(True, identity.number, who)
        elif identity.role == STORE_SERVER:
            who = "store"
        elif identity.role == STORE_CLIENT:
            who = f"{self._process}/store"
        return _Tracer(self._log, who)


class _Tracer:
    """Notes messages. Whatever else can be traced is not."""

    records_arguments = False
    records_heartbeats = False

    def __init__(self, log: MessageLog, who: str) -> None:
        self._log = log
        self._who = who
        self._is_client = who.endswith("/store")

    def tap(self, outgoing: bool, peer: int, envelope: Sequence[int], message: Any, *rest: object) -> None:
        if self._is_client:
            self._log.name_peer(False, peer, self._who)
        kind = type(message).__name__
        called = getattr(message, "wrapped", message)
        name = getattr(called, "function", "") or getattr(called, "key", "")
        verb = "->" if outgoing else "<-"
        text = f"{kind}{name and ' '}{name}"
        self._log.add(_Line(self._log.now(), self._who, verb, peer, text, envelope[3]))

    def request_described(self, message_id: int, function: str, **_: object) -> None:
        self._log.name_function(self._who, message_id, function)

    def peer_lost(self, peer: int, reason: str, left: bool = False) -> None:
        self._log.add(_Line(self._log.now(), self._who, "lost", peer, reason))

    def locate(self, peer: int, message_id: int, context: int = 0) -> str:
        return ""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: object, **kwargs: object) -> None:
    return None
