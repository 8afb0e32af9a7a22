"""``zmqgrad run``: starts the workers of this host, shows their output, and restarts or ends them together.

Each worker gets the environment variables that ``init_rpc`` and ``torch.distributed`` read, as from torchrun:
MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and others. With several nodes, this
runs on each of them; :mod:`zmqgrad.elastic.agent` does the work.
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from zmqgrad import environment
from zmqgrad.cli.colours import BLUE, CYAN, GREEN, MAGENTA, RED, YELLOW, wants_colour
from zmqgrad.cli.run_options import add_arguments, to_command, to_config
from zmqgrad.elastic.agent.agent import Tails
from zmqgrad.elastic.agent.job import is_distributed, run_job, starts_script
from zmqgrad.elastic.agent.lifecycle import Result
from zmqgrad.elastic.agent.listening import write_all
from zmqgrad.elastic.agent.report import job_report
from zmqgrad.elastic.agent.streams import STDERR, STDOUT, OutputConfig, window_of
from zmqgrad.elastic.launch_config import LaunchConfig, make_log_dir
from zmqgrad.errors import ConfigurationError, RendezvousError, TraceError
from zmqgrad.runtime.polling import Wakeup

__all__ = ["add_arguments", "execute"]

EXIT_CANNOT_START = 126

_COLOURS = (CYAN, YELLOW, MAGENTA, GREEN, BLUE, RED)


def execute(arguments: argparse.Namespace) -> int:
    """Launch the workers, and return the exit code.

    Raises:
        ConfigurationError: if the script, the address, the port, the log directory or an option of the
            rendezvous cannot be used.
    """
    config, command = to_config(arguments), to_command(arguments)
    inherited = environment.inherited()
    if arguments.replace_torch_rpc or environment.replaces_torch_rpc():
        inherited |= replacing_torch_rpc(inherited)
    inherited |= tracing(arguments.trace, config)
    terminals = {fd: window_of(fd) for fd in (STDOUT, STDERR) if os.isatty(fd)}
    coloured = frozenset(terminals) if wants_colour(inherited) else frozenset()
    if arguments.verbose and "OMP_NUM_THREADS" not in inherited and config.nproc_per_node > 1:
        _print_error("OMP_NUM_THREADS=1 for each worker, because it was not set and they share the cores")
    output = OutputConfig(
        labels(coloured), terminals, make_log_dir(config.log_dir), config.redirects, config.tee
    )
    try:
        result, stderr_tail = run_job(
            config, starts_script(command, output), inherited, output, _print_error, arguments.verbose
        )
    except OSError as error:
        _print_error(f"cannot start the workers: {error}")
        return EXIT_CANNOT_START
    if isinstance(result.error, ConfigurationError) and not isinstance(result.error, RendezvousError):
        raise result.error  # an option of the rendezvous, which was not opened
    report = job_report(result, stderr_tail)
    logs = output.log_dir or _keep_shortened(result, stderr_tail)
    stopped = Wakeup()
    if result.interrupted_by is not None:
        stopped.set()
    _print_error(*with_places(report, logs, inherited.get(environment.TRACE, "")), hurry=stopped.fd)
    return result.exit_code


def with_places(report: Sequence[str], logs: Path | None, trace: str) -> list[str]:
    """The report of a job, with where its logs are, and what to type next if it was traced."""
    places = [f"logs: {logs}"] if logs is not None and report else []
    if trace:
        places.append(f"trace: zmqgrad trace {shlex.quote(trace)}")
    return [*report[:1], *(f"    {each}" if report else each for each in places), *report[1:]]


def _keep_shortened(result: Result, tail: Tails) -> Path | None:
    """Write what was left out of the output, which has no log, to a new directory."""
    ranks = result.outcome.ended if result.outcome is not None else ()
    shortened = [rank for rank in ranks if tail(rank).was_shortened]
    if not shortened:
        return None
    try:
        directory = Path(tempfile.mkdtemp(prefix="worker-logs-"))
        for rank in shortened:
            (directory / f"worker-{rank}.stderr.log").write_text("\n".join(tail(rank).lines) + "\n")
    except OSError as error:
        _print_error(f"cannot keep what was left out of the output: {error}")
        return None
    return directory


def tracing(directory: Path | None, config: LaunchConfig) -> dict[str, str]:
    """The variables by which the workers are traced; with several nodes, this process is traced, too.

    Args:
        directory: of the logs; None: that of ZMQGRAD_TRACE, if it is set.

    Raises:
        ConfigurationError: if ``directory`` cannot be used.
    """
    variables: dict[str, str] = {}
    if directory is not None:
        from zmqgrad.trace import launch_environment  # only now: most jobs need not wait for it

        try:
            variables = launch_environment(directory)
        except TraceError as error:
            raise ConfigurationError(f"--trace {directory}: {error}") from error
    if is_distributed(config) and (variables or environment.trace_directory() is not None):
        variables[environment.TRACE_JOB] = f"{config.run_id}@{config.rdzv_endpoint}"  # the same on all nodes
        environment.export(variables)  # the agents' rendezvous is part of the job
    return variables


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


def _print_error(*lines: str, hurry: int | None = None) -> None:
    """Write to stderr; indented lines continue the previous one. ``hurry``: as for :func:`write_all`."""
    text = "".join(f"{line}\n" if line.startswith(" ") else f"zmqgrad run: {line}\n" for line in lines)
    # Nobody may read stderr, or its disk is full; the exit code still reports the failure.
    with suppress(OSError):
        write_all(STDERR, text.encode(), hurry)
