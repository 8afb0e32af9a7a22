"""torch's test suites as test cases of this tool. Importing this module calls ``zmqgrad.install()``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import unittest
from typing import Any

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


def _start_workers(self: Any) -> None:
    """Start the workers of a test. They are forks, because torch takes seconds to import."""
    super(type(self), self).setUp()
    self._start_processes(torch.multiprocessing.get_context("fork").Process)
