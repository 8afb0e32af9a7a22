"""A job as a timeline of the Trace Event Format (:mod:`zmqgrad.trace.chrome`): job -> events, streamed.

Each process is a track group, each thread of it a track. On the tracks of threads are slices that nest as the
thread ran them: requests served, waits, backward passes, groups of nodes, and each message sent or received
(a mark of ``MESSAGE_NANOSECONDS``). Arrows lead from each send to its receive, and from there to where the
request was served. What belongs to no one thread has tracks of its own, by name: calls at their caller, from
send to reply, group calls, and requests that wait in the queue of their callee. Counters: bytes in flight to
others, and the length of the queue.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from typing import Any

from zmqgrad.trace.chrome import Event
from zmqgrad.trace.events import (
    GroupCalled,
    GroupExecuted,
    MessageEvent,
    MessageReceived,
    MessageSent,
    PassFinished,
    PassStarted,
    Path,
    Published,
    RendezvousStep,
    Role,
    Serialized,
    WaitBegun,
    WaitEnded,
)
from zmqgrad.trace.job import Job
from zmqgrad.trace.kinds import PROGRAM_CALLS, is_store
from zmqgrad.trace.labels import worker_label
from zmqgrad.trace.model import Actor, Call, Message, Process, Stamped
from zmqgrad.wire.messages import MessageType

Args = Mapping[str, Any]
"""What a viewer shows of an event that is selected."""

MESSAGE_NANOSECONDS = 500
"""How long the mark of a message is: arrows need a slice. Two of a thread are further apart."""

MAX_PID = 10_000_000
"""Above the pids of all systems."""

UNFINISHED = "unfinished"
"""In the arguments of a slice that has no end in the trace: it reaches to the end of its log."""


class Timeline:
    """The events of ``job``, whose earliest moment is time 0; ``stores``: also the messages of stores."""

    def __init__(self, job: Job, stores: bool = False) -> None:
        self.job = job
        self._stores = stores
        self.start, _ = job.span()
        """The time of the job at which the timeline begins."""
        self.pids = _numbers(job)
        """Numbers of the processes in the timeline."""

    def events(self) -> Iterator[Event]:
        """Yields all events, in no order."""
        yield from self._tracks()
        yield from self._message_marks()
        yield from self._calls()
        yield from self._threads()
        yield from self._bytes_in_flight()

    # ---- helpers ----------------------------------------------------------------------------------------

    def pid(self, actor: Actor | Process) -> int:
        """The number of a process in the timeline."""
        return self.pids[id(actor.process if isinstance(actor, Actor) else actor)]

    def microseconds(self, time: int) -> float:
        """A time of the job, as the format has it."""
        return (time - self.start) / 1000

    def end(self, actor: Actor) -> int:
        """When the log of ``actor`` ends."""
        return self.job.time(actor.process, actor.process.last)

    def at(self, phase: str, name: str, actor: Actor, time: int, thread: int = 0, **fields: Any) -> Event:
        """An event; ``fields`` are those of its phase."""
        where = {"pid": self.pid(actor), "tid": thread, "ts": self.microseconds(time)}
        return {"ph": phase, "name": name, **where, **fields}

    def slice(
        self, category: str, title: str, actor: Actor, thread: int, begin: int, end: int | None, args: Args
    ) -> Event:
        """A slice on the track of a thread; ``end`` None: it has not ended."""
        if end is None:
            end, args = self.end(actor), {**args, UNFINISHED: True}
        duration = max(0, end - begin) / 1000
        return self.at("X", title, actor, begin, thread, cat=category, dur=duration, args=args)

    def _interval(
        self, category: str, title: str, actor: Actor, key: int, begin: int, end: int | None, args: Args
    ) -> Iterator[Event]:
        """A slice on a track by its name, beside others of that name that overlap it."""
        if end is None:
            end, args = self.end(actor), {**args, UNFINISHED: True}
        common: dict[str, Any] = {"cat": category, "id2": {"local": f"{key:#x}"}}
        yield self.at("b", title, actor, begin, args=args, **common)
        yield self.at("e", title, actor, max(begin, end), **common)

    # ---- tracks -----------------------------------------------------------------------------------------

    def _tracks(self) -> Iterator[Event]:
        order = {id(a.process): i for i, a in reversed(list(enumerate(self.job.actors())))}
        for process in self.job.processes:
            pid = self.pid(process)
            names = [a.name for a in process.actors.values() if a.role is Role.WORKER]
            names = names or sorted({a.role.name.lower().replace("_", " ") for a in process.actors.values()})
            title = f"{', '.join(names) or 'process'} (pid {process.info.pid}, {process.info.host})"
            yield _meta("process_name", pid, name=title)
            yield _meta("process_sort_index", pid, sort_index=order.get(id(process), len(order)))
            if process.info.program:
                yield _meta("process_labels", pid, labels=process.info.program)
            for thread in process.threads.values():
                yield _meta("thread_name", pid, thread.thread, name=thread.name)
                yield _meta("thread_sort_index", pid, thread.thread, sort_index=thread.thread)

    # ---- messages ---------------------------------------------------------------------------------------

    def _message_marks(self) -> Iterator[Event]:
        for message in self.job.messages():
            if is_store(message.kind) and not self._stores:
                continue
            for verb, actor, time, thread in (
                ("send", message.source, message.sent, message.sender_thread),
                ("receive", message.target, message.received, message.receiver_thread),
            ):
                if actor is not None and time is not None:
                    name = f"{verb} {message.type}"
                    copying = message.sending if verb == "send" else 0
                    end = time + max(MESSAGE_NANOSECONDS, copying)
                    yield self.slice("message", name, actor, thread, time, end, _fields(message))
            source, target = message.source, message.target
            if source is None or target is None or message.sent is None or message.received is None:
                continue
            arrow: dict[str, Any] = {"cat": "message", "id": f"{flow_id(message):#x}"}
            yield self.at("s", "message", source, message.sent, message.sender_thread, **arrow)
            yield self.at("f", "message", target, message.received, message.receiver_thread, bp="e", **arrow)

    def _bytes_in_flight(self) -> Iterator[Event]:
        """By sender; of messages between workers whose logs are both here."""
        flying: defaultdict[Actor, int] = defaultdict(int)
        for time, _, actor, event in self.job.events():
            if actor is None or actor.role is not Role.WORKER or event.__class__ not in _MESSAGES:
                continue
            assert isinstance(event, MessageEvent)
            peer = self.job.worker(actor.job, event.peer)
            if peer is None or not event.size:
                continue
            outgoing = event.__class__ is MessageSent
            sender = actor if outgoing else peer
            flying[sender] += event.size if outgoing else -event.size
            shown = max(0, flying[sender])  # a receive may be read just before its send
            yield self.at("C", f"{sender.name} bytes in flight", sender, time, args={"bytes": shown})

    # ---- calls ------------------------------------------------------------------------------------------

    def _calls(self) -> Iterator[Event]:
        # Twice the time, plus one where a request begins to wait. Calls come in the order of their replies.
        queues: dict[int, tuple[Actor, array[int]]] = {}
        for call in self.job.calls():
            if self._stores or not is_store(call.request.kind):
                yield from self._call(call)
            target, received, started = call.request.target, call.request.received, call.started
            if target is not None and received is not None and started is not None and received < started:
                changes = queues.setdefault(id(target), (target, array("q")))[1]
                changes.extend((received << 1 | 1, started << 1))
        for actor, changes in queues.values():
            length = 0
            for change in sorted(changes):
                length += 1 if change & 1 else -1
                yield self.at("C", f"{actor.name} queue", actor, change >> 1, args={"requests": length})

    def _call(self, call: Call) -> Iterator[Event]:
        request, reply, at = call.request, call.reply, call.request.target
        is_query = request.source is not None and request.source.role is not Role.WORKER
        name, key = (not is_query and call.function) or request.type, flow_id(request)
        if request.source is not None and request.sent is not None and expects_reply(call):
            replied = reply.received if reply is not None else None
            fields: dict[str, Any] = {"to": worker_label(at, request.peer), "arguments": call.arguments}
            fields.update({"failed": True} if call.failed else {})
            args, title = _fields(request, fields), f"call {name}"
            yield from self._interval("call", title, request.source, key, request.sent, replied, args)
        if at is None or call.started is None:
            return
        received, started = request.received, call.started
        if received is not None:
            yield from self._interval("queue", f"queued {name}", at, key ^ 1, received, started, {})
        fields = {"from": worker_label(request.source, request.peer), "failed": call.failed}
        yield self.slice("serve", name, at, call.thread, started, call.finished, _fields(request, fields))
        if received is not None:  # from where it was received to where it is served
            arrow: dict[str, Any] = {"cat": "queue", "id": f"{key:#x}"}
            yield self.at("s", "queued", at, received, request.receiver_thread, **arrow)
            yield self.at("f", "queued", at, started, call.thread, bp="e", **arrow)

    # ---- threads ----------------------------------------------------------------------------------------

    def _threads(self) -> Iterator[Event]:
        """What threads do besides serving: waits, backward passes with their groups, steps of rendezvous."""
        begun: dict[_Interval, Stamped] = {}
        for stamped in self.job.events():
            time, _, actor, event = stamped
            if actor is None or event.__class__ in _MESSAGES:
                continue
            if isinstance(event, (WaitBegun, PassStarted)):
                begun[_interval_key(actor, event)] = stamped
            elif isinstance(event, (WaitEnded, PassFinished)):
                begin = begun.pop(_interval_key(actor, event), None)
                if begin is not None:  # it may have been dropped
                    more = {"failed": True} if event.failed else {}
                    yield self._of_thread(begin, time, more, begun)
            elif isinstance(event, (GroupExecuted, Published, Serialized)):
                yield self._of_thread(stamped, time + event.nanoseconds)
            elif isinstance(event, GroupCalled):  # above its calls
                title = f"group call {event.function} on {len(event.calls)} workers"
                key = hash((self.pid(actor), event.thread, time)) & (1 << 63) - 1
                args = {"calls": list(event.calls), "failed": event.failed}
                end = time + event.nanoseconds
                yield from self._interval("group call", title, actor, key, time, end, args)
            elif isinstance(event, RendezvousStep):
                steps = {"round": event.round, "participants": event.participants, "waiting": event.waiting}
                title = f"rendezvous: {event.action}"
                yield self.at("i", title, actor, time, event.thread, s="t", args=steps)
        for begin in begun.values():
            yield self._of_thread(begin, None, {}, begun)

    def _of_thread(
        self,
        stamped: Stamped,
        end: int | None,
        more: Args | None = None,
        begun: Container[_Interval] = (),
    ) -> Event:
        """The slice of what began with this event; ``begun`` has the backward pass, if it waits for one."""
        time, _, actor, event = stamped
        assert actor is not None
        args: Args
        if isinstance(event, WaitBegun):
            peer = worker_label(self.job.worker(actor.job, event.peer), event.peer)
            of_pass = (actor, event.thread, False, event.message_id) in begun
            title = f"wait for {'the backward pass' if of_pass else peer}"
            category, args = "wait", {"request": event.message_id}
        elif isinstance(event, Published):
            category, title = "publish", f"publish {event.name}"
            args = {"version": event.version, "bytes": event.bytes}
        elif isinstance(event, Serialized):
            category, title = "send", f"serialize {'result' if event.is_reply else 'arguments'}"
            args = {"request": event.message_id, "bytes": sum(each[-1] for each in event.contents)}
        else:
            assert isinstance(event, (PassStarted, GroupExecuted))
            category, title = "backward", "backward pass"
            args = {"context": event.context, "pass": event.pass_id}
            if isinstance(event, GroupExecuted):
                title = "backward group" if event.sends else "backward roots"
                args = {**args, "sends": event.sends, "recvs": event.recvs}
        return self.slice(category, title, actor, event.thread, time, end, {**args, **(more or {})})


_Interval = tuple[Actor, int, bool, int]
"""A wait (True) or a backward pass (False) of a thread of an actor, and its number."""


def _interval_key(actor: Actor, event: WaitBegun | WaitEnded | PassStarted | PassFinished) -> _Interval:
    if isinstance(event, (WaitBegun, WaitEnded)):
        return actor, event.thread, True, event.message_id
    return actor, event.thread, False, event.pass_id


_MESSAGES = (MessageSent, MessageReceived)
_REPLIED_TO = PROGRAM_CALLS | {MessageType.DISCOVER_AUTOGRAD_REQ}


def expects_reply(call: Call) -> bool:
    """Whether its requester gets a reply; gradients, for example, are requests that get none."""
    return call.reply is not None or call.request.kind in _REPLIED_TO or is_store(call.request.kind)


def flow_id(message: Message) -> int:
    """Identifies an arrow: the same for the request of a call and for the message itself."""
    return hash((message.requester, message.message_id, message.kind, message.sent)) & (1 << 63) - 1


def _fields(message: Message, more: Args | None = None) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": message.message_id, "bytes": message.size, **(more or {})}
    if message.name:
        fields["name"] = message.name
    if message.context:
        fields["context"] = message.context
    if message.path is not Path.INLINE:
        fields["path"] = Path(message.path).name.lower()
    return {key: value for key, value in fields.items() if value not in ("", None)}


def _numbers(job: Job) -> dict[int, int]:
    """Their system pids, or, if another process has that number in its container, one above them all."""
    numbers: dict[int, int] = {}
    taken: set[int] = set()
    for process in job.processes:
        pid = MAX_PID + process.info.pid  # above the numbers of threads: Perfetto compares both
        if pid in taken:
            pid = 2 * MAX_PID + len(taken)  # viewers have 31 bits for it
        taken.add(pid)
        numbers[id(process)] = pid
    return numbers


def _meta(kind: str, pid: int, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
