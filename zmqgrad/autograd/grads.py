"""Gradients of chosen tensors, here or on other workers: ``torch.autograd.grad`` for the distributed graph.

The owners of inputs join the pass before it begins, so that their parts of it stop at the inputs. After the
pass each returns its gradients by a call inside the context. With ``create_graph`` they have a history, which
this call records as it does that of any tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zmqgrad.autograd.context import ActiveContext, Context
from zmqgrad.autograd.forwarding import Autograd, autograd_of
from zmqgrad.autograd.graph.captures import Captures
from zmqgrad.autograd.torch_internals import set_grad_mode
from zmqgrad.errors import AutogradError
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.rref.api import RRef
from zmqgrad.rpc.worker import Worker
from zmqgrad.wire.messages import PassOptions

Input = torch.Tensor | RRef[Any]
"""A tensor of this worker, or a reference to one of any worker."""


class RequestedInputs:
    """The inputs of one pass.

    Args:
        worker: this worker.
        context: the context of the pass.
        options: of the pass.
        inputs: what the program asked for.
    """

    def __init__(
        self, worker: Worker, context: Context, options: PassOptions, inputs: Sequence[Input]
    ) -> None:
        self._worker = worker
        self._context = context
        self._options = options
        self._inputs = inputs
        self._places: dict[int, list[int]] = {}  # by worker, the places of its tensors among `inputs`
        for i, each in enumerate(inputs):
            owner = worker.id if isinstance(each, torch.Tensor) else each.handle.owner
            self._places.setdefault(owner, []).append(i)
        self.gradients: list[torch.Tensor | None] = [None] * len(inputs)
        """The gradient of each of ``inputs`` after the pass; None where there is none."""

    def begin(self, pass_id: int) -> Captures:
        """Make the owners of the inputs join the pass. Returns those of this worker."""
        local = [tensor_of(self._inputs[i], i) for i in self._places.get(self._worker.id, ())]
        call = self._context.id, pass_id, self._options
        self._call_owners(
            join, {owner: (*call, self._at(places), places) for owner, places in self._places.items()}
        )
        return Captures(local, all_here=self._places.keys() <= {self._worker.id})

    def end(self, pass_id: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Collect the gradients from the owners; ``gradients`` are those of the tensors of this worker."""
        found = self._call_owners(collect, dict.fromkeys(self._places, (self._context.id, pass_id)))
        found[self._worker.id] = gradients
        for owner, places in self._places.items():
            for i, gradient in zip(places, found[owner], strict=True):
                self.gradients[i] = gradient

    def _at(self, places: Sequence[int]) -> list[Input]:
        return [self._inputs[i] for i in places]

    def _call_owners(self, function: Any, args: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call ``function`` on the other owners inside the context, which so learn of it."""
        worker, grad_mode = self._worker, torch.is_grad_enabled()
        try:  # not by `with`: what a signal handler raises before that is entered would leave the mode set
            set_grad_mode(self._options.create_graph)
            with ActiveContext(self._context):
                calls = {peer: worker.call(peer, function, args[peer]) for peer in args if peer != worker.id}
                return {peer: worker.decode(worker.wait(call)) for peer, call in calls.items()}
        finally:
            set_grad_mode(grad_mode)


def tensor_of(each: Input, place: int) -> torch.Tensor:
    """Return the input at ``place``, which this worker owns.

    Raises:
        AutogradError: if it is no tensor, or does not require grad.
    """
    tensor = each if isinstance(each, torch.Tensor) else each.local_value()
    if not isinstance(tensor, torch.Tensor):
        raise AutogradError(f"inputs[{place}] refers to a {type(tensor).__name__}, not to a tensor")
    if not tensor.requires_grad:
        raise AutogradError(f"inputs[{place}] does not require grad: there is no gradient to compute for it")
    return tensor


def join(
    context_id: int, pass_id: int, options: PassOptions, inputs: Sequence[Input], places: Sequence[int]
) -> None:
    """Take part in a pass that returns gradients of ``inputs``. Runs on their owner."""
    autograd = _autograd()
    tensors = [tensor_of(each, i) for each, i in zip(inputs, places, strict=True)]
    autograd.participant.join_pass(autograd.contexts.find(context_id), pass_id, options, tensors)


def collect(context_id: int, pass_id: int) -> list[torch.Tensor | None]:
    """Return the gradients of the inputs of a pass that are on this worker."""
    joined = _autograd().contexts.find(context_id).local_passes()[pass_id]
    assert joined.captures is not None
    return joined.captures.gradients()


def _autograd() -> Autograd:
    return autograd_of(current_worker())
