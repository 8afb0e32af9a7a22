"""A peer that takes nothing in, as a real process: memory stays bounded, and its death frees everybody."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from tests.support.processes import run_processes
from zmqgrad import rpc
from zmqgrad.errors import PeerLostError
from zmqgrad.rpc.current import current_worker
from zmqgrad.transport.tap import Tapped, observer
from zmqgrad.wire.messages import CreditWanted

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MB = 1 << 20
LIMIT = 8 * MB
SENDERS = 4


def resident() -> int:
    """Bytes of memory that this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def consume(x: torch.Tensor) -> int:
    return x.numel()


def flood_the_frozen(rank: int) -> None:
    options = rpc.RpcBackendOptions(arena_limit=0, inflight_bytes=LIMIT, rpc_timeout=60.0)
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=options)
    if rank == 1:
        rpc.shutdown()
        return
    pid = rpc.rpc_sync("worker1", os.getpid)
    worker, waits = current_worker(), threading.Semaphore(0)

    def tap(tapped: Tapped) -> None:
        if tapped.outgoing and isinstance(tapped.message, CreditWanted):
            waits.release()

    worker.mailbox.tap = observer(tap)
    assert rpc.rpc_sync("worker1", consume, args=(torch.zeros(MB),)) == MB
    os.kill(pid, signal.SIGSTOP)
    before = resident()
    answers: list[object] = []

    def flood() -> None:
        mine = torch.ones(MB // 4)
        for _ in range(100):
            answers.append(rpc.rpc_async("worker1", consume, args=(mine.clone(),)))

    threads = [threading.Thread(target=flood) for _ in range(SENDERS)]
    for thread in threads:
        thread.start()
    assert waits.acquire(timeout=20)
    state = rpc.get_stats()["inflight"]
    assert 0 < state["bytes"][1] <= LIMIT
    assert state["waiting"][1]["messages"] >= 1
    assert len(answers) <= LIMIT // MB
    assert resident() - before < 64 * MB
    os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for answer in answers:
        with pytest.raises(PeerLostError):
            answer.wait()  # type: ignore[attr-defined]
    assert len(answers) == 100 * SENDERS
    assert rpc.get_stats()["inflight"]["bytes"] == {}
    rpc.shutdown(graceful=False)


def test_a_frozen_peer_stops_its_senders_and_its_death_frees_them() -> None:
    run_processes(flood_the_frozen, 2, may_die=(1,))
