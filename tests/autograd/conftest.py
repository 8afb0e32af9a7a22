"""What the tests of autograd share."""

from __future__ import annotations

import pytest
from torch.utils.hooks import RemovableHandle

from zmqgrad.autograd.graph import hooks


@pytest.fixture(autouse=True)
def no_hooks_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins as in a process without registered hooks."""
    monkeypatch.setattr(hooks, "_internal_hooks", RemovableHandle.next_id)
