"""Statistics of a job: counts, bytes and latencies by message type, by pair of actors, and by function. Pure.

Everything streams: the memory depends on the number of different types, pairs and functions alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from zmqgrad.trace.job import Job
from zmqgrad.trace.kinds import ONE_WAY, is_store
from zmqgrad.trace.labels import ends, process_label
from zmqgrad.trace.model import Call, Message, Process
from zmqgrad.trace.sketch import Sketch
from zmqgrad.trace.waits import IN_FLIGHT_NANOSECONDS


class Latency(msgspec.Struct):
    """Quantiles in nanoseconds, within 1%; the maximum is exact. None: nothing was measured."""

    count: int = 0
    p50: int | None = None
    p90: int | None = None
    p99: int | None = None
    max: int | None = None


class Row(msgspec.Struct):
    """One type, pair or function. A call counts for the type and the pair of its request."""

    name: str
    messages: int
    bytes: int
    calls: int
    failed: int
    unanswered: int
    """Calls without a recorded reply."""
    whole: Latency
    """From the send of the request to the arrival of the reply."""
    sending: Latency
    """Of that: serializing, copying and sending request and reply, at both ends; 0 of what is small."""
    transfer: Latency
    """Of that: request and reply on their way; a receiver that is busy makes it longer."""
    queued: Latency
    """Of that: until a thread took the request."""
    running: Latency
    """Of that: in this thread, until the reply was sent."""


class ProcessRow(msgspec.Struct):
    """One process. ``clock_bound`` is the largest error of its times in ns; None: not known."""

    name: str
    host: str
    pid: int
    events: int
    dropped: int
    damage: str
    has_end: bool
    """Whether its log ends with a shutdown, or still grows; False: it was cut, or its process killed."""
    clock_bound: int | None
    clock_jumps: int


class Statistics(msgspec.Struct):
    """All of a job. ``nanoseconds`` is the time from its first event to its last."""

    nanoseconds: int
    messages: int
    bytes: int
    lost: int
    """Messages that the log of their receiver does not have, though it goes on after they were sent."""
    dropped: int
    processes: list[ProcessRow]
    types: list[Row]
    pairs: list[Row]
    functions: list[Row]


class _Group:
    """Collects one row."""

    def __init__(self) -> None:
        self.messages = self.bytes = self.calls = self.failed = self.unanswered = 0
        self.parts = tuple(Sketch() for _ in range(5))

    def add_message(self, message: Message) -> None:
        self.messages += 1
        self.bytes += message.size

    def add_call(self, call: Call) -> None:
        self.calls += 1
        self.failed += call.has_failed
        is_open = call.reply is None and call.given_up is None
        self.unanswered += is_open and call.request.kind not in ONE_WAY
        for part, value in zip(self.parts, parts(call), strict=True):
            if value is not None:
                part.add(value)

    def row(self, name: str) -> Row:
        counts = (self.messages, self.bytes, self.calls, self.failed, self.unanswered)
        return Row(name, *counts, *map(latency, self.parts))


def parts(call: Call) -> tuple[int | None, ...]:
    """How long a call took as a whole, and of that: sending, in transfer, in the queue, running (ns)."""
    there, back = call.request.transfer, call.reply.transfer if call.reply is not None else None
    transfer = None if there is None or back is None else there + back
    return call.duration, call.sending, transfer, call.queued, call.running


def is_lost(job: Job, message: Message) -> bool:
    """Whether the log of the receiver shows that ``message`` did not arrive: not if it stops before."""
    if message.sent is None or message.received is not None or message.target is None:
        return False
    return message.sent + IN_FLIGHT_NANOSECONDS < job.known_until(message.target.process)


def latency(sketch: Sketch) -> Latency:
    """The quantiles that are shown."""
    if not sketch.count:
        return Latency()
    p50, p90, p99 = map(sketch.quantile, (0.5, 0.9, 0.99))
    return Latency(sketch.count, p50, p90, p99, sketch.max)


def statistics(job: Job) -> Statistics:
    """Reads all messages and calls of ``job``."""
    types: defaultdict[str, _Group] = defaultdict(_Group)
    pairs: defaultdict[str, _Group] = defaultdict(_Group)
    functions: defaultdict[str, _Group] = defaultdict(_Group)
    messages = size = lost = 0
    for message in job.messages():
        messages += 1
        size += message.size
        lost += is_lost(job, message)
        types[message.type].add_message(message)
        pairs[" > ".join(ends(message))].add_message(message)
    for call in job.calls():
        types[call.request.type].add_call(call)
        pairs[" > ".join(ends(call.request))].add_call(call)
        if call.function and not is_store(call.request.kind):
            group = functions[call.function]
            group.add_call(call)
            for each in (call.request, call.reply):
                if each is not None:
                    group.add_message(each)
    begin, end = job.span()
    processes = [_process_row(job, process) for process in job.processes]
    dropped = sum(p.dropped for p in processes)
    rows = map(_rows, (types, pairs, functions))
    return Statistics(end - begin, messages, size, lost, dropped, processes, *rows)


def _rows(groups: Mapping[str, _Group]) -> list[Row]:
    rows = [group.row(name) for name, group in groups.items()]
    return sorted(rows, key=lambda row: (-row.messages, row.name))


def _process_row(job: Job, process: Process) -> ProcessRow:
    bound = max(job.bound(process, process.first), job.bound(process, process.last))
    limit, jumps, info = round(bound) if math.isfinite(bound) else None, len(process.jumps), process.info
    counts, has_end = (process.events, process.dropped), process.has_end or process.is_live
    label = process_label(process)
    return ProcessRow(label, info.host, info.pid, *counts, process.damage, has_end, limit, jumps)
