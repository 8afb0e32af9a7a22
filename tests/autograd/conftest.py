"""What the tests of autograd share."""

from __future__ import annotations

import pytest

from zmqgrad.autograd import torch_internals
from zmqgrad.autograd.graph import hooks
from zmqgrad.autograd.torch_internals import hook_handles_made, node_hook_handles_made


@pytest.fixture(autouse=True)
def no_hooks_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins as in a process without registered hooks."""
    monkeypatch.setattr(torch_internals, "_retained", 0)
    monkeypatch.setattr(hooks, "_internal_hooks", hook_handles_made())
    monkeypatch.setattr(hooks, "_internal_node_hooks", node_hook_handles_made())
