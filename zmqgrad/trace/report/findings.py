"""What a person should look at first: computed from the messages and the activity of a job. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import msgspec

from zmqgrad.trace.events import Role
from zmqgrad.trace.report.activity import ENDED, OPEN, Activity, Wait
from zmqgrad.trace.report.columns import HAS_RECEIVED, NO_ROW, NO_TIME, Actors, Messages
from zmqgrad.wire.messages import MessageType

PROBLEM, WARNING, NOTE = "problem", "warning", "note"

SHOWN = 5
"""How many calls, waits and contexts are named."""

MIN_CALLS = 5
STRAGGLER_FACTOR = 2.0
"""A worker that takes this many times the median of the others for the same function is a straggler."""

MAX_WAITS = 5_000
"""Of how many waits, the longest, circles are searched."""

HOT_FACTOR = 2.0
"""A worker that serves this many times its fair share of the requests is hot."""


class Finding(msgspec.Struct):
    """One finding; ``row`` is a message that shows it, or -1, and ``time`` where to look (ns), or None."""

    severity: str
    title: str
    detail: str
    row: int = NO_ROW
    time: int | None = None


class Findings:
    """Finds what stands out.

    Args:
        actors, messages, activity: of the job.
    """

    def __init__(self, actors: Actors, messages: Messages, activity: Activity) -> None:
        self._actors, self._messages, self._activity = actors, messages, activity
        self._names = messages.names.values()
        self._workers = [i for i, a in enumerate(actors.all) if a.role is Role.WORKER]

    def all(self) -> list[Finding]:
        """All findings, problems first."""
        found = [
            *self._cycles(),
            *self._lost(),
            *self._unanswered(),
            *self._stragglers(),
            *self._hot(),
            *self._unused_sends(),
            *self._longest_waits(),
            *self._slowest_calls(),
        ]
        order = (PROBLEM, WARNING, NOTE)
        return sorted(found, key=lambda f: order.index(f.severity))

    def _name(self, actor: int) -> str:
        return show_actor(self._actors, actor)

    def _function(self, row: int) -> str:
        if row == NO_ROW:
            return "a backward pass"
        messages = self._messages
        kind = messages.kind[row]
        known = kind in MessageType._value2member_map_
        return self._names[messages.name[row]] or (MessageType(kind).name if known else str(kind))

    # ---- hangs ------------------------------------------------------------------------------------------

    def _cycles(self) -> Iterator[Finding]:
        """Workers that wait for each other in a circle, among waits that got no reply."""
        for cycle in find_cycles(w for w in self._activity.waits if w.row != NO_ROW):
            path = " → ".join(self._name(w.actor) for w in [*cycle, cycle[0]])
            lines = "; ".join(
                f"{self._name(w.actor)} ({w.thread}) waits {show_time(w.ended - w.begun)} "
                f"for {self._function(w.row)} of {self._name(w.peer)}"
                for w in cycle
            )
            yield Finding(PROBLEM, f"Deadlock: {path}", lines, cycle[0].row, max(w.begun for w in cycle))

    def _lost(self) -> Iterator[Finding]:
        """Workers that were not closed."""
        last = max((a.process.last for a in self._actors.all), default=0)
        for actor in self._workers:
            each = self._actors.all[actor]
            if each.stopped is None:
                yield Finding(
                    WARNING,
                    f"{self._name(actor)} did not shut down",
                    f"Process {each.process.info.pid} on {each.process.info.host} was killed, or still ran, "
                    f"when its log ended{_before(last - each.process.last)}.",
                )
            if each.process.dropped:
                yield Finding(
                    WARNING,
                    f"{self._name(actor)} dropped {each.process.dropped:,} events",
                    "They were recorded faster than written; what is missing here is not missing in the job.",
                )

    def _unanswered(self) -> Iterator[Finding]:
        messages = self._messages
        rows = [row for row in messages.requests.values() if self._awaits_reply(row)]
        if not rows:
            return
        functions = Counter(self._function(row) for row in rows)
        shown = ", ".join(f"{name} ({count:,})" for name, count in functions.most_common(SHOWN))
        yield Finding(
            WARNING, f"{_count(len(rows), 'request')} without a reply", shown, rows[0], messages.time[rows[0]]
        )

    def _awaits_reply(self, row: int) -> bool:
        messages = self._messages
        reply = messages.pair[row]
        return messages.kind[row] in _CALLS and (reply == NO_ROW or not messages.flags[reply] & HAS_RECEIVED)

    # ---- load -------------------------------------------------------------------------------------------

    def _stragglers(self) -> Iterator[Finding]:
        """Workers that are slower than the others at the same function."""
        times: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        messages = self._messages
        for row in messages.requests.values():
            if messages.finished[row] != NO_TIME and messages.kind[row] in _CALLS and messages.name[row]:
                times[messages.name[row]][messages.target[row]].append(row)
        for name, by_worker in times.items():
            medians = {w: self._median_run(r) for w, r in by_worker.items() if len(r) >= MIN_CALLS}
            for worker, own in medians.items():
                others = [value for w, value in medians.items() if w != worker]
                if not others or own < STRAGGLER_FACTOR * median(others) or own - median(others) < 100_000:
                    continue
                slowest, usual = max(by_worker[worker], key=self._run_time), median(others)
                yield Finding(
                    WARNING,
                    f"Straggler: {self._name(worker)}",
                    f"{self._names[name]} takes {show_time(own)} there (median of {len(by_worker[worker]):,} "
                    f"calls), {show_time(usual)} on other workers: {own / max(usual, 1):.1f} times as long.",
                    slowest,
                    messages.time[slowest],
                )

    def _run_time(self, row: int) -> int:
        return self._messages.finished[row] - self._messages.started[row]

    def _median_run(self, rows: Sequence[int]) -> float:
        return median(map(self._run_time, rows))

    def _hot(self) -> Iterator[Finding]:
        """Workers that serve much more than their share."""
        messages = self._messages
        served: defaultdict[int, list[int]] = defaultdict(list)
        for row in messages.requests.values():
            if messages.kind[row] in _CALLS and messages.target[row] in self._workers:
                served[messages.target[row]].append(row)
        total = sum(map(len, served.values()))
        fair = total / max(len(self._workers), 1)
        for worker, rows in served.items():
            if len(self._workers) < 3 or len(rows) < max(HOT_FACTOR * fair, 20):
                continue
            queued = [messages.started[r] - messages.end[r] for r in rows if messages.started[r] != NO_TIME]
            size = sum(messages.size[r] for r in rows)
            longest = max(rows, key=lambda r: messages.started[r] - messages.end[r])
            wait = f" They waited {show_time(median(queued))} for a thread (median)." if queued else ""
            yield Finding(
                WARNING,
                f"Hot worker: {self._name(worker)}",
                f"It serves {len(rows) / total:.0%} of all requests ({len(rows):,} of {total:,}; "
                f"an equal share is {1 / len(self._workers):.0%}), {show_bytes(size)}.{wait}",
                longest,
                messages.time[longest],
            )

    def _unused_sends(self) -> Iterator[Finding]:
        unused = [(c, sends) for c in self._activity.contexts.values() if (sends := c.unused())]
        if not unused:
            return
        functions = Counter(self._function(s.row) for _, sends in unused for s in sends if s.row != NO_ROW)
        total = sum(len(sends) for _, sends in unused)
        first = unused[0][1][0]
        shown = ", ".join(f"{name} ({count:,})" for name, count in functions.most_common(SHOWN))
        yield Finding(
            WARNING,
            f"{_count(total, 'send')} without a gradient",
            f"Tensors that require grad were sent in {_count(len(unused), 'context')}, but no backward pass "
            f"reached them: their results are unused. {shown}",
            first.row,
            first.time,
        )

    # ---- times ------------------------------------------------------------------------------------------

    def _longest_waits(self) -> Iterator[Finding]:
        longest: dict[tuple[int, int, int, str], Wait] = {}
        for wait in sorted(self._activity.waits, key=lambda w: (w.state == ENDED, w.begun - w.ended)):
            longest.setdefault((wait.actor, wait.peer, wait.state, self._function(wait.row)), wait)
        for wait in list(longest.values())[:SHOWN]:
            end = {ENDED: "", OPEN: ", and still waits when the trace ends"}.get(
                wait.state, ", without a reply"
            )
            yield Finding(
                NOTE if wait.state == ENDED else PROBLEM,
                f"{self._name(wait.actor)} waited {show_time(wait.ended - wait.begun)}",
                f"Thread {wait.thread} waited for {self._function(wait.row)} of "
                f"{self._name(wait.peer)}{end}.",
                wait.row,
                wait.begun,
            )

    def _slowest_calls(self) -> Iterator[Finding]:
        messages = self._messages
        slowest: dict[int, tuple[int, int, int]] = {}
        for row, reply in messages.calls():
            duration = messages.end[reply] - messages.time[row]
            if duration > slowest.get(messages.name[row], (0,))[0] and messages.kind[row] in _CALLS:
                slowest[messages.name[row]] = (duration, row, reply)
        for duration, row, reply in sorted(slowest.values(), reverse=True)[:SHOWN]:
            yield Finding(
                NOTE,
                f"Slow call: {self._function(row)}, {show_time(duration)}",
                f"{self._name(messages.source[row])} → {self._name(messages.target[row])}: "
                + self._parts(row, reply),
                row,
                messages.time[row],
            )

    def _parts(self, row: int, reply: int) -> str:
        m = self._messages
        parts = [f"{show_time(m.end[row] - m.time[row])} to arrive"]
        if m.started[row] != NO_TIME:
            parts.append(f"{show_time(m.started[row] - m.end[row])} in the queue")
            if m.finished[row] != NO_TIME:
                parts.append(f"{show_time(m.finished[row] - m.started[row])} running")
        return ", ".join([*parts, f"{show_time(m.end[reply] - m.time[reply])} for the reply"]) + "."


_CALLS = frozenset(
    (
        MessageType.CALL,
        MessageType.REMOTE_CALL,
        MessageType.RREF_FETCH,
        MessageType.FORWARD_AUTOGRAD_REQ,
    )
)
"""Requests of the program, which it may wait for."""


def find_cycles(waits: Iterable[Wait]) -> Iterator[list[Wait]]:
    """Yields circles of workers that wait for each other at one moment, at least one of them in vain.

    A call that calls back also makes a circle, so the waits of a circle must last as long, more or less, as
    the one that got no reply. Each worker is in one circle at most.
    """
    longest = sorted(waits, key=lambda w: w.begun - w.ended)[:MAX_WAITS]
    seen: set[int] = set()
    for first in longest:
        if first.state == ENDED or first.actor in seen:
            continue
        path: dict[int, Wait] = {}
        wait: Wait | None = first
        while wait is not None and wait.actor not in path and wait.actor not in seen:
            path[wait.actor] = wait
            wait = _next_wait(longest, wait.peer, first)
        if wait is not None and wait.actor == first.actor:
            seen.update(path)
            yield list(path.values())


def _next_wait(waits: Sequence[Wait], actor: int, stuck: Wait) -> Wait | None:
    return next((w for w in waits if w.actor == actor and _overlap(w, stuck)), None)


def _overlap(wait: Wait, stuck: Wait) -> bool:
    """Whether both wait at one moment, for half as long as ``stuck``."""
    common = min(wait.ended, stuck.ended) - max(wait.begun, stuck.begun)
    return common > 0 and 2 * common >= stuck.ended - stuck.begun


def show_actor(actors: Actors, number: int) -> str:
    """The name of an actor, as people know it."""
    if number == NO_ROW:
        return "an unknown worker"
    actor = actors.all[number]
    names = [a.name for a in actors.all if a.process is actor.process and a.role is Role.WORKER]
    if actor.role is Role.WORKER:
        return actor.name
    kind = actor.role.name.lower().replace("_", " ")
    return f"{kind} of {names[0]}" if names else f"{kind} {actor.process.info.pid}"


def show_time(nanoseconds: float) -> str:
    """A duration with three digits and its unit."""
    for factor, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if nanoseconds >= factor:
            return (
                f"{nanoseconds / factor:.3g} {unit}"
                if nanoseconds < 1000 * factor
                else f"{nanoseconds / factor:,.0f} {unit}"
            )
    return f"{nanoseconds:.0f} ns"


def show_bytes(size: float) -> str:
    """A size with three digits and its unit."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _before(nanoseconds: int) -> str:
    return f", {show_time(nanoseconds)} before the last one" if nanoseconds > 1_000_000_000 else ""
