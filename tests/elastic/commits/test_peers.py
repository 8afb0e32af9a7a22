"""Agents move parts of commits to each other, and say why where they cannot."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from zmqgrad.elastic.commits import peers
from zmqgrad.elastic.commits.agreement import Inventory
from zmqgrad.elastic.commits.holder import Holder
from zmqgrad.elastic.commits.peers import OtherAgents
from zmqgrad.errors import CommitError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import HashStore
from zmqgrad.wire.messages import CommitId, PartId

PART = PartId(CommitId(1, 0, 1), 0, 2)
DATA = bytes(3 << 20)


class Parts:
    """What one node holds."""

    def __init__(self) -> None:
        self.parts: dict[PartId, memoryview] = {}

    def keep(self, part: PartId, data: memoryview) -> None:
        self.parts[part] = data

    @contextmanager
    def reading(self, part: PartId) -> Iterator[memoryview | None]:
        yield self.parts.get(part)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OtherAgents]]:
    monkeypatch.setattr(peers, "COPY_SECONDS", 10.0)
    holders = [Parts(), Parts()]
    holders[1].parts[PART] = memoryview(DATA)
    with HashStore() as store, store.clone() as clone:
        stores = [store, clone]
        agents = [OtherAgents(cast("Holder", held), stores[n], n, 2) for n, held in enumerate(holders)]
        meeting = [
            threading.Thread(target=agent.exchange, args=(0, Inventory(), Deadline.after(20.0)))
            for agent in agents
        ]
        for thread in meeting:
            thread.start()
        for thread in meeting:
            thread.join()
        yield agents
        for agent in agents:
            agent.close()


def test_a_part_for_which_there_is_no_memory_fails_at_once(
    agents: list[OtherAgents], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no memory")

    near, _ = agents
    with monkeypatch.context() as without:
        without.setattr(mmap, "mmap", refuse)
        with pytest.raises(CommitError, match="no memory for 3145728 bytes that worker 0 has sent"):
            near.copy(PART, memoryview(bytearray(DATA)))
        with pytest.raises(CommitError, match="no memory for 3145728 bytes that worker 1 has sent"):
            near.fetch(1, PART)
    near.copy(PART, memoryview(bytearray(DATA)))
    assert near.fetch(1, PART) == DATA
