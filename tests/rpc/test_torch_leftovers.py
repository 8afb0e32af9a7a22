"""A program that was changed to use this library, but not everywhere."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch.distributed.autograd
import torch.distributed.rpc
from torch.distributed.optim import DistributedOptimizer

import zmqgrad
from zmqgrad import rpc
from zmqgrad.rpc.torch_leftovers import warn_of_leftovers


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the program, which other tests' modules do not hide."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("tests", "test_", "bench", "examples", "__main__", "conftest")):
            monkeypatch.delitem(sys.modules, name)
        del module
    module = ModuleType("half_ported")
    module.__file__ = "/home/user/half_ported.py"
    monkeypatch.setitem(sys.modules, "half_ported", module)
    warn_of_leftovers.cache_clear()
    return module


def test_names_of_torch_are_logged_once(program: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    vars(program).update(
        DistributedOptimizer=DistributedOptimizer,
        dist_autograd=torch.distributed.autograd,
        RRef=torch.distributed.rpc.RRef,  # type: ignore[attr-defined]  # torch's stubs lack it
        remote=rpc.remote,
    )
    warn_of_leftovers()
    warn_of_leftovers()
    (line,) = caplog.messages
    assert "half_ported (DistributedOptimizer, RRef, dist_autograd)" in line


def test_ported_programs_and_libraries_are_not_reported(
    program: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    vars(program).update(rpc=rpc, torch=torch, zmqgrad=zmqgrad, RRef=rpc.RRef)
    library = ModuleType("library")
    library.__file__ = "/venv/lib/python3.12/site-packages/library.py"
    vars(library).update(rpc=torch.distributed.rpc)
    sys.modules["library"] = library
    try:
        warn_of_leftovers()
    finally:
        del sys.modules["library"]
    assert caplog.messages == []
