"""Real processes that join, freeze, die, leave and come back."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.processes.test_lifecycle import take, what_is_open
from tests.support.processes import run_processes
from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import DuplicateWorkerError, PeerLostError, RpcTimeoutError
from zmqgrad.rpc.current import current_worker

pytestmark = [pytest.mark.processes, pytest.mark.slow]

WAIT = 25.0

OPTIONS = rpc.RpcBackendOptions(rpc_timeout=WAIT, num_worker_threads=4, liveness_timeout=0.3)


def join(name: str, rank: int | None = -1) -> None:
    """Into a group of no fixed size; the rank 0 of the environment serves the store."""
    os.environ.pop("WORLD_SIZE", None)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=OPTIONS)


told_to_become_b = threading.Event()


def become_b() -> None:
    """Leave, and come back under another name."""
    told_to_become_b.set()


told_to_leave = threading.Event()


def leave() -> None:
    """The second b has been seen."""
    told_to_leave.set()


def member(rank: int) -> dict[str, Any]:
    """Rank 0 looks on while b freezes, dies, and is followed by another b."""
    if rank == 0:
        return look_on()
    join("bc"[rank - 1])
    if rank == 1:
        threading.Event().wait(WAIT)  # to be killed
    assert told_to_become_b.wait(WAIT)
    rpc.wait_for_workers(["hub"])
    rpc.shutdown()
    assert what_is_open()[0] == []
    join("b", rank=None)
    assert told_to_leave.wait(WAIT)  # somebody who comes and goes at once is seen by nobody who is slow
    try:
        return {"id": rpc.get_worker_info().id}
    finally:
        rpc.shutdown()


def look_on() -> dict[str, Any]:
    """What happens to the others."""
    join("hub")
    lost: list[Any] = []
    heard = threading.Event()

    def on_loss(info: rpc.WorkerInfo, why: str) -> None:
        lost.append((info.name, info.id, why))
        heard.set()

    rpc.on_loss(on_loss)
    rpc.wait_for_workers(["b", "c"])
    pid = rpc.rpc_sync("b", os.getpid)
    rref = rpc.remote("b", list, args=("ab",))
    assert rref.to_here() == ["a", "b"]

    stop(pid)
    waiting = rpc.rpc_async("b", os.getpid, timeout=0)
    with pytest.raises(RpcTimeoutError, match="getpid on b"):
        rpc.rpc_sync("b", os.getpid, timeout=0.01)
    # Others may be silent, too, on a machine that has much to do.
    eventually(lambda: current_worker().silent, lambda silent: 1 in silent, WAIT)
    assert not waiting.done()
    assert not lost
    os.kill(pid, signal.SIGCONT)
    assert waiting.wait() == pid

    doomed = rpc.rpc_async("b", take, args=(50.0,))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLostError, match=r"b .worker 1. is gone: its process has ended.*take"):
        doomed.wait()
    assert heard.wait(WAIT)
    assert lost[0][:2] == ("b", 1)

    rpc.rpc_async("c", become_b)
    [info] = rpc.wait_for_workers(["b"])
    with pytest.raises(PeerLostError, match=f"the b that runs now .worker {info.id}. is a new one"):
        rref.to_here()
    rpc.rpc_sync("b", leave)
    rpc.shutdown()
    return {"left": what_is_open()[0], "id": info.id}


def stop(pid: int) -> None:
    """Freeze a process; returns when all its threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    eventually(
        lambda: [task.read_text() for task in tasks.glob("*/stat")],
        lambda stats: all(" T " in stat for stat in stats),
        WAIT,
    )


def test_a_life() -> None:
    hub, _, other = run_processes(member, 3, may_die=[1])
    assert hub["left"] == []
    assert hub["id"] == other["id"] > 2


def same_name(rank: int) -> str:
    """Both want to be called a; rank 1 tries while rank 0 is there."""
    if rank == 0:
        join("a")
        assert told_to_become_b.wait(WAIT)
        rpc.shutdown()
        return "joined"
    join("b")
    rpc.wait_for_workers(["a"])
    rpc.shutdown()
    with pytest.raises(DuplicateWorkerError) as caught:
        join("a")
    assert what_is_open()[0] == []
    join("b")
    rpc.rpc_sync("a", become_b)
    rpc.shutdown()
    return str(caught.value)


def test_a_name_is_refused_while_its_holder_lives() -> None:
    joined, told = run_processes(same_name, 2)
    assert joined == "joined"
    assert "'a' is not unique: worker 0" in told
