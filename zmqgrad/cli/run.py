"""``zmqgrad run``: starts the workers of one host, shows what they print, and ends them together.

Each worker gets the environment variables that ``init_rpc`` and ``torch.distributed`` read: MASTER_ADDR,
MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zmqgrad import environment
from zmqgrad.elastic.agent.group import Group, launch
from zmqgrad.elastic.agent.listening import write_all
from zmqgrad.elastic.agent.report import failure_report
from zmqgrad.elastic.agent.workers import STDERR, STDOUT, window_of
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
        default="127.0.0.1",
        metavar="HOST",
        help="address of this host at which worker 0 listens for the others (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--master-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="port at which worker 0 listens (default: 0, any free port)",
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
    port = usable_port(arguments.master_addr, arguments.master_port)
    inherited = environment.inherited()
    if arguments.replace_torch_rpc or environment.replaces_torch_rpc():
        inherited |= replacing_torch_rpc(inherited)
    environments = worker_environments(inherited, arguments.nproc_per_node, arguments.master_addr, port)
    terminals = {fd: window_of(fd) for fd in (STDOUT, STDERR) if os.isatty(fd)}
    coloured = frozenset(terminals) if wants_colour(inherited) else frozenset()
    if arguments.verbose:
        _print_error(f"{arguments.nproc_per_node} workers meet at {arguments.master_addr}:{port}")
        if "OMP_NUM_THREADS" not in inherited and arguments.nproc_per_node > 1:
            _print_error("OMP_NUM_THREADS=1 for each worker, because it was not set and they share the cores")
    group = Group(command, environments, labels(coloured), terminals, _log_dir(arguments.log_dir))
    try:
        outcome, stderr_tail = launch(group)
    except OSError as error:
        _print_error(f"cannot start the workers: {error}")
        return EXIT_CANNOT_START
    _print_error(*failure_report(outcome, stderr_tail))
    return outcome.exit_code


def worker_environments(
    inherited: Mapping[str, str], workers: int, master_addr: str, master_port: int
) -> list[dict[str, str]]:
    """The environment of each worker, by rank: ``inherited``, plus rank and world size."""
    common = dict(inherited)
    if workers > 1:
        # Otherwise each worker would start a thread per core, and the threads would compete for the cores.
        common.setdefault("OMP_NUM_THREADS", "1")
    common.setdefault("PYTHONUNBUFFERED", "1")
    if not environment.has_secret(common):
        common[environment.SECRET] = secrets.token_hex(32)  # keeps other users of this host out
    common |= {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
    }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]


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


def usable_port(host: str, port: int) -> int:
    """Check that ``port`` can be bound on ``host``. Returns it, or a free port if it is 0.

    Raises:
        ConfigurationError: if ``host`` is not an address of this machine, or the port is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. --master-addr must be an address of"
            " this host, and --master-port free (0 finds a free one)"
        ) from error


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
