"""One backward pass where it began: it starts at the roots, waits, and looks after what will never arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import torch

from zmqgrad.autograd.context import Context
from zmqgrad.autograd.passes.discovery import Discovery
from zmqgrad.autograd.passes.engine import make_pass
from zmqgrad.autograd.passes.local_pass import LocalPass
from zmqgrad.autograd.passes.request import Request
from zmqgrad.autograd.passes.tally import ROOTS, Tally
from zmqgrad.errors import AutogradError, RpcTimeoutError
from zmqgrad.rpc.calls import ChannelOutcome
from zmqgrad.rpc.profiling import profiled_here
from zmqgrad.rpc.remote_errors import rebuild_exception
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.base import Inbound, ReplyChannel
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import (
    BackwardAutogradReq,
    DiscoverAutogradReq,
    DiscoverAutogradResp,
    DropAutogradReq,
    ExceptionReply,
    Reach,
)

if TYPE_CHECKING:
    from zmqgrad.autograd.passes.part import Passes


class Root:
    """A pass that ``worker`` begins. :meth:`run` it once, then :meth:`leave`."""

    def __init__(self, passes: Passes, worker: Worker, context: Context) -> None:
        self._passes = passes
        self._worker = worker
        self._context = context
        self.id = worker.ids.next()
        self.inbox: SimpleQueue[Inbound | None] | None = SimpleQueue() if profiled_here() else None
        """Where gradients come to, so that the profiler of the calling thread records what they set off."""
        channel = self._channel = None if self.inbox is not None else self._acquire_channel()
        self.tally = (
            Tally(worker.id) if channel is None else Tally(worker.id, lambda: ChannelOutcome(channel))
        )
        self._finished = False

    def _acquire_channel(self) -> ReplyChannel | None:
        """Where the root waits for what comes from workers of its host; None if it waits elsewhere."""
        return next(filter(None, map(self._worker.mailbox.acquire_channel, self._context.peers())), None)

    def run(self, roots: Sequence[torch.Tensor], retain_graph: bool, mode: str) -> None:
        """Start at ``roots``; returns when the pass has finished on all workers.

        Raises:
            as :meth:`~zmqgrad.autograd.passes.part.Passes.run`.
        """
        context = self._context
        with context.pass_lock:
            work = context.passes[self.id] = make_pass(context, self._worker.id, retain_graph, roots)
        if mode == "smart":
            self._drop(self._discover({self._worker.id}, work), work)
        channel = 0 if self._channel is None else self._channel.number
        request = Request(self._passes, work, self.id, self._worker.id, channel, (ROOTS,))
        request.carry_out(lambda: work.start([torch.ones_like(r) for r in roots], request))
        self._wait()
        if self.tally.waiting():
            discovery = self._discover(self.tally.waiting(), work)
            if mode == "fast":
                self._complain(discovery)
            self._drop(discovery, work)
            self._wait()
        if self.tally.waiting():
            raise AutogradError(f"the backward pass stands still, though nothing is missing:\n{work}")
        self._finished = True

    def leave(self) -> None:
        """It is over, finished or not."""
        if self._channel is not None:
            self._channel.release()
            if not self._finished:
                self._worker.waiting.leave_early()

    def _wait(self) -> None:
        """Wait until nothing of the pass is under way, and raise what went wrong."""
        tally, channel = self.tally, self._channel
        patience = self._worker.default_timeout or None
        while True:
            steps = tally.steps
            if self.inbox is not None:
                over = self._wait_at_inbox(self.inbox, patience)
            else:
                over = (
                    tally.finished.wait_done(patience)
                    if channel is None
                    else self._wait_at(channel, patience)
                )
            if over:
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

    def _wait_at(self, channel: ReplyChannel, patience: float | None) -> bool:
        """Handle what comes to ``channel`` until the pass has finished, or ``patience`` seconds (False)."""
        clock = self._worker.clock
        until = math.inf if patience is None else clock.now() + patience
        while not self.tally.finished.done():
            left = None if patience is None else until - clock.now()
            if left is not None and left <= 0:
                return False
            with blocking_section():
                inbound = channel.receive(left)
            if inbound is None:
                continue
            message = inbound.message
            if isinstance(message, BackwardAutogradReq) and message.pass_id == self.id:
                self._worker.serve_here(self._passes.on_backward, inbound)
            else:
                self._worker.on_stray(inbound)
        return True

    def _wait_at_inbox(self, inbox: SimpleQueue[Inbound | None], patience: float | None) -> bool:
        """Handle what other threads put there until the pass has finished, or for ``patience`` seconds."""
        until = Deadline.after(patience, self._worker.clock)
        finished = self.tally.finished
        finished.add_done_callback(lambda _: inbox.put(None))
        while not finished.done():
            try:
                with blocking_section():
                    inbound = inbox.get(timeout=until.timeout())
            except Empty:
                return False
            if inbound is not None:
                self._passes.take_in(inbound)
        return True

    def _discover(self, workers: set[int], work: LocalPass) -> Discovery:
        """Find out what may still arrive, beginning with ``workers``."""
        discovery = Discovery(workers)
        message = DiscoverAutogradReq(work.context.id, self.id, work.retain_graph)
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

    def _drop(self, discovery: Discovery, work: LocalPass) -> None:
        """Have all workers go on without what will never arrive."""
        never = {
            worker: tuple(number for number, _, _ in sends) for worker, sends in discovery.never().items()
        }
        requests = {worker: self._worker.ids.next() for worker in never}
        self.tally.expect({number: worker for worker, number in requests.items()})
        own = self._worker.id
        for worker, number in requests.items():
            if worker != own:
                self._worker.post(
                    worker,
                    DropAutogradReq(work.context.id, self.id, number, own, work.retain_graph, never[worker]),
                )
        if own in requests:
            request = Request(self._passes, work, self.id, own, 0, (requests[own],))
            request.carry_out(lambda: work.drop(requests[own], never[own], request))

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
