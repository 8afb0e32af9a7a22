"""Joining and leaving in real processes: in good order, in bad order, interrupted and killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import run_processes
from zmqgrad import rpc
from zmqgrad.errors import (
    DuplicateWorkerError,
    FunctionNotFoundError,
    NotInitializedError,
    PeerLostError,
    RendezvousError,
    RendezvousTimeoutError,
    RpcError,
    RpcTimeoutError,
    WorldSizeError,
)
from zmqgrad.rendezvous import register_rendezvous_handler
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.membership.shutdown import LEAVE_POLL_SECONDS
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.store import FileStore, Store, TCPStore

pytestmark = [pytest.mark.processes, pytest.mark.slow]

QUICK = rpc.RpcBackendOptions(rpc_timeout=30.0, num_worker_threads=4)

AT_ONCE = 10.0
"""Seconds: plenty, on any machine, for what waits for no other worker, and well below the timeouts above."""


def join(rank: int, **how: Any) -> None:
    """As most programs do."""
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=QUICK, **how)


def what_is_open() -> tuple[list[str], int]:
    """Threads of ours, and file descriptors."""
    ours = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    return ours, len(os.listdir("/proc/self/fd"))


# ---- good order ------------------------------------------------------------------------------------------


SERVER: list[str] = []


def what_serves() -> list[str]:
    return SERVER


def serve_what_is_made_next(rank: int) -> list[str]:
    """As parameter servers do: the server makes what it serves as soon as it has joined."""
    join(rank)
    if rank == 0:
        SERVER.append("made")
    made: list[str] = rpc.rpc_sync("worker0", what_serves)
    rpc.shutdown()
    return made


def test_no_call_is_served_before_the_worker_has_joined() -> None:
    for _ in range(3):
        assert run_processes(serve_what_is_made_next, 4) == [["made"]] * 4


def ends_as_soon_as_it_has_joined(rank: int) -> str:
    join(rank)
    if rank == 0:
        rpc.shutdown(graceful=False)
        return "ended"
    return "joined"


def test_the_worker_that_serves_the_store_may_end_at_once() -> None:
    assert run_processes(ends_as_soon_as_it_has_joined, 3) == ["ended", "joined", "joined"]


def ten_rounds(rank: int, rounds: int) -> tuple[list[float], list[tuple[list[str], int]]]:
    """Join, call everybody, leave; again and again at one port."""
    join(rank)
    rpc.shutdown()
    taken, open_after = [], []
    for n in range(rounds):
        began = MONOTONIC.now()
        join(rank)
        for to in range(3):
            assert rpc.rpc_sync(f"worker{to}", torch.add, args=(torch.ones(2), n)).sum() == 2 * (n + 1)
        rpc.shutdown()
        taken.append(MONOTONIC.now() - began)
        open_after.append(what_is_open())
    return taken, open_after


def test_rounds_at_one_port_are_quick_and_leave_nothing() -> None:
    for taken, open_after in run_processes(ten_rounds, 3, args=(10,)):
        assert sorted(taken)[3] < LEAVE_POLL_SECONDS, "a round in which workers wait in vain takes longer"
        assert [threads for threads, _ in open_after] == [[]] * 10
        assert open_after[-1][1] <= open_after[0][1] + 2, [number for _, number in open_after]


def kept_waiting(rank: int, path: str) -> int:
    """Rank 0 gives up waiting a few times before rank 1 comes."""
    gate = FileStore(path)
    if rank == 0:
        for _ in range(3):
            with pytest.raises(RendezvousTimeoutError):
                rpc.init_rpc("worker0", rpc_backend_options=rpc.RpcBackendOptions(join_timeout=0.1))
        gate.set("tried", b"")
    else:
        gate.wait(["tried"])
    join(rank)
    told = rpc.rpc_sync(1 - rank, len, args=("abc",))
    rpc.shutdown()
    gate.close()
    return told


def test_a_worker_that_timed_out_joins_again_and_meets_the_others(tmp_path: Path) -> None:
    assert run_processes(kept_waiting, 2, args=(str(tmp_path / "gate"),)) == [3, 3]


def others_work_on(rank: int) -> int:
    """Rank 0 is done at once; what the others have to do needs it all the same."""
    join(rank)
    if rank == 0:
        rpc.shutdown()
        return -1
    total = 0
    for n in range(50):
        total += rpc.rpc_sync("worker0", int.__add__, args=(n, rank))
    rpc.shutdown()
    return total


def test_a_worker_in_shutdown_serves_others_until_they_are_done() -> None:
    assert run_processes(others_work_on, 3) == [-1, 1225 + 50, 1225 + 100]


def fire_and_forget(rank: int, path: str) -> int:
    """Calls whose replies are not waited for, and their nested calls, still run before all leave."""
    join(rank)
    if rank == 1:
        for n in range(5):
            rpc.rpc_async("worker0", pass_on, args=(path, n))
    rpc.shutdown()
    return len(os.listdir(path))


def pass_on(path: str, n: int) -> None:
    """Have worker 1 make a file, and do not wait for it either."""
    rpc.rpc_async("worker1", Path(path, str(n)).touch)


def test_shutdown_waits_for_calls_without_waiters(tmp_path: Path) -> None:
    assert run_processes(fire_and_forget, 2, args=(str(tmp_path),)) == [5, 5]


def leave_alone(rank: int) -> float:
    """With graceful=False a worker waits for no other; the later shutdown of the other fails in time."""
    join(rank)
    began = MONOTONIC.now()
    rpc.shutdown(graceful=False)
    return MONOTONIC.now() - began


def test_leaving_without_grace() -> None:
    assert all(seconds < AT_ONCE for seconds in run_processes(leave_alone, 2))


def forget_to_leave(rank: int) -> int:
    """Return without shutdown, with a call under way."""
    join(rank)
    rpc.rpc_async(f"worker{1 - rank}", take, args=(0.2,))
    return rank


def test_a_program_that_ends_without_shutdown_ends() -> None:
    assert run_processes(forget_to_leave, 2) == [0, 1]


# ---- bad order -------------------------------------------------------------------------------------------


def errors_of_joining(rank: int) -> dict[str, str]:
    """Each mistake of one process, and how it is told."""
    told: dict[str, str] = {}

    def expect(name: str, kind: type[Exception], **how: Any) -> None:
        with pytest.raises(kind) as caught:
            rpc.init_rpc("worker0", rpc_backend_options=QUICK, **how)
        told[name] = str(caught.value)

    expect("rank", RendezvousError, rank=2, world_size=2)
    expect("rank below", RendezvousError, rank=-3, world_size=2)
    expect("size", RendezvousError, rank=0, world_size=0)
    port = os.environ["MASTER_PORT"]
    with TCPStore("127.0.0.1", int(port), is_master=True):
        expect("port", RendezvousError, rank=0, world_size=1)
    del os.environ["MASTER_ADDR"]
    expect("address", RendezvousError, rank=0, world_size=1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "a door"
    expect("malformed", RendezvousError, rank=0, world_size=1)
    os.environ["MASTER_PORT"] = port
    rpc.init_rpc("worker0", rank=0, world_size=1)
    assert rpc.rpc_sync(0, len, args=("abc",)) == 3
    rpc.shutdown()
    told["left"] = str(what_is_open()[0])
    told["port number"] = port
    return told


def test_errors_of_joining_name_the_cause_and_leave_nothing_behind() -> None:
    (told,) = run_processes(errors_of_joining, 1)
    assert "rank" in told["rank"]
    assert "2" in told["rank"]
    assert "-3" in told["rank below"]
    assert "world" in told["size"].lower()
    assert told["port number"] in told["port"]
    assert "listen" in told["port"]
    assert "MASTER_ADDR" in told["address"]
    assert "MASTER_PORT" in told["malformed"]
    assert "a door" in told["malformed"]
    assert told["left"] == "[]"


def same(rank: int, what: str) -> str:
    """Two workers claim one name, or one rank; a third is as it should be."""
    options = rpc.RpcBackendOptions(join_timeout=8.0)
    name = "worker" if what == "name" and rank else f"worker{rank}"
    claimed = 1 if what == "rank" and rank else rank
    try:
        rpc.init_rpc(name, rank=claimed, world_size=3, rpc_backend_options=options)
    except (DuplicateWorkerError, RendezvousTimeoutError) as e:
        assert what_is_open()[0] == []
        return f"{type(e).__name__}: {e}"
    return "joined"


@pytest.mark.parametrize("what", ["name", "rank"])
def test_two_workers_of_one_name_or_rank(what: str) -> None:
    told = run_processes(same, 3, args=(what,))
    refused = [t for t in told if t.startswith("DuplicateWorkerError")]
    if what == "rank":  # the others only learn that no worker came for the rank that is left
        assert len(refused) == 1
    assert all(("'worker'" if what == "name" else "rank 1") in text for text in refused)
    others = sum("have not joined" in t or "no store answered" in t for t in told)
    assert refused
    assert len(refused) + others == 3, told


def another_size(rank: int) -> str:
    """Rank 1 expects one worker more than rank 0."""
    with pytest.raises(WorldSizeError) as caught:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2 + rank)
    assert what_is_open()[0] == []
    return str(caught.value)


def test_different_world_sizes_are_refused_on_both_sides() -> None:
    told = run_processes(another_size, 2)
    assert told[0] == told[1]
    assert "passed 2" in told[0]
    assert "passed 3" in told[0]


def one_never_comes(rank: int) -> tuple[float, str]:
    """Rank 2 stays away."""
    if rank == 2:
        return 0.0, ""
    began = MONOTONIC.now()
    with pytest.raises(RendezvousTimeoutError) as caught:
        rpc.init_rpc(f"worker{rank}", rpc_backend_options=rpc.RpcBackendOptions(join_timeout=3.0))
    assert what_is_open()[0] == []
    return MONOTONIC.now() - began, str(caught.value)


def test_a_worker_that_never_joins_is_named_within_the_timeout() -> None:
    for rank, (seconds, told) in enumerate(run_processes(one_never_comes, 3)[:2]):
        assert seconds < 3.0 + AT_ONCE
        assert told.startswith(f"worker{rank}: of 3 workers")
        assert "2" in told.partition("have not joined: [")[2].partition("]")[0]
        assert "MASTER_ADDR" in told


def one_comes_late(rank: int, init_method: str, path: str) -> int:
    """Rank 1 comes when more time has passed than a call may take."""
    gate = FileStore(path)
    timeout = 1.0
    if rank:
        gate.wait(["waiting"])
    else:
        threading.Timer(3 * timeout, gate.set, ("waiting", b"")).start()
    options = rpc.RpcBackendOptions(rpc_timeout=timeout, init_method=init_method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    told = rpc.rpc_sync(1 - rank, len, args=("abc",), timeout=AT_ONCE)
    rpc.shutdown()
    gate.close()
    return told


@pytest.mark.parametrize("init_method", ["env://", "file://{}/store"])
def test_the_timeout_of_calls_does_not_bound_joining(tmp_path: Path, init_method: str) -> None:
    args = (init_method.format(tmp_path), str(tmp_path / "gate"))
    assert run_processes(one_comes_late, 2, args=args) == [3, 3]


def only_here(rank: int, directory: str) -> str:
    """A module that one of the two can import."""
    import sys

    join(rank)
    told = ""
    if rank == 0:
        sys.path.insert(0, directory)
        import module_of_one

        with pytest.raises(FunctionNotFoundError) as caught:
            rpc.rpc_sync("worker1", module_of_one.function)
        told = str(caught.value)
        with pytest.raises(FunctionNotFoundError):
            rpc.remote("worker1", module_of_one.function).to_here()
        assert rpc.rpc_sync("worker1", len, args=("ab",)) == 2
    rpc.shutdown()
    return told


def test_a_function_that_the_other_side_cannot_import(tmp_path: Path) -> None:
    (tmp_path / "module_of_one.py").write_text("def function():\n    return 1\n")
    told, _ = run_processes(only_here, 2, args=(str(tmp_path),))
    assert "module_of_one" in told
    assert "worker1" in told
    assert "importable" in told


# ---- others that do not come, or die ---------------------------------------------------------------------


told_to_go = threading.Event()


def go() -> None:
    """Called by the other worker."""
    told_to_go.set()


def wait_to_go() -> None:
    """Be busy until told."""
    told_to_go.wait(50)


def take(seconds: float) -> None:
    """Be busy for so long."""
    threading.Event().wait(seconds)


def one_is_killed(rank: int) -> tuple[float, str, list[str]]:
    """Rank 1 dies in the middle of its work."""
    join(rank)
    if rank == 1:
        rpc.rpc_sync("worker0", go)
        os.kill(os.getpid(), signal.SIGKILL)
    assert told_to_go.wait(30)
    # A long one: worker1 may still be alive for the moment between its last answer and its end.
    with pytest.raises(PeerLostError, match=r"worker1 .* is gone"):
        rpc.rpc_sync("worker1", take, args=(50.0,))
    began = MONOTONIC.now()
    rpc.shutdown()
    return MONOTONIC.now() - began, "", what_is_open()[0]


def test_calls_and_shutdown_do_not_wait_for_the_dead(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    alive, _ = run_processes(one_is_killed, 2, may_die=[1], env=env)
    seconds, _, left = alive
    assert seconds < AT_ONCE
    assert left == []
    assert os.listdir(tmp_path) == [], "files of the killed process"


def killed_while_leaving(rank: int, step: str) -> tuple[float, list[str]]:
    """Of three, rank 2 dies just after it posted ``step`` of leaving together."""
    join(rank)
    for to in range(3):
        rpc.rpc_sync(to, int)
    rpc.barrier()
    if rank == 2:
        wait = Store.wait

        def die(store: Store, keys: list[str], *args: Any) -> None:
            if any(key.endswith(f"{step}/{rank}") for key in keys):
                os.kill(os.getpid(), signal.SIGKILL)
            wait(store, keys, *args)

        Store.wait = die  # type: ignore[method-assign]
    began = MONOTONIC.now()
    rpc.shutdown()
    return MONOTONIC.now() - began, what_is_open()[0]


@pytest.mark.parametrize("step", ["arrived", "quiet/1"])
def test_two_of_three_leave_though_one_is_killed_meanwhile(step: str) -> None:
    for seconds, left in run_processes(killed_while_leaving, 3, args=(step,), may_die=[2])[:2]:
        assert seconds < AT_ONCE
        assert left == []


def master_is_killed(rank: int) -> tuple[float, str, list[str]]:
    """The worker that serves the store dies."""
    join(rank)
    if rank == 0:
        rpc.rpc_sync("worker1", go)
        os.kill(os.getpid(), signal.SIGKILL)
    assert told_to_go.wait(30)
    began = MONOTONIC.now()
    with pytest.raises(RpcTimeoutError, match="worker0") as caught:
        rpc.shutdown(timeout=1.0)
    return MONOTONIC.now() - began, str(caught.value), what_is_open()[0]


def test_shutdown_when_the_master_is_dead() -> None:
    _, (seconds, _told, left) = run_processes(master_is_killed, 2, may_die=[0])
    assert seconds < 1.0 + AT_ONCE
    assert left == []


# ---- Ctrl-C ----------------------------------------------------------------------------------------------


def interrupted(rank: int, where: str) -> tuple[float, list[str]]:
    """Wait where it says, and be interrupted there."""
    began, pressed = 0.0, threading.Event()

    def press_ctrl_c() -> None:
        nonlocal began
        began = MONOTONIC.now()
        os.kill(os.getpid(), signal.SIGINT)
        pressed.set()

    timer = threading.Timer(0.5, press_ctrl_c)
    if where != "init_rpc":
        join(rank)
    with pytest.raises(KeyboardInterrupt):
        wait_to_be_interrupted(where, rank, timer, pressed)
    told_to_go.set()  # what the other one has called ends now, and not before
    if where != "init_rpc" and (where != "shutdown" or rank == 1):
        rpc.shutdown(graceful=False)
    seconds = MONOTONIC.now() - began
    timer.join()
    return seconds, what_is_open()[0]


def wait_to_be_interrupted(where: str, rank: int, timer: threading.Timer, pressed: threading.Event) -> None:
    timer.start()
    try:
        wait_in(where, rank)
    except PeerLostError:
        pass  # the other one was interrupted first, and has gone
    # Our turn comes. A signal does not end a wait that Python is just about to begin, but the event does.
    pressed.wait(20)


kept: list[rpc.RRef[Any]] = []  # Python ignores what is raised in __del__, so none may run when Ctrl-C comes


def wait_in(where: str, rank: int) -> None:
    """Wait, in one of the ways that there are, for longer than anybody would."""
    other = f"worker{1 - rank}"
    if where == "init_rpc":
        join(rank, world_size=2)
    elif where == "shutdown":
        if rank == 0:
            rpc.shutdown()
    elif where == "rpc_sync":
        rpc.rpc_sync(other, wait_to_go)
    elif where == "wait":
        rpc.rpc_async(other, wait_to_go).wait()
    elif where == "to_here":
        kept.append(rpc.remote(other, wait_to_go))
        kept[0].to_here()


@pytest.mark.parametrize("where", ["init_rpc", "rpc_sync", "wait", "to_here", "shutdown"])
def test_ctrl_c_ends_the_wait_at_once_and_leaves_nothing(where: str) -> None:
    n = 1 if where == "init_rpc" else 2
    for seconds, left in run_processes(interrupted, n, args=(where,)):
        assert seconds < AT_ONCE
        assert left == []


# ---- shutdown during shutdown ----------------------------------------------------------------------------


def leaves_at_once(rank: int, who: str) -> tuple[float, list[str]]:
    """Worker 0 is in shutdown and waits for worker 1, when something calls shutdown a second time."""
    join(rank)
    if rank == 1:
        with pytest.raises(PeerLostError):
            rpc.rpc_sync("worker0", wait_to_go)
        rpc.shutdown(graceful=False)
        return 0.0, what_is_open()[0]
    began = 0.0

    def again(*_: object) -> None:
        nonlocal began
        began = MONOTONIC.now()
        rpc.shutdown(graceful=False)
        if who == "handler that raises":
            raise SystemExit

    signal.signal(signal.SIGUSR1, again)
    call = again if who == "thread" else partial(os.kill, os.getpid(), signal.SIGUSR1)
    timer = threading.Timer(1.0, call)
    timer.start()
    with pytest.raises(SystemExit) if who == "handler that raises" else nullcontext():
        rpc.shutdown()
    seconds = MONOTONIC.now() - began
    told_to_go.set()
    timer.join()
    return seconds, [name for name in what_is_open()[0] if "engine" not in name]


@pytest.mark.parametrize("who", ["thread", "handler", "handler that raises"])
def test_shutdown_without_grace_ends_a_shutdown_that_waits(who: str) -> None:
    for seconds, left in run_processes(leaves_at_once, 2, args=(who,)):
        assert seconds < AT_ONCE
        assert left == []


def interrupted_as_it_leaves(rank: int, graceful: bool) -> list[str]:
    """Ctrl-C while the worker closes. What is left then, nobody could close any more."""
    join(rank, world_size=1)
    membership = current_worker().membership
    close = membership.close

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        close()

    membership.close = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        rpc.shutdown(graceful)
    return what_is_open()[0]


@pytest.mark.parametrize("graceful", [True, False])
def test_a_worker_that_is_interrupted_as_it_leaves_leaves_nothing_behind(graceful: bool) -> None:
    assert run_processes(interrupted_as_it_leaves, 1, args=(graceful,)) == [[]]


def interrupted_as_it_tells_others(_: int) -> list[str]:
    """Ctrl-C while a worker of a dynamic group that leaves at once tells the store."""
    del os.environ["WORLD_SIZE"]
    rpc.init_rpc("worker0", rank=0, rpc_backend_options=QUICK)
    store = current_worker().directory.shared()
    store.set_timeout = lambda _: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        rpc.shutdown(graceful=False)
    return what_is_open()[0]


def test_a_worker_that_is_interrupted_as_it_tells_that_it_leaves_leaves_nothing_behind() -> None:
    assert run_processes(interrupted_as_it_tells_others, 1) == [[]]


def leave_in_a_callback(rank: int, graceful: bool) -> str:
    """One worker leaves in a callback, which a thread of it runs; there it can only leave at once."""
    join(rank)
    text = ""
    if rank == 0:
        call = rpc.rpc_async("worker1", take, args=(0.2,))
        try:
            call.then(lambda _: rpc.shutdown(graceful)).wait()
        except RuntimeError as e:
            text = str(e)
    if rank != 0 or graceful:
        rpc.shutdown(graceful)
    return text


@pytest.mark.parametrize("graceful", [True, False])
def test_a_callback_can_only_leave_at_once(graceful: bool) -> None:
    """Otherwise it would wait for its own end."""
    text, nothing = run_processes(leave_in_a_callback, 2, args=(graceful,))
    assert ("shutdown was called by a callback" in text) is graceful
    assert (text == "") is not graceful
    assert nothing == ""


def interrupted_as_it_joins(rank: int) -> str:
    """A handler that leaves the group, which this worker has not joined yet."""
    signal.signal(signal.SIGUSR1, lambda *_: rpc.shutdown(graceful=False))
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    with pytest.raises(NotInitializedError) as caught:
        join(rank, world_size=2)
    timer.join()
    assert what_is_open()[0] == []
    return str(caught.value)


def test_a_handler_that_calls_shutdown_ends_init_rpc() -> None:
    assert "not been initialized" in run_processes(interrupted_as_it_joins, 1)[0]


def is_refused_while_it_joins(rank: int) -> int:
    """A thread joins where nobody else comes. Returns the status of a fork that joins a group of its own."""
    inside, end = threading.Event(), threading.Event()

    def meet(url: str, **settings: Any) -> Iterator[Any]:
        inside.set()
        if end.wait(AT_ONCE):
            raise RendezvousError("nobody came")
        yield

    def join_by(init_method: str) -> None:
        rpc.init_rpc(
            "a", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=init_method)
        )

    register_rendezvous_handler("waits", meet)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join_by, "waits://")
        assert inside.wait(AT_ONCE)
        try:
            with pytest.raises(RpcError, match="init_rpc is running already"):
                join_by("env://")
            for graceful in True, False:
                with pytest.raises(NotInitializedError, match="not been initialized"):
                    rpc.shutdown(graceful)
            child = os.fork()
            if child == 0:
                join_by("env://")
                rpc.shutdown()
                os._exit(0)
            status = os.waitpid(child, 0)[1]
        finally:
            end.set()
        with pytest.raises(RendezvousError, match="nobody came"):
            joining.result()
    join_by("env://")
    rpc.shutdown()
    return status


def test_init_rpc_and_shutdown_do_not_wait_for_another_thread_that_joins() -> None:
    assert run_processes(is_refused_while_it_joins, 1) == [0]
