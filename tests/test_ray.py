"""The launcher for Ray, with a real Ray of one host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray", reason="needs the extra zmqgrad[ray]")

from zmqgrad.errors import ConfigurationError
from zmqgrad.ray import Host, RayLauncher, assign_ranks, worker_variables

SECONDS = 500
"""Limit of a program, which takes a minute where nothing else runs: the processes of Ray start slowly."""

PROGRAM = Path(__file__).parent / "support" / "ray_program.py"


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_ranks_are_consecutive_on_each_host(nodes: list[str]) -> None:
    ranks = assign_ranks(nodes)
    assert sorted(rank.rank for rank in ranks) == list(range(len(nodes)))
    for node, size in Counter(nodes).items():
        here = [rank for rank, its in zip(ranks, nodes, strict=True) if its == node]
        assert sorted(rank.rank - rank.local_rank for rank in here) == [min(r.rank for r in here)] * size
        assert sorted(rank.local_rank for rank in here) == list(range(size))
        assert {rank.local_world_size for rank in here} == {size}
        assert len({rank.group_rank for rank in here}) == 1
    assert ranks[0].rank == 0


def variables(*hosts: Host) -> list[dict[str, str]]:
    return worker_variables(hosts, assign_ranks([host.node for host in hosts]), "secret", 2, 3)


def test_the_variables_of_workers_on_two_hosts() -> None:
    found = variables(
        Host("a", "1.1.1.1", 11, ()), Host("b", "2.2.2.2", 12, ()), Host("a", "1.1.1.1", 13, ())
    )
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [[each[name] for name in names] for each in found] == [
        ["0", "0", "2", "0"],
        ["2", "0", "1", "1"],
        ["1", "1", "2", "0"],
    ]
    common = {
        "MASTER_ADDR": "1.1.1.1",
        "MASTER_PORT": "11",
        "WORLD_SIZE": "3",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "ZMQGRAD_SECRET": "secret",
    }
    assert all(common.items() <= each.items() for each in found)
    assert all("CUDA_VISIBLE_DEVICES" not in each for each in found)


def test_the_gpu_of_a_worker_is_at_its_local_rank() -> None:
    found = variables(
        Host("a", "", 1, ("3",)),
        Host("b", "", 1, ("5",)),
        Host("a", "", 1, ("1",)),
        Host("c", "", 1, ("0", "1")),
    )
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in found] == ["3,1", "5", "3,1", None]
    shared = variables(Host("a", "", 1, ("0",)), Host("a", "", 1, ("0",)))
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in shared] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers is 0"),
        ({"max_restarts": -1}, "max_restarts -1"),
        ({"start_timeout": 0}, "start_timeout 0"),
        ({"strategy": "pack"}, "must be one of PACK, SPREAD"),
        ({"cpus_per_worker": 0}, "one must not be 0"),
        ({"resources_per_worker": {"disk": -1}}, "none may be negative"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RayLauncher(**{"num_workers": 2, **arguments})


def run_program(path: Path) -> str:
    """What a program prints that uses Ray."""
    environ = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environ["PYTHONPATH"] = os.pathsep.join([str(PROGRAM.parents[2]), environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(path)], env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    """What each scenario of the program returned, or the type and the text of its error.

    One Ray serves them all, because it takes seconds to start.
    """
    found: dict[str, list[Any]] = json.loads(run_program(PROGRAM).splitlines()[-1])
    return found


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 50)
class TestWithRay:
    """The slow part is the fixture, which belongs to whichever test comes first."""

    def test_workers_call_each_other_and_the_results_are_in_order(
        self, results: dict[str, list[Any]]
    ) -> None:
        assert [each["result"] for each in results["calls"]] == [[0, 7], [1, 7]]

    def test_the_secret_is_in_no_command_line(self, results: dict[str, list[Any]]) -> None:
        assert [(each["secret"], each["told"]) for each in results["calls"]] == [(True, False)] * 2

    def test_a_killed_worker_restarts_the_group_in_new_processes(self, results: dict[str, list[Any]]) -> None:
        (warning,) = results["warnings"]
        assert warning.startswith("restart 1 of 1: the worker of rank 1 died")
        assert "restart 1, new: True" in results["dies"][1]

    def test_the_traceback_is_that_of_the_worker_that_failed_first(
        self, results: dict[str, list[Any]]
    ) -> None:
        kind, text, rank, restarts = results["dies"]
        assert (kind, rank, restarts) == ("WorkerFailedError", 1, 1)
        assert "in die" in text
        assert "KeyError: 'restart 1" in text
        assert "PeerLostError" not in text

    def test_the_timeout_names_the_ranks_that_have_not_exited(self, results: dict[str, list[Any]]) -> None:
        assert results["timeout"] == ["LaunchTimeoutError", "the timeout has passed; running: ranks [1]"]

    def test_an_exit_code_is_a_failure(self, results: dict[str, list[Any]]) -> None:
        assert results["exit 3"][0] == "WorkerFailedError"
        assert "SystemExit: 3" in results["exit 3"][1]

    def test_what_cannot_be_pickled(self, results: dict[str, list[Any]]) -> None:
        assert results["argument"][0] == "PayloadError"
        assert results["result"][0] == "WorkerFailedError"
        assert "cannot pickle" in results["result"][1]

    def test_more_than_the_cluster_has(self, results: dict[str, list[Any]]) -> None:
        kind, text = results["too much"]
        assert kind == "LaunchTimeoutError"
        assert "3 workers with {'CPU': 1} each (PACK) within 1 s; the cluster has 2 of 2 CPU free" in text

    def test_gpus(self, results: dict[str, list[Any]]) -> None:
        assert [each["devices"] for each in results["calls"]] == [["0,1", "0"], ["0,1", "1"]]

    def test_an_interrupt_ends_the_workers(self, results: dict[str, list[Any]]) -> None:
        assert results["interrupt"][0] == "KeyboardInterrupt"

    def test_nothing_stays_reserved(self, results: dict[str, list[Any]]) -> None:
        assert results["left"] == [["REMOVED"], True]

    def test_the_documented_program(self, tmp_path: Path) -> None:
        page = Path(__file__).parents[1].joinpath("docs/ray.md").read_text()
        (text,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        (program := tmp_path / "program.py").write_text(text)
        losses = json.loads(run_program(program).splitlines()[-1])
        assert losses[0] == losses[1]
        assert 0 < losses[0] < 0.1
