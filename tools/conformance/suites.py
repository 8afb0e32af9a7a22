"""torch's test suites as test cases of this tool. Importing this module calls ``zmqgrad.install()``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch.distributed
import torch.multiprocessing
from torch.distributed.rpc.api import _use_rpc_pickler

import zmqgrad
import zmqgrad.rpc.api

zmqgrad.install()
if not hasattr(zmqgrad.rpc.api, "_use_rpc_pickler"):  # the tests import it; one of them uses it
    zmqgrad.rpc.api._use_rpc_pickler = _use_rpc_pickler  # type: ignore[attr-defined]

_HOME = "torch.testing._internal.distributed"

_SUITES = {
    "rpc": {"rpc.rpc_test": ["RpcTest", "TensorPipeAgentRpcTest"]},
    "dist_autograd": {"rpc.dist_autograd_test": ["DistAutogradTest", "TensorPipeAgentDistAutogradTest"]},
    "optimizer": {"rpc.dist_optimizer_test": ["DistOptimizerTest"]},
    "remote_module": {"nn.api.remote_module_test": ["RemoteModuleTest", "ThreeWorkersRemoteModuleTest"]},
    "ddp": {"ddp_under_dist_autograd_test": ["DdpUnderDistAutogradTest", "DdpComparisonTest"]},
    "jit": {
        "rpc.jit.rpc_test": ["JitRpcTest"],
        "rpc.jit.dist_autograd_test": ["JitDistAutogradTest"],
    },
    "examples": {
        "rpc.examples.parameter_server_test": ["ParameterServerTest"],
        "rpc.examples.reinforcement_learning_rpc_test": ["ReinforcementLearningRpcTest"],
    },
}
"""Modules and classes of each suite."""


class _NoExpectTest(types.ModuleType):
    """Stands for a package that torch's test cases inherit from, and these suites do not use."""

    TestCase = unittest.TestCase


if importlib.util.find_spec("expecttest") is None:
    sys.modules["expecttest"] = _NoExpectTest("expecttest")


def suites() -> dict[str, list[tuple[type[unittest.TestCase], str]]]:
    """The test methods of each suite, in torch's order."""
    return {
        suite: [
            (case, method)
            for module, names in modules.items()
            for name in names
            for case in [_test_case(f"{_HOME}.{module}", name)]
            for method in unittest.defaultTestLoader.getTestCaseNames(case)
        ]
        for suite, modules in _SUITES.items()
    }


def _test_case(module: str, name: str) -> type[unittest.TestCase]:
    """Add to a class of torch's what its own test runner adds: an agent, and processes to run in."""
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    fixture: Any = importlib.import_module(f"{_HOME}.rpc.tensorpipe_rpc_agent_test_fixture")
    tests = getattr(importlib.import_module(module), name)
    bases = (tests, fixture.TensorPipeRpcAgentTestFixture, common.MultiProcessTestCase)
    return type(name, bases, {"setUp": _start_workers, "__module__": __name__})


_groups: list[Any] = []
"""All process groups that were made in this process: see :func:`_keep`."""


def _keep(make_group: Callable[..., Any]) -> Callable[..., Any]:
    """Let process groups live until their process ends, and exist everywhere once they exist somewhere.

    The destructor of torch's gloo group joins a thread while it holds the GIL. If that thread is dropping the
    tensors of an all-reduce, it needs the GIL, and both wait forever: with DDP, without any RPC.

    ``init_process_group`` returns on one rank before it has on others, which the tests of DDP call at once.
    """

    def make_and_keep(*args: Any, **kwargs: Any) -> Any:
        made = make_group(*args, **kwargs)
        if made is None:  # it is init_process_group
            torch.distributed.barrier()
        _groups.append((made, torch.distributed.group.WORLD))
        return made

    return make_and_keep


def _start_workers(self: Any) -> None:
    """Start the workers of a test. They are forks, because torch takes seconds to import."""
    super(type(self), self).setUp()
    for name in ("init_process_group", "new_group"):
        setattr(torch.distributed, name, _keep(getattr(torch.distributed, name)))
    self._start_processes(torch.multiprocessing.get_context("fork").Process)
