"""Workers that call a function, in processes of multiprocessing: started, and what runs inside of them.

The result, or the exception, goes through a file: it may be larger than a pipe holds, and the agent has one
thread, which must not wait for the rest.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import context, parent_process, process, reduction
from pathlib import Path
from typing import Any

from zmqgrad import environment
from zmqgrad.elastic.agent.death_signal import die_with_parent
from zmqgrad.elastic.agent.error_files import write_error
from zmqgrad.elastic.agent.signals import STOPPING
from zmqgrad.elastic.agent.streams import STDERR, STDOUT, Stream, passed_on
from zmqgrad.elastic.agent.variables import ERROR_FILE
from zmqgrad.elastic.agent.workers import Worker

EXIT_FAILED = 1

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""


def read_result(path: Path) -> Any:
    """The result that a worker wrote to its result file, which only this user can write.

    None if there is none: the function has ended its process with success, as ``sys.exit()`` does.
    """
    return pickle.loads(path.read_bytes()) if path.exists() else None


class FunctionWorker(Worker):
    """A worker that calls a function, started on construction.

    Args:
        rank: of the worker.
        context: how the process is started.
        call: the function and its arguments; pickled unless the process is forked.
        environ: its environment.
        result_file: where it writes the pickled result.
        streams: where its output goes; empty: that of this process.

    Raises:
        OSError: if no process can be started.
        Exception: what pickling the call raises.
    """

    def __init__(
        self,
        rank: int,
        context: context.BaseContext,
        call: Call,
        environ: Mapping[str, str],
        result_file: Path,
        streams: Sequence[Stream] = (),
    ) -> None:
        super().__init__(rank, streams)
        ends = [_Descriptor(stream.child_end()) for stream in streams]
        # A forked process has the handlers of the agent first, which would wake that as if it were meant.
        blocked = STOPPING if context.get_start_method() == "fork" else ()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            arguments = (call, dict(environ), result_file, ends, mask)
            self._process: process.BaseProcess = context.Process(  # type: ignore[attr-defined]
                target=_run, args=arguments, name=f"zmqgrad-worker-{rank}"
            )
            # A spawned process imports modules before it calls _run.
            with passed_on(streams), environment.replaced(environ):
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.sentinel = self._process.sentinel

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def signal(self, signum: int) -> bool:
        if super().signal(signum):
            return True
        if self._process.exitcode is not None:
            return False
        try:
            os.kill(self.pid, signum)  # it does not lead its session yet
        except ProcessLookupError:
            return False
        return True

    def _reap(self, seconds: float) -> None:
        self._process.join(seconds)
        if self._process.exitcode is not None:
            self._process.close()

    def __repr__(self) -> str:
        return f"<FunctionWorker {self.rank} pid {self.pid}>"


class _Descriptor:
    """A file descriptor that the child inherits, or gets when it is unpickled there."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def take(self) -> int:
        return self._fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _descriptor_from, (reduction.DupFd(self._fd),)


def _descriptor_from(duplicate: Any) -> _Descriptor:
    return _Descriptor(duplicate.detach())


def _run(
    call: Call,
    environ: Mapping[str, str],
    result_file: Path,
    ends: Sequence[_Descriptor],
    mask: Collection[int],
) -> None:
    """The main function of a worker. ``mask``: the signals that the agent has blocked."""
    _become_worker(environ, ends)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what came before is delivered now
    function, arguments = call
    try:
        result = pickle.dumps(function(*arguments))
        partial = result_file.with_suffix(".part")
        partial.write_bytes(result)
        partial.replace(result_file)
    except (Exception, KeyboardInterrupt) as error:
        write_error(Path(environ[ERROR_FILE]), error)
        _flush()
        sys.exit(EXIT_FAILED)
    _flush()


def _become_worker(environ: Mapping[str, str], ends: Sequence[_Descriptor]) -> None:
    agent = parent_process()
    if (request_death_signal := die_with_parent(os.getppid())) is not None:
        request_death_signal()
    if agent is not None and not agent.is_alive():
        os._exit(EXIT_FAILED)  # with forkserver our parent is the server, which ends with the agent
    os.setsid()
    environment.replace_all(environ)
    _reset_signals()
    for fd, end in zip((STDOUT, STDERR), ends, strict=False):
        os.dup2(end.take(), fd)


def _reset_signals() -> None:
    """Handle signals as a new process does: a forked one has the handlers of the agent."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in {*STOPPING, signal.SIGCHLD} - {signal.SIGINT}:
        signal.signal(signum, signal.SIG_DFL)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
