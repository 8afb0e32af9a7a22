"""One worker process of the launcher: start, output, signals, exit.

Each worker leads a session of its own, so that a signal reaches its child processes as well, and a
Ctrl-C in the terminal reaches only the launcher. On Linux the kernel kills it when the launcher dies.
The launcher must stay single-threaded, because code runs between fork and exec.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from zmqgrad.elastic.agent.output import LineSplitter, without_escapes

STDOUT, STDERR = 1, 2

_CHUNK = 64 * 1024
_TAIL_LINES = 200
_TAIL_WIDTH = 2000
_REAP_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Window:
    """The size of a terminal, in characters."""

    rows: int
    columns: int

    def remaining(self, label: bytes) -> Window:
        """The window without the columns of a label."""
        return Window(self.rows, max(20, self.columns - len(without_escapes(label))))


class Stream:
    """The launcher's end of a worker's stdout or stderr.

    Args:
        fd: 1 (stdout) or 2 (stderr).
        label: label of each displayed line.
        window: size of the pseudo-terminal that the worker writes to; None: a pipe.
        log: gets a copy of every byte.
    """

    def __init__(self, fd: int, label: bytes, window: Window | None, log: IO[bytes] | None) -> None:
        self.fd = fd
        self.label = label
        self.live = window is not None
        self.lines = LineSplitter()
        self._log = log
        self._ours, self._theirs = _open_terminal(window.remaining(label)) if window else os.pipe()
        os.set_blocking(self._ours, False)

    def fileno(self) -> int:
        """The descriptor to select on."""
        return self._ours

    def child_end(self) -> int:
        """The worker's end. Call :meth:`started` once the worker has inherited it."""
        return self._theirs

    def started(self) -> None:
        """Close the worker's end here, so that its exit ends the stream."""
        os.close(self._theirs)

    def read(self) -> bytes | None:
        """The bytes that have arrived, perhaps none; None at the end of the stream."""
        try:
            chunk = os.read(self._ours, _CHUNK)
        except BlockingIOError:
            return b""
        except OSError:  # EIO: on Linux, the other end of the terminal has no holder left
            return None
        if self._log is not None:
            self._log.write(chunk)
        return chunk or None

    def close(self) -> None:
        """Close all descriptors."""
        os.close(self._ours)
        if self._log is not None:
            self._log.close()


class WorkerProcess:
    """A worker process, started on construction. ``tail`` holds the last lines of its stderr.

    Raises:
        OSError: if the program or a log file cannot be opened.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        labels: Mapping[int, bytes],
        windows: Mapping[int, Window],
        log_dir: Path | None,
    ) -> None:
        self.rank = rank
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.streams = [
            Stream(fd, labels[fd], windows.get(fd), _open_log(log_dir, rank, fd)) for fd in (STDOUT, STDERR)
        ]
        stdout, stderr = self.streams
        try:
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=stdout.child_end(),
                stderr=stderr.child_end(),
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        except BaseException:
            self._release()
            raise
        finally:
            for stream in self.streams:
                stream.started()

    @property
    def pid(self) -> int:
        """The process id, also that of its session and process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or minus the signal that killed it; None while it runs."""
        return self._process.poll()

    def remember(self, lines: Sequence[bytes]) -> None:
        """Keep lines of stderr for the report."""
        for line in lines:
            self.tail.append(without_escapes(line)[:_TAIL_WIDTH].decode(errors="replace"))

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
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # blocked in the kernel; the supervisor has reported it
        self._release()

    def _release(self) -> None:
        for stream in self.streams:
            stream.close()

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.rank} pid {self.pid} exit code {self._process.returncode}>"


def window_of(fd: int) -> Window:
    """The size of the terminal behind ``fd``."""
    size = os.get_terminal_size(fd)
    return Window(size.lines, size.columns) if size.columns else Window(24, 80)


def _open_terminal(window: Window) -> tuple[int, int]:
    ours, theirs = pty.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n already
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", window.rows, window.columns, 0, 0))
    return ours, theirs


def _open_log(log_dir: Path | None, rank: int, fd: int) -> IO[bytes] | None:
    if log_dir is None:
        return None
    return open(log_dir / f"worker-{rank}.{'stdout' if fd == STDOUT else 'stderr'}.log", "wb", buffering=0)


def _die_with_parent() -> Callable[[], None] | None:
    """Setup of the child before exec, so that the kernel kills it when its parent dies."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def request_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl, so there will be no signal
            os._exit(1)

    return request_death_signal
