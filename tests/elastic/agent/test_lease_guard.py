"""Workers that the lease guard has killed have not failed, whenever the agent finds them dead."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence

from tests.support.waiting import eventually
from zmqgrad.elastic.agent.agent import AgentSpec, run_agent
from zmqgrad.elastic.agent.coordination import SingleNode
from zmqgrad.elastic.agent.events import CoordinatorRequest, Join, Leave, RendezvousFailed
from zmqgrad.elastic.agent.ranks import NodeInfo, Placement
from zmqgrad.elastic.agent.signals import SignalInbox
from zmqgrad.elastic.agent.streams import OutputConfig, Stream
from zmqgrad.elastic.agent.workers import ScriptWorker, Worker
from zmqgrad.errors import RendezvousTimeoutError


class _Leased(SingleNode):
    """Has a lease until ``lost`` is set, and no second round."""

    def __init__(self) -> None:
        super().__init__(lambda restarts: NodeInfo("node", "default", 1, restarts, "127.0.0.1", 1))
        self.lost = threading.Event()
        self.requests: list[CoordinatorRequest] = []

    def carry_out(self, request: CoordinatorRequest) -> None:
        self.requests.append(request)
        if isinstance(request, Join) and self.requests.count(request) > 1:
            self.events.post(RendezvousFailed(RendezvousTimeoutError("no other round")))
        else:
            super().carry_out(request)

    def lease_left(self) -> float:
        return 0.0 if self.lost.is_set() else 0.05


class _KilledWhenPolled(ScriptWorker):
    """Loses the lease after the agent has looked at it, and before that looks at this worker."""

    def __init__(self, coordinator: _Leased, streams: Sequence[Stream]) -> None:
        super().__init__(0, [sys.executable, "-c", "import signal; signal.pause()"], {}, streams)
        self._coordinator = coordinator

    def poll(self) -> int | None:
        self._coordinator.lost.set()
        code = eventually(super().poll, lambda code: code is not None)
        assert code == -signal.SIGKILL
        return code


def test_a_worker_that_the_guard_kills_after_the_agent_has_looked_at_the_lease() -> None:
    coordinator, output = _Leased(), OutputConfig(lambda rank, fd: b"")

    def start(place: Placement, local_rank: int) -> Worker:
        return _KilledWhenPolled(coordinator, output.open(0, 0, append=False))

    said: list[str] = []
    spec = AgentSpec(coordinator, start, lambda round, rank: [], output, said.append, is_distributed=True)
    with SignalInbox() as signals:
        result, _ = run_agent(spec, signals)
    assert coordinator.requests == [Join(0), Join(0), Leave(close=False)], said
    assert result.failure is None
