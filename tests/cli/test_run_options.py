"""The options of ``zmqgrad run``: torchrun's parser is the oracle for what both understand."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import to_map

from tests.support.interpreter import run_python
from zmqgrad.cli import run_options
from zmqgrad.elastic.launch_config import LaunchConfig, Streams
from zmqgrad.environment import is_host
from zmqgrad.errors import ConfigurationError

SCRIPT = __file__

words = st.text("abcxyz019.-_", min_size=1, max_size=8).filter(lambda word: not word.startswith("-"))
hosts = words.filter(is_host)
"""torchrun takes others, and fails later."""
flags = {"--no-python", "--run-path", "--module", "-m"}


@pytest.fixture(autouse=True)
def no_defaults_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in vars(torchrun.get_args_parser().parse_args([SCRIPT])):
        monkeypatch.delenv(f"PET_{option.upper()}", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun would set it, for good


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="zmqgrad run", allow_abbrev=False)
    run_options.add_arguments(parser)
    return parser.parse_args(arguments)


def config_of(*arguments: str) -> LaunchConfig:
    return run_options.to_config(parse(*arguments, SCRIPT))


def options(name: str, values: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    """The option in any of its spellings, or none."""
    spellings = sorted({f"--{name}", f"--{name.replace('-', '_')}"})
    given_as = st.tuples(st.sampled_from(spellings), values, st.booleans())
    return st.none().map(lambda _: list[str]()) | given_as.map(
        lambda drawn: [f"{drawn[0]}={drawn[1]}"] if drawn[2] else [drawn[0], drawn[1]]
    )


def joined(parts: Iterable[list[str]]) -> list[str]:
    return list(itertools.chain.from_iterable(parts))


small = st.integers(1, 9).map(str)
ranges = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda pair: f"{pair[0]}:{sum(pair)}")
streams = st.integers(0, 3).map(str) | st.dictionaries(
    st.integers(0, 9), st.integers(0, 3), min_size=1, max_size=3
).map(lambda ranks: ",".join(f"{rank}:{number}" for rank, number in ranks.items()))
pairs = st.dictionaries(words, words, max_size=3).map(
    lambda config: ", ".join(f"{name}={value}" for name, value in config.items())
)
fixed = st.tuples(
    options("nnodes", small), st.sampled_from([["--rdzv-backend", "static"], ["--node_rank=0"]])
).map(joined)
elastic = st.tuples(options("nnodes", small | ranges), st.just(["--rdzv-backend", "c10d"])).map(joined)
event_log_handlers = (  # torch 2.6 and older do not know this option
    options("event-log-handler", st.just("null"))
    if "--event-log-handler" in torchrun.get_args_parser()._option_string_actions
    else st.just(list[str]())
)
shared = st.tuples(
    fixed | elastic,
    options("nproc-per-node", small | st.just("cpu")),
    options("rdzv-endpoint", hosts.map(lambda host: f"{host}:29400")),
    options("rdzv-id", words),
    options("rdzv-conf", pairs),
    options("max-restarts", st.integers(0, 5).map(str)),
    options("monitor-interval", st.sampled_from(["0.5", "2", "1e-3"])),
    options("start-method", st.sampled_from(["spawn", "fork", "forkserver"])),
    options("role", words),
    options("redirects", streams),
    options("tee", streams),
    options("local-addr", hosts),
    options("master-addr", hosts),
    event_log_handlers,
    st.lists(st.sampled_from(sorted(flags)), max_size=1),
    st.permutations([["--log-dir", "logs"], ["--master-port", "1234"]]),
)


@given(shared, st.lists(st.sampled_from(["--nnodes", "-m", "x", "--lr=1"]), max_size=3))
def test_the_same_command_line_means_the_same_as_to_torchrun(
    given_options: tuple[Any, ...], script_arguments: list[str]
) -> None:
    line = [*joined(given_options[:-1]), *joined(given_options[-1]), SCRIPT, *script_arguments]
    theirs, command, rest = torchrun.config_from_args(namespace := torchrun.parse_args(line))
    arguments = parse(*line)
    ours = run_options.to_config(with_a_place_to_meet(arguments))
    assert (ours.min_nodes, ours.max_nodes) == (theirs.min_nodes, theirs.max_nodes)
    for name in ("nproc_per_node", "run_id", "role", "max_restarts", "monitor_interval", "start_method"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.local_addr == theirs.local_addr
    if ours.max_nodes > 1 or namespace.rdzv_endpoint:
        assert ours.rdzv_endpoint == (theirs.rdzv_endpoint or "elsewhere")
    configs = {k: v for k, v in theirs.rdzv_configs.items() if k not in ("timeout", "rank")}
    assert {k: v for k, v in ours.rdzv_configs.items() if k not in ("timeout", "rank")} == configs
    assert ours.node_rank == theirs.rdzv_configs.get("rank")
    for name in ("redirects", "tee"):
        expected = to_map(getattr(theirs.logs_specs, f"_{name}"), 10)
        assert {rank: getattr(ours, name).of(rank) for rank in range(10)} == expected
    assert ours.log_dir == Path(namespace.log_dir)
    assert run_options.to_command(arguments) == plainly(command, rest)


def with_a_place_to_meet(arguments: argparse.Namespace) -> argparse.Namespace:
    """``arguments``, which we refuse for several hosts unless they say where these meet."""
    missing = arguments.rdzv_backend == "c10d" and not arguments.rdzv_endpoint
    if missing and arguments.nnodes[1] > 1:
        arguments.rdzv_endpoint = "elsewhere"
    return arguments


def plainly(command: object, rest: list[str]) -> list[str]:
    """The command that torchrun runs, without -u, which our launcher sets in the environment."""
    if not isinstance(command, str):  # --run-path: a function that runs the script
        return [sys.executable, *rest]
    return [command, *(rest[1:] if rest[:1] == ["-u"] else rest)]


@pytest.mark.parametrize(
    "option",
    [
        action.option_strings[-1]
        for action in torchrun.get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    ],
)
def test_every_option_of_torchrun_is_known(option: str) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    run_options.add_arguments(parser)
    known = {name for action in parser._actions for name in action.option_strings}
    theirs = torchrun.get_args_parser()._option_string_actions[option]
    assert set(theirs.option_strings) <= known


def test_variables_set_defaults_and_options_override_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "NNODES": "1:4",
        "NPROC_PER_NODE": "3",
        "RDZV_ENDPOINT": "host:1",
        "RDZV_BACKEND": "c10d",
        "MAX_RESTARTS": "2",
        "TEE": "0:3",
        "NO_PYTHON": "1",
        "MODULE": "0",
    }.items():
        monkeypatch.setenv(f"PET_{name}", value)
    config = config_of()
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 4, 3)
    assert (config.rdzv_endpoint, config.rdzv_backend, config.max_restarts) == ("host:1", "zmqgrad", 2)
    assert config.tee == Streams.from_str("0:3")
    assert run_options.to_command(parse("program", "x")) == ["program", "x"]
    assert config_of("--nnodes", "2", "--tee", "0").max_nodes == 2


def test_the_variables_of_kubeflow_give_fixed_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "NNODES": "2",
        "NPROC_PER_NODE": "1",
        "NODE_RANK": "1",
        "MASTER_ADDR": "job-node-0-0.job",
        "MASTER_PORT": "29400",
    }.items():
        monkeypatch.setenv(f"PET_{name}", value)
    config = config_of()
    assert (config.max_nodes, config.node_rank) == (2, 1)
    assert config.rdzv_endpoint == "job-node-0-0.job:29400"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PET_NNODES", "many", "--nnodes: (from PET_NNODES) invalid number: 'many'"),
        ("PET_STANDALONE", "yes", "--standalone: (from PET_STANDALONE) must be 1 or 0, not 'yes'"),
    ],
)
def test_a_malformed_variable_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match="2"):
        parse(SCRIPT)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "0"], "must be at least 1, not 0"),
        (["--nnodes", "3:2"], "must be at least 3, not 2"),
        (["--nnodes", "1:2:3"], "invalid number: '2:3'"),
        (["--nproc-per-node", "tpu"], "a number, gpu, xpu, cpu or auto is expected"),
        (["--rdzv-conf", "a=1,b"], "not of the form name=value"),
        (["--rdzv-backend", "etcd-v2"], "'etcd-v2' is not supported: use zmqgrad, or etcd (version 3)"),
        (["--rdzv-backend", "zookeeper"], "there is no backend 'zookeeper': use one of zmqgrad, c10d"),
        (["-r", "4"], "cannot read '4' as output streams"),
        (["--master-port", "-1"], "must be between 0 and 65535"),
        (["--start-method", "thread"], "invalid choice: 'thread'"),
        (["--monitor-interval", "soon"], "could not convert"),
    ],
)
def test_malformed_options(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(*arguments, SCRIPT)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2"], "have no place to meet"),
        (["--nnodes", "1:2", "--node-rank", "0"], "fixed ranks need a fixed number"),
        (["--nnodes", "2", "--node-rank", "2"], "node_rank is 2; it must be an integer, from 0 to 1"),
        (["--standalone", "--nnodes", "2"], "--standalone is for one host"),
        (["-r", "3"], "log_dir is not set"),
        (["--virtual-local-rank"], "--virtual-local-rank is not supported: let the program use the device"),
        (["--logs-specs", "mine"], "--logs-specs is not supported"),
        (["--signals-to-handle", "SIGUSR1"], "--signals-to-handle is not supported"),
        (["--shutdown-timeout", "60"], "--shutdown-timeout is not supported"),
    ],
)
def test_options_that_contradict_or_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_of(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--event-log-handler", "console"], "--event-log-handler is ignored: events go to"),
        (["--local-ranks-filter", "0"], "--local-ranks-filter is ignored"),
        (["--log-line-prefix-template", "${hostname}: "], "--log-line-prefix-template is ignored"),
        (["--numa-binding", "node"], "--numa-binding is ignored"),
        (
            ["--rdzv-backend", "c10d", "--rdzv-endpoint", "h", "--node-rank", "1"],
            "--node-rank is ignored: --rdzv-backend c10d assigns the ranks",
        ),
    ],
)
def test_ignored_options_are_reported_once(
    caplog: pytest.LogCaptureFixture, arguments: list[str], message: str
) -> None:
    config = config_of(*arguments)
    assert config.node_rank is None
    assert [message in record.getMessage() for record in caplog.records] == [True]


def test_torchruns_defaults_of_unsupported_options_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    defaults = ["--event-log-handler=null", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT"]
    assert config_of(*defaults) == config_of()
    assert not caplog.records


def test_standalone_overrides_where_to_meet() -> None:
    config = config_of("--standalone", "--rdzv-endpoint", "host:1", "--rdzv-id", "mine")
    assert config.rdzv_endpoint == ""
    assert config.run_id not in ("", "mine", config_of("--standalone").run_id)


def test_one_host_needs_no_rendezvous() -> None:
    config = config_of("--nproc-per-node", "2", "--master-addr", "10.0.0.1")
    assert (config.rdzv_endpoint, config.master_addr, config.master_port) == ("", "10.0.0.1", 0)


def test_nodes_of_fixed_ranks_meet_at_the_master() -> None:
    config = config_of("--nnodes=2", "--node-rank=1", "--master-addr=host0")
    assert (config.node_rank, config.rdzv_endpoint) == (1, "host0:29500")


def test_commands_that_cannot_run() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no file 'no/such.py'.*-m; for a program, --no-p"):
        run_options.to_command(parse("no/such.py"))
    with pytest.raises(ConfigurationError, match="leave one out"):
        run_options.to_command(parse("-m", "--no-python", "x"))


def test_torchruns_completion_refers_to_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--print-completion", "bash")
    assert "--print-completion: not supported: use `zmqgrad completion bash`" in capsys.readouterr().err


def test_help_shows_examples_and_exit_codes() -> None:
    parser = argparse.ArgumentParser(prog="zmqgrad run")
    run_options.add_arguments(parser)
    text = parser.format_help()
    assert "zmqgrad run --nnodes 1:4" in text
    assert "exit codes:" in text
    assert "--virtual-local-rank" not in text


def documented_commands() -> list[str]:
    """The commands of the help and of the page on clusters, with variables replaced."""
    parser = argparse.ArgumentParser(prog="zmqgrad run")
    run_options.add_arguments(parser)
    page = Path(SCRIPT).parents[2].joinpath("docs/clusters.md").read_text()
    text = f"{parser.epilog}{page}".replace("\\\n", " ").replace("$SLURM_NNODES", "2")
    return re.findall(
        r"zmqgrad run (-.*(?:train\.py|package\.train).*)", re.sub(r"\n +- (?!\{|name)", " ", text)
    )


def test_documented_commands_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_options, "count_workers", lambda given: 4)
    commands = documented_commands()
    assert len(commands) == 7
    for command in commands:
        config = run_options.to_config(parse(*shlex.split(command)))
        assert config.rdzv_endpoint or config.max_nodes == 1, command


@pytest.mark.slow
def test_devices_are_counted_by_torch_outside_of_the_launcher() -> None:
    program = (
        "import argparse, sys\n"
        "from zmqgrad.cli import run_options\n"
        "from zmqgrad.errors import ConfigurationError\n"
        "parser = argparse.ArgumentParser()\n"
        "run_options.add_arguments(parser)\n"
        "for kind in 'auto', 'gpu':\n"
        "    arguments = parser.parse_args(['--nproc-per-node', kind, 'x'])\n"
        "    try: print(run_options.to_config(arguments).nproc_per_node)\n"
        "    except ConfigurationError as e: print('finds no such device' in str(e))\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "devices = torch.cuda.device_count()\n"
        "from torch.distributed.run import determine_local_world_size as count\n"
        "print(count('auto'))\n"
        "print(devices or True)\n"
    )
    ours_auto, ours_gpu, theirs_auto, theirs_gpu = run_python(program).splitlines()
    assert (ours_auto, ours_gpu) == (theirs_auto, theirs_gpu)
