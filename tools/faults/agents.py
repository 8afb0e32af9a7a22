"""Roles of an elastic agent: jobs of two nodes, one after the other, from the rendezvous to the exit barrier.

In each job a worker fails once, so that every job has two rounds. Both nodes are needed: a job waits for a
node that is missing. A worker appends its round to a file again and again, which shows whether two rounds of
one job ever ran at the same time. A step is one job.

A job that has succeeded on one node is closed to the others, and the next one begins.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.faults.model import ENTERING
from tools.faults.participant import PAUSE_SECONDS, Participant
from zmqgrad import environment
from zmqgrad.elastic.agent.job import run_job, starts_script
from zmqgrad.elastic.agent.lifecycle import Event, Lifecycle
from zmqgrad.elastic.agent.streams import OutputConfig
from zmqgrad.elastic.endpoint import open_endpoint
from zmqgrad.elastic.launch_config import LaunchConfig
from zmqgrad.errors import RendezvousClosedError, RendezvousError
from zmqgrad.store import TCPStore

SETTINGS = {"keep_alive_interval": "0.5", "last_call_timeout": "1", "read_timeout": "20"}
"""A node that died is removed after 1.5 s."""

WORKER = """
import os, sys, time
job, path = sys.argv[1:]
log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
for _ in range(30):
    os.write(log, f"{job} {os.environ['ZMQGRAD_ROUND']}\\n".encode())
    time.sleep(0.01)
sys.exit(not again and os.environ["RANK"] == "0")
"""


class Jobs:
    """The number of the present job, which one of the nodes sets, in the names of files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def present(self) -> int:
        """The number of the present job."""
        return max((int(file.suffix[1:]) for file in self._directory.glob("job.*")), default=1)

    def advance(self) -> None:
        """The present job is over."""
        (self._directory / f"job.{self.present() + 1}").touch()


def agent(leads: bool, serves: bool = False, at_victim: bool = False) -> Callable[[Participant], None]:
    """The agent of a node.

    Args:
        leads: it numbers the jobs.
        serves: it serves the store of the rendezvous.
        at_victim: the store is on the host of the victim.
    """

    def work(p: Participant) -> None:
        host = p.place.victims_address if at_victim else p.place.address
        endpoint = f"{host}:{p.place.port}"
        if serves:
            p.report("endpoints", (f"tcp://{endpoint}",))
        p.moments.arm()
        _show_phases(p)
        p.ready()
        with _interrupted_at_the_end(p):
            p.steps(lambda n: _complete_job(p, leads, endpoint, serves))
        p.idle()
        p.eventually("P6: a thread is left", lambda: not _waiting_threads())
        if serves:  # an agent that was interrupted goes on to serve it
            open_endpoint(endpoint, 5.0, is_host=True).close()
        if not at_victim:  # a store that was lost begins anew at round 0
            _check_rounds(p)

    return work


def _waiting_threads() -> list[str]:
    """Threads that have waited for a reply of the store: they end after its timeout."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("zmqgrad-agent", "zmqgrad-rendezvous"))]


def serve_rendezvous(p: Participant) -> None:
    """Serves the store at which the agents meet."""
    place = p.place
    with TCPStore(place.address, place.port, is_master=True, wait_for_workers=False):
        p.ready()
        p.finish.wait()
        p.idle()


def _show_phases(p: Participant) -> None:
    """The phases of the agent are moments."""
    handle = Lifecycle.handle

    def handle_at_moment(lifecycle: Lifecycle, event: Event) -> object:
        before = lifecycle.phase
        effects = handle(lifecycle, event)
        if lifecycle.phase is not before:
            p.moments.reach(ENTERING, lifecycle.phase.name)
        return effects

    Lifecycle.handle = handle_at_moment  # type: ignore[assignment, method-assign]


@contextmanager
def _interrupted_at_the_end(p: Participant) -> Iterator[None]:
    """Once the cell is over, the present job ends by SIGTERM: it may wait for a node that begins no other."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # between two jobs it means nothing
    is_over = threading.Event()

    def interrupt() -> None:
        p.finish.wait()
        while not is_over.wait(1.0):
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt, name="interrupt")
    thread.start()
    try:
        yield
    finally:
        p.finish.set()
        is_over.set()
        thread.join()


def _complete_job(p: Participant, leads: bool, endpoint: str, serves: bool) -> None:
    """Run jobs on this node until one succeeds, or raise why one has failed."""
    jobs, has_run = Jobs(Path(p.place.directory)), False
    while not has_run and not p.finish.is_set():
        try:
            _run(p, jobs.present(), endpoint, serves)
            has_run = True
        except OSError as e:  # as ``zmqgrad run``, which says so and exits
            raise RendezvousError(f"cannot start the workers: {e}") from e
        except RendezvousClosedError:
            time.sleep(PAUSE_SECONDS)  # the other node has completed it, and may soon begin the next
        if leads:
            jobs.advance()


def _run(p: Participant, number: int, endpoint: str, serves: bool) -> None:
    """Run one job on this node."""
    directory = Path(p.place.directory)
    script = directory / f"worker-{p.place.name}.py"
    script.write_text(WORKER)
    output = OutputConfig(lambda rank, fd: b"")
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        run_id=f"job-{number}",
        rdzv_endpoint=endpoint,
        rdzv_configs={**SETTINGS, "join_timeout": str(p.place.step_seconds), "is_host": str(serves).lower()},
        max_restarts=1000,
    )
    command = (sys.executable, "-S", str(script), str(number), str(directory / "rounds"))
    result, _ = run_job(config, starts_script(command, output), environment.inherited(), output, _say)
    if result.error is not None and not p.finish.is_set():
        raise result.error
    if p.finish.is_set():
        return
    assert result.exit_code == 0, f"the job ended with {result}"


def _say(text: str) -> None:
    print(f"{time.monotonic():.3f} {threading.current_thread().name}: {text}", flush=True)


def _check_rounds(p: Participant) -> None:
    """No worker of a round has written after one of a later round of its job."""
    log = Path(p.place.directory) / "rounds"
    rounds: dict[int, list[int]] = defaultdict(list)
    for line in log.read_text().splitlines() if log.exists() else ():
        job, number = map(int, line.split())
        rounds[job].append(number)
    for job, numbers in rounds.items():
        if any(later < earlier for earlier, later in itertools.pairwise(numbers)):
            p.problems.append(f"two rounds of job {job} ran at the same time")
