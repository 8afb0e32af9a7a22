"""Tensors that were sent in an autograd context, and got no gradient. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from zmqgrad.trace.events import GroupExecuted, PassFinished, SendRecorded
from zmqgrad.trace.findings.finding import Finding, Severity, counted, most_common
from zmqgrad.trace.job import Job
from zmqgrad.trace.labels import show_time, size, tidy
from zmqgrad.trace.model import Actor, Call, Stamped


class Sends:
    """The sends of all autograd contexts that got no gradient yet, and the backward passes that ended."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.open: dict[tuple[Actor, int], SendRecorded] = {}
        self.ended: dict[int, tuple[int, PassFinished]] = {}

    def add(self, stamped: Stamped) -> None:
        """Adds the event ``stamped``."""
        actor, event = stamped.actor, stamped.event
        if actor is None:
            return
        if isinstance(event, SendRecorded):
            self.open[actor, event.autograd_id] = event
        elif isinstance(event, GroupExecuted):
            for send in event.sends:
                self.open.pop((actor, send), None)
        elif isinstance(event, PassFinished):
            self.ended[event.context] = stamped.time, event

    def unused(self) -> list[tuple[Actor, SendRecorded]]:
        """The sends that got no gradient in a context in which a backward pass has ended.

        A log that stops before that does not tell, nor does one that dropped events.
        """
        known = self._job.known_until
        return [
            (actor, send)
            for (actor, _), send in self.open.items()
            if send.context in self.ended and self.ended[send.context][0] <= known(actor.process)
        ]


def unused_sends(job: Job, sends: Sends) -> Iterator[Finding]:
    """Sends without a gradient, with what they cost."""
    unused, ended = sends.unused(), sends.ended
    if not unused:
        return
    calls = _calls_of(job, unused)
    names = {key: tidy(call.function) for key, call in calls.items()}
    pairs = Counter(
        f"{names.get(_call_key(actor, send)) or 'a call'} "
        + ("(its result)" if send.is_reply else "(its arguments)")
        + f" from {actor.name} to worker {send.peer}"
        for actor, send in unused
    )
    contexts = {send.context for _, send in unused}
    sent = [
        message
        for actor, send in unused
        if (call := calls.get(_call_key(actor, send))) is not None
        and (message := call.reply if send.is_reply else call.request) is not None
    ]
    bytes_sent = sum(message.size for message in sent)
    transfer = sum(m.transfer or 0 for m in sent)
    failed = sum(ended[context][1].failed for context in contexts)
    yield Finding(
        "unused sends",
        Severity.PROBLEM if failed else Severity.WARNING,
        f"{counted(len(unused), 'send')} got no gradient",
        f"Tensors that require grad were sent in {counted(len(contexts), 'context')} whose pass did not "
        f"reach them"
        + (f", {failed} of which failed" if failed else "")
        + f": messages of {size(bytes_sent)}, {show_time(transfer)} in transfer. "
        "Detach them, or do not send them: " + most_common(pairs),
        tuple(sorted({actor.name for actor, _ in unused})),
        evidence={"sends": len(unused), "contexts": len(contexts), "failed": failed},
        message=next((calls[key].request.key for each in unused if (key := _call_key(*each)) in calls), None),
    )


def _calls_of(job: Job, sends: Iterable[tuple[Actor, SendRecorded]]) -> dict[tuple[int, int, int], Call]:
    """The calls that the sends belong to, by :func:`_call_key`."""
    wanted = {_call_key(actor, send) for actor, send in sends}
    found: dict[tuple[int, int, int], Call] = {}
    for call in job.calls():
        request = call.request
        if request.context and request.source is not None:
            key = (request.context, request.message_id, request.source.rank)
            if key in wanted:
                found[key] = call
    return found


def _call_key(actor: Actor, send: SendRecorded) -> tuple[int, int, int]:
    """The context, the request and the caller of the call whose arguments or result were sent."""
    return send.context, send.message_id, send.peer if send.is_reply else actor.rank
