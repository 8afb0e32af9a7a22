"""Names of ``torch.distributed.optim`` and ``.nn`` that have nothing to do with RPC are torch's own."""

from __future__ import annotations

import importlib

import pytest
import torch.distributed.nn
import torch.distributed.optim

import zmqgrad.nn.functional
from tests.support.interpreter import run_python
from zmqgrad import nn, optim
from zmqgrad.optim import _TORCH


@pytest.mark.parametrize("name", sorted(_TORCH))
def test_optimizers_are_torchs_own(name: str) -> None:
    assert getattr(optim, name) is getattr(torch.distributed.optim, name)


@pytest.mark.parametrize("name", nn.functional.__all__)
def test_collectives_are_torchs_own(name: str) -> None:
    wanted = getattr(torch.distributed.nn, name)
    assert getattr(nn, name) is getattr(zmqgrad.nn.functional, name) is wanted


def test_the_documented_path_of_remote_module() -> None:
    documented = importlib.import_module("zmqgrad.nn.api.remote_module")
    assert documented.RemoteModule is nn.RemoteModule


def test_unknown_names() -> None:
    for module in optim, nn, nn.functional:
        assert not hasattr(module, "nowhere")
        assert {*module.__all__} <= {*dir(module)}


@pytest.mark.slow
def test_they_are_loaded_on_first_use() -> None:
    code = """
import sys, zmqgrad.nn, zmqgrad.optim
print([name for name in ("torch.distributed.nn", "torch.distributed.optim") if name in sys.modules])
import warnings
warnings.simplefilter("ignore")  # torch warns about itself
from zmqgrad.optim import ZeroRedundancyOptimizer
from zmqgrad.nn.functional import all_reduce
print(ZeroRedundancyOptimizer.__module__, all_reduce.__module__)
"""
    assert run_python(code).splitlines() == [
        "[]",
        "torch.distributed.optim.zero_redundancy_optimizer torch.distributed.nn.functional",
    ]
