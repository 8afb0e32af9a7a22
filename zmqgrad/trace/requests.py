"""Where a request is that was sent to another worker, as that worker's log tells: for errors of running jobs.

The logs of a job lie in one directory on each host, so those of workers on other hosts are found only if it
is shared. What is read is bounded: the end of one log.
"""

from __future__ import annotations

import itertools
import logging
import threading
from pathlib import Path

import msgspec

from zmqgrad.errors import TraceError
from zmqgrad.runtime.clock import monotonic_ns, wall_ns
from zmqgrad.trace.declarations import declare
from zmqgrad.trace.events import (
    Event,
    MessageReceived,
    MessageSent,
    RequestFinished,
    RequestStarted,
    ThreadDeclared,
)
from zmqgrad.trace.kinds import BACKWARD, ONE_WAY
from zmqgrad.trace.log import LogReader, find_logs
from zmqgrad.trace.model import Actor, Call, Message, Process
from zmqgrad.trace.places import place
from zmqgrad.transport.tap import WORKER, Identity
from zmqgrad.wire.messages import REQUEST, RESPONSE

logger = logging.getLogger(__name__)

MAX_BYTES = 2 << 20
"""What is read of the end of a log: some 50,000 events, which takes 50 ms."""

FIRST_RECORDS = 32
"""The records at the start of a log in which its worker is looked for."""

FRESH_NANOSECONDS = 1_000_000_000
"""For how long a log that was read is used again: thousands of calls may time out together."""


class _Snapshot(msgspec.Struct):
    """The requests that worker ``actor`` has received, by their sender and message id."""

    process: Process
    actor: Actor
    read: int
    is_complete: bool
    """Whether all of its log was read."""
    calls: dict[tuple[int, int], Call] = {}

    def now(self) -> int:
        """This moment by the clock of that process; by wall clocks, if it is on another host."""
        own, here = monotonic_ns(), wall_ns() - self.process.wall_offset
        return own if abs(own - here) < FRESH_NANOSECONDS else here


class RemoteRequests:
    """Locates requests of the worker ``identity``, whose job records into ``directory``. Thread-safe."""

    def __init__(self, directory: Path, identity: Identity) -> None:
        self._directory, self._identity = directory, identity
        self._lock = threading.Lock()  # guards the snapshots
        self._snapshots: dict[int, _Snapshot] = {}

    def locate(self, peer: int, incarnation: int, message_id: int, context: int = 0) -> str:
        """As :meth:`zmqgrad.transport.tap.Tracer.locate`; ``incarnation`` of ``peer``: 0 if unknown."""
        try:
            with self._lock:
                snapshot = self._snapshots.get(peer)
                if snapshot is None or monotonic_ns() - snapshot.read > FRESH_NANOSECONDS:
                    snapshot = self._read(peer, incarnation)
                    if snapshot is not None:
                        self._snapshots[peer] = snapshot
        except TraceError as e:
            logger.debug("%s", e)
            return ""
        return "" if snapshot is None else self._describe(snapshot, message_id, context)

    def _describe(self, snapshot: _Snapshot, message_id: int, context: int) -> str:
        calls = snapshot.calls
        call = calls.get((self._identity.number, message_id))
        if context:
            call = next(
                (
                    c
                    for c in calls.values()
                    if c.request.kind in BACKWARD and c.request.context == context and c.finished is None
                ),
                None,
            )
        if call is None:
            unknown = context or not snapshot.is_complete
            return "" if unknown else f"{snapshot.actor.name} has not received it, as far as its trace shows"
        waiting = [c for c in calls.values() if c.finished is None and c.request.kind not in ONE_WAY]
        before = call.request.received or 0
        queued = sum(c.started is None and (c.request.received or 0) < before for c in waiting)
        running = sum(c.started is not None for c in waiting)
        thread = snapshot.process.thread_name(call.thread)
        return place(call, snapshot.now(), snapshot.actor.name, thread, (queued, running))

    def _read(self, peer: int, incarnation: int) -> _Snapshot | None:
        """Reads the end of the log of worker ``peer``; None: it is not here."""
        for path in reversed(find_logs(self._directory)):
            try:
                if (snapshot := self._read_log(path, peer, incarnation)) is not None:
                    return snapshot
            except TraceError as e:  # of another version, say, or of a process that is just starting
                logger.debug("%s", e)
        return None

    def _read_log(self, path: Path, peer: int, incarnation: int) -> _Snapshot | None:
        with LogReader(path) as reader:
            process = Process(path, reader.info)
            first = [e for batch in itertools.islice(reader.batches(), FIRST_RECORDS) for e in batch]
            declare(process, first)
            for actor in process.actors.values():
                by_rank = (actor.role, actor.rank, actor.job) == (WORKER, peer, self._identity.job)
                if actor.incarnation == incarnation if incarnation else by_rank:
                    snapshot = _Snapshot(process, actor, monotonic_ns(), not reader.skip(MAX_BYTES))
                    for event in itertools.chain(first, reader):
                        _apply(snapshot, event)
                    return snapshot
        return None


def _apply(snapshot: _Snapshot, event: Event) -> None:
    """Notes what ``event`` tells about the requests that the worker has received."""
    calls, actor = snapshot.calls, snapshot.actor.number
    if isinstance(event, ThreadDeclared):
        declare(snapshot.process, [event])
    elif isinstance(event, MessageReceived):
        if event.actor == actor and event.kind & REQUEST:
            calls[event.peer, event.message_id] = Call(
                Message(event.kind, event.message_id, received=event.time, context=event.context)
            )
    elif isinstance(event, (RequestStarted, RequestFinished, MessageSent)):
        call = calls.get((event.peer, event.message_id))
        if call is None or event.actor != actor:
            return
        if isinstance(event, RequestStarted):
            call.started, call.thread = event.time, event.thread
        elif isinstance(event, RequestFinished):
            call.finished = event.time
        elif event.kind & RESPONSE:
            call.reply = Message(event.kind, event.message_id, sent=event.time)
