"""Tensors that were sent in an autograd context, and got no gradient: all of a message, or some. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

from zmqgrad.trace.events import GroupExecuted, PassFinished, SendRecorded
from zmqgrad.trace.findings.finding import Finding, Severity, counted, most_common
from zmqgrad.trace.job import Job
from zmqgrad.trace.labels import ends, size
from zmqgrad.trace.model import Actor, Call, Stamped

_Context = tuple[str, int]
"""The group of its workers, and its number, which another group may have as well."""

_Key = tuple[_Context, int, int]
"""The context, the request and the caller of the call whose arguments or result were sent."""


class Sends:
    """The sends of all autograd contexts that lack a gradient, and the backward passes that ended."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._open: dict[tuple[Actor, int], tuple[int, SendRecorded]] = {}
        self._missing: dict[tuple[Actor, int], tuple[int, ...]] = {}
        self.ended: dict[_Context, tuple[int, PassFinished]] = {}

    def add(self, stamped: Stamped) -> None:
        """Adds the event ``stamped``."""
        actor, event = stamped.actor, stamped.event
        if actor is None:
            return
        if isinstance(event, SendRecorded):
            self._open[actor, event.autograd_id] = stamped.time, event
        elif isinstance(event, GroupExecuted):
            missing = dict(event.missing)
            for send in event.sends:
                key = actor, send
                now, before = missing.get(send, ()), self._missing.get(key)
                left = now if before is None else tuple(a & b for a, b in zip(now, before, strict=False))
                if any(left):
                    self._missing[key] = left
                else:  # another pass may have reached the rest
                    self._open.pop(key, None)
                    self._missing.pop(key, None)
        elif isinstance(event, PassFinished):
            self.ended[actor.job, event.context] = stamped.time, event

    def unused(self) -> Iterator[tuple[Actor, SendRecorded, tuple[int, ...]]]:
        """Yields the sends that lack gradients in a context in which a backward pass has ended.

        With which of their tensors got none; empty: all. A log that stops before that does not tell, nor does
        one that dropped events.
        """
        for (actor, number), (time, send) in self._open.items():
            ended = self.ended.get((actor.job, send.context))
            if ended is not None and time < ended[0] <= self._job.known_until(actor.process):
                yield actor, send, self._missing.get((actor, number), ())


def unused_sends(job: Job, sends: Sends) -> Iterator[Finding]:
    """Results that no loss uses, whole or in part, and arguments without a gradient; by function."""
    unused = list(sends.unused())
    if not unused:
        return
    results: dict[_Key, tuple[int, ...]] = {}
    arguments: set[_Key] = set()
    for actor, send, missing in unused:
        context = actor.job, send.context
        if send.is_reply:
            results[context, send.message_id, send.peer] = missing
        elif not missing:
            arguments.add((context, send.message_id, actor.rank))
    calls, totals = _calls_of(job, {*results, *arguments}, sends.ended)
    found: defaultdict[tuple[str, bool, tuple[int, ...]], list[_Key]] = defaultdict(list)
    for key, missing in results.items():
        found[_function(calls.get(key)), True, missing].append(key)
    for key in arguments - results.keys():
        found[_function(calls.get(key)), False, ()].append(key)
    for (function, is_result, missing), keys in found.items():
        name = function or "a call"
        share = (
            f"{len(keys)} of {counted(totals[function], 'call')}" if function else counted(len(keys), "time")
        )
        which = _which(missing)
        if is_result:
            title = f"The loss does not use {which} {name} returned ({share})"
            advice = (
                "Is a term missing from the loss? If it is meant to be unused, detach it there, or call the "
                "function outside of the context."
            )
        else:
            title = f"No gradient came back for the arguments of {name} ({share})"
            advice = (
                "Does the function detach them, or compute without gradients? Then detach them at the caller."
            )
        known = [calls[key] for key in keys if key in calls]
        messages = [m for call in known if (m := call.reply if is_result else call.request) is not None]
        contexts = {context for context, *_ in keys}
        failed = sum(sends.ended[context][1].failed for context in contexts)
        pairs = Counter(" calls ".join(ends(call.request)) for call in known)
        yield Finding(
            "unused result" if is_result else "unused arguments",
            Severity.PROBLEM if failed else Severity.WARNING,
            title,
            (f"{most_common(pairs)}: " if pairs else "")
            + f"no gradient came back in {counted(len(contexts), 'context')} with a backward pass"
            + (f", {failed} of which failed" if failed else "")
            + f"; messages of {size(sum(m.size for m in messages))}. {advice}",
            tuple(sorted({name for call in known for name in ends(call.request)})),
            evidence={"sends": len(keys), "contexts": len(contexts), "failed": failed},
            message=known[0].request.key if known else None,
        )


def _which(missing: tuple[int, ...]) -> str:
    numbers = ", ".join(str(i) for i, each in enumerate(missing, 1) if each)
    return f"tensor {numbers} of the {len(missing)} that" if missing else "what"


def _calls_of(
    job: Job, wanted: Collection[_Key], contexts: Collection[_Context]
) -> tuple[dict[_Key, Call], Counter[str]]:
    """The calls that are wanted, and how many there are in ``contexts``, by function."""
    found: dict[_Key, Call] = {}
    totals: Counter[str] = Counter()
    for call in job.calls():
        request = call.request
        source = request.source
        if source is not None and (source.job, request.context) in contexts and call.function:
            totals[_function(call)] += 1
            key = (source.job, request.context), request.message_id, source.rank
            if key in wanted:
                found[key] = call
    return found, totals


def _function(call: Call | None) -> str:
    return call.function if call is not None else ""
