"""Sends a call to several workers, serialized once for all of them that can read the same bytes.

The bytes differ if the call has RRefs, of which each worker needs forks of its own; for a worker that runs
another program, which lacks the ``__main__`` of this one; and for a worker with a device map.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from zmqgrad.errors import (
    ConfigurationError,
    GroupError,
    GroupTimeoutError,
    PeerLostError,
    RpcTimeoutError,
    RRefError,
    UnknownWorkerError,
)
from zmqgrad.rpc.calls import Description, PendingCall, describe, refused_wait
from zmqgrad.rpc.membership.worker_info import WorkerInfo, WorkerRecord
from zmqgrad.rpc.raising import copy_exception
from zmqgrad.rpc.relaying import is_local, offer_frames, retract
from zmqgrad.rpc.remote_errors import summarize
from zmqgrad.rpc.reply_port import ReplyPort
from zmqgrad.rpc.serialization.context import SerializationContext, SerializedPayload
from zmqgrad.rpc.serialization.serializer import serialize_call
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.blocking import may_wait_for_others
from zmqgrad.runtime.clock import Deadline, monotonic_ns
from zmqgrad.runtime.future import Promise
from zmqgrad.transport import tap

MIN_RELAYED_BYTES = 1 << 20
"""Frames of a call of at least this size go to another host once, if several of its members are there."""

OnErrors = Literal["raise", "return"]
"""What becomes of the errors of members: they are raised as one, or each is returned in place of a result."""

Request = Callable[[int, WorkerRecord, float, int], PendingCall]
"""(index, member, seconds that are left or 0, number of the reply port) -> the request that was sent."""

Serialized = tuple[str, SerializedPayload]
"""The reference of a function, if it is not in the payload, and the payload."""


class SharedCall:
    """What several workers get.

    Args:
        worker: the caller.
        members: the workers.
        serialize: serializes it for the workers of one context.
    """

    def __init__(
        self,
        worker: Worker,
        members: Sequence[WorkerInfo],
        serialize: Callable[[SerializationContext], Serialized],
    ) -> None:
        self._worker = worker
        self._members = members
        self._serialize = serialize
        self._ready: dict[bool, Serialized] = {}  # by main_by_reference
        self._placed: dict[tuple[int, bool], Serialized] = {}  # by id, and whether for this host
        self._offered: list[int] = []  # the frames that other hosts fetch

    def to(self, peer: WorkerRecord) -> Serialized:
        """Return what ``peer`` gets.

        Raises:
            PayloadError: if it cannot be serialized.
        """
        context = self._worker.contexts.for_calls(peer)
        ready = None if context.devices else self._ready.get(context.main_by_reference)
        if ready is None:
            ready = reference, serialized = self._serialize(context)
            if serialized.payload.forks or context.devices:  # those are for one worker alone
                return ready
            self._ready[context.main_by_reference] = ready
            if serialized.payload.pickled is None and reference and not reference.startswith("__main__:"):
                self._ready[not context.main_by_reference] = ready
        return self._place(ready, peer) if ready[1].frames else ready

    def _place(self, ready: Serialized, peer: WorkerRecord) -> Serialized:
        """Members on this host read the same memory. Those of another one get large frames once, and pass
        them on."""
        here = is_local(self._worker, peer.id)
        placed = self._placed.get((id(ready), here))
        if placed is not None:
            return placed
        (reference, serialized), mailbox = ready, self._worker.mailbox
        if here:
            serialized = serialized._replace(frames=mailbox.share(serialized.frames))
        elif sum(map(len, serialized.frames)) < MIN_RELAYED_BYTES or not self._has_neighbour(peer):
            return ready
        else:
            key = offer_frames(self._worker, self._placed.get((id(ready), True), ready)[1].frames)
            self._offered.append(key)
            serialized = serialized._replace(payload=replace(serialized.payload, shelf=key), frames=())
        self._placed[id(ready), here] = reference, serialized
        return self._placed[id(ready), here]

    def _has_neighbour(self, peer: WorkerRecord) -> bool:
        """Whether another of the workers is on the host of ``peer``, which is not this one."""
        found = self._worker.membership.find_known
        others = [other for info in self._members if info.id != peer.id and (other := found(info.id))]
        return any(other.host == peer.host and not is_local(self._worker, other.id) for other in others)

    def release(self, replies: Iterable[Promise[Any]]) -> None:
        """All messages were sent: what they share goes with its last reader, or the last of ``replies``."""
        self._placed.clear()
        self._ready.clear()
        while self._offered:
            retract(self._worker, self._offered.pop(), replies)


@dataclass(slots=True)
class GroupCall:
    """A call to ``members``, with one deadline.

    Args:
        worker: the caller.
        members: of the group, as they are when the call is made.
        what: the function, for errors.
        seconds: the timeout; 0 for no limit.
        errors: what becomes of errors.
        request: sends the request of one member.
        shared: what all requests share, if there is such.
    """

    worker: Worker
    members: Sequence[WorkerInfo]
    what: Description
    seconds: float
    errors: OnErrors
    request: Request
    shared: SharedCall | None = None
    _began: int = 0  # 0: not yet, or it has ended
    _sent: Sequence[PendingCall | Exception] = ()  # until all have ended
    _span: tap.GroupSpan | None = None

    def send(self, reply_to: int = 0) -> list[PendingCall | Exception]:
        """Send the request of each member; of one that is lost or unknown, or failed before, it is the error.

        Raises:
            Exception: what else ``request`` raises. Then the requests that were sent are given up.
        """
        deadline = Deadline.after(self.seconds or None, self.worker.clock)
        sent: list[PendingCall | Exception] = []
        self._sent, self._began = sent, monotonic_ns()
        if tap.spans is not None:
            self._span = tap.spans.group(describe(self.what), self.worker.name, len(self.members))
        try:
            with nullcontext() if self._span is None else self._span.parent():
                for index, member in enumerate(self.members):
                    try:
                        peer = self.worker.membership.record(member.id, deadline.timeout())
                        sent.append(self.request(index, peer, deadline.call_timeout(), reply_to))
                    except (PeerLostError, RpcTimeoutError, RRefError, UnknownWorkerError) as e:
                        sent.append(copy_exception(e))
        except BaseException as e:
            self._give_up(type(e).__name__)
            raise
        finally:
            if self.shared is not None:
                self.shared.release([each.promise for each in sent if isinstance(each, PendingCall)])
        return sent

    def _ended(self, error: str) -> None:
        """Tell those who trace that all calls have ended; ``error`` says how, empty: with results."""
        calls = [each.message_id for each in self._sent if isinstance(each, PendingCall)]
        self._sent = ()  # replies may hold much memory
        if self._span is not None:
            self._span.end(error)
        if (tracer := self.worker.tracer) is not None:
            tracer.group_called(self._began, describe(self.what), calls, bool(error))
        self._began = 0

    def send_and_wait(self) -> list[Any]:
        """Send the requests, wait for all replies, and return the results in the order of the members.

        The calling thread reads the replies itself where a reply port is free, as for a single call.

        Raises:
            GroupError: if members failed, and errors are raised.
        """
        worker = self.worker
        port = worker.ports.acquire_any([member.id for member in self.members])
        complete = False
        try:
            sent = self.send(port.number)
            calls = [each for each in sent if isinstance(each, PendingCall)]
            if calls:
                self._wait(calls, port)
            complete = all([c.promise.exception() is None or c.peer in worker.lost for c in calls])
        except BaseException as e:
            self._give_up(type(e).__name__)
            raise
        finally:
            if complete:
                port.release()
            else:  # a reply may still come
                port.abandon(worker.ports.on_unexpected)
        return self.conclude([partial(_decode, worker, each) for each in sent])

    def _wait(self, calls: Sequence[PendingCall], port: ReplyPort) -> None:
        """Wait until each request has a reply, or has failed; it does by its deadline."""
        if not may_wait_for_others():
            raise refused_wait(self.what)
        ended, last_first = port.promise(), [call.promise for call in reversed(calls)]

        def is_over() -> bool:
            return all(map(Promise.done, last_first))

        def on_done(_: object) -> None:
            if is_over():
                ended.set_result(None)

        tracer = self.worker.tracer
        try:
            for call in calls:
                call.promise.add_done_callback(on_done)
                if tracer is not None:
                    tracer.wait_begun(call.peer, call.message_id)
            while not is_over():  # what a signal handler raises in a callback is only logged there
                inbound = port.receive(ended, math.inf)
                if inbound is not None:
                    self.worker.ports.on_unexpected(inbound)
            port.settle()
        finally:
            if tracer is not None:
                for call in reversed(calls):
                    failed = not call.promise.done() or call.promise.exception() is not None
                    tracer.wait_ended(call.peer, call.message_id, failed)

    def _give_up(self, why: str) -> None:
        """Cancel what was sent. Idempotent."""
        if not self._began:
            return
        if may_wait_for_others():  # otherwise the members are to run it all the same
            for each in self._sent:
                if isinstance(each, PendingCall):
                    self.worker.client.cancel(each)
        self._ended(why)

    def conclude(self, outcomes: Iterable[Callable[[], Any]]) -> list[Any]:
        """Return the results, which ``outcomes`` return or raise, in the order of the members.

        Raises:
            GroupError: if members failed, and errors are raised.
        """
        found: list[Any] = []
        errors: dict[str, Exception] = {}
        names = self._names()
        for name, outcome in zip(names, outcomes, strict=True):
            try:
                value = outcome()
            except Exception as e:
                value = errors[name] = copy_exception(e)  # its traceback would form a cycle with this frame
            found.append(value)
        results = {name: each for name, each in zip(names, found, strict=True) if name not in errors}
        late = [name for name, each in zip(names, self._sent, strict=True) if _timed_out(each)]
        error = self._error(results, errors, late) if errors else None
        self._ended(str(error) if error else "")
        if error is None or self.errors == "return":
            return found
        try:
            raise error from next(iter(errors.values()))
        finally:
            # The traceback refers to this frame: avoid a reference cycle.
            del error, errors, found, results, value

    def _names(self) -> list[str]:
        """The names of the members. A worker that owns several references is several members."""
        counts = Counter(m.name for m in self.members)
        return [
            m.name if counts[m.name] == 1 else f"{m.name} (member {i})" for i, m in enumerate(self.members)
        ]

    def _error(
        self, results: dict[str, Any], errors: dict[str, Exception], late: Sequence[str]
    ) -> GroupError:
        reasons = [f"{name}: {summarize(e)}" for name, e in errors.items() if name not in late]
        if late:
            reasons.insert(0, f"no reply within {self.seconds:g} s from {', '.join(late)}")
        in_time = [error for error in errors.values() if not isinstance(error, RpcTimeoutError)]
        kind = GroupError if in_time else GroupTimeoutError
        what, count = describe(self.what), f"{len(errors)} of {len(self.members)} members"
        return kind(f"{what} failed on {count} of the group: {'; '.join(reasons)}", results, errors)


def _timed_out(sent: PendingCall | Exception) -> bool:
    error = sent if isinstance(sent, Exception) else sent.promise.exception()
    return isinstance(error, RpcTimeoutError)


def _decode(worker: Worker, sent: PendingCall | Exception) -> Any:
    if isinstance(sent, Exception):
        raise sent
    return worker.decode(sent.promise.result())


def send_call(
    worker: Worker, peer: WorkerRecord, call: Serialized, seconds: float, reply_to: int, what: Sequence[Any]
) -> PendingCall:
    """Sends a serialized call of ``what``: function, args and kwargs."""
    on_id = worker.client.describer(call[0], *what)
    return worker.request_call(peer.id, *call, seconds, what[0], on_id=on_id, reply_to=reply_to)


def same_for_all(
    worker: Worker, members: Sequence[WorkerInfo], what: Sequence[Any], seconds: float, errors: OnErrors
) -> GroupCall:
    """A call of ``what``: function, args and kwargs, which are the same for all ``members``."""
    shared = SharedCall(worker, members, partial(serialize_call, *what))

    def request(_: int, peer: WorkerRecord, left: float, reply_to: int) -> PendingCall:
        return send_call(worker, peer, shared.to(peer), left, reply_to, what)

    return GroupCall(worker, members, what[0], seconds, errors, request, shared)


def check_length(sets: Sequence[Any], members: Sequence[Any], group: object) -> None:
    """Raise ConfigurationError unless there is one set of arguments for each member."""
    if len(sets) != len(members):
        raise ConfigurationError(
            f"map got {len(sets)} sets of arguments for {len(members)} members of {group!r}: give one tuple "
            f"of arguments for each member, in the order of the members; WorkerGroup.choose_async divides "
            f"any number of calls among workers"
        )


def check_errors(errors: object) -> None:
    """Raise ConfigurationError unless ``errors`` is one of :data:`OnErrors`."""
    if errors not in ("raise", "return"):
        raise ConfigurationError(f'errors must be "raise" or "return", not {errors!r}')
