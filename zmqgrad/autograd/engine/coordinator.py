"""The coordinator of one backward pass: starts it at the roots, waits for its end, and resolves stalls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

import torch

from zmqgrad.autograd.context import Context
from zmqgrad.autograd.engine.discovery import Discovery
from zmqgrad.autograd.engine.executor import LocalPass
from zmqgrad.autograd.engine.failures import ReportedFailure, rebuild_failure
from zmqgrad.autograd.engine.step import BackwardStep
from zmqgrad.autograd.engine.termination import ROOTS, TerminationDetector
from zmqgrad.autograd.graph.captures import Captures
from zmqgrad.autograd.graph.node import Gradient
from zmqgrad.errors import AutogradError, RpcTimeoutError
from zmqgrad.rpc.profiling import profiled_here
from zmqgrad.rpc.remote_errors import rebuild_exception
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import (
    BackwardAutogradReq,
    DiscoverAutogradReq,
    DiscoverAutogradResp,
    DropAutogradReq,
    ExceptionReply,
    PassOptions,
    ReachabilityReport,
)

if TYPE_CHECKING:
    from zmqgrad.autograd.engine.participant import Participant


class Inputs(Protocol):
    """The tensors, on any workers, whose gradients a pass returns."""

    def begin(self, pass_id: int) -> Captures:
        """Make the other workers take part in the pass. Returns the tensors of this worker."""

    def end(self, pass_id: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Collect the gradients; ``gradients`` are those of the tensors of this worker."""


class Coordinator:
    """One pass that begins on ``worker``. Call :meth:`run` once, then :meth:`close`."""

    def __init__(
        self, participant: Participant, worker: Worker, context: Context, pass_id: int | None = None
    ) -> None:
        self._participant = participant
        self._worker = worker
        self._context = context
        self.id = pass_id or worker.ids.next()
        self.inbox: SimpleQueue[Inbound | None] | None = SimpleQueue() if profiled_here() else None
        """Under a profiler: the queue by which the calling thread receives, and so records, all requests."""
        ports = worker.ports
        self._port = ports.at_receiver if self.inbox is not None else ports.acquire_any(context.peers())
        self.detector = TerminationDetector(
            worker.id, self._port.promise, partial(participant.stop, context, self.id)
        )
        self.finished = False

    def run(
        self,
        roots: Sequence[torch.Tensor],
        options: PassOptions,
        mode: str,
        gradients: Sequence[Gradient] | None,
        inputs: Inputs | None,
    ) -> None:
        """Run the pass from ``roots``. Returns when it has finished on all workers.

        Args: as :meth:`~zmqgrad.autograd.engine.participant.Participant.run`.

        Raises:
            Exception: as :meth:`~zmqgrad.autograd.engine.participant.Participant.run`.
        """
        context = self._context
        is_strict = mode == "fast" and not context.has_history
        local_inputs: Captures | Sequence[torch.Tensor] = ()
        if inputs is not None:
            try:
                local_inputs = inputs.begin(self.id)
            except BaseException as e:  # nothing was sent that could report
                self.detector.abort(e)
                raise
        with context.pass_lock:
            sends = context.sends(self.id)
            local_pass = LocalPass(
                context, self._worker.id, options, roots, local_inputs, sends, pass_id=self.id
            )
            context.add_pass(self.id, local_pass)
        if mode == "smart":
            self._drop(_never(self._discover({self._worker.id}, local_pass)), local_pass)
        step = BackwardStep(
            self._participant, local_pass, self.id, self._worker.id, self._port.number, (ROOTS,)
        )
        given = [None] * len(roots) if gradients is None else gradients
        started = [torch.ones_like(r) if g is None else g for r, g in zip(roots, given, strict=True)]
        step.carry_out(lambda: local_pass.start(started, step))
        self._wait()
        if stalled := self.detector.waiting():
            discovery = self._discover(stalled, local_pass)
            if is_strict:
                self._raise_unused(discovery)
            self._drop(_never(discovery), local_pass)
            self._wait()
            if self.detector.waiting():
                raise AutogradError(
                    f"the backward pass makes no progress, though no gradient is missing:\n{local_pass}"
                )
        if with_callbacks := self.detector.with_callbacks():
            self._drop(dict.fromkeys(with_callbacks, ()), local_pass)
            self._wait()
        self.finished = True
        if inputs is not None and local_pass.captures is not None:
            inputs.end(self.id, local_pass.captures.gradients())

    def close(self) -> None:
        """Release what the pass holds, whether or not it has finished."""
        if self.finished:
            self._port.release()
        else:
            self.detector.abort(AutogradError("the backward pass has failed"))  # it may not have begun
            self._port.abandon(self._worker.server.on_unexpected)

    def _wait(self) -> None:
        """Wait until no request of the pass is outstanding, and raise its error, if any."""
        tracer, reporter = self._participant.hooks.tracer, self._worker.client.reporter
        if tracer is None and reporter is None:
            self._wait_for_reports()
            return
        report = (
            reporter.watch(lambda: f"a backward pass: {self._missing()}") if reporter is not None else None
        )
        if tracer is not None:
            tracer.wait_begun(self._worker.id, self.id)
        try:
            self._wait_for_reports()
        finally:
            if report is not None:
                report.cancel()
            if tracer is not None:
                failed = self.detector.error() is not None or not self.detector.finished.done()
                tracer.wait_ended(self._worker.id, self.id, failed)

    def _wait_for_reports(self) -> None:
        detector = self.detector
        timeout = self._worker.default_timeout or None
        while True:
            steps = detector.steps
            if self.inbox is not None:
                ended = self._wait_at_inbox(self.inbox, timeout)
            else:
                ended = self._wait_at_port(timeout)
            if ended:
                break
            if detector.steps == steps:
                detector.abort(
                    RpcTimeoutError(
                        f"no report of the backward pass arrived for {timeout} s; "
                        f"it waits for {self._missing()}"
                    )
                )
                break
        error = detector.error()
        if error is not None:
            raise rebuild_failure(error.reply) if isinstance(error, ReportedFailure) else error

    def _missing(self) -> str:
        """The workers whose reports are missing, and what the trace knows of their requests."""
        tracer, found = self._participant.hooks.tracer, []
        for worker in sorted(set(self.detector.outstanding().values())):
            place = tracer.locate(worker, 0, self._context.id) if tracer is not None else ""
            found.append(f"{self._name(worker)} ({place})" if place else self._name(worker))
        return ", ".join(found) or "reports"

    def _wait_at_port(self, timeout: float | None) -> bool:
        """Handle messages at the port until the pass has finished. Returns False on timeout (seconds)."""
        worker, finished = self._worker, self.detector.finished
        until = math.inf if timeout is None else worker.clock.now() + timeout
        while (inbound := self._port.receive(finished, until)) is not None:
            message = inbound.message
            if isinstance(message, BackwardAutogradReq) and message.pass_id == self.id:
                self._participant.take_report(inbound)
                self._port.settle()  # what follows may wait for a peer that ends
                worker.server.serve_here(self._participant.on_backward, inbound)
            else:
                worker.server.on_unexpected(inbound)
        return finished.done()

    def _wait_at_inbox(self, inbox: SimpleQueue[Inbound | None], timeout: float | None) -> bool:
        """Handle messages in ``inbox`` until the pass has finished. Returns False on timeout (seconds)."""
        deadline = Deadline.after(timeout, self._worker.clock)
        finished = self.detector.finished
        finished.add_done_callback(lambda _: inbox.put(None))
        while not finished.done():
            try:
                with blocking_section():
                    inbound = inbox.get(timeout=deadline.timeout())
            except Empty:
                return False
            if inbound is not None:
                self._participant.receive(inbound)
        return True

    def _discover(self, workers: set[int], local_pass: LocalPass) -> Discovery:
        """Find the gradients that will never arrive; ``workers`` report first."""
        discovery = Discovery(workers)
        message = DiscoverAutogradReq(local_pass.context.id, self.id, local_pass.options)
        seconds = self._worker.default_timeout
        while unknown := discovery.unknown():
            calls = [
                self._worker.request(
                    peer, message, seconds=seconds, description="the discovery of a backward pass"
                )
                for peer in unknown
                if peer != self._worker.id
            ]
            if self._worker.id in unknown:
                discovery.learn(local_pass.reach(starts_here=True))
            for call in calls:
                discovery.learn(self._reach_of(self._worker.wait(call)))
        return discovery

    def _reach_of(self, reply: Inbound) -> ReachabilityReport:
        message = reply.message
        if isinstance(message, ExceptionReply):
            raise rebuild_exception(message)
        assert isinstance(message, DiscoverAutogradResp)
        return message.reach

    def _drop(self, never: Mapping[int, tuple[int, ...]], local_pass: LocalPass) -> None:
        """Make workers continue without the gradients for these sends; without any, end their parts."""
        requests = {worker: self._worker.ids.next() for worker in never}
        self.detector.expect({number: worker for worker, number in requests.items()})
        own = self._worker.id
        for worker, number in requests.items():
            if worker != own:
                self._worker.post(
                    worker,
                    DropAutogradReq(
                        local_pass.context.id, self.id, number, own, local_pass.options, never[worker]
                    ),
                )
        if own in requests:
            step = BackwardStep(self._participant, local_pass, self.id, own, 0, (requests[own],))
            step.carry_out(lambda: local_pass.drop(requests[own], never[own], step))

    def _raise_unused(self, discovery: Discovery) -> None:
        lines = [
            f"  {what}: tensors sent by {self._name(worker)} to {self._name(peer)} ({show_id(number)})"
            for worker, sends in discovery.never().items()
            for number, peer, what in sends
        ]
        raise AutogradError(
            "the backward pass cannot finish in FAST mode, which expects a gradient for everything that was "
            "sent. No gradient will arrive for\n" + "\n".join(lines) + "\n"
            "as no root depends on it. Do not request results that the loss does not use, call .detach() "
            "on what need not be differentiated, or use mode='auto'."
        )

    def _name(self, worker: int) -> str:
        return self._worker.membership.name_of(worker)


def _never(discovery: Discovery) -> dict[int, tuple[int, ...]]:
    """The sends of each worker whose gradients will never arrive."""
    return {worker: tuple(number for number, _, _ in sends) for worker, sends in discovery.never().items()}
