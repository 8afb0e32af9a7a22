"""Whole jobs under the scheduler: a seed gives one way, faults are survived, and a bug has a number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import ConfigurationError
from zmqgrad.testing.simulation import Run, SimulationFailed, __main__, simulate
from zmqgrad.testing.simulation.campaign import Faults
from zmqgrad.testing.simulation.drawn_jobs import kind_of, run_many


def exchange(rank: int) -> int:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    found: int = rpc.rpc_sync(f"worker{1 - rank}", max, args=(rank, 1))
    rpc.shutdown()
    return found


def send_a_lambda(rank: int) -> int:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    found: int = rpc.rpc_sync(f"worker{1 - rank}", lambda: rank)
    rpc.shutdown()
    return found


def meet_and_leave(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    for _ in range(3):
        rpc.barrier()
    rpc.shutdown(graceful=False)


balance = 0


def withdraw(amount: int) -> None:
    global balance
    before = balance
    for _ in range(50):  # points between the read and the write
        time.monotonic()
    balance = before - amount


def transfers(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank:
        for future in [rpc.rpc_async("worker0", withdraw, args=(amount,)) for amount in (1, 2)]:
            future.wait()
    rpc.shutdown()
    assert rank or balance == -3, f"the balance is {balance}"


def test_a_job_runs_and_a_seed_repeats_it_exactly() -> None:
    first = simulate(exchange, workers=2, seeds=5)
    again = simulate(exchange, workers=2, seeds=5)
    assert [run.values for run in first] == [{0: 1, 1: 1}] * 5
    assert [(run.digest, run.messages) for run in first] == [(run.digest, run.messages) for run in again]
    assert len({run.digest for run in first}) == 5


def test_a_worker_may_leave_at_once_after_a_barrier() -> None:
    simulate(meet_and_leave, workers=3, hosts=("a", "b"), seeds=[63, *range(20)])


def test_the_messages_of_a_run_are_told() -> None:
    [run] = simulate(exchange, workers=2, seeds=[3])
    sent = [line for line in run.messages if "worker0 ->" in line and "Call" in line]
    assert sent


def test_functions_are_sent_by_value() -> None:
    [run] = simulate(send_a_lambda, workers=2, seeds=[0])
    assert run.values == {0: 0, 1: 1}
    assert any("lambda" in message for message in run.messages)


def test_a_program_that_no_process_can_import_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="its own copy"):
        simulate(lambda rank: rank)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": 0}, "workers is 0; it must be an integer, at least 1"),
        ({"seeds": 0}, "seeds is 0; at least one must run"),
        ({"seeds": "17"}, "seeds must be a number or a list, not the str '17'"),
        ({"faults": 3}, r"faults must be Faults\(\.\.\.\), not 3"),
        ({"faults": Faults(kills=3)}, "kills is 3; it must be an integer, from 0 to 2"),
        ({"kill": "worker1"}, "kill is 'worker1'; it must be 'any' or None"),
        ({"hosts": "host0"}, "hosts must be a list of names, not the str 'host0'"),
        ({"hosts": ()}, "hosts is empty"),
    ],
)
def test_arguments_that_would_run_nothing_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        simulate(exchange, **arguments)


def test_hosts_may_have_any_names() -> None:
    [run] = simulate(exchange, workers=2, hosts=("a", "b"))
    assert run.values == {0: 1, 1: 1}


def test_a_worker_is_killed_at_any_moment_and_the_others_may_tell_of_it() -> None:
    runs = simulate(exchange, workers=2, seeds=6, kill="any")
    assert any(run.killed for run in runs)
    for run in runs:
        assert len(run.killed) + len(run.losses) + len(run.values) >= 2
        assert run.killed or not run.losses


def test_a_process_that_is_stopped_for_seconds_goes_on() -> None:
    runs = simulate(exchange, workers=2, seeds=6, faults=Faults(stops=2, lasting=5.0))
    assert [run.values for run in runs] == [{0: 1, 1: 1}] * 6
    assert max(run.simulated_seconds for run in runs) > 2


def test_a_debugger_gets_one_seed() -> None:
    with pytest.raises(ConfigurationError, match="one seed, not 2"):
        simulate(exchange, workers=2, seeds=2, inline=True)


def test_a_race_of_the_program_is_found_and_repeated() -> None:
    with pytest.raises(SimulationFailed, match=r"the balance is -[12]\b") as failed:
        simulate(transfers, workers=2, seeds=60)
    seed = failed.value.run.seed
    with pytest.raises(SimulationFailed, match=r"the balance is -[12]\b") as repeated:
        simulate(transfers, workers=2, seeds=[seed])
    assert repeated.value.run.digest == failed.value.run.digest


@pytest.mark.processes
@pytest.mark.slow
def test_a_seed_of_a_campaign_is_the_same_schedule_when_it_runs_alone() -> None:
    [found] = run_many([1], 1)  # on one processor, without a log
    command = [sys.executable, "-m", "zmqgrad.testing.simulation", "--seed", "1"]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert alone.stdout.endswith(f"seed 1: ended well (digest {found.digest:x})\n")


@pytest.mark.processes
@pytest.mark.slow
def test_no_process_outlives_a_campaign_that_is_killed() -> None:
    command = [sys.executable, "-m", "zmqgrad.testing.simulation", "--minutes", "5", "--jobs", "1"]
    campaign = subprocess.Popen(command, start_new_session=True)
    children = Path(f"/proc/{campaign.pid}/task/{campaign.pid}/children")
    eventually(lambda: len(children.read_text().split()) == 2)  # one is the resource tracker
    campaign.kill()
    campaign.wait()
    eventually(partial(_has_members, campaign.pid), lambda found: not found)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_campaign_names_each_seed_that_fails_and_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = [Run(0), Run(1, "it broke"), Run(2)]
    monkeypatch.setattr(__main__, "run_many", lambda seeds, jobs: iter(ended))
    monkeypatch.setattr("sys.argv", ["simulation", "--seeds", "3"])
    assert __main__.main() == 1
    printed = capsys.readouterr().out
    assert "it broke" in printed
    assert "3 seeds, 1 failed" in printed
    assert f"python -m zmqgrad.testing.simulation --kind {kind_of(1)} --seed 1\n" in printed
    del ended[1]
    assert __main__.main() == 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def survive(rank: int) -> float:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="worker1"):
            rpc.rpc_sync("worker1", die)
    else:
        time.sleep(3600)
    rpc.shutdown(graceful=False)
    return time.monotonic() - began


def wait_in_vain(rank: int) -> float:
    began = time.monotonic()
    if rank == 0:
        threading.Timer(5.0, die).start()
    if rank < 2:
        with pytest.raises(
            RuntimeError, match=r"these ranks have not joined: \[2\].* the process that served it has ended"
        ):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    return time.monotonic() - began


@pytest.mark.parametrize("hosts", [["host0"], ["host0", "host1"]], ids=["one host", "two hosts"])
def test_a_worker_that_joins_is_told_that_the_store_has_ended(hosts: list[str]) -> None:
    # It waited for the store until the timeout of init_rpc, and others for its replies.
    [run] = simulate(wait_in_vain, workers=3, hosts=hosts, seeds=[0])
    assert run.killed == (0,)
    assert 5 < run.values[1] < 20


def test_a_session_that_waits_to_reconnect_does_nothing_meanwhile() -> None:
    # Its timer once fired without a pause, since what it had sent before was overdue.
    [run] = simulate(survive, workers=2, hosts=("host0", "host1"), seeds=[0])
    assert run.killed == (1,)
    assert run.values[0] > 3
    assert run.points < 10_000
