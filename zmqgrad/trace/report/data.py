"""The data of a report, packed: a description in JSON and columns of numbers."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from zmqgrad.errors import TraceError
from zmqgrad.trace.contexts import Context
from zmqgrad.trace.events import Role
from zmqgrad.trace.findings import Finding, Survey
from zmqgrad.trace.job import Job
from zmqgrad.trace.kinds import type_name
from zmqgrad.trace.labels import actor_label
from zmqgrad.trace.model import Message
from zmqgrad.trace.places import locate, thread_label
from zmqgrad.trace.report.activity import Activity
from zmqgrad.trace.report.columns import (
    MAX_UINT32,
    NO_ROW,
    NO_TIME,
    Actors,
    Messages,
    Numbering,
    little_endian,
)
from zmqgrad.trace.stats import is_lost
from zmqgrad.wire.ids import show_id, split_id

MAX_MESSAGES = 2_000_000
MAX_CONTEXTS = 200
MAX_GROUPS = 20_000
"""Contexts, and groups of them, of which the page draws the graph: the first ones."""

OPEN = 2
"""The state of a wait that has not ended; 0: it got its reply, 1: it did not."""

MAX_PLACES = 1_000
"""How many stuck waits are explained."""

_TYPED_ARRAYS = {"B": "Uint8", "H": "Uint16", "I": "Uint32", "i": "Int32"}


class Report:
    """The data of a page: columns of messages and waits, and what fits into JSON."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.actors = Actors(job.actors())
        self._start, self._end = job.span()
        self._lost = 0
        self.messages = Messages(self.actors, self._shown())
        self.activity = Activity(self.messages)
        survey = Survey(job, also=self.activity)
        self.activity.waits.sort(key=lambda w: w.since)
        self._waits, self.findings = survey.waits, survey.findings(notes=True)
        self._tick = max(1, -(-(self._end - self._start) // (MAX_UINT32 - 1)))

    def _shown(self) -> Iterator[Message]:
        for count, message in enumerate(self._job.messages()):
            if count == MAX_MESSAGES:
                raise TraceError(
                    f"{self._job.directory} has more than {MAX_MESSAGES:,} messages, which is more than "
                    "a page can show: choose a part of it with --since and --until"
                )
            self._lost += is_lost(self._job, message)
            yield message

    # ---- columns ----------------------------------------------------------------------------------------

    def packed(self) -> bytes:
        """A description in JSON, preceded by its size in 4 bytes, and the columns that it lists."""
        texts = Numbering("")
        columns = {**self._message_columns(texts), **self._wait_columns()}
        layout = [(name, _TYPED_ARRAYS[c.typecode], len(c)) for name, c in columns.items()]
        summary = self._summary(texts)
        head = msgspec.json.encode({**summary, "texts": texts.values(), "columns": layout})
        head += b" " * (-(len(head) + 4) % 8)
        return struct.pack("<I", len(head)) + head + b"".join(map(little_endian, columns.values()))

    def _message_columns(self, texts: Numbering) -> dict[str, array[int]]:
        m = self.messages
        ticks = self._ticks(m.time)
        steps = array("I", [b - a for a, b in zip([0, *ticks], ticks, strict=False)])
        arguments = array("I", [0]) * len(m)
        for row, text in m.arguments.items():
            arguments[row] = texts[text]
        return {
            "step": steps,
            "flight": self._spans(m.time, m.end),
            "queued": self._spans(m.end, m.started),
            "ran": self._spans(m.started, m.finished),
            "pair": m.pair,
            "flags": m.flags,
            "kind": m.kind,
            "source": m.source,
            "target": m.target,
            "senderThread": m.sender_thread,
            "receiverThread": m.receiver_thread,
            "name": m.name,
            "size": m.size,
            "idWorker": array("H", [number >> 48 for number in m.number]),
            "idCounter": array("I", [split_id(number)[1] & MAX_UINT32 for number in m.number]),
            "context": m.context,
            "arguments": arguments,
        }

    def _wait_columns(self) -> dict[str, array[int]]:
        waits, now, worker = self.activity.waits, self._waits.now, self._job.worker
        requests, threads = self.messages.requests, self.messages.threads
        return {
            "waitBegun": self._ticks(w.since for w in waits),
            "waitTime": array("I", [min(w.duration(now) // self._tick, MAX_UINT32) for w in waits]),
            "waitActor": array("i", [self.actors.number(w.waiter) for w in waits]),
            "waitPeer": array("i", [self.actors.number(worker(w.waiter.job, w.rank)) for w in waits]),
            "waitState": array("B", [OPEN if w.until is None else int(w.failed) for w in waits]),
            "waitRow": array(
                "i", [requests.get((w.waiter.incarnation, w.message_id), NO_ROW) for w in waits]
            ),
            "waitThread": array("I", [threads[thread_label(w)] for w in waits]),
        }

    def _ticks(self, times: Iterable[int]) -> array[int]:
        start, tick, end = self._start, self._tick, MAX_UINT32
        return array("I", [min(max(t - start, 0) // tick, end) for t in times])

    def _spans(self, begins: array[int], ends: array[int]) -> array[int]:
        """Durations in ticks; the largest number where one end is unknown."""
        tick = self._tick
        return array(
            "I",
            [
                min(max(b - a, 0) // tick, MAX_UINT32 - 1) if a != NO_TIME and b != NO_TIME else MAX_UINT32
                for a, b in zip(begins, ends, strict=True)
            ],
        )

    # ---- summary ----------------------------------------------------------------------------------------

    def _summary(self, texts: Numbering) -> dict[str, Any]:
        job, m = self._job, self.messages
        return {
            "tick": self._tick,
            "lost": self._lost,
            "duration": self._end - self._start,
            "wall": job.wall(self._start) // 1_000_000,
            "directory": str(job.directory),
            "program": next((p.info.program for p in job.processes if p.info.program), ""),
            "actors": [self._actor(i) for i in range(len(self.actors.all))],
            "kinds": {kind: type_name(kind) for kind in sorted(set(m.kind))},
            "names": m.names.values(),
            "threads": m.threads.values(),
            "contextIds": [show_id(number) if number else "" for number in m.contexts.values()],
            "findings": list(map(self._finding, self.findings)),
            "stacks": self._stacks(texts),
            "places": self._places(texts),
            "contexts": list(self._contexts()),
        }

    def _tick_of(self, time: int) -> int:
        return max(time - self._start, 0) // self._tick

    def _finding(self, finding: Finding) -> dict[str, Any]:
        return {
            "kind": finding.kind,
            "severity": finding.severity,
            "title": finding.title,
            "detail": finding.detail,
            "time": None if finding.time is None else self._tick_of(finding.time),
            "row": self.messages.requests.get(finding.message, NO_ROW) if finding.message else NO_ROW,
        }

    def _stacks(self, texts: Numbering) -> list[tuple[int, str, int, int]]:
        """The recorded stacks: the process, its thread, the tick, and the text."""
        index = self._job.processes.index
        return [
            (index(process), event.name, self._tick_of(time), texts[event.stack])
            for time, process, event in self.activity.stacks
        ]

    def _places(self, texts: Numbering) -> dict[int, list[int]]:
        """Where the requests are that the stuck waits wait for, in words; by the number of the wait."""
        numbers = {(w.waiter, w.thread, w.since): i for i, w in enumerate(self.activity.waits)}
        places: dict[int, list[int]] = {}
        for wait in self._waits.stuck()[:MAX_PLACES]:
            number = numbers.get((wait.waiter, wait.thread, wait.since))
            if number is not None and wait.is_blocking:
                places.setdefault(number, []).append(texts[locate(wait, self._waits)])
        return places

    def _actor(self, number: int) -> dict[str, Any]:
        actor = self.actors.all[number]
        process = actor.process
        bound = self._job.bound(process, (actor.started + process.last) // 2)
        return {
            "name": actor_label(actor),
            "role": actor.role.name.lower().replace("_", " "),
            "isWorker": actor.role is Role.WORKER,
            "rank": actor.rank,
            "host": process.info.host,
            "pid": process.info.pid,
            "process": self._job.processes.index(process),
            "bound": None if bound == float("inf") else bound,
            "dropped": process.dropped,
            "stopped": actor.stopped is not None,
        }

    def _contexts(self) -> Iterator[dict[str, Any]]:
        groups = 0
        used = [each for each in self.activity.contexts.all.values() if each.sends or each.passes]
        for context in used[:MAX_CONTEXTS]:
            groups += len(context.groups)
            if groups > MAX_GROUPS:
                return
            yield self._context(context)

    def _context(self, context: Context) -> dict[str, Any]:
        number, worker, tick = self.actors.number, self._job.worker, self._tick_of
        unused, rows = {send.id for send in context.unused()}, self.activity.send_rows
        groups = sorted(context.groups, key=lambda g: g.began)
        return {
            "id": show_id(context.number),
            "sends": [
                (
                    show_id(s.id),
                    number(s.actor),
                    number(worker(s.actor.job, s.peer)),
                    rows[context.job, s.id],
                    tick(s.time),
                    s.id in unused,
                )
                for s in context.sends.values()
            ],
            "groups": [
                (number(g.actor), tick(g.began), g.nanoseconds // self._tick, _ids(g.sends), _ids(g.recvs))
                for g in groups
            ],
            "passes": [
                (number(p.actor), tick(p.began), None if p.ended is None else tick(p.ended), p.failed)
                for p in context.passes.values()
                if p.actor is not None
            ],
        }


def _ids(sends: Iterable[int]) -> list[str]:
    return list(map(show_id, sends))
