"""The end of every call that waits: its answer, its deadline, or that nobody wants it any more.

A thread that waits at a channel (:mod:`zmqgrad.transport.local.channels`) reads its answer itself; others
are woken by whoever brings it. Calls that nobody waits for (futures) end by the timekeeper, which looks
when the earliest deadline has come.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING

from zmqgrad.errors import PeerLostError, RpcError, RpcTimeoutError, TransportError
from zmqgrad.rpc.calls import PendingCall
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.transport.base import Inbound, ReplyChannel
from zmqgrad.wire.messages import Cancel, MessageType

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 1.0
"""So long after a caller gave up, an answer that was on its way to its channel has come."""

CANCELLABLE = frozenset((MessageType.CALL, MessageType.REMOTE_CALL, MessageType.RREF_FETCH))


class Waiting:
    """Waits for the calls of ``worker``, or has their time run out."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._calls = worker.calls
        self._clock = worker.clock
        self._timekeeper = worker.timekeeper
        self._next_check = math.inf  # when the timekeeper looks for calls that are over time
        self._check_lock = threading.Lock()

    def wait(self, call: PendingCall) -> Inbound:
        """Wait for the answer of ``call``.

        Raises:
            RpcTimeoutError: if it does not come in time. Others: as the outcome says.
        """
        if call.channel is not None:
            return self._wait_at(call.channel, call)
        outcome = call.outcome
        left = None if call.deadline == math.inf else max(0.0, call.deadline - self._clock.now())
        try:
            if not outcome.wait_done(left) and self._calls.take(call.message_id) is not None:
                outcome.set_exception(self.over_time(call))
                self._cancel(call)
            outcome.wait_done()  # at most the moment between its being taken and set by another thread
        except BaseException:  # Ctrl-C: the caller does not want it any more
            self.give_up(call)
            raise
        try:
            return outcome.result()
        finally:
            del call, outcome  # an error's traceback holds this frame: make no cycle of it

    def give_up(self, call: PendingCall) -> None:
        """Nobody waits for ``call`` any more: tell its callee; drop the answer if it is here already."""
        if self._calls.take(call.message_id) is not None:
            call.outcome.set_exception(RpcError(f"{call.describe()} was given up by its caller"))
            self._cancel(call)
            if call.channel is not None:
                self.leave_early()
        elif call.outcome.done() and call.outcome.exception() is None:
            self._worker.drop_unread(call.outcome.result())

    def _cancel(self, call: PendingCall) -> None:
        """Tell the callee that nobody waits for ``call`` any more."""
        if call.kind not in CANCELLABLE or call.peer in self._worker.lost:
            return
        try:
            self._worker.post(call.peer, Cancel(call.message_id))
        except (TransportError, RpcError) as e:
            logger.debug("%s: cannot cancel %s: %s", self._worker.name, call.describe(), e)

    def _wait_at(self, channel: ReplyChannel, call: PendingCall) -> Inbound:
        """Read replies at ``channel`` until that of ``call`` is there, or its outcome is set elsewhere."""
        try:
            with blocking_section():
                while not call.outcome.done():
                    left = None if call.deadline == math.inf else call.deadline - self._clock.now()
                    inbound = channel.receive(None if left is None else max(0.0, left))
                    if inbound is None:
                        if left is not None and left <= 0 and self._calls.take(call.message_id) is not None:
                            call.outcome.set_exception(self.over_time(call))
                            self._cancel(call)
                            self.leave_early()
                    elif inbound.envelope.message_id != call.message_id:
                        self._worker.on_stray(inbound)  # for somebody who gave up; or of a stranger
                    elif self._calls.take(call.message_id) is not None:
                        call.outcome.set_result(inbound)
                        return inbound
                    else:
                        call.outcome.wait_done()  # another thread has taken it and is about to settle it
                if isinstance(call.outcome.exception(), PeerLostError):
                    inbound = self._last_word(channel, call)
                    if inbound is not None:
                        return inbound
        except BaseException:  # Ctrl-C
            self.give_up(call)
            raise
        finally:
            channel.release()
        try:
            return call.outcome.result()
        finally:
            del call  # as in wait()

    def _last_word(self, channel: ReplyChannel, call: PendingCall) -> Inbound | None:
        """The answer of ``call``, if it had come before its sender was lost, and was not read yet."""
        while (inbound := channel.receive(0.0)) is not None:
            if inbound.envelope.message_id == call.message_id:
                return inbound
            self._worker.on_stray(inbound)
        return None

    def leave_early(self) -> None:
        """What the calling thread waited for at a channel may still come: it must not stay there."""
        self._timekeeper.call_later(DRAIN_SECONDS, self.drain_channels)

    def drain_channels(self) -> None:
        """Read what came to channels after those who waited there had gone."""
        for channel in self._worker.mailbox.acquire_idle_channels():
            try:
                while (inbound := channel.receive(0.0)) is not None:
                    self._worker.on_stray(inbound)
            finally:
                channel.release()

    def note(self, deadline: float) -> None:
        """A call ends at ``deadline``, whether or not anybody waits for it."""
        if deadline < self._next_check:
            self._check_at(deadline)

    def _check_at(self, deadline: float) -> None:
        with self._check_lock:
            if deadline >= self._next_check:
                return
            self._next_check = deadline
        self._timekeeper.call_later(max(0.0, deadline - self._clock.now()), self._check_deadlines)

    def _check_deadlines(self) -> None:
        now = self._clock.now()
        for call in self._calls.expire(now):
            call.outcome.set_exception(self.over_time(call))
            self._cancel(call)
        with self._check_lock:
            if self._next_check > now:
                return  # a later check is on its way
            self._next_check = math.inf
        following = self._calls.next_deadline()
        if following < math.inf:
            self._check_at(following)

    def over_time(self, call: PendingCall) -> RpcTimeoutError:
        """The error of ``call`` at its deadline."""
        name = self._worker.membership.name_of(call.peer)
        since = self._worker.silent.get(call.peer)
        silence = f", silent for {self._clock.now() - since:.1f} s by now" if since is not None else ""
        return RpcTimeoutError(
            f"RPC ran for more than set timeout ({call.timeout * 1000:.0f} ms) and will now be marked "
            f"with an error: {call.describe()} on {name}{silence}"
        )
