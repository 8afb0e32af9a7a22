"""``zmqgrad run``: starts the workers of this host, shows their output, and restarts or ends them together.

Each worker gets the environment variables that ``init_rpc`` and ``torch.distributed`` read, as from torchrun:
MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and others. With several nodes, this
runs on each of them; :mod:`zmqgrad.elastic.agent` does the work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zmqgrad import environment
from zmqgrad.elastic.agent.job import run_job, starts_script
from zmqgrad.elastic.agent.listening import write_all
from zmqgrad.elastic.agent.report import job_report
from zmqgrad.elastic.agent.streams import STDERR, STDOUT, OutputConfig, window_of
from zmqgrad.elastic.launch_config import LaunchConfig
from zmqgrad.errors import ConfigurationError

EXIT_CANNOT_START = 126

_COLOURS = (36, 33, 35, 32, 34, 31)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad run``."""
    parser.add_argument(
        "--nproc-per-node", type=_at_least_one, default=1, metavar="N", help="number of workers (default: 1)"
    )
    parser.add_argument(
        "--master-addr",
        default="",
        metavar="HOST",
        help="address of this host at which worker 0 listens for the others (default: 127.0.0.1, with several"
        " nodes the address that faces the rendezvous endpoint)",
    )
    parser.add_argument(
        "--master-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="port at which worker 0 listens (default: 0, any free port)",
    )
    parser.add_argument(
        "--nnodes",
        type=_node_range,
        default=(1, 1),
        metavar="N or MIN:MAX",
        help="number of nodes, each with a launcher of its own (default: 1)",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        default="",
        metavar="HOST[:PORT]",
        help="where the nodes meet; the first launcher on HOST serves the store (default port: 29400)",
    )
    parser.add_argument("--rdzv-id", default="", metavar="ID", help="name of the job, equal on all nodes")
    parser.add_argument(
        "--rdzv-conf",
        type=_options,
        default={},
        metavar="KEY=VALUE,...",
        help="join_timeout, last_call_timeout, keep_alive_interval and others, in seconds",
    )
    parser.add_argument(
        "--max-restarts",
        type=_restarts,
        default=0,
        metavar="N",
        help="how often all workers are restarted after the failure of one (default: 0)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="also write each worker's output to DIR/worker-RANK.stdout.log and .stderr.log",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print the address, the number of workers and changed variables",
    )
    parser.add_argument(
        "--replace-torch-rpc",
        action="store_true",
        help="use this library for torch.distributed.rpc in the workers and the Python processes that they"
        f" start (also {environment.REPLACE_TORCH_RPC}=1)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")


def execute(arguments: argparse.Namespace) -> int:
    """Launch the workers, and return the exit code.

    Raises:
        ConfigurationError: if the script, the address, the port or the log directory cannot be used.
    """
    command = _command(arguments.script, arguments.module, arguments.args)
    inherited = environment.inherited()
    if arguments.replace_torch_rpc or environment.replaces_torch_rpc():
        inherited |= replacing_torch_rpc(inherited)
    terminals = {fd: window_of(fd) for fd in (STDOUT, STDERR) if os.isatty(fd)}
    coloured = frozenset(terminals) if wants_colour(inherited) else frozenset()
    config = launch_config(arguments)
    if arguments.verbose and "OMP_NUM_THREADS" not in inherited and config.nproc_per_node > 1:
        _print_error("OMP_NUM_THREADS=1 for each worker, because it was not set and they share the cores")
    output = OutputConfig(labels(coloured), terminals, _log_dir(config.log_dir), config.redirects, config.tee)
    try:
        result, stderr_tail = run_job(
            config, starts_script(command, output), inherited, output, _print_error, arguments.verbose
        )
    except OSError as error:
        _print_error(f"cannot start the workers: {error}")
        return EXIT_CANNOT_START
    _print_error(*job_report(result, stderr_tail))
    return result.exit_code


def launch_config(arguments: argparse.Namespace) -> LaunchConfig:
    """The configuration that the arguments describe.

    Raises:
        ConfigurationError: if they contradict each other.
    """
    least, most = arguments.nnodes
    if most > 1 and not arguments.rdzv_endpoint:
        raise ConfigurationError(
            "several nodes need a place to meet: --rdzv-endpoint HOST[:PORT], equal on all nodes"
        )
    return LaunchConfig(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=arguments.nproc_per_node,
        run_id=arguments.rdzv_id,
        rdzv_endpoint=arguments.rdzv_endpoint,
        rdzv_configs=arguments.rdzv_conf,
        max_restarts=arguments.max_restarts,
        log_dir=arguments.log_dir,
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
    )


def replacing_torch_rpc(inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables by which all Python processes of a program use this library for torch's RPC."""
    path = [str(Path(__file__).parent / "startup"), inherited.get("PYTHONPATH", "")]
    return {
        environment.REPLACE_TORCH_RPC: "1",
        "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
    }


def labels(coloured: frozenset[int]) -> Callable[[int, int], bytes]:
    """The label of each worker's lines on a descriptor; coloured by worker on those in ``coloured``."""

    def label(rank: int, fd: int) -> bytes:
        text = f"[worker {rank}]"
        if fd in coloured:
            text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return f"{text} ".encode()

    return label


def wants_colour(environ: Mapping[str, str]) -> bool:
    """Whether to use colours on a terminal (see no-color.org)."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def _command(script: str, is_module: bool, args: Sequence[str]) -> list[str]:
    if is_module:
        return [sys.executable, "-m", script, *args]
    if not Path(script).exists():
        raise ConfigurationError(f"there is no file {script!r} in {Path.cwd()} (for a module, say -m)")
    return [sys.executable, script, *args]


def _log_dir(path: Path | None) -> Path | None:
    if path is not None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--log-dir {path} cannot be created: {error.strerror}") from error
    return path


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _restarts(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {number}")
    return number


def _node_range(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    first, last = int(least), int(most if colon else least)
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError(f"must be N or MIN:MAX, from 1 on, not {text}")
    return first, last


def _options(text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in text.split(",") if item]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE,..., not {text!r}")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"must be between 0 and 65535, not {number}")
    return number


def _print_error(*lines: str) -> None:
    """Write to stderr; indented lines continue the previous one."""
    text = "".join(f"{line}\n" if line.startswith(" ") else f"zmqgrad run: {line}\n" for line in lines)
    try:
        write_all(STDERR, text.encode())
    except BrokenPipeError:
        pass  # stderr has no reader; the exit code still reports the failure
