"""One step of a thread in a backward pass: handle requests, send the gradients they produce, and report.

A request is the gradients for one send, known by its autograd id. The gradients that requests produce for
other workers are sent when the queue of the pass is empty, or after ``FLUSH_SECONDS`` of work; those for one
worker travel in one message (:mod:`~zmqgrad.autograd.engine.batch`). So the micro-batches of a pipeline, or
calls that ran at the same time, take one message per worker instead of one each, and long computations do not
delay other workers.

A report lists the handled requests and those that they set off. So the coordinator never mistakes a running
pass for a finished one (:mod:`~zmqgrad.autograd.engine.termination`). A batch for the worker of the
coordinator carries the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from zmqgrad.autograd.context import own_context, pass_context, set_own_context
from zmqgrad.autograd.engine.batch import Batch
from zmqgrad.autograd.engine.executor import LocalPass
from zmqgrad.autograd.engine.termination import ROOTS
from zmqgrad.autograd.engine.work_queue import Arrival
from zmqgrad.autograd.graph.node import Gradient
from zmqgrad.autograd.profiling import RECV_NAME, profiled
from zmqgrad.autograd.send_recv import RecvMetadata
from zmqgrad.autograd.torch_internals import set_grad_mode
from zmqgrad.errors import AutogradError
from zmqgrad.rpc.profiling import profiled_anywhere
from zmqgrad.runtime.clock import monotonic_ns, thread_time
from zmqgrad.transport.base import Frame
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import BackwardAutogradReq, ProgressReport

if TYPE_CHECKING:
    from zmqgrad.autograd.engine.participant import Participant

FLUSH_SECONDS = 2e-3
"""How long gradients for other workers wait while more is computed. Some messages take as long."""

SHORT_RUN_SECONDS = FLUSH_SECONDS / 4
"""If a run of entries took less, the next one has twice as many; else it has one."""


_autograd_id: Callable[[Arrival], int] = itemgetter(0)


class BackwardStep:
    """Handles requests of one pass in the calling thread.

    Args:
        participant: this worker's part in backward passes.
        local_pass: the pass on this worker.
        pass_id: the id of the pass.
        root: the worker where the pass began.
        channel: the reply channel at which its coordinator waits; 0 for none.
        handled: the requests that this step handles; :meth:`run` adds to them.
    """

    def __init__(
        self,
        participant: Participant,
        local_pass: LocalPass,
        pass_id: int,
        root: int,
        channel: int,
        handled: Sequence[int] = (),
    ) -> None:
        self._participant = participant
        self._pass = local_pass
        self._pass_id = pass_id
        self._root = root
        self._channel = channel
        self._handled = list(handled)
        # By worker, and whether the tensors had arrived in a reply, which matters with device maps.
        self._batches: dict[tuple[int, bool], Batch] = {}
        self._sent: list[tuple[int, tuple[int, ...]]] = []
        self._missing: list[tuple[int, list[int]]] | None = None  # what a trace tells of sends
        self._began, self._used = participant.now(), thread_time()

    def carry_out(self, action: Callable[[], object]) -> None:
        """Call ``action``, send the gradients that it produces, and report.

        If ``action`` returns False, nothing is sent: its request was a repetition. Nor if the pass has been
        abandoned meanwhile: its coordinator does not wait any more.
        """
        tracer = self._participant.hooks.tracer
        if tracer is None:
            self._carry_out(action)
            return
        began, self._missing = monotonic_ns(), []
        try:
            self._carry_out(action)
        finally:
            sends = [send for send in self._handled if send != ROOTS]
            recvs = [(recv, worker) for worker, requests in self._sent for recv in requests]
            if self._handled or recvs:
                context_id = self._pass.context.id
                tracer.group_executed(began, context_id, self._pass_id, sends, recvs, self._missing)

    def _carry_out(self, action: Callable[[], object]) -> None:
        error: BaseException | None = None
        context, create_graph = self._pass.context, self._pass.options.create_graph
        computing, grad_mode = pass_context.get(), torch.is_grad_enabled()
        recording = own_context() if create_graph else None
        try:
            pass_context.set(context)
            if create_graph:  # calls of hooks and backward functions are part of the graph, on every worker
                set_own_context(context)
            set_grad_mode(create_graph)  # in which the engine runs hooks
            if action() is False or self._pass.abandoned or self._send_all():
                return
        except BaseException as e:
            error = e
            self._pass.abandon()
        finally:
            try:  # Ctrl-C may come behind each of these
                set_grad_mode(grad_mode)
            finally:
                try:
                    pass_context.set(computing)
                finally:
                    if create_graph:
                        set_own_context(recording)
        try:
            self._participant.report(self._root, self._pass_id, self._report(error), self._channel)
            if error is not None and not isinstance(error, Exception):
                raise error  # a hook that calls sys.exit() has not left the coordinator waiting
        finally:
            del error  # its traceback refers to this frame: avoid a reference cycle

    def run(self) -> bool:
        """Handle what the queue of the pass holds, until it is empty or the gradients have to be sent.

        Returns:
            Whether there was anything to handle.
        """
        queue = self._pass.queue
        count, spent = 1, 0.0
        while arrivals := queue.take(count):
            if queue.needs_help():
                self._participant.request_help(self._pass, self._pass_id, self._root, self._channel)
            self._handled += map(_autograd_id, arrivals)
            if self._missing is not None:
                missing = [(send, [int(gradient is None) for gradient in found]) for send, found in arrivals]
                self._missing += [each for each in missing if any(each[1])]
            self._pass.arrive(arrivals, self)
            before, spent = spent, self._effort()
            self._participant.note_effort((spent - before) / len(arrivals))
            if spent > FLUSH_SECONDS:
                break
            count = 2 * count if spent - before < SHORT_RUN_SECONDS else 1
        return bool(self._handled)

    def _effort(self) -> float:
        """Return the seconds that the calling thread has worked in this step.

        The wait for a core does not count: messages would make it longer, as their receivers need cores, too.
        If waiting takes most of the time, it is for something else, such as a device, and counts in part.
        """
        return max(thread_time() - self._used, (self._participant.now() - self._began) / 4)

    def _send_all(self) -> bool:
        """Send all batches. Returns whether the one for the coordinator's worker has carried the report."""
        last, to = None, (self._root, False)
        if self._root != self._participant.worker_id:
            last = self._batches.pop(to, None)
            if last is None and self._batches:
                to = self._root, True
                last = self._batches.pop(to, None)
        if self._batches:
            self._flush()
        if last is None:
            return False
        self._send(to, last, self._report(None, (self._root, last.requests())))
        self._sent.append((self._root, last.requests()))
        return True

    def _report(self, error: BaseException | None, *last: tuple[int, tuple[int, ...]]) -> ProgressReport:
        described = None if error is None else self._participant.describe_error(error, self._root)
        return ProgressReport(tuple(self._handled), (*self._sent, *last), self._pass.waiting(), described)

    def send_gradients(self, recv: RecvMetadata, gradients: Sequence[Gradient]) -> None:
        """Add the complete gradients of a recv to the batch for the worker of its send."""
        context = self._pass.context
        if recv.context_id != context.id:
            raise AutogradError(
                f"a tensor that was received in context {show_id(recv.context_id)} is part of the graph of "
                f"context {show_id(context.id)}: use one context for both, or detach it"
            )
        if recv.arguments_of is not None:
            recv.arguments_of().receive(gradients)
            return
        if recv.peer == self._participant.worker_id and self._pass.checkpoint(recv.autograd_id) is not None:
            self._sent.append((recv.peer, (recv.autograd_id,)))
            self._participant.compute_again(
                self._pass, self._pass_id, self._root, self._channel, recv.autograd_id, gradients
            )
            return
        to = recv.peer, recv.in_reply and self._participant.maps_devices(recv.peer)
        batch = self._batches.get(to)
        if batch is not None and batch.is_full:
            self._send_batch(to)
            batch = None
        if batch is None:
            batch = self._batches[to] = Batch()
        batch.add(recv, gradients)

    def flush_if_late(self) -> None:
        """Send the batches if ``FLUSH_SECONDS`` of work have passed."""
        if self._batches and self._effort() > FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        for to in list(self._batches):
            self._send_batch(to)

    def _send_batch(self, to: tuple[int, bool]) -> None:
        batch = self._batches.pop(to)
        self._send(to, batch, None)
        self._sent.append((to[0], batch.requests()))

    def _send(self, to: tuple[int, bool], batch: Batch, handled: ProgressReport | None) -> None:
        participant, peer = self._participant, to[0]
        context, options = self._pass.context, self._pass.options
        frames: list[Frame] = []
        history = 0
        if options.create_graph:
            history = participant.record(context, peer, batch.tensors)
        message = BackwardAutogradReq(
            context.id,
            self._pass_id,
            self._root,
            tuple(batch.sends),
            batch.describe(frames, participant.devices(*to)),
            options,
            handled,
            history,
            to[1],
        )
        if profiled_anywhere():
            with profiled(RECV_NAME):
                participant.send(peer, message, frames, self._channel)
        else:
            participant.send(peer, message, frames, self._channel)
