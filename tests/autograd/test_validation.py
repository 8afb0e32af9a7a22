"""Gradients from other workers are validated as torch's engine validates those of its own nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zmqgrad import autograd, rpc
from zmqgrad.autograd.engine.termination import ROOTS
from zmqgrad.autograd.forwarding import autograd_of
from zmqgrad.autograd.graph.validation import fit, matches
from zmqgrad.autograd.send_recv import EdgeOrLeaf, edge_of
from zmqgrad.errors import AutogradError
from zmqgrad.testing import cluster
from zmqgrad.wire.lazy_frame import Frame
from zmqgrad.wire.messages import BackwardAutogradReq, MessageType, PassOptions
from zmqgrad.wire.tensors import encode_tensors


class Returns(torch.autograd.Function):
    """A node that returns any gradient, for torch's engine to validate."""

    gradient: torch.Tensor

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Any function."""
        return x * 2

    @staticmethod
    def backward(ctx: Any, *_: Any) -> torch.Tensor:
        """What the test has set."""
        return Returns.gradient


def torch_makes(gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor | str:
    """What torch's engine makes of ``gradient`` for ``leaf``, or its error."""
    Returns.gradient = gradient
    output = Returns.apply(leaf)
    try:
        (made,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
    except RuntimeError as e:
        return str(e)
    assert isinstance(made, torch.Tensor)
    return made


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "equal": lambda: torch.rand(3, 4),
    "larger": lambda: torch.rand(5, 3, 4),
    "with a one": lambda: torch.rand(1, 3, 4),
    "too small": lambda: torch.rand(4),
    "other": lambda: torch.rand(3, 5),
    "scalar": lambda: torch.tensor(2.0),
    "double": lambda: torch.rand(3, 4, dtype=torch.float64),
    "half": lambda: torch.rand(3, 4).half(),
    "integer": lambda: torch.ones(3, 4, dtype=torch.int64),
    "bool": lambda: torch.ones(3, 4, dtype=torch.bool),
    "complex": lambda: torch.rand(3, 4, dtype=torch.complex64),
    "sparse": lambda: torch.rand(3, 4).to_sparse(),
    "mkldnn": lambda: torch.rand(3, 4).to_mkldnn(),
    "other device": lambda: torch.rand(3, 4, device="meta"),
    "scalar on another device": lambda: torch.rand((), device="meta"),
}

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float": lambda: torch.rand(3, 4),
    "row": lambda: torch.rand(1, 4),
    "scalar": lambda: torch.rand(()),
    "double": lambda: torch.rand(3, 4, dtype=torch.float64),
    "complex": lambda: torch.rand(3, 4, dtype=torch.complex128),
}


@pytest.mark.parametrize("place", ["leaf", "edge"])
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_becomes_what_torch_makes_of_it(form: str, tensor: str, place: str) -> None:
    leaf, gradient = TENSORS[tensor]().requires_grad_(), FORMS[form]()
    at: EdgeOrLeaf = leaf if place == "leaf" else edge_of(leaf * 2)
    expected = torch_makes(gradient, leaf)
    if isinstance(expected, str):
        assert not matches(gradient, at) or gradient.layout is not leaf.layout
        if place == "leaf" or gradient.layout is leaf.layout:  # an edge has no layout
            with pytest.raises(RuntimeError):
                fit(gradient, at)
        return
    made = fit(gradient, at)
    assert (made.shape, made.dtype, made.layout) == (expected.shape, expected.dtype, expected.layout)
    assert made.device == expected.device
    if made.device.type != "meta":
        assert torch.equal(made.to_dense(), expected.to_dense())
    assert not matches(gradient, at) or made is gradient


def total(x: torch.Tensor) -> torch.Tensor:
    """Runs on another worker."""
    return (x * 3).sum()


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_gradient_for_a_sent_leaf_is_fitted_to_what_the_leaf_is_now(is_leaf: bool) -> None:
    """Its data was replaced since: torch sums and casts the gradient."""
    with cluster(2), autograd.context() as context_id:
        x = torch.rand(2, 3, requires_grad=True)
        loss = rpc.rpc_sync(1, total, args=(x if is_leaf else x.view(2, 3),))
        if is_leaf:
            x.data = torch.rand(3, dtype=torch.float64)
        autograd.backward(context_id, [loss])
        (gradient,) = autograd.get_gradients(context_id).values()
        expected = torch.full((3,), 6.0, dtype=torch.float64) if is_leaf else torch.full((2, 3), 3.0)
        assert gradient.dtype is expected.dtype
        assert torch.equal(gradient, expected)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this version of torch has none")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, None])
@pytest.mark.parametrize("sent", [False, True])
def test_the_gradient_of_a_leaf_with_a_grad_dtype(sent: bool, dtype: torch.dtype | None) -> None:
    """Also where a group runs node by node: of a tensor that is sent, and used with what it is made of."""

    def run(square: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
        x.grad_dtype = dtype
        if sent:
            return x, square(x.view_as(x) if dtype is None else x).sum()
        y = (x * torch.tensor([1 / 3, 2 / 3])).exp()
        z = y * y
        return x, (square(z) + z + y).sum()

    alone, loss = run(torch.square)
    loss.backward()
    with cluster(2), autograd.context() as context_id:
        x, loss = run(lambda x: rpc.rpc_sync(1, torch.square, args=(x,)))
        autograd.backward(context_id, [loss])
        assert alone.grad is not None
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], alone.grad)


def test_an_invalid_gradient_names_worker_message_and_tensor() -> None:
    with cluster(2), autograd.context() as context_id:
        first, x = torch.rand(1, requires_grad=True), torch.rand(2, 3, requires_grad=True)
        loss = rpc.rpc_sync(1, torch.mul, args=(first, x)).sum()
        x.data = torch.rand(4)
        with pytest.raises(AutogradError) as raised:
            autograd.backward(context_id, [loss])
    text = str(raised.value)
    assert "worker 1 returned an invalid gradient at index 1" in text
    assert "got [2, 3] but expected shape compatible with [4]" in text
    assert "tensor 1 of the 2 that worker 0 sent to it in message" in text
    assert "test_validation.py" in text, "where the program made the call"


def test_gradients_count_only_if_they_come_from_the_worker_that_got_the_tensors() -> None:
    with cluster(3) as c, autograd.context() as context:
        x = torch.ones(3, requires_grad=True)
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, x))
        sends = autograd_of(c.workers[1]).contexts.find(context).sends(0)
        frames: list[Frame] = []
        wrong = encode_tensors([torch.full((3,), 100.0)], frames)
        intruder = c.workers[2]
        for count, number in enumerate([ROOTS, *(send.autograd_id for send in sends)], 1):
            message = BackwardAutogradReq(
                context, intruder.ids.next(), 2, ((number, (0,)),), wrong, PassOptions(retain_graph=True)
            )
            intruder.mailbox.send(1, message, intruder.ids.next(), frames)
            c.network.wait_sent(MessageType.BACKWARD_AUTOGRAD_RESP, count)
        c.network.wait_quiet()
        autograd.backward(context, [y.sum()])
        assert autograd.get_gradients(context)[x].tolist() == [2.0, 2.0, 2.0]
