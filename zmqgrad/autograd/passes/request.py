"""What a thread does of a backward pass in one go: it handles requests, sends what they set off, and reports.

A request is the gradients for one send, known by its autograd id. What they make for other workers waits
until the thread is through, and what is for one of them goes in one message
(:mod:`~zmqgrad.autograd.passes.batch`): the micro-batches of a pipeline, or calls that were under way at a
time, take a message a worker instead of one each. Those that came together, or meanwhile
(:mod:`~zmqgrad.autograd.passes.desk`), run together where their graphs do not meet.

That saves time as long as there is little to compute. Where there is much, workers had better work side by
side. So after ``SHARE`` a thread sends what it has before it goes on; and it tries how long a few take before
it runs many.

The root hears of everything that was set off before, or together with, word of what was handled, so it never
takes a pass for finished that is not (:mod:`~zmqgrad.autograd.passes.tally`). Gradients that go to the root
itself carry the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zmqgrad.autograd.functions import RecvNote
from zmqgrad.autograd.graph.single import Gradient
from zmqgrad.autograd.passes.batch import Batch
from zmqgrad.autograd.passes.desk import Arrival
from zmqgrad.autograd.passes.local_pass import LocalPass
from zmqgrad.autograd.profiling import RECV_NAME, profiled
from zmqgrad.errors import AutogradError
from zmqgrad.rpc.profiling import profiled_anywhere
from zmqgrad.transport.base import Frame
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import BackwardAutogradReq, ProgressReport

if TYPE_CHECKING:
    from zmqgrad.autograd.passes.part import Passes

SHARE = 2e-3
"""Seconds of computing after which a thread sends what it has: some messages take as long."""

LATE = 2 * SHARE
"""Seconds after which it does so if it is not through, though there was little to do."""

FEW = 8
"""How many entries are run to see how long they take, if those before took little time."""


class Request:
    """What one thread does of a pass in one go. ``channel`` is where the root of the pass waits.

    ``handled``: the requests that it stands for.
    """

    def __init__(
        self,
        passes: Passes,
        work: LocalPass,
        pass_id: int,
        root: int,
        channel: int,
        handled: Sequence[int] = (),
    ) -> None:
        self._passes = passes
        self._work = work
        self._pass_id = pass_id
        self._root = root
        self._channel = channel
        self._handled = list(handled)
        # By worker, and whether their tensors came in a reply, which matters where there are device maps.
        self._batches: dict[tuple[int, bool], Batch] = {}
        self._sent: list[tuple[int, tuple[int, ...]]] = []
        self._began = passes.now()

    def carry_out(self, step: Callable[[], object]) -> None:
        """Do ``step``, send what it makes, and report; unless it says by False that it was done before."""
        error: Exception | None = None
        try:
            if step() is False or self._send_all():
                return
        except Exception as e:
            error = e
        except BaseException as e:  # a hook that calls sys.exit() must not leave the root waiting
            self._passes.report(self._root, self._pass_id, self._report(e), self._channel)
            raise
        self._passes.report(self._root, self._pass_id, self._report(error), self._channel)

    def take_turns(self, first: Sequence[Arrival] = ()) -> bool:
        """Handle ``first``, then what waits at the desk, as long as there is time. False: there was nothing.

        A few entries first; then as many at once as it seems that there is time for.
        """
        work, passes, desk = self._work, self._passes, self._work.desk
        at = self._began
        arrivals = first or desk.take(max(1, min(FEW, desk.fitting(SHARE))), at)
        while arrivals:
            for send, _ in arrivals:
                self._handled.append(send)
            work.arrive(arrivals, self)
            began, at = at, passes.now()
            passes.pace = desk.learn(len(arrivals), at - began)
            if not desk.waiting:
                break
            passes.hire(desk.hire(at), work, self._pass_id, self._root, self._channel)
            count = desk.fitting(SHARE - len(self._handled) * desk.pace)
            arrivals = desk.take(count, at) if count else ()
        return bool(self._handled)

    def _send_all(self) -> bool:
        """Send what waits. True if the report has gone with what is for the root."""
        last, to = None, (self._root, False)
        if self._root != self._passes.own:
            last = self._batches.pop(to, None)
            if last is None and self._batches:
                to = self._root, True
                last = self._batches.pop(to, None)
        if self._batches:
            self._send_waiting()
        if last is None:
            return False
        self._send(to, last, self._report(None, (self._root, last.requests())))
        return True

    def _report(self, error: BaseException | None, *last: tuple[int, tuple[int, ...]]) -> ProgressReport:
        said = None if error is None else self._passes.describe_error(error, self._root)
        return ProgressReport(tuple(self._handled), (*self._sent, *last), self._work.waiting(), said)

    def send_on(self, note: RecvNote, gradients: Sequence[Gradient]) -> None:
        """Gradients that are complete at a recv go to its send: when this is done, or they are many."""
        context = self._work.context
        if note.context_id != context.id:
            raise AutogradError(
                f"a tensor that was received in context {show_id(note.context_id)} is part of the graph of "
                f"context {show_id(context.id)}: use one context for both, or detach it"
            )
        to = note.peer, note.in_reply and self._passes.maps_devices(note.peer)
        batch = self._batches.get(to)
        if batch is not None and batch.is_full:
            self._send_counted(to)
            batch = None
        if batch is None:
            batch = self._batches[to] = Batch()
        batch.add(note, gradients)

    def let_go(self) -> None:
        """More is about to be run: what has waited long enough goes now."""
        if self._batches and self._passes.now() - self._began > LATE:
            self._send_waiting()

    def _send_waiting(self) -> None:
        for to in list(self._batches):
            self._send_counted(to)

    def _send_counted(self, to: tuple[int, bool]) -> None:
        batch = self._batches.pop(to)
        self._send(to, batch, None)
        self._sent.append((to[0], batch.requests()))

    def _send(self, to: tuple[int, bool], batch: Batch, handled: ProgressReport | None) -> None:
        work, passes, peer = self._work, self._passes, to[0]
        frames: list[Frame] = []
        message = BackwardAutogradReq(
            work.context.id,
            self._pass_id,
            self._root,
            tuple(batch.sends),
            batch.describe(frames, passes.devices(*to)),
            work.retain_graph,
            handled,
        )
        if profiled_anywhere():
            with profiled(RECV_NAME):
                passes.send(peer, message, frames, self._channel)
        else:
            passes.send(peer, message, frames, self._channel)
