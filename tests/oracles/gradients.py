"""Distributed autograd: contexts, gradients, repeated passes, hooks, errors."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from tests.oracles.calls import combine, same
from tests.oracles.implementation import dist_autograd, rpc
from tests.oracles.outcome import attempt
from tests.oracles.scenario import AFTER, BEFORE, scenario


def leaf(*values: float) -> torch.Tensor:
    """Make a leaf."""
    return torch.tensor(values, requires_grad=True)


def gradients_of(context_id: int, *leaves: torch.Tensor) -> list[Any]:
    """Return the gradient of each leaf; None where there is none."""
    found = dist_autograd.get_gradients(context_id)
    return [found.get(x) for x in leaves]


# ---- on the callee ----------------------------------------------------------------------------------------

WEIGHT = torch.tensor([2.0, 3.0], requires_grad=True)


def scale(x: torch.Tensor) -> torch.Tensor:
    """Multiply by the weight of this worker."""
    return x * WEIGHT


def scale_there(name: str, x: torch.Tensor) -> torch.Tensor:
    """Multiply on another worker, too."""
    return rpc.rpc_sync(name, scale, args=(x * WEIGHT,))


def gradient_here(context_id: int) -> Any:
    """Return the gradient of the weight of this worker."""
    return dist_autograd.get_gradients(context_id).get(WEIGHT)


def number_of_gradients(context_id: int) -> int:
    """Return how many gradients this worker has."""
    return len(dist_autograd.get_gradients(context_id))


def two_results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two results of one input."""
    return x * 2, x * 3


class FailingBackward(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Fail."""
        raise ValueError("backward failed")


class Triple(torch.autograd.Function):
    """A custom function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Multiply, and show that saved tensors are there."""
        (x,) = ctx.saved_tensors
        return grad * 3 + 0 * x


def fail_in_backward(x: torch.Tensor) -> torch.Tensor:
    """Fail in the backward pass."""
    return FailingBackward.apply(x)


def triple(x: torch.Tensor) -> torch.Tensor:
    """Use a custom function."""
    return Triple.apply(x)


def grad_mode_of(x: torch.Tensor) -> Any:
    """Describe what arrived."""
    return torch.is_grad_enabled(), x.requires_grad, x.is_leaf, x.grad_fn is not None


started, going_on = threading.Event(), threading.Event()


def double_when_told(x: torch.Tensor) -> torch.Tensor:
    """Multiply, after a call of :func:`go_on_without`."""
    started.set()
    going_on.wait(20.0)
    going_on.clear()
    return x * 2


def wait_for_start() -> None:
    """Wait until :func:`double_when_told` runs, in its context."""
    started.wait(20.0)
    started.clear()


def go_on_without(context_id: int) -> None:
    """Let :func:`double_when_told` continue when this worker has cleaned up the context."""
    end = time.monotonic() + 20.0
    while knows(context_id) and time.monotonic() < end:
        time.sleep(0.001)  # torch cleans up some time after the call that asks for it, without any event
    going_on.set()


def knows(context_id: int) -> bool:
    """Whether this worker has the context."""
    try:
        dist_autograd.get_gradients(context_id)
    except RuntimeError:
        return False
    return True


# ---- gradients --------------------------------------------------------------------------------------------


@scenario()
def a_pass_over_two_workers() -> Any:
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.mul, args=(x, y)).sum()
        result = dist_autograd.backward(context_id, [loss])
        return result, gradients_of(context_id, x, y), x.grad, y.grad


@scenario()
def all_kinds_of_calls() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        results = [
            rpc.rpc_sync("worker1", scale, args=(x,)),
            rpc.rpc_async("worker1", scale, args=(x,)).wait(),
            rpc.remote("worker1", scale, args=(x,)).to_here(),
            rpc.rpc_sync("worker0", combine, args=(x, 1)),
            rpc.rpc_sync("worker1", combine, kwargs={"a": x, "b": 1}),
            rpc.rpc_sync("worker2", scale_there, args=("worker1", x)),
            rpc.rpc_sync("worker1", scale_there, args=("worker0", x)),
        ]
        dist_autograd.backward(context_id, [sum(results).sum()])
        there = [rpc.rpc_sync(name, gradient_here, args=(context_id,)) for name in ("worker1", "worker2")]
        return gradients_of(context_id, x), there, gradient_here(context_id)


@scenario()
def a_result_that_stays_in_an_rref() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        rref = rpc.remote("worker1", scale, args=(x,))
        again = rpc.rpc_sync("worker2", fetch, args=(rref,))
        dist_autograd.backward(context_id, [(again * rref.to_here()).sum()])
        return gradients_of(context_id, x), rpc.rpc_sync("worker1", gradient_here, args=(context_id,))


def fetch(rref: Any) -> torch.Tensor:
    """Fetch a value of a third worker."""
    return rref.to_here() * 2


@scenario()
def backward_of_an_rref() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        loss = rpc.remote("worker1", sum_of_scaled, args=(x,))
        loss.backward(context_id)
        return gradients_of(context_id, x), rpc.rpc_sync("worker1", gradient_here, args=(context_id,))


def sum_of_scaled(x: torch.Tensor) -> torch.Tensor:
    """Return a loss."""
    return scale(x).sum()


@scenario()
def several_roots() -> Any:
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    with dist_autograd.context() as context_id:
        one = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
        other = rpc.rpc_sync("worker2", scale, args=(y,)).prod()
        dist_autograd.backward(context_id, [one, other, x.sum()])
        return gradients_of(context_id, x, y)


@scenario()
def one_root_twice() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
        return attempt(lambda: dist_autograd.backward(context_id, [loss, loss])), gradients_of(context_id, x)


@scenario()
def a_leaf_sent_twice() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        one = rpc.rpc_sync("worker1", scale, args=(x,))
        other = rpc.rpc_sync("worker1", combine, args=(x, x))
        dist_autograd.backward(context_id, [(one * other).sum()])
        return gradients_of(context_id, x)


@scenario()
def a_leaf_used_here_and_there() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [(rpc.rpc_sync("worker1", scale, args=(x,)) * x).sum()])
        return gradients_of(context_id, x)


@scenario()
def several_results() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        one, other = rpc.rpc_sync("worker1", two_results, args=(x,))
        dist_autograd.backward(context_id, [(one * other).sum()])
        return gradients_of(context_id, x)


@scenario()
def one_of_two_results() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        one, _ = rpc.rpc_sync("worker1", two_results, args=(x,))
        dist_autograd.backward(context_id, [one.sum()])
        return gradients_of(context_id, x)


@scenario()
def a_pass_without_calls() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [(x * x).sum()])
        return gradients_of(context_id, x), x.grad


@scenario()
def gradients_beside_those_in_grad() -> Any:
    x = leaf(1.0, 2.0)
    (x * 5).sum().backward()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, args=(x,)).sum()])
        return gradients_of(context_id, x), x.grad


@scenario()
def dtypes_and_shapes() -> Any:
    results = []
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64):
        with dist_autograd.context() as context_id:
            x = torch.ones(2, 1, dtype=dtype, requires_grad=True)
            loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum().abs()
            dist_autograd.backward(context_id, [loss])
            results += gradients_of(context_id, x)
    return results


@scenario()
def sparse_gradients() -> Any:
    weight = torch.ones(4, 2, requires_grad=True)
    with dist_autograd.context() as context_id:
        rows = torch.nn.functional.embedding(torch.tensor([1, 1, 3]), weight, sparse=True)
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(rows, 2)).sum()])
        (gradient,) = gradients_of(context_id, weight)
        return gradient.is_sparse, gradient.to_dense()


@scenario()
def custom_functions() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [Triple.apply(rpc.rpc_sync("worker1", triple, args=(x,))).sum()])
        return gradients_of(context_id, x)


@scenario()
def hooks_of_tensors() -> Any:
    x = leaf(1.0, 2.0)
    seen: list[Any] = []
    x.register_hook(lambda g: seen.append(("leaf", g.tolist())))
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale, args=(x,))
        y.register_hook(lambda g: g * 10)
        z = x * 2
        z.register_hook(lambda g: seen.append(("inner", g.tolist())))
        dist_autograd.backward(context_id, [(y + rpc.rpc_sync("worker1", scale, args=(z,))).sum()])
        return gradients_of(context_id, x), sorted(seen)


# ---- several passes and contexts --------------------------------------------------------------------------


@scenario()
def a_second_pass_adds() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
        dist_autograd.backward(context_id, [loss], retain_graph=True)
        first = gradients_of(context_id, x)[0].tolist()
        dist_autograd.backward(context_id, [loss])
        return first, gradients_of(context_id, x), rpc.rpc_sync("worker1", gradient_here, args=(context_id,))


@scenario()
def a_second_pass_over_a_freed_graph() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        loss = (rpc.rpc_sync("worker1", scale, args=(x,)) ** 2).sum()
        dist_autograd.backward(context_id, [loss])
        return attempt(
            lambda: dist_autograd.backward(context_id, [loss]),
            "Trying to backward through the graph a second time",
        )


@scenario()
def a_second_pass_over_a_freed_graph_elsewhere() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale, args=(x,))
        dist_autograd.backward(context_id, [y.sum()])
        return attempt(
            lambda: dist_autograd.backward(context_id, [y.sum()]),
            "Trying to backward through the graph a second time",
        )


@scenario()
def a_context_within_a_context() -> Any:
    def nested() -> Any:
        with dist_autograd.context(), dist_autograd.context():
            pass

    return attempt(nested, "Already have an autograd context id for this thread")


@scenario()
def contexts_one_after_another() -> Any:
    x = leaf(1.0, 2.0)
    results = []
    for _ in range(2):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, args=(x,)).sum()])
            results.append(gradients_of(context_id, x))
    return results, isinstance(context_id, int)


@scenario()
def a_context_of_another_worker() -> Any:
    return rpc.rpc_sync("worker1", pass_there, args=("worker2",))


def pass_there(name: str) -> Any:
    """Run a pass of its own on the callee."""
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync(name, scale, args=(x,)).sum()])
        return gradients_of(context_id, x)


@scenario()
def contexts_that_do_not_exist() -> Any:
    with dist_autograd.context() as ended:
        pass
    x = leaf(1.0)
    return [
        attempt(lambda: dist_autograd.get_gradients(ended), "Could not find autograd context with id:"),
        attempt(lambda: dist_autograd.get_gradients(12345), "Could not find autograd context with id: 12345"),
        attempt(lambda: dist_autograd.backward(ended, [x.sum()]), "Could not find autograd context with id:"),
        attempt(lambda: dist_autograd.get_gradients("1"), "incompatible function arguments"),
        attempt(lambda: dist_autograd.get_gradients(None), "incompatible function arguments"),
        attempt(
            lambda: dist_autograd._retrieve_context(12345), "Could not find autograd context with id: 12345"
        ),
    ]


@scenario()
def no_current_context() -> Any:
    return attempt(dist_autograd._current_context, "Current thread doesn't have a valid autograd context")


@scenario()
def gradients_before_a_pass() -> Any:
    x = leaf(1.0)
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", same, args=(x,))
        return dist_autograd.get_gradients(context_id), rpc.rpc_sync(
            "worker1", number_of_gradients, args=(context_id,)
        )


@scenario()
def ids_of_contexts() -> Any:
    with dist_autograd.context() as one:
        pass
    with dist_autograd.context() as other:
        current = dist_autograd._current_context()._context_id() == other
    return other - one, one >> 48, current


# ---- what does not require grad ---------------------------------------------------------------------------


@scenario()
def calls_under_no_grad() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        with torch.no_grad():
            constant = rpc.rpc_sync("worker1", same, args=(x,))
        loss = (constant * x).sum()
        dist_autograd.backward(context_id, [loss])
        return gradients_of(context_id, x)


@scenario()
def the_result_of_a_call_under_no_grad() -> Any:
    with dist_autograd.context(), torch.no_grad():
        return rpc.rpc_sync("worker1", same, args=(leaf(1.0),)).requires_grad


@scenario()
def what_arrives() -> Any:
    x = leaf(1.0)
    with dist_autograd.context():
        inside = [rpc.rpc_sync("worker1", grad_mode_of, args=(t,)) for t in (x, x * 2, x.detach())]
        with torch.no_grad():
            modes = rpc.rpc_sync("worker1", grad_mode_of, args=(x.detach(),))
    return inside, modes, rpc.rpc_sync("worker1", grad_mode_of, args=(x.detach(),))


@scenario()
def results_that_require_grad() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context():
        ours = rpc.rpc_sync("worker1", same, args=(x,))
        weights = rpc.rpc_sync("worker1", scale, args=(torch.ones(2),))
        constants = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        return [(t.requires_grad, t.is_leaf) for t in (ours, weights, constants)]


@scenario()
def a_root_that_requires_no_grad() -> Any:
    with dist_autograd.context() as context_id:
        return attempt(
            lambda: dist_autograd.backward(context_id, [torch.ones(1).sum()]), "requires_grad not set on root"
        )


@scenario()
def roots_that_are_no_scalars() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale, args=(x,))
        return [
            attempt(
                lambda: dist_autograd.backward(context_id, [y]),
                "is not a scalar, all roots need to be scalar",
            ),
            attempt(lambda: dist_autograd.backward(context_id, [x[:0]])),
        ]


@scenario()
def a_root_with_one_element() -> Any:
    x = leaf(1.0)
    with dist_autograd.context() as context_id:
        result = attempt(
            lambda: dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, (x, 2))])
        )
        return result, gradients_of(context_id, x)


@scenario()
def wrong_roots() -> Any:
    x = leaf(1.0)
    with dist_autograd.context() as context_id:
        return [
            attempt(
                lambda: dist_autograd.backward(context_id, []), "No tensors provided for gradient computation"
            ),
            attempt(lambda: dist_autograd.backward(context_id, x.sum())),
            attempt(lambda: dist_autograd.backward(context_id, [None])),
            attempt(lambda: dist_autograd.backward(context_id, [5]), "incompatible function arguments"),
            attempt(lambda: dist_autograd.backward(context_id, None), "incompatible function arguments"),
            attempt(lambda: dist_autograd.backward("1", [x.sum()]), "incompatible function arguments"),
            attempt(lambda: dist_autograd.backward(context_id)),
        ]


@scenario()
def a_leaf_as_root() -> Any:
    x = torch.tensor(2.0, requires_grad=True)
    with dist_autograd.context() as context_id:
        result = attempt(lambda: dist_autograd.backward(context_id, [x]))
        return result, gradients_of(context_id, x)


# ---- errors -----------------------------------------------------------------------------------------------


@scenario()
def a_function_that_fails_there() -> Any:
    x = leaf(1.0)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", fail_in_backward, args=(x,)).sum()
        return attempt(lambda: dist_autograd.backward(context_id, [loss]), "backward failed")


@scenario()
def a_function_that_fails_here() -> Any:
    x = leaf(1.0)
    with dist_autograd.context() as context_id:
        loss = FailingBackward.apply(rpc.rpc_sync("worker1", same, args=(x,))).sum()
        return attempt(lambda: dist_autograd.backward(context_id, [loss]), "backward failed")


@scenario()
def a_pass_after_a_failure() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", fail_in_backward, args=(x,)).sum()
        attempt(lambda: dist_autograd.backward(context_id, [loss]))
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, args=(x,)).sum()])
        return gradients_of(context_id, x)


@scenario()
def local_backward_through_a_call() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context():
        loss = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
        return attempt(loss.backward), attempt(lambda: torch.autograd.grad(loss, [x]))


@scenario()
def a_local_pass_in_a_context() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        (x * 2).sum().backward()
        return x.grad, gradients_of(context_id, x)


@scenario()
def a_changed_tensor() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", same, args=(x,))
        z = (y**2).sum()
        with torch.no_grad():
            y.add_(1)
        return attempt(
            lambda: dist_autograd.backward(context_id, [z]), "has been modified by an inplace operation"
        )


@scenario()
def the_graph_of_a_context() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context():
        rpc.rpc_sync("worker1", torch.add, args=(x, x * 2))
        current = dist_autograd._current_context()
        (send,) = current._send_functions().values()
        (recv,) = current._recv_functions().values()
        return [
            send.name().split("::")[-1],
            recv.name().split("::")[-1],
            [node.name().split("::")[-1] for node, _ in send.next_functions],
            sorted(current._known_worker_ids()),
        ]


# ---- hanging in torch -------------------------------------------------------------------------------------


@scenario()
def an_unused_result() -> Any:
    """The first result never gets a gradient. Torch's worker1 waits for it until the pass times out.

    If the worker that calls ``backward`` waits itself, torch never returns, so there is no scenario of that.
    """
    x = leaf(1.0, 2.0)
    before = rpc.get_rpc_timeout()
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", scale, args=(x,))
        y = rpc.rpc_sync("worker1", scale, args=(x,))
        rpc._set_rpc_timeout(0.5)
        try:
            return attempt(lambda: dist_autograd.backward(context_id, [y.sum()]))
        finally:
            rpc._set_rpc_timeout(before)


# ---- before and after -------------------------------------------------------------------------------------


def enter() -> None:
    """Enter and leave a context."""
    with dist_autograd.context():
        pass


def outside() -> list[Any]:
    """Use the API while there is no group."""
    return [
        attempt(lambda: dist_autograd.get_gradients(1)),
        attempt(lambda: dist_autograd.backward(1, [leaf(1.0).sum()])),
    ]


@scenario(BEFORE)
def before_init_rpc() -> Any:
    return outside()


@scenario(BEFORE)
def a_context_before_init_rpc() -> Any:
    return attempt(enter)


@scenario(AFTER)
def after_shutdown() -> Any:
    return outside()


@scenario(AFTER)
def a_context_after_shutdown() -> Any:
    return attempt(enter)


@scenario()
def a_reply_that_arrives_after_its_context_has_ended() -> Any:
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        future = rpc.rpc_async("worker1", double_when_told, args=(x,))
        rpc.rpc_sync("worker1", wait_for_start)
    rpc.rpc_sync("worker1", go_on_without, args=(context_id,))
    return attempt(future.wait, "Couldn't find autograd context")


@scenario()
def a_constant_that_arrives_after_its_context_has_ended() -> Any:
    with dist_autograd.context() as context_id:
        future = rpc.rpc_async("worker1", double_when_told, args=(torch.ones(2),))
        rpc.rpc_sync("worker1", wait_for_start)
    rpc.rpc_sync("worker1", go_on_without, args=(context_id,))
    return future.wait()


@scenario()
def a_call_of_another_thread_is_not_recorded() -> Any:
    x = leaf(1.0, 2.0)
    results: list[torch.Tensor] = []
    with dist_autograd.context() as context_id:
        other = threading.Thread(
            target=lambda: results.append(rpc.rpc_sync("worker1", scale, args=(x,))), daemon=True
        )
        other.start()
        other.join(20.0)
        dist_autograd.backward(context_id, [results[0].sum()])
        return results[0].is_leaf, gradients_of(context_id, x, results[0])
