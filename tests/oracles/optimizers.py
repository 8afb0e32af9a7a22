"""DistributedOptimizer: steps of several optimizers, parameters without gradients, errors of owners."""

from __future__ import annotations

from typing import Any

import torch

from tests.oracles.calls import same
from tests.oracles.implementation import DistributedOptimizer, dist_autograd, rpc
from tests.oracles.outcome import attempt
from tests.oracles.scenario import scenario

STEPS = 3


class Layer:
    """A parameter and a function of it."""

    def __init__(self, *values: float) -> None:
        self.w = torch.nn.Parameter(torch.tensor(values))
        self.unused = torch.nn.Parameter(torch.tensor(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x * self.w

    def parameter(self) -> Any:
        """Return a reference to the parameter."""
        return rpc.RRef(self.w)

    def unused_parameter(self) -> Any:
        """Return a reference to a parameter that no loss depends on."""
        return rpc.RRef(self.unused)

    def values(self) -> list[float]:
        """Return the parameter."""
        return self.w.tolist()

    def unused_values(self) -> list[float]:
        """Return the other parameter."""
        return self.unused.tolist()

    def has_grad(self) -> bool:
        """Whether .grad is set."""
        return self.w.grad is not None


class FailsInStep(torch.optim.SGD):
    """Fails in step."""

    def step(self, closure: Any = None) -> None:
        """Fail."""
        raise ValueError("step failed")


class FailsInInit(torch.optim.SGD):
    """Fails when it is made."""

    def __init__(self, params: Any, lr: float) -> None:
        raise ValueError("not made")


def two_layers() -> list[Any]:
    """Make a layer on each of two workers."""
    return [rpc.remote("worker1", Layer, args=(1.0, 2.0)), rpc.remote("worker2", Layer, args=(3.0, 4.0))]


def forward(layers: list[Any], x: torch.Tensor) -> torch.Tensor:
    """Apply all layers."""
    for layer in layers:
        x = layer.rpc_sync().forward(x)
    return x.square().sum()


def train(kind: Any, **options: Any) -> Any:
    """Take some steps and return the parameters after each."""
    layers = two_layers()
    optimizer = DistributedOptimizer(kind, [layer.rpc_sync().parameter() for layer in layers], **options)
    history = []
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [forward(layers, torch.ones(2))])
            result = optimizer.step(context_id)
        history.append([layer.rpc_sync().values() for layer in layers])
    return result, history, [layer.rpc_sync().has_grad() for layer in layers]


@scenario()
def sgd() -> Any:
    return train(torch.optim.SGD, lr=0.01), train(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1)


@scenario()
def adam() -> Any:
    return train(torch.optim.Adam, lr=0.01), train(torch.optim.AdamW, lr=0.01, amsgrad=True)


@scenario()
def others() -> Any:
    return [
        train(torch.optim.Adagrad, lr=0.1),
        train(torch.optim.RMSprop, lr=0.01),
        train(torch.optim.Adamax, lr=0.01),
    ]


@scenario()
def positional_arguments() -> Any:
    layers = two_layers()
    optimizer = DistributedOptimizer(torch.optim.SGD, [layers[0].rpc_sync().parameter()], 0.1)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [forward(layers, torch.ones(2))])
        optimizer.step(context_id)
    return [layer.rpc_sync().values() for layer in layers]


@scenario()
def parameters_without_gradients() -> Any:
    layers = two_layers()
    refs = [layer.rpc_sync().parameter() for layer in layers] + [layers[0].rpc_sync().unused_parameter()]
    optimizer = DistributedOptimizer(torch.optim.SGD, refs, lr=0.1, weight_decay=0.5)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [forward(layers[:1], torch.ones(2))])
        optimizer.step(context_id)
    return [layer.rpc_sync().values() for layer in layers], layers[0].rpc_sync().unused_values()


@scenario()
def parameters_of_this_worker() -> Any:
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(w)], lr=0.1)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(w, 3)).sum()])
        optimizer.step(context_id)
    return w.detach(), w.grad


@scenario()
def two_optimizers_of_one_parameter() -> Any:
    layers = two_layers()
    refs = [layer.rpc_sync().parameter() for layer in layers]
    optimizers = [DistributedOptimizer(torch.optim.SGD, refs, lr=lr) for lr in (0.01, 0.02)]
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [forward(layers, torch.ones(2))])
        for optimizer in optimizers:
            optimizer.step(context_id)
    return [layer.rpc_sync().values() for layer in layers]


@scenario()
def a_parameter_given_twice() -> Any:
    layer, _ = two_layers()
    optimizer = DistributedOptimizer(torch.optim.SGD, [layer.rpc_sync().parameter()] * 2, lr=0.01)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [forward([layer], torch.ones(2))])
        optimizer.step(context_id)
    return layer.rpc_sync().values()


@scenario()
def sparse_gradients() -> Any:
    table = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(table)], lr=0.1)
    with dist_autograd.context() as context_id:
        rows = torch.nn.functional.embedding(torch.tensor([1, 1, 2]), table, sparse=True)
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(rows, 3)).sum()])
        optimizer.step(context_id)
    return table.detach()


@scenario()
def optimizers_that_are_no_classes() -> Any:
    refs = [rpc.RRef(torch.nn.Parameter(torch.ones(1)))]
    local = torch.optim.SGD([torch.ones(1)], lr=0.1)
    return [attempt(lambda kind=kind: DistributedOptimizer(kind, refs, lr=0.1)) for kind in ("SGD", local)]


@scenario()
def a_step_twice() -> Any:
    layers = two_layers()
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [layer.rpc_sync().parameter() for layer in layers], lr=0.01
    )
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [forward(layers, torch.ones(2))])
        optimizer.step(context_id)
        optimizer.step(context_id)
    return [layer.rpc_sync().values() for layer in layers]


@scenario()
def a_step_before_a_pass() -> Any:
    layers = two_layers()
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [layer.rpc_sync().parameter() for layer in layers], lr=0.01
    )
    with dist_autograd.context() as context_id:
        forward(layers, torch.ones(2))
        optimizer.step(context_id)
    return [layer.rpc_sync().values() for layer in layers]


@scenario()
def steps_in_contexts_that_do_not_exist() -> Any:
    layers = two_layers()
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [layer.rpc_sync().parameter() for layer in layers], lr=0.01
    )
    with dist_autograd.context() as ended:
        pass
    return [
        attempt(lambda: optimizer.step(ended), "Could not find autograd context"),
        attempt(lambda: optimizer.step(12345), "Could not find autograd context"),
    ]


@scenario()
def a_step_in_an_untouched_context() -> Any:
    layers = two_layers()
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [layer.rpc_sync().parameter() for layer in layers], lr=0.01
    )
    with dist_autograd.context() as context_id:
        return attempt(lambda: optimizer.step(context_id))


@scenario()
def a_step_that_fails() -> Any:
    layers = two_layers()
    refs = [layer.rpc_sync().parameter() for layer in layers]
    optimizer = DistributedOptimizer(FailsInStep, refs, lr=0.01)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [forward(layers, torch.ones(2))])
        return attempt(lambda: optimizer.step(context_id), "step failed")


@scenario()
def an_optimizer_that_cannot_be_made() -> Any:
    refs = [layer.rpc_sync().parameter() for layer in two_layers()]
    return [
        attempt(lambda: DistributedOptimizer(FailsInInit, refs, lr=0.01), "not made"),
        attempt(lambda: DistributedOptimizer(torch.optim.SGD, refs, nonsense=1), "nonsense"),
    ]


@scenario()
def a_negative_learning_rate() -> Any:
    refs = [layer.rpc_sync().parameter() for layer in two_layers()]
    return attempt(lambda: DistributedOptimizer(torch.optim.SGD, refs, lr=-1.0))


@scenario()
def the_default_learning_rate_of_adamax() -> Any:
    return train(torch.optim.Adamax)[1][-1]


@scenario()
def a_value_that_is_no_parameter() -> Any:
    return attempt(
        lambda: DistributedOptimizer(torch.optim.SGD, [rpc.remote("worker1", same, args=(5,))], lr=0.01)
    )


@scenario()
def a_parameter_that_is_no_rref() -> Any:
    return attempt(
        lambda: DistributedOptimizer(torch.optim.SGD, [torch.nn.Parameter(torch.ones(1))], lr=0.01)
    )


@scenario()
def none_for_the_parameters() -> Any:
    return attempt(lambda: DistributedOptimizer(torch.optim.SGD, None, lr=0.01))


@scenario()
def no_parameters() -> Any:
    return attempt(lambda: DistributedOptimizer(torch.optim.SGD, [], lr=0.01))
