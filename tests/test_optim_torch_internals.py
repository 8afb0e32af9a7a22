"""How zmqgrad.optim calls torch's optimizers: a failure here names what a release of torch changed."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from zmqgrad.optim import torch_internals as internals

WITHOUT_COMPILER = """
import sys
import torch
from tests.test_optim_torch_internals import KINDS, optimizer_of
from zmqgrad.optim import torch_internals as internals

for kind in KINDS:
    optimizer = optimizer_of(internals.construct, kind)
    internals.step(optimizer)
    internals.call(optimizer, "load_state_dict", internals.call(optimizer, "state_dict"))
    assert "torch._dynamo" not in sys.modules, kind
torch.optim.SGD(optimizer.param_groups[0]["params"])
assert "torch._dynamo" in sys.modules, "torch's own optimizers import it no more: internals are not needed"
"""

KINDS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and name not in ("Optimizer", "LBFGS")
)


def optimizer_of(construct: Any, kind: str) -> Any:
    """Construct an optimizer of one parameter with a gradient."""
    generator = torch.Generator().manual_seed(0)
    parameter, gradient = torch.rand(2, 3, 4, generator=generator)
    parameter.requires_grad_().grad = gradient.to_sparse() if kind == "SparseAdam" else gradient
    return construct(getattr(torch.optim, kind), [parameter], (), {"lr": 0.1})


def call_class(optimizer_class: Any, params: Any, args: Any, kwargs: Any) -> Any:
    return optimizer_class(params, *args, **kwargs)


@pytest.mark.processes
def test_the_compiler_is_not_imported() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], check=True, timeout=120)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_state_are_those_of_torch_bit_for_bit(kind: str) -> None:
    ours, its = optimizer_of(internals.construct, kind), optimizer_of(call_class, kind)
    for _ in range(3):
        internals.step(ours)
        its.step()
    assert vars(ours).keys() == vars(its).keys()
    assert str(ours) == str(its)
    torch.testing.assert_close(ours.param_groups[0]["params"], its.param_groups[0]["params"], rtol=0, atol=0)
    state = internals.call(ours, "state_dict")
    torch.testing.assert_close(state["state"], its.state_dict()["state"], rtol=0, atol=0)
    assert state["param_groups"] == its.state_dict()["param_groups"]
    internals.call(its, "load_state_dict", state)
    torch.testing.assert_close(its.state_dict()["state"], state["state"], rtol=0, atol=0)


def test_hooks_run() -> None:
    optimizer, calls = optimizer_of(internals.construct, "SGD"), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("after any"))
    try:
        internals.step(optimizer)
    finally:
        handle.remove()
    internals.call(optimizer, "state_dict")
    assert calls == ["before", "after", "after any", "state"]


def test_the_profiler_records_the_step_by_torchs_name() -> None:
    optimizer = optimizer_of(internals.construct, "SGD")
    with torch.profiler.profile() as profile:
        internals.step(optimizer)
    assert [e.count for e in profile.key_averages() if e.key == "Optimizer.step#SGD.step"] == [1]


def test_a_step_that_somebody_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = torch.optim.SGD.step

    @functools.wraps(original)
    def counted(self: Any, *args: Any) -> Any:
        calls.append("class")
        return original(self, *args)

    optimizer = optimizer_of(internals.construct, "SGD")
    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    internals.step(optimizer)
    optimizer.step = lambda: calls.append("instance")
    internals.step(optimizer)
    assert calls == ["class", "instance"]


@pytest.mark.filterwarnings("error")
def test_a_scheduler_sees_the_steps() -> None:
    optimizer = optimizer_of(internals.construct, "SGD")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    internals.step(optimizer)
    schedule.step()  # torch warns if the optimizer has not stepped before
    assert schedule.get_last_lr() == [0.05]
