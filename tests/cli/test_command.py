"""Arguments, messages and environments: what needs no worker."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from tests.support.interpreter import run_python
from tests.trace.test_job import two
from zmqgrad import __version__
from zmqgrad.__main__ import main
from zmqgrad.cli.colours import wants_colour
from zmqgrad.cli.run import labels
from zmqgrad.elastic.agent.addresses import reserve_port, usable_port
from zmqgrad.elastic.agent.ranks import NodeInfo, place
from zmqgrad.elastic.agent.variables import common_variables, worker_variables
from zmqgrad.elastic.launch_config import LaunchConfig
from zmqgrad.errors import ConfigurationError


@pytest.mark.slow
def test_the_command_starts_without_torch() -> None:
    heavy = "[name for name in ('torch', 'zmq', 'numpy', 'msgspec', 'rich') if name in sys.modules]"
    assert run_python(f"import sys, zmqgrad.__main__; print({heavy})") == "[]\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"zmqgrad {__version__}\n"


def test_a_closed_stdout_fails_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["completion", "bash"]) == 0
    sys.stdout.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="stands for a full disk")
def test_an_output_that_takes_no_more_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == "zmqgrad completion: cannot write: No space left on device\n"


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("rnu", "did you mean 'run'?"),
        ("frobnicate", "there is: completion, doctor, examples, run, secret, store"),
    ],
)
def test_an_unknown_command(capsys: pytest.CaptureFixture[str], word: str, hint: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([word])
    assert f"there is no command '{word}'; {hint}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trace", "repot", "d"], "there is no view 'repot'; did you mean 'report'?"),
        (["store", "list"], "there is no command 'list'; did you mean 'keys'?"),
        (["trace"], "VIEW is missing: it is one of findings, report"),
        (["store"], "COMMAND is missing: it is one of serve, get"),
        (["store", "get"], "key is missing; for example: zmqgrad store get step --endpoint"),
        (["store", "get", "host0:29500", "step"], "unrecognized arguments: step; it takes key"),
        (["completion", "powershell"], "argument shell: invalid choice: 'powershell' (choose from "),
        (["run"], "SCRIPT is missing; for example: zmqgrad run --nproc-per-node 4 train.py"),
    ],
)
def test_a_mistake_is_named_with_what_was_meant(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert f": error: {message}" in capsys.readouterr().err


def test_a_closed_port_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with reserve_port("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    assert main(["store", "get", "step", "--endpoint", f"127.0.0.1:{port}"]) == 1
    assert f"no store is served at 127.0.0.1:{port}, which refuses connections" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc-per-node", "0", "x.py"], "must be at least 1, not 0"),
        (["--nproc-per-node", "two", "x.py"], "invalid"),
        (["--master-port", "65536", "x.py"], "must be between 0 and 65535, not 65536"),
        (["--nproc", "2", "x.py"], "--nproc"),
        ([], "SCRIPT"),
    ],
)
def test_arguments_that_cannot_be(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", *arguments])
    assert message in capsys.readouterr().err


def test_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no/such/script.py"]) == 2
    assert "there is no file 'no/such/script.py'" in capsys.readouterr().err


def test_a_path_that_the_system_does_not_look_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ("x" * 300)  # as one in a directory of another user
    two(tmp_path, 1)
    for arguments, code, said in (
        (["run", str(path)], 2, f"cannot find '{path}': "),
        (["examples", str(path)], 2, f"cannot write {path}: "),
        (["trace", "timeline", str(tmp_path), "-o", str(path)], 1, f"cannot write {path}: "),
    ):
        assert main(arguments) == code
        assert said in capsys.readouterr().err


def test_an_endpoint_of_the_doctor_that_is_malformed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--peer", "host:port"]) == 2
    assert "--peer is 'host:port'; it must be HOST:PORT" in capsys.readouterr().err


def test_an_address_of_another_host() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1:0: .*--master-addr must be"):
        usable_port("192.0.2.1", 0)


def test_a_port_in_use_and_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{taken}: Address already in use"):
            usable_port("127.0.0.1", taken)
        free = usable_port("127.0.0.1", 0)
    assert free != taken
    assert usable_port("127.0.0.1", free) == free


def test_a_reserved_port_is_for_rank_0_only() -> None:
    """It can be listened at, but is no free port: the system would choose it about once in 14,000 times."""
    with reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        for _ in range(30_000):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", 0))
                assert other.getsockname()[1] != port
        with socket.create_server(("127.0.0.1", port)):
            pass


def worker_environments(inherited: dict[str, str], workers: int, port: int) -> list[dict[str, str]]:
    """The variables of the workers of a single node."""
    common = common_variables(inherited, LaunchConfig(nproc_per_node=workers, max_restarts=3))
    placement = place([NodeInfo("node", "default_role", workers, 1, "127.0.0.1", port)], 0, round=0)
    return [worker_variables(common, placement, rank) for rank in range(workers)]


def test_each_worker_gets_its_rank_in_the_environment() -> None:
    inherited = {"HOME": "/home/me", "RANK": "9", "ZMQGRAD_SECRET_FILE": "/run/secret"}
    first, second = worker_environments(inherited, 2, 4711)
    assert first == {
        "ZMQGRAD_SECRET_FILE": "/run/secret",
        "HOME": "/home/me",
        "ZMQGRAD_ROUND": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4711",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default_role",
        "ROLE_RANK": "0",
        "ROLE_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert second == first | {"RANK": "1", "LOCAL_RANK": "1", "ROLE_RANK": "1"}


@pytest.mark.parametrize("query", ["", "?protocol=https"])
def test_each_round_after_the_first_has_a_store_of_its_own_in_etcd(query: str) -> None:
    common = common_variables({"ZMQGRAD_STORE": f"etcd://host/job{query}"}, LaunchConfig(max_restarts=2))
    node = NodeInfo("node", "default_role", 1, 0, "127.0.0.1", 1)
    urls = [worker_variables(common, place([node], 0, round), 0)["ZMQGRAD_STORE"] for round in range(3)]
    assert urls == [f"etcd://host/{path}{query}" for path in ("job", "job/1", "job/2")]


def test_variables_set_by_the_user_are_kept() -> None:
    [alone] = worker_environments({}, 1, 1)
    assert "OMP_NUM_THREADS" not in alone
    chosen = worker_environments({"OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": ""}, 2, 1)
    assert [(e["OMP_NUM_THREADS"], e["PYTHONUNBUFFERED"]) for e in chosen] == [("4", "")] * 2


@pytest.mark.parametrize(
    ("environ", "wants"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colours_are_a_matter_of_taste(environ: dict[str, str], wants: bool) -> None:
    assert wants_colour(environ) is wants


def test_labels() -> None:
    label = labels(frozenset({1}))
    assert label(12, 2) == b"[worker 12] "
    assert label(0, 1) == b"\x1b[36m[worker 0]\x1b[0m "
    assert len({label(rank, 1).split(b"[worker")[0] for rank in range(6)}) == 6
