"""A worker's part in backward passes: it begins its own, and handles the requests of all passes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextvars import copy_context
from queue import SimpleQueue

import torch

from zmqgrad.autograd.context import Context, Contexts
from zmqgrad.autograd.engine.batch import decode, unpack
from zmqgrad.autograd.engine.coordinator import Coordinator, Inputs
from zmqgrad.autograd.engine.executor import LocalPass
from zmqgrad.autograd.engine.failures import ReportedFailure, describe_failure
from zmqgrad.autograd.engine.step import BackwardStep
from zmqgrad.autograd.engine.termination import TerminationDetector
from zmqgrad.autograd.graph.node import Gradient
from zmqgrad.errors import AutogradError, ClosedError, RpcError, TransportError
from zmqgrad.rpc.membership.membership import LEFT, LEFT_AT_ONCE
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.blocking import check_may_wait
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.ids import show_id, split_id
from zmqgrad.wire.messages import (
    BackwardAutogradReq,
    BackwardAutogradResp,
    DiscoverAutogradReq,
    DiscoverAutogradResp,
    DropAutogradReq,
    ExceptionReply,
    MessageType,
    PassOptions,
    ProgressReport,
    StallReport,
)
from zmqgrad.wire.tensors.streams import NO_COPIES, record_copies

logger = logging.getLogger(__name__)

MODES = ("fast", "smart", "auto")

HELP_SECONDS = 2e-3
"""If the gradients of one send take more time, several threads handle those of several sends."""

EFFORT_DECAY = 0.8
"""The expected time falls by this factor with each send that takes less."""


class Participant:
    """The backward passes of one worker.

    Args:
        worker: the worker.
        contexts: its contexts.
        end_passes: called with a context and the passes in it that all workers are to forget.
    """

    def __init__(
        self, worker: Worker, contexts: Contexts, end_passes: Callable[[Context, Sequence[int]], None]
    ) -> None:
        self._worker = worker
        self.worker_id = worker.id
        self.hooks = worker.hooks
        self.now = worker.clock.now
        self._contexts = contexts
        self._end_passes = end_passes
        self._monitored = {worker.id}  # workers whose loss would be noticed
        self._detectors: dict[int, TerminationDetector] = {}  # of passes that began here, by pass id
        self.maps_devices = worker.contexts.maps_devices
        self.devices = worker.contexts.for_gradients
        self._inboxes: dict[int, SimpleQueue[Inbound | None]] = {}  # of passes under a profiler
        self.send = worker.post
        """Send a request of a pass. The coordinator, which waits at the given channel, gets the report."""
        self._has_helpers = worker.options.num_worker_threads > 1
        self._effort: float | None = None  # time that the gradients of a send have taken lately

    def install(self) -> None:
        """Register the handlers of backward messages with the worker."""
        hooks = self._worker.hooks
        hooks.requests[MessageType.BACKWARD_AUTOGRAD_REQ] = self.on_backward
        hooks.reports[MessageType.BACKWARD_AUTOGRAD_REQ] = self.take_report
        hooks.requests[MessageType.DISCOVER_AUTOGRAD_REQ] = self.on_discover
        hooks.requests[MessageType.DROP_AUTOGRAD_REQ] = self.on_drop
        hooks.control[MessageType.BACKWARD_AUTOGRAD_RESP] = self.on_report
        hooks.peer_lost.append(self.peer_lost)
        hooks.closing.append(self.close)

    # ---- passes that begin here -------------------------------------------------------------------------

    def run(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        options: PassOptions,
        mode: str,
        gradients: Sequence[Gradient] | None = None,
        inputs: Inputs | None = None,
        pass_id: int | None = None,
    ) -> None:
        """Run one pass from ``roots``. Returns when it has finished on all workers.

        Args:
            context: the context of the pass.
            roots: tensors of this worker.
            options: how it runs.
            mode: one of ``MODES``.
            gradients: of ``roots``; None, for all or one of them: ones.
            inputs: the tensors whose gradients it returns, if leaves accumulate none.
            pass_id: its id, if a recomputation has one for it already.

        Raises:
            AutogradError: in fast mode, if groups somewhere wait for a gradient that will never arrive; if
                the context is released meanwhile.
            RpcTimeoutError: if no report of the pass arrives for the default timeout; names the workers.
            Exception: any error of a backward function or hook on any worker, also as a RuntimeError.
        """
        check_may_wait()
        coordinator = Coordinator(self, self._worker, context, pass_id)
        tracer = self.hooks.tracer
        if tracer is not None:
            tracer.pass_started(context.id, coordinator.id)
        self._detectors[coordinator.id] = coordinator.detector
        context.running[coordinator.id] = coordinator.detector.abort
        if coordinator.inbox is not None:
            self._inboxes[coordinator.id] = coordinator.inbox
        try:
            if torch.is_inference_mode_enabled():  # nothing that the pass makes could be differentiated
                with torch.inference_mode(False):
                    coordinator.run(roots, options, mode, gradients, inputs)
            else:
                coordinator.run(roots, options, mode, gradients, inputs)
        finally:
            if tracer is not None:
                tracer.pass_finished(context.id, coordinator.id, not coordinator.finished)
            del self._detectors[coordinator.id], context.running[coordinator.id]
            self._inboxes.pop(coordinator.id, None)
            ended = context.end_pass(coordinator.id) if coordinator.finished else [coordinator.id]
            if ended:
                self._end_passes(context, ended)
            coordinator.close()

    def stop(self, context: Context, pass_id: int) -> None:
        """Stop a failed pass that began here on all workers, even while its own thread computes.

        Called by any thread.
        """
        local_pass = context.passes.get(pass_id)
        if local_pass is not None:
            local_pass.abandon()
        try:
            self._worker.submit(functools.partial(self._end_passes, context, [pass_id]))
        except ClosedError:
            logger.debug("a failed pass ends with its worker")

    def running(self) -> int:
        """Return the number of contexts with a pass that began here or has work for this worker."""
        return sum(
            any(
                number in self._detectors or each.is_running()
                for number, each in context.local_passes().items()
            )
            for context in self._contexts.live()
        )

    def peer_lost(self, peer: int, error: BaseException) -> None:
        """Fail the passes that have requests outstanding at ``peer``; those of other workers by a report.

        The workers where those passes began may still reach ``peer``, but what was sent to it from here may
        not have arrived, which nobody knows as long as it has not reported that. If it has left, it has said
        so to all, behind its last report.
        """
        self._monitored.discard(peer)
        for detector in list(self._detectors.values()):
            detector.lose(peer, error)
        if self._worker.lost[peer] in (LEFT, LEFT_AT_ONCE):
            return
        try:
            self._worker.submit(functools.partial(self._report_lost, peer, error))
        except ClosedError:
            logger.debug("passes of other workers end with this one")

    def _report_lost(self, peer: int, error: BaseException) -> None:
        """Report the requests that passes of other workers may have sent from here to a lost peer."""
        waiting = StallReport(self.worker_id, 0)
        for context in self._contexts.live():
            for pass_id, local_pass in context.local_passes().items():
                root, requests = split_id(pass_id)[0], local_pass.requests_to(peer)
                if requests and root not in (self.worker_id, peer):
                    described = self.describe_error(error, root)
                    self.report(root, pass_id, ProgressReport((), (), waiting, described, requests))

    def close(self) -> None:
        """Fail the passes that began here, because the worker shuts down."""
        for detector in list(self._detectors.values()):
            detector.abort(self._shut_down())

    def _shut_down(self) -> RpcError:
        return RpcError(f"worker {self._worker.name} was shut down while a backward pass was under way")

    # ---- requests of any pass ---------------------------------------------------------------------------

    def on_backward(self, inbound: Inbound) -> None:
        """Handle gradients for sends of this worker; in a profiled pass, let its own thread do so.

        What they report was taken before (:meth:`take_report`).
        """
        message = inbound.message
        assert isinstance(message, BackwardAutogradReq)
        if not self._inboxes or (inbox := self._inboxes.get(message.pass_id)) is None:
            self.receive(inbound)
        else:
            inbox.put(inbound)

    def receive(self, inbound: Inbound) -> None:
        """Queue gradients for sends of this worker, and handle the queue unless another thread does."""
        message = inbound.message
        assert isinstance(message, BackwardAutogradReq)
        arrived = NO_COPIES
        try:
            context = self._contexts.find(message.context_id)
            source = inbound.envelope.source
            context.add_peer(source)
            if self.maps_devices(source):  # gradients may be copied to devices
                tensors, arrived = record_copies(lambda: decode(message, inbound.frames, context, source))
            else:
                tensors = decode(message, inbound.frames, context, source)
            arrivals = unpack(message.sends, tensors)
            local_pass = self._local_pass(context, message.pass_id, message.options)
            local_pass.check(arrivals, source)
            consumes = local_pass.queue.add(arrivals, arrived)
        except Exception as e:
            self._report_rejected(message.root, message.pass_id, [send for send, _ in message.sends], e)
            return
        if not consumes and self._is_heavy() and self._may_help(message.pass_id):
            consumes = not local_pass.recomputes and local_pass.queue.help()
        if consumes:
            self._consume(local_pass, message.pass_id, message.root, inbound.envelope.channel)
        elif local_pass.queue.needs_help():
            self.request_help(local_pass, message.pass_id, message.root, inbound.envelope.channel)

    def _consume(self, local_pass: LocalPass, pass_id: int, root: int, channel: int) -> None:
        """Handle what the queue of a pass holds, as one of its consumers."""
        while True:
            step = BackwardStep(self, local_pass, pass_id, root, channel)
            try:
                step.carry_out(step.run)
            except BaseException:
                if not local_pass.queue.finish():  # another thread continues
                    self._worker.submit(functools.partial(self._consume, local_pass, pass_id, root, channel))
                raise
            if local_pass.queue.finish():
                return

    def note_effort(self, seconds: float) -> None:
        """Note the time that the gradients of one send have taken."""
        self._effort = max(seconds, EFFORT_DECAY * (self._effort or 0.0))

    def _may_help(self, pass_id: int) -> bool:
        """Whether several threads may handle what arrives: not in a profiled pass, which one records."""
        return self._has_helpers and pass_id not in self._inboxes

    def _is_heavy(self) -> bool:
        """Whether the gradients of each send will probably keep a thread busy."""
        return self._effort is not None and self._effort >= HELP_SECONDS

    def request_help(self, local_pass: LocalPass, pass_id: int, root: int, channel: int) -> None:
        """Let another thread take part in a pass if the gradients that wait will probably keep it busy.

        To wake a thread takes longer than small gradients do, which also better share a message.
        """
        if not self._may_help(pass_id):
            return
        help_pass = functools.partial(self._help, local_pass, pass_id, root, channel)
        if self._is_heavy():
            help_pass()
        elif self._effort is None:  # nothing is known yet: see whether they still wait after a while
            look_later = functools.partial(self._worker.submit_if_open, help_pass)  # at all of the graph
            self._worker.timer.call_later(HELP_SECONDS, look_later)

    def _help(self, local_pass: LocalPass, pass_id: int, root: int, channel: int) -> None:
        if local_pass.recomputes or not local_pass.queue.request_help():
            return
        consume = functools.partial(self._consume_as_helper, local_pass, pass_id, root, channel)
        try:
            self._worker.submit(consume)
        except ClosedError:
            logger.debug("a backward pass is about to end with its worker")  # see close()

    def _consume_as_helper(self, local_pass: LocalPass, pass_id: int, root: int, channel: int) -> None:
        """Runs in an engine thread, with the modes and context variables that a request would find."""
        if local_pass.queue.help(requested=True):
            _run_in_clean_thread(functools.partial(self._consume, local_pass, pass_id, root, channel))

    def compute_again(
        self,
        local_pass: LocalPass,
        pass_id: int,
        root: int,
        channel: int,
        send: int,
        gradients: Sequence[Gradient],
    ) -> None:
        """Let another thread lead the gradients of a checkpointed call, which has ``send``, through it."""
        lead = functools.partial(self._lead_through, local_pass, pass_id, root, channel, send, gradients)
        try:
            self._worker.submit(functools.partial(_run_in_clean_thread, lead))
        except ClosedError:
            logger.debug("a backward pass is about to end with its worker")  # see close()

    def _lead_through(
        self,
        local_pass: LocalPass,
        pass_id: int,
        root: int,
        channel: int,
        send: int,
        gradients: Sequence[Gradient],
    ) -> None:
        if local_pass.abandoned:
            return
        try:
            call = local_pass.checkpoint(send)
            found = copy_context().run(call.backward, self, local_pass, gradients)
        except BaseException as e:
            self._report_rejected(root, pass_id, [send], e)
            if not isinstance(e, Exception):
                raise
            return
        if local_pass.queue.add([(send, found)]):
            self._consume(local_pass, pass_id, root, channel)

    def forget(self, context: Context, pass_id: int) -> None:
        """Free on all workers what a recomputation for this pass has left there."""
        if context.was_repeated(pass_id):
            self._end_passes(context, [pass_id])

    def on_discover(self, inbound: Inbound) -> None:
        """Report to the coordinator which entries lead to which recvs."""
        message = inbound.message
        assert isinstance(message, DiscoverAutogradReq)
        context = self._contexts.find(message.context_id)
        context.add_peer(inbound.envelope.source)
        local_pass = self._local_pass(context, message.pass_id, message.options)
        self._worker.reply(inbound, DiscoverAutogradResp(local_pass.reach(starts_here=False)))

    def on_drop(self, inbound: Inbound) -> None:
        """Continue without gradients that will never arrive, as the coordinator has found out."""
        message = inbound.message
        assert isinstance(message, DropAutogradReq)
        try:
            context = self._contexts.find(message.context_id)
            local_pass = self._local_pass(context, message.pass_id, message.options)
        except Exception as e:
            self._report_rejected(message.root, message.pass_id, [message.request], e)
            return
        channel, handled = inbound.envelope.channel, (message.request,)
        step = BackwardStep(self, local_pass, message.pass_id, message.root, channel, handled)
        step.carry_out(lambda: local_pass.drop(message.request, message.sends, step))

    def join_pass(
        self, context: Context, pass_id: int, options: PassOptions, inputs: Sequence[torch.Tensor]
    ) -> LocalPass:
        """Take part in a pass before its first gradient arrives, as it returns gradients of ``inputs``."""
        with context.pass_lock:
            joined = LocalPass(context, self.worker_id, options, (), inputs, pass_id=pass_id)
            context.add_pass(pass_id, joined)
            return joined

    def record(self, context: Context, peer: int, gradients: Sequence[torch.Tensor]) -> int:
        """Record a send of gradients for ``peer``. Returns its id; 0 if none of them requires grad."""
        return context.record(self._worker.ids, peer, gradients, "the gradients of a backward pass")

    def _local_pass(self, context: Context, pass_id: int, options: PassOptions) -> LocalPass:
        found = context.passes.get(pass_id)
        if found is not None and not options.retain_graph:
            return found
        with context.pass_lock:
            found = context.passes.get(pass_id)
            if found is None:
                if context.is_forgotten(pass_id):
                    raise AutogradError(f"backward pass {show_id(pass_id)} has ended")
                sends = context.sends(pass_id)
                found = LocalPass(context, self.worker_id, options, sends=sends, pass_id=pass_id)
                context.add_pass(pass_id, found)
            elif options.retain_graph and not found.options.retain_graph:
                found.keep_graph()
            return found

    def _report_rejected(
        self, root: int, pass_id: int, requests: Sequence[int], error: BaseException
    ) -> None:
        """Report requests that cannot be handled here."""
        if self._worker.closed:
            error = self._shut_down()  # that its contexts are released follows from it
        described = self.describe_error(error, root)
        self.report(
            root, pass_id, ProgressReport(tuple(requests), (), StallReport(self.worker_id, 0), described)
        )

    def report(self, root: int, pass_id: int, handled: ProgressReport, channel: int = 0) -> None:
        """Report to the coordinator of a pass, which waits at ``channel``, what has been handled here."""
        if root == self.worker_id:
            self._count(pass_id, handled)
            return
        try:
            self._worker.mailbox.send(root, BackwardAutogradResp(handled), pass_id, channel=channel)
        except (RpcError, TransportError) as e:
            logger.warning("cannot report to worker %d, which started the backward pass: %s", root, e)
            if type(e) is TransportError:  # such as no free descriptor: the pass would never end
                self._worker.retry(functools.partial(self.report, root, pass_id, handled))

    def describe_error(self, error: BaseException, root: int) -> ExceptionReply:
        """Serialize an error of this worker for the coordinator of a pass."""
        members = self._worker.membership
        return describe_failure(error, self.worker_id, repr(members.own.info), members.runs_the_same(root))

    def take_report(self, inbound: Inbound) -> None:
        """Record that gradients have come, and their report, whoever is to handle them, and however late."""
        message = inbound.message
        assert isinstance(message, BackwardAutogradReq)
        if (detector := self._detectors.get(message.pass_id)) is not None:
            detector.arrived([send for send, _ in message.sends])
        if message.handled is not None:
            self._count(message.pass_id, message.handled)

    def on_report(self, inbound: Inbound) -> None:
        """Record what another worker has handled of a pass that began here. Runs in the receiver thread."""
        message = inbound.message
        assert isinstance(message, BackwardAutogradResp)
        self._count(inbound.envelope.message_id, message.handled)

    def _count(self, pass_id: int, handled: ProgressReport) -> None:
        detector, error = self._detectors.get(pass_id), None
        if detector is None:
            return
        if handled.error is not None:
            error = ReportedFailure(handled.error)
            if handled.lost:
                detector.lose_requests(handled.lost, error)
                return
        detector.handled(handled.requests, handled.sent, handled.waiting, error)
        for worker, _ in handled.sent:
            if worker not in self._monitored:
                self._monitor(worker, detector)

    def _monitor(self, worker: int, detector: TerminationDetector) -> None:
        """Make sure that the loss of ``worker``, which others sent a request to, is noticed here."""
        self._monitored.add(worker)
        if worker in self._worker.lost:  # looked up last: a loss from now on finds both
            self._monitored.discard(worker)
            detector.lose(worker, self._worker.loss_of(worker, "its part of a backward pass"))
            return
        try:
            self._worker.submit(functools.partial(self._monitor_connection, worker))
        except ClosedError:
            logger.debug("a pass is about to end with its worker")  # see close()

    def _monitor_connection(self, worker: int) -> None:
        """Runs in an engine thread: it may have to look up the address of ``worker``."""
        try:
            self._worker.mailbox.monitor(worker)
        except (RpcError, TransportError) as e:
            logger.debug("cannot watch worker %d, which has part in a backward pass: %s", worker, e)
            for detector in list(self._detectors.values()):
                detector.lose(worker, e)


def _run_in_clean_thread(task: Callable[[], None]) -> None:
    """Run ``task`` in an engine thread with the modes and context variables that a request would find."""
    torch.set_grad_enabled(True)
    torch.set_default_device(None)
    copy_context().run(task)
