"""Nodes of a job on this host: launchers as processes of their own, whose output can be waited for."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

from tests.support.waiting import eventually

WAIT_SECONDS = 60.0

FAST = "keep_alive_interval=0.5,last_call_timeout=1,join_timeout=60"
"""A node that died is removed after 1.5 s."""

WORKER = """
import os, pathlib, signal, sys
place = " ".join(os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
print("worker", os.getpid(), "has", place, flush=True)
if len(sys.argv) > 1:
    exec(sys.argv[1])
signal.pause()
"""
"""Prints its pid, rank, world size and restart count; runs its argument; waits for a signal."""


class Launcher(Protocol):
    """A process that starts workers: a Popen, or what is like it."""

    stdout: IO[bytes] | None
    pid: int

    def kill(self) -> None: ...

    def send_signal(self, sig: int, /) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def run_command(*arguments: object, within: Sequence[str] = (), **environ: str) -> subprocess.Popen[bytes]:
    """Start ``zmqgrad run``.

    Args:
        within: a command that executes it, such as ``ip netns exec NAME``.
        environ: variables in addition to those of this process.
    """
    return subprocess.Popen(
        [*within, sys.executable, "-m", "zmqgrad", "run", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environ},
    )


class Node:
    """A launcher with its workers.

    Args:
        process: the launcher.
        read: begin to read its output.
    """

    def __init__(self, process: Launcher, read: bool = True) -> None:
        self.process = process
        self.text = ""
        self._grown = threading.Condition()
        self._seen = 0
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        if read:
            self.read()

    def read(self) -> None:
        """Begin to read the output."""
        self._reader.start()

    def wait_until_blocked(self) -> None:
        """Wait until the launcher cannot write more output, because nobody reads it."""
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()

        def unread() -> int:
            return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)

        enough = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) // 2  # the last page may stay empty in part
        eventually(unread, lambda count: count > enough, WAIT_SECONDS)

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            with self._grown:
                self.text += line.decode(errors="replace")
                self._grown.notify_all()

    def find(self, pattern: str) -> re.Match[str]:
        """Wait until ``pattern`` appears after what was found before."""
        compiled = re.compile(pattern, re.MULTILINE)
        with self._grown:
            self._grown.wait_for(lambda: compiled.search(self.text, self._seen), WAIT_SECONDS)
            match = compiled.search(self.text, self._seen)
            assert match, f"{pattern!r} did not appear in:\n{self.text}"
            self._seen = match.end()
            return match

    def find_workers(self, count: int, world_size: int, restarts: int = 0) -> dict[int, int]:
        """Wait for ``count`` workers to start in a group. Returns their pids by rank."""
        found = [
            self.find(rf"worker (\d+) has (\d+) {world_size} {restarts}$").groups() for _ in range(count)
        ]
        return {int(rank): int(pid) for pid, rank in found}

    def wait(self) -> int:
        """Wait for the launcher's exit. Returns the exit code."""
        code = self.process.wait(WAIT_SECONDS)
        self._reader.join(WAIT_SECONDS)
        return code

    def close(self) -> None:
        """Kill the launcher, and with it its workers."""
        self.process.kill()
        self.process.wait()
        if self._reader.ident is not None:
            self._reader.join(WAIT_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Job:
    """The nodes of one job.

    Args:
        endpoint: of its rendezvous.
        script: that its workers run.
    """

    def __init__(self, endpoint: str, script: Path) -> None:
        script.write_text(WORKER)
        self.endpoint = endpoint
        self.script = script
        self.nodes: list[Node] = []

    def start(
        self,
        code: str,
        *options: object,
        nodes: str = "1:3",
        restarts: int = 0,
        read: bool = True,
        within: Sequence[str] = (),
        **environ: str,
    ) -> Node:
        """Start a node, whose workers run ``code``."""
        command = run_command(
            *("--nnodes", nodes, "--rdzv-endpoint", self.endpoint, "--rdzv-id", "job", "--rdzv-conf", FAST),
            *("--max-restarts", restarts, *options, self.script, code),
            within=within,
            TMPDIR=str(self.script.parent),  # a launcher that is killed cannot remove its temporary directory
            **environ,
        )
        node = Node(command, read)
        self.nodes.append(node)
        return node

    def close(self) -> None:
        """Kill all nodes."""
        for node in self.nodes:
            node.close()


def exits(pid: int, seconds: float = 15.0) -> bool:
    """Whether the process, which is no child of ours, exits in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def pause(node: Node, seconds: float) -> None:
    """Freeze a launcher for a time, as a host that is suspended or swaps."""
    node.process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    node.process.send_signal(signal.SIGCONT)
