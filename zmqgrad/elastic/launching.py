"""Launches a function in several workers, of this host and perhaps others, as torch's ``mp.spawn`` does."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from zmqgrad import environment
from zmqgrad.elastic.agent.functions import FunctionWorker, read_result
from zmqgrad.elastic.agent.job import run_job
from zmqgrad.elastic.agent.lifecycle import Result
from zmqgrad.elastic.agent.ranks import Placement
from zmqgrad.elastic.agent.report import job_report
from zmqgrad.elastic.agent.streams import OutputConfig
from zmqgrad.elastic.agent.workers import Tail, Worker
from zmqgrad.elastic.launch_config import LaunchConfig, make_log_dir
from zmqgrad.errors import WorkerFailedError
from zmqgrad.runtime.arguments import check_callable, check_instance


class launch:
    """Call ``fn`` in the workers of a job: ``results = launch(fn, config)(*args)``.

    The workers have the environment of ``torchrun`` (RANK, WORLD_SIZE, MASTER_ADDR, ...). Unless the start
    method is ``fork``, ``fn`` and ``args`` are pickled, and the program calls this below ``if __name__ ==
    "__main__":``.

    Args:
        fn: called in each worker.
        config: of the job; None: one worker.

    Raises:
        ArgumentTypeError: if one is of another type, as when they are given in the order of torch.

    Example:
        >>> if __name__ == "__main__":  # doctest: +SKIP
        ...     print(launch(train, LaunchConfig(nproc_per_node=2, max_restarts=3))(0.1))  # by rank
        {0: 0.2, 1: 0.2}
    """

    def __init__(self, fn: Callable[..., Any], config: LaunchConfig | None = None) -> None:
        check_callable(fn, "fn")
        self._fn = fn
        self._config = LaunchConfig() if config is None else config
        check_instance("config", self._config, LaunchConfig, "a LaunchConfig")

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the job. Returns the results of the workers of this node, by rank; None after ``sys.exit()``.

        Raises:
            WorkerFailedError: if a worker of any node failed and no restart was left; with its traceback.
            RendezvousError: if the nodes could not find, or have lost, each other.
            ConfigurationError: if the configuration is invalid.
            KeyboardInterrupt: after SIGINT. The workers were ended.
            OSError: if a worker cannot be started.
        """
        with tempfile.TemporaryDirectory(prefix="zmqgrad-launch-") as directory:
            result, report, values = self._run(args, Path(directory))
        _raise_for(result, report)  # a signal may end this process
        return values

    def _run(self, args: tuple[Any, ...], directory: Path) -> tuple[Result, str, dict[int, Any]]:
        config = self._config
        context = get_context(config.start_method)
        output = OutputConfig(_label, {}, make_log_dir(config.log_dir), config.redirects, config.tee)
        results: dict[int, Path] = {}

        def start(place: Placement, local_rank: int, environ: Mapping[str, str], files: Path) -> Worker:
            rank = place.first_rank + local_rank
            if local_rank == 0:
                results.clear()
            results[rank] = files / f"result-{rank}.pickle"
            # Without logs the workers write to our own stdout and stderr, as with mp.spawn.
            streams = output.open(rank, local_rank, place.round > 0) if config.log_dir is not None else []
            return FunctionWorker(rank, context, (self._fn, args), environ, results[rank], streams)

        result, tails = run_job(config, start, environment.inherited(), output, _say, directory=directory)
        report = "\n".join(job_report(result, lambda rank: Tail(tails(rank).lines)))
        has_failed = result.exit_code != 0
        return result, report, {} if has_failed else {rank: read_result(p) for rank, p in results.items()}


def _raise_for(result: Result, report: str) -> None:
    if result.interrupted_by is not None:
        signal.raise_signal(result.interrupted_by)
        raise KeyboardInterrupt(report)  # the program handles this signal, and returned from its handler
    if result.error is not None:
        raise result.error
    if result.exit_code == 0:
        return
    failed = result.failure
    rank, code = (None, result.exit_code) if failed is None else (failed.rank, failed.code)
    raise WorkerFailedError(report, rank, exit_code=code)


def _label(rank: int, fd: int) -> bytes:
    return f"[worker {rank}] ".encode()


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads stderr, or its disk is full
        print(f"zmqgrad: {text}", file=sys.stderr, flush=True)
