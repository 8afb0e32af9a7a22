"""What a running job does now: rates and latencies of the last seconds, queues, threads, shared memory. Pure.

Rates are of a sliding window of ``SLOTS`` slots of a second each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from zmqgrad.trace.calls import Assembly
from zmqgrad.trace.events import (
    Dropped,
    MessageEvent,
    MessageReceived,
    MessageSent,
    Path,
    RequestFinished,
    RequestStarted,
    Role,
    Usage,
    WaitBegun,
    WaitEnded,
)
from zmqgrad.trace.kinds import SERVED, is_store, type_name
from zmqgrad.trace.labels import actor_label
from zmqgrad.trace.model import Actor, Call, Entry, Process
from zmqgrad.trace.sketch import Sketch

SLOTS = 10
SLOT_NANOSECONDS = 1_000_000_000

Request = tuple[int, int]
"""A request at its server: the rank of the requester, and the message id."""


_Pair = tuple[str, str, int | None]
"""Label of the sender; the job and rank of the worker at the other end, or what else is there and None."""


class Rate(msgspec.Struct):
    """One type, or one pair of actors: per second, in the window; latencies in ns."""

    name: str
    messages: float
    bytes: float
    calls: float
    p50: int | None
    p99: int | None


class WorkerLoad(msgspec.Struct):
    """One worker now. ``oldest_ns`` is for how long the longest of the ``running`` requests has run."""

    name: str
    pid: int
    sent: float
    received: float
    bytes_sent: float
    shared_memory_bytes: float
    """Of ``bytes_sent``, through shared memory."""
    queued: int
    running: int
    oldest_ns: int
    waiting: int
    """Threads that wait for a reply or a backward pass."""
    threads: int
    blocked: int
    working_limit: int
    leased_bytes: int
    leased_limit: int
    dropped: int


class Snapshot(msgspec.Struct):
    """The load of a job at ``time``; rates are per second over ``seconds``."""

    time: int
    seconds: float
    types: list[Rate]
    pairs: list[Rate]
    workers: list[WorkerLoad]


class _Cell:
    """A type, a pair or a worker in one slot; ``received`` and ``shared`` are of a worker."""

    def __init__(self, cells: Iterable[_Cell] = ()) -> None:
        self.counts: Counter[str] = Counter()
        self.latency = Sketch()
        for each in cells:
            self.counts.update(each.counts)
            self.latency.merge(each.latency)


_Slot = defaultdict[tuple[str, Any], _Cell]
"""The cells of a second: of ``("type", name)``, ``("pair", its ends)`` and ``("worker", its id)``."""


class _State:
    """What is open at one worker."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.queued: set[Request] = set()
        self.running: dict[Request, int] = {}
        self.waiting: set[int] = set()
        self.usage = Usage(0, 0, 0, 0, 0)


class Load:
    """Follows the events of a job, each added once, nearly in order of time.

    Args:
        stores: whether the messages of stores count as well.
    """

    def __init__(self, stores: bool = False) -> None:
        self._stores = stores
        self.newest = 0
        self._first: int | None = None
        self._calls = Assembly()
        self._slots: dict[int, _Slot] = {}
        self._states: dict[int, _State] = {}
        self._dropped: dict[int, int] = {}
        self._names: dict[tuple[str, int], str] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """Adds events."""
        for entry in entries:
            time, declared, actor, event = entry
            if isinstance(event, MessageEvent) and is_store(event.kind) and not self._stores:
                continue
            self.newest = max(self.newest, time)
            for call in self._calls.add(entry):
                self._count_call(call)
            if isinstance(event, Dropped):
                number = id(declared.process)
                self._dropped[number] = self._dropped.get(number, 0) + event.count
            elif actor is not None:
                if isinstance(event, MessageEvent):
                    self._count_message(time, actor, event)
                if actor.role is Role.WORKER:
                    self._note(self._state(actor), time, event)

    def _count_message(self, time: int, actor: Actor, event: MessageEvent) -> None:
        slot = self._slot(time)
        own = slot["worker", id(actor)]
        if isinstance(event, MessageReceived):
            own.counts["received"] += 1
            return
        own.counts["shared"] += event.size if event.path == Path.SHARED_MEMORY else 0
        for cell in (own, slot["type", type_name(event.kind)], slot["pair", _pair(actor, event.peer)]):
            cell.counts["messages"] += 1
            cell.counts["bytes"] += event.size

    def _count_call(self, call: Call) -> None:
        request, reply = call.request, call.reply
        if request.source is None or call.duration is None or reply is None or reply.received is None:
            return
        slot = self._slot(reply.received)
        for cell in (slot["type", request.type], slot["pair", _pair(request.source, request.peer)]):
            cell.counts["calls"] += 1
            cell.latency.add(call.duration)

    def _state(self, actor: Actor) -> _State:
        state = self._states.get(id(actor))
        if state is None:
            state = self._states[id(actor)] = _State(actor)
            self._names[actor.job, actor.rank] = actor.name
        return state

    def _note(self, state: _State, time: int, event: object) -> None:
        if isinstance(event, MessageReceived):
            if event.kind in SERVED:
                state.queued.add((event.peer, event.message_id))
        elif isinstance(event, MessageSent):
            state.queued.discard((event.peer, event.message_id))
        elif isinstance(event, RequestStarted):
            request = (event.peer, event.message_id)
            state.queued.discard(request)
            state.running[request] = time
        elif isinstance(event, RequestFinished):
            state.running.pop((event.peer, event.message_id), None)
        elif isinstance(event, WaitBegun):
            state.waiting.add(event.thread)
        elif isinstance(event, WaitEnded):
            state.waiting.discard(event.thread)
        elif isinstance(event, Usage):
            state.usage = event

    def _slot(self, time: int) -> _Slot:
        number = time // SLOT_NANOSECONDS
        if number not in self._slots:
            self._first = number if self._first is None else self._first
            for old in [each for each in self._slots if each < number - SLOTS]:
                del self._slots[old]
            self._slots[number] = defaultdict(_Cell)
        return self._slots[number]

    def snapshot(self, elapsed: int = 0, alive: Callable[[Process], bool] = lambda _: True) -> Snapshot:
        """The load ``elapsed`` ns after the newest event; of worker processes that are ``alive``."""
        time = self.newest + elapsed
        now = time // SLOT_NANOSECONDS
        first = max(now - SLOTS, self._first if self._first is not None else now)
        slots = [slot for number, slot in self._slots.items() if number >= first]
        seconds = max(time - first * SLOT_NANOSECONDS, SLOT_NANOSECONDS) / 1e9
        workers = [
            self._worker(state, slots, seconds, time)
            for state in self._states.values()
            if state.actor.stopped is None and alive(state.actor.process)
        ]
        types, pairs = _rates(slots, "type", seconds, str), _rates(slots, "pair", seconds, self._name)
        return Snapshot(time, seconds, types, pairs, sorted(workers, key=lambda w: w.name))

    def _name(self, pair: _Pair) -> str:
        """By the names of the workers, which may be told after their first messages."""
        source, other, rank = pair
        return f"{source} > {other if rank is None else self._names.get((other, rank), f'rank {rank}')}"

    def _worker(self, state: _State, slots: Iterable[_Slot], seconds: float, time: int) -> WorkerLoad:
        actor, usage = state.actor, state.usage
        traffic = _Cell(slot["worker", id(actor)] for slot in slots).counts
        sent, received = traffic["messages"] / seconds, traffic["received"] / seconds
        volume = (traffic["bytes"] / seconds, traffic["shared"] / seconds)
        oldest = time - min(state.running.values(), default=time)
        requests = (len(state.queued), len(state.running), oldest, len(state.waiting))
        threads = (usage.threads, usage.blocked, usage.working_limit)
        memory = (usage.leased_bytes, usage.leased_limit)
        dropped = self._dropped.get(id(actor.process), 0)
        return WorkerLoad(
            actor.name, actor.process.info.pid, sent, received, *volume, *requests, *threads, *memory, dropped
        )


def _pair(actor: Actor, rank: int) -> _Pair:
    label = actor_label(actor)
    if actor.role is Role.WORKER:
        return label, actor.job, rank
    return label, "store" if actor.role is Role.STORE_CLIENT else "clients", None


def _rates(slots: Iterable[_Slot], kind: str, seconds: float, name: Callable[[Any], str]) -> list[Rate]:
    """What ``slots`` have of one kind, most messages first."""
    cells: defaultdict[str, list[_Cell]] = defaultdict(list)
    for slot in slots:
        for (each, what), cell in slot.items():
            if each == kind:
                cells[name(what)].append(cell)
    found = []
    for label, total in ((label, _Cell(each)) for label, each in cells.items()):
        counts = total.counts
        rates = (counts["messages"] / seconds, counts["bytes"] / seconds, counts["calls"] / seconds)
        found.append(Rate(label, *rates, total.latency.quantile(0.5), total.latency.quantile(0.99)))
    return sorted(found, key=lambda rate: (-rate.messages, rate.name))
