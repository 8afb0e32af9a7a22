"""What a worker does of backward passes: it takes part in those of others, and begins its own."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from zmqgrad.autograd.context import Context, Contexts
from zmqgrad.autograd.passes.batch import unpack
from zmqgrad.autograd.passes.desk import Arrival
from zmqgrad.autograd.passes.engine import make_pass
from zmqgrad.autograd.passes.failures import describe_failure, rebuild_failure
from zmqgrad.autograd.passes.local_pass import LocalPass
from zmqgrad.autograd.passes.request import Request
from zmqgrad.autograd.passes.root import Root
from zmqgrad.autograd.passes.tally import Tally
from zmqgrad.errors import AutogradError, ClosedError, RpcError, TransportError
from zmqgrad.rpc.worker import Worker
from zmqgrad.transport.base import Frame, Inbound
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import (
    BackwardAutogradReq,
    BackwardAutogradResp,
    DiscoverAutogradReq,
    DiscoverAutogradResp,
    DropAutogradReq,
    ExceptionReply,
    Handled,
    MessageType,
    Waiting,
)
from zmqgrad.wire.tensors.streams import NOTHING_ARRIVED, watch_arrivals

logger = logging.getLogger(__name__)

MODES = ("fast", "smart", "auto")


class Passes:
    """What one worker does of backward passes, its own and those of others."""

    def __init__(
        self, worker: Worker, contexts: Contexts, end_passes: Callable[[Context, Sequence[int]], None]
    ) -> None:
        self._worker = worker
        self.own = worker.id
        """Of this worker."""
        self.now = worker.clock.now
        self.pace = math.inf
        """Seconds that an entry of a pass takes here lately."""
        self._contexts = contexts
        self._end_passes = end_passes
        self._watched = {worker.id}  # those that would be known to be lost
        self._tallies: dict[int, Tally] = {}  # of passes that were started here, by pass id
        self.maps_devices = worker.maps_devices
        self.devices = worker.gradient_devices
        self._inboxes: dict[int, SimpleQueue[Inbound | None]] = {}  # of those that are profiled

    def install(self) -> None:
        """Fill the doors of the worker."""
        doors = self._worker.doors
        doors.requests[MessageType.BACKWARD_AUTOGRAD_REQ] = self.on_backward
        doors.requests[MessageType.DISCOVER_AUTOGRAD_REQ] = self.on_discover
        doors.requests[MessageType.DROP_AUTOGRAD_REQ] = self.on_drop
        doors.control[MessageType.BACKWARD_AUTOGRAD_RESP] = self.on_report
        doors.peer_lost.append(self.peer_lost)
        doors.closing.append(self.close)

    # ---- its own ----------------------------------------------------------------------------------------

    def run(self, context: Context, roots: Sequence[torch.Tensor], retain_graph: bool, mode: str) -> None:
        """One pass from ``roots``; returns when it has finished on all workers.

        Raises:
            AutogradError: in fast mode, if groups somewhere wait for a gradient that will never come.
            RpcTimeoutError: if nothing is heard of the pass for the default timeout, naming the workers.
            Anything else: what failed, anywhere; a RuntimeError besides.
        """
        root = Root(self, self._worker, context)
        self._tallies[root.id] = root.tally
        if root.inbox is not None:
            self._inboxes[root.id] = root.inbox
        try:
            root.run(roots, retain_graph, mode)
        finally:
            del self._tallies[root.id]
            self._inboxes.pop(root.id, None)
            if over := context.end_pass(root.id):
                self._end_passes(context, over)
            root.leave()

    def under_way(self) -> int:
        """How many passes that began here have not finished."""
        return len(self._tallies)

    def peer_lost(self, peer: int, error: BaseException) -> None:
        """Passes that were started here cannot finish if ``peer`` had a part in what is under way."""
        self._watched.discard(peer)
        for tally in list(self._tallies.values()):
            tally.lose(peer, error)

    def close(self) -> None:
        """The worker is shut down while passes that were started here are under way."""
        error = RpcError(f"worker {self._worker.name} was shut down while a backward pass was under way")
        for tally in list(self._tallies.values()):
            tally.end(error)

    # ---- those of others, too ---------------------------------------------------------------------------

    def on_backward(self, inbound: Inbound) -> None:
        """Gradients for sends of this worker."""
        message = inbound.message
        assert isinstance(message, BackwardAutogradReq)
        inbox = self._inboxes.get(message.pass_id)
        if inbox is None:
            self.take_in(inbound)
        else:
            inbox.put(inbound)

    def take_in(self, inbound: Inbound) -> None:
        """Gradients for sends of this worker: handle them, unless other threads do."""
        message = inbound.message
        assert isinstance(message, BackwardAutogradReq)
        arrived, alone = NOTHING_ARRIVED, False
        try:
            context = self._contexts.find(message.context_id)
            context.know(inbound.envelope.source)
            if self.maps_devices(inbound.envelope.source):  # so gradients may come to devices
                arrivals, arrived = watch_arrivals(
                    lambda: unpack(message.sends, message.tensors, inbound.frames)
                )
            else:
                arrivals = unpack(message.sends, message.tensors, inbound.frames)
            work = self._pass(context, message.pass_id, message.retain_graph)
            work.check(arrivals)
            now = self.now()
            if len(arrivals) == 1 and not arrived.events:
                alone = work.desk.take_alone(arrivals[0][0], now)
            threads = 1 if alone else work.desk.put(arrivals, now, arrived)
        except Exception as e:
            self._refuse(message.root, message.pass_id, [send for send, _ in message.sends], e)
            return
        finally:
            if message.handled is not None:
                self._count(message.pass_id, message.handled)
        if threads:
            channel = inbound.envelope.channel
            if threads > 1:
                self.hire(threads - 1, work, message.pass_id, message.root, channel)
            self._work_off(work, message.pass_id, message.root, channel, arrivals if alone else ())

    def hire(self, threads: int, work: LocalPass, pass_id: int, root: int, channel: int) -> None:
        """Have so many other threads handle what waits at the desk of a pass."""
        for _ in range(threads):
            self._worker.submit(functools.partial(self._begin, work, pass_id, root, channel))

    def _begin(self, work: LocalPass, pass_id: int, root: int, channel: int) -> None:
        work.desk.begin()
        self._work_off(work, pass_id, root, channel)

    def _work_off(
        self, work: LocalPass, pass_id: int, root: int, channel: int, first: Sequence[Arrival] = ()
    ) -> None:
        """Handle ``first``, and what waits at the desk of a pass, until there is nothing left."""
        while True:
            request = Request(self, work, pass_id, root, channel)
            try:
                request.carry_out(functools.partial(request.take_turns, first))
            except BaseException:
                work.desk.flee()
                self.hire(work.desk.hire(self.now()), work, pass_id, root, channel)
                raise
            if work.desk.leave():
                return
            first = ()

    def on_discover(self, inbound: Inbound) -> None:
        """The root of a pass asks what leads where."""
        message = inbound.message
        assert isinstance(message, DiscoverAutogradReq)
        context = self._contexts.find(message.context_id)
        context.know(inbound.envelope.source)
        work = self._pass(context, message.pass_id, message.retain_graph)
        self._worker.reply(inbound, DiscoverAutogradResp(work.reach(starts_here=False)))

    def on_drop(self, inbound: Inbound) -> None:
        """The root of a pass knows that some gradients will never arrive."""
        message = inbound.message
        assert isinstance(message, DropAutogradReq)
        try:
            context = self._contexts.find(message.context_id)
            work = self._pass(context, message.pass_id, message.retain_graph)
        except Exception as e:
            self._refuse(message.root, message.pass_id, [message.request], e)
            return
        channel, handled = inbound.envelope.channel, (message.request,)
        request = Request(self, work, message.pass_id, message.root, channel, handled)
        request.carry_out(lambda: work.drop(message.request, message.sends, request))

    def _pass(self, context: Context, pass_id: int, retain_graph: bool) -> LocalPass:
        with context.pass_lock:
            work = context.passes.get(pass_id)
            if work is None and context.is_forgotten(pass_id):
                raise AutogradError(f"backward pass {show_id(pass_id)} has ended")
            if work is None:
                work = context.passes[pass_id] = make_pass(context, self._worker.id, retain_graph)
                work.desk.pace = self.pace
            return work

    def _refuse(self, root: int, pass_id: int, requests: Sequence[int], error: Exception) -> None:
        """There is no pass here to carry on, or not so."""
        handled = Handled(tuple(requests), (), Waiting(self._worker.id, 0), self.describe_error(error, root))
        self.report(root, pass_id, handled)

    def report(self, root: int, pass_id: int, handled: Handled, channel: int = 0) -> None:
        """Tell the root of a pass, which waits at ``channel``, what has been handled here."""
        if root == self._worker.id:
            self._count(pass_id, handled)
            return
        try:
            self._worker.mailbox.send(root, BackwardAutogradResp(handled), pass_id, channel=channel)
        except (RpcError, TransportError) as e:
            logger.warning("cannot report to worker %d, which started the backward pass: %s", root, e)

    def describe_error(self, error: BaseException, root: int) -> ExceptionReply:
        """An error of this worker, for the root of a pass."""
        members = self._worker.membership
        return describe_failure(error, self._worker.id, repr(members.own.info), members.runs_the_same(root))

    def on_report(self, inbound: Inbound) -> None:
        """Another worker has handled a request of a pass that was started here. In the reading thread."""
        message = inbound.message
        assert isinstance(message, BackwardAutogradResp)
        self._count(inbound.envelope.message_id, message.handled)

    def _count(self, pass_id: int, handled: Handled) -> None:
        tally = self._tallies.get(pass_id)
        if tally is not None:
            error = None if handled.error is None else rebuild_failure(handled.error)
            tally.handled(handled.requests, handled.sent, handled.waiting, error)
            for worker, _ in handled.sent:
                if worker not in self._watched:
                    self._watch(worker, tally)

    def _watch(self, worker: int, tally: Tally) -> None:
        """Others have sent a request to a worker that this one may have nothing to do with: is it there?"""
        if worker in self._worker.lost:
            tally.lose(worker, self._worker.loss_of(worker, "its part of a backward pass"))
            return
        self._watched.add(worker)
        try:
            self._worker.submit(functools.partial(self._follow, worker))
        except ClosedError:
            logger.debug("a pass is about to end with its worker")  # see close()

    def _follow(self, worker: int) -> None:
        """In an engine thread, as it may have to ask where that is."""
        try:
            self._worker.mailbox.monitor(worker)
        except (RpcError, TransportError) as e:
            logger.debug("cannot watch worker %d, which has part in a backward pass: %s", worker, e)
            for tally in list(self._tallies.values()):
                tally.lose(worker, e)

    def send(self, peer: int, message: BackwardAutogradReq, frames: list[Frame], channel: int) -> None:
        """Send a request of a pass; whoever handles it tells the root, which waits at ``channel``."""
        self._worker.post(peer, message, frames, channel)
