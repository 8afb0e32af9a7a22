"""One request of a backward pass, as a worker handles it: what it sets off, and the report at its end.

The root hears of everything that a request has set off before, or together with, word that it was handled, so
it never takes a pass for finished that is not (:mod:`~zmqgrad.autograd.passes.tally`). Gradients that go to
the root itself carry the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from zmqgrad.autograd.functions import RecvNote
from zmqgrad.autograd.graph.single import Gradient
from zmqgrad.autograd.graph.undefined import UNDEFINED
from zmqgrad.autograd.passes.local_pass import LocalPass
from zmqgrad.autograd.profiling import RECV_NAME, profiled
from zmqgrad.errors import AutogradError
from zmqgrad.rpc.profiling import profiled_anywhere
from zmqgrad.transport.base import Frame
from zmqgrad.wire.ids import show_id
from zmqgrad.wire.messages import NO_GRADIENT, NOT_REACHED, BackwardAutogradReq, Handled
from zmqgrad.wire.tensors import describe

if TYPE_CHECKING:
    from zmqgrad.autograd.passes.part import Passes


class Request:
    """One request, while this worker handles it. ``lane`` is where the root of the pass waits."""

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
            if gradient is None or gradient is UNDEFINED:
                numbers.append(NOT_REACHED if gradient is None else NO_GRADIENT)
            else:
                numbers.append(len(present))
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
