"""What a worker asks of others: calls, other requests, and messages that nobody answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zmqgrad.errors import CongestionError, RpcTimeoutError, TransportError, UnknownPeerError
from zmqgrad.rpc.calls import ChannelOutcome, PendingCall, What, describe
from zmqgrad.rpc.groups.membership import WorkerRecord
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT, check_timeout
from zmqgrad.rpc.packing.packing import pack_call
from zmqgrad.rpc.packing.terms import PACKED_NOTHING, Packed
from zmqgrad.rpc.serving import time_left
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Frame, Inbound
from zmqgrad.wire.messages import Call, Message

if TYPE_CHECKING:
    from zmqgrad.rpc.worker.worker import Worker


class Calling:
    """Sends what ``worker`` asks of others. Safe to use from any thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._membership = worker.membership
        self._mailbox = worker.mailbox
        self._clock = worker.clock
        self._doors = worker.doors
        self._calls = worker.calls
        self._lost = worker.lost
        self._terms = worker.terms
        self._note_deadline = worker.waiting.note
        self._next_id = worker.ids.next
        self.sent = 0

    def seconds(self, timeout: Any) -> float:
        """What a ``timeout`` argument means: seconds, 0 for no limit, -1 for the default.

        Inside a call that is served here, never more than what that call has left.

        Raises:
            ConfigurationError: for anything else. RpcTimeoutError: if that call has no time left.
        """
        seconds = self._worker.default_timeout if timeout == UNSET_RPC_TIMEOUT else check_timeout(timeout)
        left = time_left()
        if left == math.inf:
            return seconds
        if left == 0.0:
            raise RpcTimeoutError(
                f"RPC ran for more than set timeout and will now be marked with an error: nobody waits any "
                f"more for the call that {self._worker.name} serves here, so it can make no further calls"
            )
        return min(seconds, left) if seconds else left

    def call(
        self,
        to: object,
        function: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: Any = UNSET_RPC_TIMEOUT,
        waits: bool = False,
    ) -> PendingCall:
        """Ask worker ``to`` to run ``function(*args, **kwargs)``; see :meth:`request` for ``waits``."""
        seconds = self.seconds(timeout)
        peer = self._membership.find_here(to)
        if peer is None:
            peer, seconds = self.locate(to, seconds)
        reference, packed = pack_call(function, args, kwargs, self._terms(peer))
        return self.request_call(peer.id, reference, packed, seconds, function, waits=waits)

    def locate(self, to: object, seconds: float) -> tuple[WorkerRecord, float]:
        """The worker that ``to`` means, which others must be asked for, and what is left of ``seconds`` then.

        Raises:
            UnknownWorkerError: if there is none. RpcTimeoutError: if nothing is left.
        """
        if not seconds:
            return self._membership.find(to), 0.0
        began = self._clock.now()
        peer = self._membership.find(to, seconds)
        return peer, max(1e-6, seconds - (self._clock.now() - began))  # 0 would be no limit

    def request_call(
        self,
        peer: int,
        reference: str,
        packed: Packed,
        seconds: float,
        what: What,
        keep: Any = None,
        waits: bool = False,
    ) -> PendingCall:
        """Send a CALL of a function that is packed already."""
        call = Call(reference, packed.payload, seconds)
        return self.request(peer, call, packed, seconds, what, keep, waits=waits)

    def request(
        self,
        peer: int,
        message: Message,
        packed: Packed = PACKED_NOTHING,
        seconds: float = 0.0,
        what: What = "",
        keep: Any = None,
        settled: Callable[[Promise[Inbound]], None] | None = None,
        waits: bool = False,
    ) -> PendingCall:
        """Send a request that will be answered within ``seconds`` (0: no limit).

        ``keep`` is kept alive until then; ``settled`` is called with the outcome, in whichever thread
        brings it, and must not block. ``waits``: the calling thread goes on to :meth:`wait` at once, so it
        may as well read the answer itself.
        """
        if self._worker.closed:
            raise self._worker.closed_error()
        kind = message.TYPE
        if peer in self._lost:
            self._worker.drop_unsent(peer, packed)
            raise self._worker.loss_of(peer, describe(what))
        if self._doors.outgoing is not None:
            message = self._doors.outgoing(peer, message, packed.tensors, what)
        deadline = self._clock.now() + seconds if seconds else math.inf
        channel = self._mailbox.acquire_channel(peer) if waits else None
        if channel is None:
            call = PendingCall(self._next_id(), peer, deadline, seconds, what, keep, kind)
        else:
            call = PendingCall(
                self._next_id(), peer, deadline, seconds, what, keep, kind, ChannelOutcome(channel), channel
            )
        if settled is not None:
            call.outcome.add_done_callback(settled)
        self._calls.add(call)
        try:
            if peer in self._lost:  # since we looked: whoever noted the loss may not have seen this call
                raise self._worker.loss_of(peer, describe(what))
            self._mailbox.send(
                peer,
                message,
                call.message_id,
                packed.frames,
                0 if channel is None else channel.number,
                seconds,
            )
        except BaseException as e:
            self._calls.take(call.message_id)
            if channel is not None:
                channel.release()
            if self._doors.unsent is not None:
                self._doors.unsent(message)
            self._worker.drop_unsent(peer, packed)
            error = self._why_unsent(call, e)
            try:
                call.outcome.set_exception(error)
                if error is e:
                    raise
                raise error from e
            finally:
                del call, error  # its traceback holds this frame: make no cycle of it
        self.sent += 1
        self._note_deadline(deadline)
        return call

    def _why_unsent(self, call: PendingCall, error: BaseException) -> BaseException:
        """What to tell the caller of ``error``, which kept ``call`` from being sent."""
        if isinstance(error, UnknownPeerError):  # it ended before it was ever sent to
            self._worker.lose(call.peer, str(error))
        if isinstance(error, TransportError) and call.peer in self._lost:
            return self._worker.loss_of(call.peer, call.describe())
        if isinstance(error, CongestionError):
            return RpcTimeoutError(f"{self._worker.waiting.over_time(call)}: it was not sent, for {error}")
        return error

    def post(self, peer: int, message: Message, frames: Sequence[Frame] = (), channel: int = 0) -> None:
        """Send a request that is not answered to this worker, if at all."""
        if self._worker.closed:
            raise self._worker.closed_error()
        try:
            self._mailbox.send(peer, message, self._next_id(), frames, channel, self._worker.default_timeout)
        except CongestionError as e:
            raise RpcTimeoutError(str(e)) from e
        self.sent += 1
