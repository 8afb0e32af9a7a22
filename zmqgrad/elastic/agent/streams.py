"""The output streams of a worker, at the agent's end: pipes, or a pseudo-terminal for programs that draw."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pty
import struct
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from zmqgrad.elastic.agent.output import LineSplitter, without_escapes
from zmqgrad.elastic.launch_config import Std, Streams

logger = logging.getLogger(__name__)

STDOUT, STDERR = 1, 2

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a file that takes no more. The output is lost; the workers are not."""

PIPE_BYTES = 1 << 20
"""The most that a pipe or a pseudo-terminal holds: usually it is a sixteenth of that."""

_CHUNK = 64 * 1024


@dataclass(frozen=True)
class Window:
    """The size of a terminal, in characters."""

    rows: int
    columns: int

    def remaining(self, label: bytes) -> Window:
        """The window without the columns of a label."""
        return Window(self.rows, max(20, self.columns - len(without_escapes(label))))


class Stream:
    """The agent's end of a worker's stdout or stderr.

    Args:
        fd: 1 (stdout) or 2 (stderr).
        label: label of each displayed line.
        window: size of the pseudo-terminal that the worker writes to; None: a pipe.
        log: gets a copy of every byte, until its disk is full.
        shown: whether the agent displays it.
    """

    def __init__(
        self, fd: int, label: bytes, window: Window | None, log: IO[bytes] | None, shown: bool = True
    ) -> None:
        self.fd = fd
        self.shown = shown
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
        self._write_log(chunk)
        return chunk or None

    def _write_log(self, chunk: bytes) -> None:
        if self._log is None:
            return
        try:
            while chunk:
                chunk = chunk[self._log.write(chunk) :]
        except OSError as e:
            if e.errno not in DISK_FULL:
                raise
            text = "cannot write the log %s: %s; it ends here, and what follows is only displayed"
            logger.error(text, self._log.name, e.strerror)
            self._log.close()
            self._log, self.shown = None, True

    def close(self) -> None:
        """Close all descriptors."""
        os.close(self._ours)
        if self._log is not None:
            self._log.close()


@contextmanager
def passed_on(streams: Sequence[Stream]) -> Iterator[None]:
    """Context manager that starts the worker of ``streams``: they are closed if that fails."""
    try:
        yield
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    finally:
        for stream in streams:
            stream.started()


@dataclass(frozen=True)
class OutputConfig:
    """Where the output of the workers goes.

    Attributes:
        label: returns the label of a worker's lines, by rank and file descriptor.
        terminals: the terminals among descriptors 1 and 2, with their sizes; local rank 0 may draw there.
        log_dir: directory for a copy of all output, one file per worker and stream.
        redirects: streams that only go there.
        tee: exceptions from ``redirects``.
    """

    label: Callable[[int, int], bytes]
    terminals: Mapping[int, Window] = field(default_factory=dict)
    log_dir: Path | None = None
    redirects: Streams = field(default_factory=Streams)
    tee: Streams = field(default_factory=Streams)

    def open(self, rank: int, local_rank: int, append: bool) -> list[Stream]:
        """Open stdout and stderr of a worker. ``append``: keep the logs of earlier rounds.

        Raises:
            OSError: if a log file cannot be opened.
        """
        streams: list[Stream] = []
        try:
            for fd in (STDOUT, STDERR):
                window = self.terminals.get(fd) if local_rank == 0 else None
                log = _open_log(self.log_dir, rank, fd, append)
                streams.append(Stream(fd, self.label(rank, fd), window, log, self._shows(local_rank, fd)))
        except BaseException:
            for stream in streams:
                stream.started()
                stream.close()
            raise
        return streams

    def _shows(self, local_rank: int, fd: int) -> bool:
        std = Std.OUT if fd == STDOUT else Std.ERR
        return not (self.redirects.of(local_rank) & std) or bool(self.tee.of(local_rank) & std)


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


def _open_log(log_dir: Path | None, rank: int, fd: int, append: bool) -> IO[bytes] | None:
    if log_dir is None:
        return None
    name = f"worker-{rank}.{'stdout' if fd == STDOUT else 'stderr'}.log"
    return open(log_dir / name, "ab" if append else "wb", buffering=0, opener=_open_own)


def _open_own(path: str, flags: int) -> int:
    """Open a file of this user alone: in a directory that others may write to, it may be a trap."""
    descriptor = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "it belongs to another user", path)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
