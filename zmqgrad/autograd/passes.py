"""Backward passes over workers: the root that starts one and waits, and the workers that carry it on.

A pass is a set of requests, each handled once: gradients for a send, or word that none will come. Whoever
handles one tells the root what that set off, and the root's tally knows when nothing is under way. If groups
wait somewhere at that point, they wait for ever, unless the pass goes on as ``mode`` says:

- *fast*: it does not; the error names what was sent and never used;
- *smart*: the root has found out before the start (:mod:`~zmqgrad.autograd.discovery`) what will never
  arrive, and told the workers to go on without it;
- *auto*: it begins as fast, and if groups wait at the end, it goes on as smart. Where everything is used
  this costs nothing.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence

import torch

from zmqgrad.autograd.context import Context, Contexts
from zmqgrad.autograd.discovery import Discovery
from zmqgrad.autograd.engine import make_pass
from zmqgrad.autograd.failures import describe_failure, rebuild_failure
from zmqgrad.autograd.functions import RecvNote
from zmqgrad.autograd.graph.single import Gradient
from zmqgrad.autograd.local_pass import LocalPass
from zmqgrad.autograd.profiling import RECV_NAME, profiled
from zmqgrad.autograd.tally import ROOTS, Tally
from zmqgrad.errors import AutogradError, ClosedError, RpcError, RpcTimeoutError, TransportError
from zmqgrad.rpc.calls import LaneOutcome
from zmqgrad.rpc.profiling import profiled_anywhere
from zmqgrad.rpc.remote_errors import rebuild_exception
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.blocking import about_to_block
from zmqgrad.transport.base import Frame, Inbound, Lane
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
    Reach,
    Waiting,
)
from zmqgrad.wire.tensors import Devices, describe, rebuild

logger = logging.getLogger(__name__)

MODES = ("fast", "smart", "auto")


class Passes:
    """What one worker does of backward passes, its own and those of others."""

    def __init__(
        self, worker: Worker, contexts: Contexts, end_passes: Callable[[Context, Sequence[int]], None]
    ) -> None:
        self._worker = worker
        self._contexts = contexts
        self._end_passes = end_passes
        self._watched = {worker.id}  # those that would be known to be lost
        self._tallies: dict[int, Tally] = {}  # of passes that were started here, by pass id

    def install(self) -> None:
        """Fill the doors of the worker."""
        doors = self._worker.doors
        doors.requests[MessageType.BACKWARD_AUTOGRAD_REQ] = self.on_backward
        doors.requests[MessageType.DISCOVER_AUTOGRAD_REQ] = self.on_discover
        doors.requests[MessageType.DROP_AUTOGRAD_REQ] = self.on_drop
        doors.control[MessageType.BACKWARD_AUTOGRAD_RESP] = self.on_report
        doors.peer_lost.append(self.peer_lost)
        doors.closing.append(self.close)

    # ---- at the root ------------------------------------------------------------------------------------

    def run(self, context: Context, roots: Sequence[torch.Tensor], retain_graph: bool, mode: str) -> None:
        """One pass from ``roots``; returns when it has finished on all workers.

        Raises:
            AutogradError: in fast mode, if groups somewhere wait for a gradient that will never come.
            RpcTimeoutError: if nothing is heard of the pass for the default timeout, naming the workers.
            Anything else: what failed, anywhere; a RuntimeError besides.
        """
        pass_id = self._worker.ids.next()
        lane = self._take_lane(context)
        tally = self._tallies[pass_id] = (
            Tally(self._worker.id) if lane is None else Tally(self._worker.id, lambda: LaneOutcome(lane))
        )
        finished = False
        try:
            with context.pass_lock:
                work = context.passes[pass_id] = make_pass(context, self._worker.id, retain_graph, roots)
            if mode == "smart":
                self._drop(self._discover({self._worker.id}, work, pass_id), tally, work, pass_id)
            request = _Request(
                self, work, pass_id, ROOTS, self._worker.id, 0 if lane is None else lane.number
            )
            request.carry_out(lambda: work.start([torch.ones_like(r) for r in roots], request.send_on))
            self._wait_for(tally, pass_id, lane)
            if tally.waiting():
                discovery = self._discover(tally.waiting(), work, pass_id)
                if mode == "fast":
                    self._complain(discovery)
                self._drop(discovery, tally, work, pass_id)
                self._wait_for(tally, pass_id, lane)
            if tally.waiting():
                raise AutogradError(f"the backward pass stands still, though nothing is missing:\n{work}")
            finished = True
        finally:
            del self._tallies[pass_id]
            if over := context.end_pass(pass_id):
                self._end_passes(context, over)
            if lane is not None:
                lane.give_back()
                if not finished:
                    self._worker.waiting.leave_early()

    def _take_lane(self, context: Context) -> Lane | None:
        """Where the root waits for what comes from workers of its host; None if it waits elsewhere."""
        return next(filter(None, map(self._worker.mailbox.take_lane, context.peers())), None)

    def under_way(self) -> int:
        """How many passes that began here have not finished."""
        return len(self._tallies)

    def _wait_for(self, tally: Tally, pass_id: int, lane: Lane | None) -> None:
        """Wait until nothing of the pass is under way, and raise what went wrong."""
        patience = self._worker.default_timeout or None
        while True:
            steps = tally.steps
            if lane is None:
                done = tally.finished.wait_done(patience)
            else:
                done = self._wait_at(lane, tally, pass_id, patience)
            if done:
                break
            if tally.steps == steps:
                names = ", ".join(sorted({self._name(worker) for worker in tally.under_way().values()}))
                raise RpcTimeoutError(
                    f"nothing was heard of the backward pass for {patience} s; "
                    f"it waits for {names or 'reports'}"
                )
        error = tally.error()
        if error is not None:
            raise error

    def _wait_at(self, lane: Lane, tally: Tally, pass_id: int, patience: float | None) -> bool:
        """Handle what comes to ``lane`` until the pass has finished, or for ``patience`` seconds (False)."""
        clock = self._worker.clock
        until = math.inf if patience is None else clock.now() + patience
        while not tally.finished.done():
            left = None if patience is None else until - clock.now()
            if left is not None and left <= 0:
                return False
            with about_to_block():
                inbound = lane.receive(left)
            if inbound is None:
                continue
            message = inbound.message
            if isinstance(message, BackwardAutogradReq) and message.pass_id == pass_id:
                self._worker.serve_here(self.on_backward, inbound)
            else:
                self._worker.on_stray(inbound)
        return True

    def _discover(self, workers: set[int], work: LocalPass, pass_id: int) -> Discovery:
        """Find out what may still arrive, beginning with ``workers``."""
        discovery = Discovery(workers)
        message = DiscoverAutogradReq(work.context.id, pass_id, work.retain_graph)
        seconds = self._worker.default_timeout
        while unknown := discovery.unknown():
            asked = [
                self._worker.request(peer, message, seconds=seconds, what="the discovery of a backward pass")
                for peer in unknown
                if peer != self._worker.id
            ]
            if self._worker.id in unknown:
                discovery.learn(work.reach(starts_here=True))
            for call in asked:
                discovery.learn(self._reach_of(self._worker.wait(call)))
        return discovery

    def _reach_of(self, answer: Inbound) -> Reach:
        message = answer.message
        if isinstance(message, ExceptionReply):
            raise rebuild_exception(message)
        assert isinstance(message, DiscoverAutogradResp)
        return message.reach

    def _drop(self, discovery: Discovery, tally: Tally, work: LocalPass, pass_id: int) -> None:
        """Have all workers go on without what will never arrive."""
        never = {
            worker: tuple(number for number, _, _ in sends) for worker, sends in discovery.never().items()
        }
        requests = {worker: self._worker.ids.next() for worker in never}
        tally.expect({number: worker for worker, number in requests.items()})
        own = self._worker.id
        for worker, number in requests.items():
            if worker != own:
                self._worker.post(
                    worker,
                    DropAutogradReq(work.context.id, pass_id, number, own, work.retain_graph, never[worker]),
                )
        if own in requests:
            request = _Request(self, work, pass_id, requests[own], own, 0)
            request.carry_out(lambda: work.drop(requests[own], never[own], request.send_on))

    def _complain(self, discovery: Discovery) -> None:
        lines = [
            f"  {what}: tensors sent by {self._name(worker)} to {self._name(peer)} ({show_id(number)})"
            for worker, sends in discovery.never().items()
            for number, peer, what in sends
        ]
        raise AutogradError(
            "the backward pass cannot finish in FAST mode, which expects a gradient for everything that was "
            "sent. Nothing came back for\n" + "\n".join(lines) + "\n"
            "as no root depends on it. Do not ask for results that the loss does not use, call .detach() "
            "on what need not be differentiated, or use mode='auto'."
        )

    def _name(self, worker: int) -> str:
        return self._worker.membership.name_of(worker)

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

    # ---- at every worker --------------------------------------------------------------------------------

    def on_backward(self, inbound: Inbound) -> None:
        """Gradients for a send of this worker."""
        message = inbound.message
        assert isinstance(message, BackwardAutogradReq)
        try:
            context = self._contexts.find(message.context_id)
            context.know(inbound.envelope.source)
            tensors = rebuild(message.tensors, inbound.frames)
            gradients = [None if i < 0 else tensors[i] for i in message.gradients]
            work = self._pass(context, message.pass_id, message.retain_graph)
        except Exception as e:
            self._refuse(message.root, message.pass_id, message.autograd_id, e)
            return
        finally:
            if message.handled is not None:
                self._count(message.pass_id, message.handled)
        lane = inbound.envelope.lane
        request = _Request(self, work, message.pass_id, message.autograd_id, message.root, lane)
        request.carry_out(lambda: work.arrive(message.autograd_id, gradients, request.send_on))

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
            self._refuse(message.root, message.pass_id, message.request, e)
            return
        request = _Request(self, work, message.pass_id, message.request, message.root, inbound.envelope.lane)
        request.carry_out(lambda: work.drop(message.request, message.sends, request.send_on))

    def _pass(self, context: Context, pass_id: int, retain_graph: bool) -> LocalPass:
        with context.pass_lock:
            work = context.passes.get(pass_id)
            if work is None and context.is_forgotten(pass_id):
                raise AutogradError(f"backward pass {show_id(pass_id)} has ended")
            if work is None:
                work = context.passes[pass_id] = make_pass(context, self._worker.id, retain_graph)
            return work

    def _refuse(self, root: int, pass_id: int, request: int, error: Exception) -> None:
        """There is no pass here to carry on."""
        handled = Handled(request, (), Waiting(self._worker.id, 0), self.describe_error(error))
        self.report(root, pass_id, handled)

    def report(self, root: int, pass_id: int, handled: Handled, lane: int = 0) -> None:
        """Tell the root of a pass, which waits at ``lane``, what has been handled here."""
        if root == self._worker.id:
            self._count(pass_id, handled)
            return
        try:
            self._worker.mailbox.send(root, BackwardAutogradResp(handled), pass_id, lane=lane)
        except (RpcError, TransportError) as e:
            logger.warning("cannot report to worker %d, which started the backward pass: %s", root, e)

    def describe_error(self, error: BaseException) -> ExceptionReply:
        """An error of this worker, for the root."""
        return describe_failure(error, self._worker.id, repr(self._worker.membership.own.info))

    def on_report(self, inbound: Inbound) -> None:
        """Another worker has handled a request of a pass that was started here. In the reading thread."""
        message = inbound.message
        assert isinstance(message, BackwardAutogradResp)
        self._count(inbound.envelope.message_id, message.handled)

    def _count(self, pass_id: int, handled: Handled) -> None:
        tally = self._tallies.get(pass_id)
        if tally is not None:
            error = None if handled.error is None else rebuild_failure(handled.error)
            tally.handled(handled.autograd_id, handled.sent, handled.waiting, error)
            for _, worker in handled.sent:
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
            self._worker.mailbox.follow(worker)
        except (RpcError, TransportError) as e:
            logger.debug("cannot watch worker %d, which has part in a backward pass: %s", worker, e)
            for tally in list(self._tallies.values()):
                tally.lose(worker, e)

    def is_here(self, worker: int) -> bool:
        """Is that this worker?"""
        return worker == self._worker.id

    def devices(self, peer: int) -> Devices:
        """On which devices of ``peer`` gradients arrive."""
        return self._worker.gradient_devices(peer)

    def send(self, peer: int, message: BackwardAutogradReq, frames: list[Frame], lane: int) -> None:
        """Send a request of a pass; whoever handles it tells the root, which waits at ``lane``."""
        self._worker.post(peer, message, frames, lane)


class _Request:
    """One request of a pass, while this worker handles it: what it sets off, and the report at its end."""

    def __init__(
        self, passes: Passes, work: LocalPass, pass_id: int, autograd_id: int, root: int, lane: int
    ) -> None:
        self._passes = passes
        self._lane = lane  # where the root waits
        self._work = work
        self._pass_id = pass_id
        self._autograd_id = autograd_id
        self._root = root
        self._sent: list[tuple[int, int]] = []
        self._last: tuple[RecvNote, Sequence[Gradient]] | None = None  # for the root: carries the report

    def carry_out(self, step: Callable[[], bool | None]) -> None:
        """Do ``step`` and report; unless it says by False that another thread does the same."""
        error: Exception | None = None
        try:
            if step() is False:
                return
        except Exception as e:
            error = e
        except BaseException as e:  # a hook that calls sys.exit() must not leave the root waiting
            self._passes.report(self._root, self._pass_id, self._report(e), self._lane)
            raise
        last, self._last = self._last, None
        if last is not None:
            self._sent.append((last[0].autograd_id, self._root))
            try:
                self._send(*last, self._report(error))
                return
            except Exception as e:
                self._sent.pop()
                error = error or e
        self._passes.report(self._root, self._pass_id, self._report(error), self._lane)

    def _report(self, error: BaseException | None) -> Handled:
        said = None if error is None else self._passes.describe_error(error)
        return Handled(self._autograd_id, tuple(self._sent), self._work.waiting(), said)

    def send_on(self, note: RecvNote, gradients: Sequence[Gradient]) -> None:
        """Gradients that are complete at a recv go to its send."""
        context = self._work.context
        if note.context_id != context.id:
            raise AutogradError(
                f"a tensor that was received in context {show_id(note.context_id)} is part of the graph of "
                f"context {show_id(context.id)}: use one context for both, or detach it"
            )
        if note.peer == self._root and not self._passes.is_here(note.peer):
            if self._last is not None:
                self._send_counted(*self._last)
            self._last = note, gradients
        else:
            self._send_counted(note, gradients)

    def _send_counted(self, note: RecvNote, gradients: Sequence[Gradient]) -> None:
        self._send(note, gradients, None)
        self._sent.append((note.autograd_id, note.peer))

    def _send(self, note: RecvNote, gradients: Sequence[Gradient], handled: Handled | None) -> None:
        present: list[torch.Tensor] = []
        numbers: list[int] = []
        for gradient in gradients:
            numbers.append(-1 if gradient is None else len(present))
            if gradient is not None:
                present.append(_packed(gradient))
        frames: list[Frame] = []
        message = BackwardAutogradReq(
            self._work.context.id,
            self._pass_id,
            note.autograd_id,
            self._root,
            tuple(numbers),
            describe(present, frames, self._passes.devices(note.peer)),
            self._work.retain_graph,
            handled,
        )
        if profiled_anywhere():
            with profiled(RECV_NAME):
                self._passes.send(note.peer, message, frames, self._lane)
        else:
            self._passes.send(note.peer, message, frames, self._lane)


FEW = 1024
"""Gradients of up to so many elements are sent contiguous, which takes less work; others as they are."""


def _packed(gradient: torch.Tensor) -> torch.Tensor:
    strided = gradient.layout is torch.strided
    return gradient.contiguous() if strided and gradient.numel() <= FEW else gradient
