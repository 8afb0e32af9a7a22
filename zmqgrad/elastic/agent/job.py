"""Runs a job as configured: a command or a function in each worker, on this node and perhaps others."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from zmqgrad import environment
from zmqgrad.elastic.agent.addresses import master_address, reserve_port, worker_port
from zmqgrad.elastic.agent.agent import AgentSpec, Tails, run_agent
from zmqgrad.elastic.agent.coordination import Coordinator, SingleNode
from zmqgrad.elastic.agent.death_signal import ends_workers
from zmqgrad.elastic.agent.error_files import read_error
from zmqgrad.elastic.agent.lifecycle import Result
from zmqgrad.elastic.agent.ranks import NodeInfo, Placement
from zmqgrad.elastic.agent.signals import SignalInbox
from zmqgrad.elastic.agent.streams import OutputConfig
from zmqgrad.elastic.agent.variables import ERROR_FILE, common_variables, worker_variables
from zmqgrad.elastic.agent.workers import ScriptWorker, Worker
from zmqgrad.elastic.commits.server import CommitServer
from zmqgrad.elastic.launch_config import LaunchConfig
from zmqgrad.elastic.settings import RendezvousTimeout
from zmqgrad.errors import ConfigurationError, RendezvousConnectionError

StartWorker = Callable[[Placement, int, Mapping[str, str], Path], Worker]
"""(place, local rank, environment, directory of the round for its files) -> a running worker."""


def run_job(
    config: LaunchConfig,
    start: StartWorker,
    inherited: Mapping[str, str],
    output: OutputConfig,
    say: Callable[[str], None],
    verbose: bool = False,
    directory: Path | None = None,
) -> tuple[Result, Tails]:
    """Run the workers of this node until the job ends.

    Args:
        config: of the job.
        start: starts one worker.
        inherited: environment variables of all workers.
        output: where the output of the workers goes.
        say: tells the user what happens.
        verbose: tell also what is of no interest usually.
        directory: for files of the workers (errors, results); None: a temporary one.

    Raises:
        ConfigurationError: if an address or a port cannot be used.
        OSError: if a worker cannot be started.
    """
    with ExitStack() as cleanup:
        signals = cleanup.enter_context(SignalInbox())  # before there is anything that a signal would leave
        if directory is None:
            temporary = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="zmqgrad-run-"))
            directory = Path(temporary)
        return _run_job(config, start, inherited, output, say, verbose, directory, signals)


def _run_job(
    config: LaunchConfig,
    start: StartWorker,
    inherited: Mapping[str, str],
    output: OutputConfig,
    say: Callable[[str], None],
    verbose: bool,
    directory: Path,
    signals: SignalInbox,
) -> tuple[Result, Tails]:
    common = common_variables(inherited, config)
    reserved: list[socket.socket] = []
    coordinator = open_coordinator(config, reserved)
    commits = CommitServer(directory) if ends_workers() else None

    def begin_round(place: Placement) -> None:
        if commits is not None:
            commits.begin_round(place, coordinator.round_store)
            common[environment.COMMITS] = f"{place.round}:{commits.path}"

    def start_worker(place: Placement, local_rank: int) -> Worker:
        environ = worker_variables(common, place, local_rank)
        files = round_directory(directory, place.round)
        files.mkdir(exist_ok=True)
        environ[ERROR_FILE] = str(_error_file(directory, place.round, place.first_rank + local_rank))
        return start(place, local_rank, environ, files)

    def error_lines(round: int, rank: int) -> Sequence[str]:
        return read_error(_error_file(directory, round, rank))

    spec = AgentSpec(
        coordinator,
        start_worker,
        error_lines,
        output,
        say,
        config.max_restarts,
        is_distributed(config),
        verbose,
        describe_wait(config) if is_distributed(config) else "",
        begin_round,
    )
    try:
        return run_agent(spec, signals)
    finally:
        _close(reserved)
        if commits is not None:
            commits.close()


def _close(reserved: list[socket.socket]) -> None:
    while reserved:
        reserved.pop().close()


def describe_wait(config: LaunchConfig) -> str:
    """What joining a round waits for."""
    least, most = config.min_nodes, config.max_nodes
    text = f"joining a round at {config.rdzv_endpoint}: waiting for {least} node{'s' * (least > 1)}"
    if least == most:
        return text
    seconds = config.rdzv_configs.get("last_call_timeout", f"{RendezvousTimeout.last_call:g}")
    return f"{text}, then up to {seconds} s for more, at most {most} (last_call_timeout)"


def starts_script(command: Sequence[str], output: OutputConfig) -> StartWorker:
    """Returns a function that starts ``command`` as a worker."""

    def start(place: Placement, local_rank: int, environ: Mapping[str, str], files: Path) -> Worker:
        rank = place.first_rank + local_rank
        streams = output.open(rank, local_rank, append=place.round > 0)
        return ScriptWorker(rank, command, environ, streams)

    return start


def is_distributed(config: LaunchConfig) -> bool:
    """Whether the job may have several nodes, which meet at a rendezvous."""
    return config.max_nodes > 1 or bool(config.rdzv_endpoint)


def open_coordinator(config: LaunchConfig, reserved: list[socket.socket]) -> Coordinator:
    """Connect to the agents of the other nodes, if there may be any.

    Args:
        reserved: gets the sockets of the round: one keeps the port for worker rank 0, and one is open as long
            as this process runs.

    Raises:
        ConfigurationError: if the address of this node cannot be used, or the nodes need a secret.
    """
    with suppress(RendezvousConnectionError):  # no route, or an unknown name: connecting waits for it
        master_address(config)  # what it refuses by the environment, it refuses at once
    distributed = is_distributed(config)

    def describe(restarts: int, node: str = "single") -> NodeInfo:
        _close(reserved)
        address = master_address(config)
        port = 0
        if not config.node_rank:  # another fixed rank has neither the address nor the port of worker rank 0
            reserved.append(reserve_port(address, worker_port(config)))
            port = int(reserved[0].getsockname()[1])
        watched = 0
        if distributed and ends_workers():
            with suppress(ConfigurationError):  # no port of the range is left: the heartbeat must do
                reserved.append(reserve_port(address, 0))
                reserved[-1].listen()
                watched = int(reserved[-1].getsockname()[1])
        return NodeInfo(
            node, config.role, config.nproc_per_node, restarts, address, port, config.node_rank, watched
        )

    if not distributed:
        return SingleNode(describe)
    # Loads the store, which a single node does not need.
    from zmqgrad.elastic.agent.opening import check_secret, open_rendezvous
    from zmqgrad.elastic.agent.rendezvoused import RendezvousCoordinator

    if config.rdzv_backend == "zmqgrad":
        check_secret(config.rdzv_endpoint)
    return RendezvousCoordinator(lambda: open_rendezvous(config), describe)


def round_directory(directory: Path, round: int) -> Path:
    """Where the workers of a round put their files."""
    return directory / f"round-{round}"


def _error_file(directory: Path, round: int, rank: int) -> Path:
    return round_directory(directory, round) / f"error-{rank}.json"
