"""Runs the workers of a job in a Ray cluster: one Ray actor for each, all in one placement group.

    with RayLauncher(num_workers=4, gpus_per_worker=1, max_restarts=3) as launcher:
        results = launcher.run(train, 100)

In each actor ``train(100)`` finds the variables that torchrun sets, so that it can call ``init_rpc`` or
``init_process_group`` without arguments. When a worker fails or dies, a new round begins: Ray kills the other
actors, and all workers start again in new processes. Ranks are assigned in each round, because Ray may have
moved workers to other hosts.

Requires ``zmqgrad[ray]``.
"""

from __future__ import annotations

import enum
import logging
import secrets
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from zmqgrad import environment
from zmqgrad.errors import ConfigurationError, LaunchTimeoutError, PayloadError, WorkerFailedError
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.transport.security import load_keys, read_secret

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as e:
    raise ModuleNotFoundError("zmqgrad.ray requires Ray: pip install 'zmqgrad[ray]'", name=e.name) from e

logger = logging.getLogger(__name__)

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

GRACE_SECONDS = 1.0
"""How long after a failure to wait for others, which may have happened before it."""


class Host(NamedTuple):
    """Where Ray has started a worker."""

    node: str
    """Ray's id of the host."""
    address: str
    port: int
    """Free, and reserved while the worker runs."""
    gpus: tuple[str, ...]


class Rank(NamedTuple):
    """The place of a worker in its group."""

    rank: int
    local_rank: int
    local_world_size: int
    group_rank: int
    """Number of its host."""


def assign_ranks(nodes: Sequence[str]) -> list[Rank]:
    """Assign ranks to workers, so that the workers of a host get consecutive ranks. Pure.

    Args:
        nodes: the host of each worker. Hosts are numbered in the order of their first worker.

    Returns:
        the rank of each worker, in the order of ``nodes``.
    """
    hosts = list(dict.fromkeys(nodes))
    sizes, ranks = Counter(nodes), [Rank(0, 0, 0, 0)] * len(nodes)
    by_host = sorted(range(len(nodes)), key=lambda worker: hosts.index(nodes[worker]))
    local: Counter[str] = Counter()
    for rank, worker in enumerate(by_host):
        node = nodes[worker]
        ranks[worker] = Rank(rank, local[node], sizes[node], hosts.index(node))
        local[node] += 1
    return ranks


class _Outcome(enum.IntEnum):
    """How a worker ended. The lowest of a group is the most likely cause of the others."""

    DIED = 0
    RAISED = 1
    LOST_PEER = 2
    SUCCEEDED = 3


class _Result(NamedTuple):
    """What became of the function in one worker."""

    value: Any
    outcome: _Outcome = _Outcome.SUCCEEDED
    traceback: str = ""


class _Worker:
    """The actor."""

    def __init__(self) -> None:
        # Bound, but not listening: no other socket gets this port by chance, and rank 0 can listen on it.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))

    def locate(self) -> Host:
        """Where this worker runs."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        node = ray.get_runtime_context().get_node_id()
        return Host(node, ray.util.get_node_ip_address(), self._reserved.getsockname()[1], tuple(gpus))

    def configure(self, variables: Mapping[str, str]) -> None:
        """Set the environment. A call of its own: :meth:`run` begins with importing what it is passed."""
        environment.export(variables, remove=[environment.SECRET_FILE])

    def run(self, call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> _Result:
        """Call the function of the user."""
        function, args, kwargs = call
        try:
            return _Result(function(*args, **kwargs))
        except SystemExit as e:  # to Ray, it would be the end of the actor
            if e.code in (None, 0):
                return _Result(None)
            return _Result(None, _Outcome.RAISED, traceback.format_exc())
        except Exception as e:
            lost = isinstance(e, ConnectionError)
            return _Result(None, _Outcome.LOST_PEER if lost else _Outcome.RAISED, traceback.format_exc())


class RayLauncher:
    """Runs a function in a group of Ray actors.

    Use it in a ``with`` block to keep the placement group for several calls of :meth:`run`; otherwise each
    call creates and removes one. Ray is initialized by its own rules (``ray.init``, RAY_ADDRESS). Not
    thread-safe.

    Args:
        num_workers: the world size.
        cpus_per_worker, gpus_per_worker: what Ray reserves for each worker.
        resources_per_worker: further resources of the cluster, by name.
        strategy: of the placement group: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        max_restarts: how often all workers are started again after one failed, in each :meth:`run`.
        start_timeout: seconds that Ray has to place and start all workers, in each round.

    Raises:
        ConfigurationError: if an argument is invalid.

    Example:
        >>> with RayLauncher(num_workers=2, gpus_per_worker=1, max_restarts=3) as launcher:  # doctest: +SKIP
        ...     results = launcher.run(train, 100)
    """

    def __init__(
        self,
        num_workers: int,
        *,
        cpus_per_worker: float = 1,
        gpus_per_worker: float = 0,
        resources_per_worker: Mapping[str, float] | None = None,
        strategy: str = "PACK",
        max_restarts: int = 0,
        start_timeout: float = 300.0,
    ) -> None:
        if num_workers < 1 or max_restarts < 0 or not start_timeout > 0:
            raise ConfigurationError(
                f"num_workers is {num_workers}, max_restarts {max_restarts}, start_timeout {start_timeout}; "
                "they must be at least 1, at least 0, and greater than 0"
            )
        if strategy not in STRATEGIES:
            raise ConfigurationError(f"strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}")
        resources = {"CPU": cpus_per_worker, "GPU": gpus_per_worker, **(resources_per_worker or {})}
        if min(resources.values()) < 0 or not any(resources.values()):
            raise ConfigurationError(
                f"the resources of a worker are {resources}; none may be negative, and one must not be 0"
            )
        self._bundle = {name: amount for name, amount in resources.items() if amount}
        self._num_workers = num_workers
        self._strategy = strategy
        self._max_restarts = max_restarts
        self._start_timeout = start_timeout
        self._group: Any = None

    def __enter__(self) -> RayLauncher:
        """Create the placement group.

        Raises:
            LaunchTimeoutError: if Ray cannot place the workers within ``start_timeout``.
        """
        self._group = placement_group([self._bundle] * self._num_workers, strategy=self._strategy)
        try:
            if not self._group.wait(self._start_timeout):
                raise LaunchTimeoutError(f"Ray has not placed {self._explain()}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the placement group, and with it all workers. Idempotent."""
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            remove_placement_group(group)

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` in all workers.

        Args:
            function: pickled by Ray, with its arguments.
            timeout: seconds for all rounds together. None: no limit. It is not passed to ``function``.

        Returns:
            The results, by rank.

        Raises:
            WorkerFailedError: if a worker failed in the last round; with the traceback of the first one.
            LaunchTimeoutError: if Ray cannot start the workers in time, or ``timeout`` has passed.
            PayloadError: if the function or an argument cannot be pickled.
        """
        if self._group is None:
            with self:
                return self.run(function, *args, timeout=timeout, **kwargs)
        deadline = None if timeout is None else MONOTONIC.now() + timeout
        try:
            call = ray.put((function, args, kwargs))  # once for all workers and rounds
        except TypeError as e:
            raise PayloadError(f"{function!r} or an argument of it cannot be sent to the workers: {e}") from e
        secret = _job_secret()
        for restarts in range(self._max_restarts + 1):
            try:
                return self._run_round(call, secret, restarts, deadline)
            except WorkerFailedError as e:
                if restarts == self._max_restarts:
                    raise
                logger.warning("restart %d of %d: %s", restarts + 1, self._max_restarts, e)
        raise AssertionError("unreachable")

    def _run_round(self, call: Any, secret: str, restarts: int, deadline: float | None) -> list[Any]:
        workers = [self._create(bundle) for bundle in range(self._num_workers)]
        try:
            hosts = self._start([worker.locate.remote() for worker in workers], restarts)
            ranks = assign_ranks([host.node for host in hosts])
            variables = worker_variables(hosts, ranks, secret, restarts, self._max_restarts)
            configured = [w.configure.remote(v) for w, v in zip(workers, variables, strict=True)]
            self._start(configured, restarts)
            runs = {w.run.remote(call): rank.rank for w, rank in zip(workers, ranks, strict=True)}
            return _collect(runs, restarts, deadline)
        finally:
            if ray.is_initialized():
                for worker in workers:
                    ray.kill(worker)

    def _create(self, bundle: int) -> Any:
        resources = dict(self._bundle)
        return (
            ray.remote(_Worker)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=bundle
                ),
            )
            .remote()
        )

    def _start(self, replies: Sequence[Any], restarts: int) -> list[Any]:
        try:
            return list(ray.get(replies, timeout=self._start_timeout))
        except GetTimeoutError:
            raise LaunchTimeoutError(f"Ray has not started {self._explain()}") from None
        except (RayActorError, RayTaskError) as e:
            raise WorkerFailedError(f"a worker failed while it started: {e}", None, restarts) from e

    def _explain(self) -> str:
        total, free = ray.cluster_resources(), ray.available_resources()
        cluster = ", ".join(
            f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in self._bundle
        )
        return (
            f"{self._num_workers} workers with {self._bundle} each ({self._strategy}) within "
            f"{self._start_timeout:g} s; the cluster has {cluster} free. Request less, add hosts, or raise "
            "start_timeout"
        )


def worker_variables(
    hosts: Sequence[Host], ranks: Sequence[Rank], secret: str, restarts: int, max_restarts: int
) -> list[dict[str, str]]:
    """The environment of each worker, as torchrun sets it. Pure.

    Workers with one GPU see all GPUs of the group on their host, and theirs at LOCAL_RANK.

    Args:
        hosts: where each worker runs, with its GPUs and a free port.
        ranks: of :func:`assign_ranks`, in the order of ``hosts``.
        secret: of the job.
        restarts, max_restarts: how often the group was restarted, and the limit.
    """
    master = hosts[[rank.rank for rank in ranks].index(0)]
    common = {
        "MASTER_ADDR": master.address,
        "MASTER_PORT": str(master.port),
        "WORLD_SIZE": str(len(hosts)),
        "GROUP_WORLD_SIZE": str(len({host.node for host in hosts})),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        environment.SECRET: secret,
    }
    found = []
    for host, rank in zip(hosts, ranks, strict=True):
        own = {
            "RANK": str(rank.rank),
            "LOCAL_RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(rank.local_world_size),
            "GROUP_RANK": str(rank.group_rank),
        }
        visible = [gpu for other in hosts if other.node == host.node for gpu in other.gpus]
        if len(host.gpus) == 1 and len(set(visible)) == rank.local_world_size:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        found.append(common | own)
    return found


def _job_secret() -> str:
    """The secret of this process, or a new one."""
    load_keys()  # checks what is set
    path = environment.secret_file()
    return environment.secret() or (read_secret(path).decode() if path else secrets.token_hex(32))


def _collect(runs: dict[Any, int], restarts: int, deadline: float | None) -> list[Any]:
    """Wait for all ``runs``, which are given with their ranks. Returns the results by rank."""
    values: dict[int, Any] = {}
    while runs:
        left = None if deadline is None else max(0.0, deadline - MONOTONIC.now())
        done, _ = ray.wait(list(runs), timeout=left)
        if not done:
            raise LaunchTimeoutError(f"the timeout has passed; running: ranks {sorted(runs.values())}")
        rank = runs.pop(done[0])
        result = _result_of(done[0])
        if result.outcome is not _Outcome.SUCCEEDED:
            raise _first_failure(rank, result, runs, restarts)
        values[rank] = result.value
    return [values[rank] for rank in sorted(values)]


def _result_of(run: Any) -> _Result:
    try:
        result: _Result = ray.get(run)
    except RayActorError as e:
        return _Result(None, _Outcome.DIED, str(e))
    except RayTaskError as e:  # the function cannot be imported there, or its result cannot be pickled
        return _Result(None, _Outcome.RAISED, str(e))
    return result


def _first_failure(rank: int, result: _Result, runs: dict[Any, int], restarts: int) -> WorkerFailedError:
    """The error for the most likely cause, among ``result`` and the failures that follow it at once."""
    failures = [(rank, result)]
    if result.outcome is not _Outcome.DIED and runs:
        done, _ = ray.wait(list(runs), num_returns=len(runs), timeout=GRACE_SECONDS)
        failures += [(runs[run], _result_of(run)) for run in done]
    rank, result = min(failures, key=lambda failure: failure[1].outcome)
    verb = "died" if result.outcome is _Outcome.DIED else "failed"
    return WorkerFailedError(f"the worker of rank {rank} {verb}:\n{result.traceback}", rank, restarts)
