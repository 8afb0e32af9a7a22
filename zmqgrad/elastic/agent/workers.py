"""One worker process of an agent: start, signals, exit.

Each worker leads a session of its own, so that a signal reaches its child processes as well, and a
Ctrl-C in the terminal reaches only the agent. On Linux the kernel kills it when the agent dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zmqgrad.elastic.agent.death_signal import die_with_parent
from zmqgrad.elastic.agent.output import without_escapes
from zmqgrad.elastic.agent.streams import STDERR, Stream, passed_on
from zmqgrad.elastic.agent.tracebacks import Shown, Tracebacks

_TAIL_LINES = 200
_TAIL_WIDTH = 2000
_REAP_SECONDS = 1.0


class Tail(NamedTuple):
    """The last lines of the stderr of a worker; whether they were shown, and whether in part only."""

    lines: Sequence[str]
    was_shown: bool = False
    was_shortened: bool = False


class Worker(ABC):
    """A running worker.

    Attributes:
        rank: among all workers of the job.
        streams: its output, to be read; none if it writes to that of the agent.
        sentinel: a descriptor that is readable once it has exited; None: SIGCHLD tells.
        tail: the last lines of its stderr.
        tracebacks: what is shown of its tracebacks.
    """

    sentinel: int | None = None

    def __init__(self, rank: int, streams: Sequence[Stream]) -> None:
        self.rank = rank
        self.streams = streams
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.tracebacks = Tracebacks(Shown(), rank)

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process id, also that of its session and process group."""

    @abstractmethod
    def poll(self) -> int | None:
        """The exit code, or minus the signal that killed it; None while it runs."""

    @abstractmethod
    def _reap(self, seconds: float) -> None:
        """Wait for its exit, at most ``seconds``."""

    def remember(self, lines: Sequence[bytes]) -> None:
        """Keep lines of stderr for the report."""
        for line in lines:
            self.tail.append(without_escapes(line)[:_TAIL_WIDTH].decode(errors="replace"))

    def end_of_stderr(self) -> Tail:
        """The last lines that it wrote to stderr."""
        was_shown = any(stream.fd == STDERR and stream.shown for stream in self.streams)
        return Tail(list(self.tail), was_shown, self.tracebacks.shortened)

    def signal(self, signum: int) -> bool:
        """Send ``signum`` to the worker and its child processes. Returns False if none is left."""
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            return False
        except PermissionError:  # macOS: only zombies are left
            return False
        return True

    def close(self) -> None:
        """Kill the remaining processes and reap the worker."""
        self.signal(signal.SIGKILL)
        self._reap(_REAP_SECONDS)  # a worker that remains is blocked in the kernel; the outcome names it
        for stream in self.streams:
            stream.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.rank} pid {self.pid} exit code {self.poll()}>"


class ScriptWorker(Worker):
    """A worker that runs a command, started on construction.

    The agent may have threads, which hold locks while the child is forked: what runs between fork and exec
    takes none.

    Raises:
        OSError: if the program cannot be started. The streams are closed then.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environ: Mapping[str, str], streams: Sequence[Stream]
    ) -> None:
        super().__init__(rank, streams)
        stdout, stderr = streams
        with passed_on(streams):
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=stdout.child_end(),
                stderr=stderr.child_end(),
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def _reap(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
