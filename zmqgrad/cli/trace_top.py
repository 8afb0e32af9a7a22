"""``zmqgrad trace top``: rates, latencies, queues and threads of a running job, renewed each second."""

from __future__ import annotations

import argparse
import itertools
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from zmqgrad.cli.trace_live import polls, wait_for_closed_output
from zmqgrad.cli.trace_output import (
    add_job_arguments,
    add_stores_argument,
    clock_text,
    directory_of,
    duration,
    positive,
    print_table,
    printable,
    table,
)
from zmqgrad.errors import TraceError
from zmqgrad.runtime.clock import monotonic_ns
from zmqgrad.trace.follow import Follower
from zmqgrad.trace.labels import size
from zmqgrad.trace.live import is_recording
from zmqgrad.trace.load import Load, Rate, Snapshot, WorkerLoad

WORKER_COLUMNS = (
    "worker",
    "queued",
    "running",
    "longest",
    "waiting",
    "threads",
    "blocked",
    "out/s",
    "in/s",
    "bytes out/s",
    "shm/s",
    "shm used",
    "dropped",
    "pid",
)
"""By importance: the last ones are left out where they do not fit."""

RATE_COLUMNS = ("msg/s", "bytes/s", "calls/s", "p50", "p99")

_ORDERS: dict[str, Callable[[Rate], float]] = {
    "messages": lambda rate: rate.messages,
    "bytes": lambda rate: rate.bytes,
    "p99": lambda rate: rate.p99 or 0,
}

Show = Callable[[Snapshot, int], None]
"""Shows a snapshot, given its wall time in nanoseconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad trace top``."""
    add_job_arguments(parser)
    add_stores_argument(parser)
    parser.epilog = "In the terminal: q ends, s changes the order, space pauses. Rates are of the last 10 s."
    parser.add_argument("--sort", choices=_ORDERS, default="messages", help="order (default: %(default)s)")
    parser.add_argument(
        "--interval", type=positive, default=1.0, metavar="SECONDS", help="between two updates (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one snapshot as text, and end")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object per update; times in nanoseconds"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Show the load of a job until it ends, or ``q`` is pressed."""
    with Follower(directory_of(arguments), arguments.job) as follower:
        if not follower.is_recording():
            raise TraceError(
                f"no process records into {follower.directory} any more; "
                "`zmqgrad trace stats` shows what they did"
            )
        if arguments.json or arguments.once:
            show = _show_json if arguments.json else _text_printer(arguments.sort)
            _run(follower, show, arguments, wait_for_closed_output)
            return 0
        with _Terminal(arguments.sort) as terminal:
            _run(follower, terminal.show, arguments, terminal.wait, lambda: terminal.is_over)
    return 0


def _run(
    follower: Follower,
    show: Show,
    arguments: argparse.Namespace,
    wait: Callable[[float], None],
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    load, shown, once = Load(arguments.stores), monotonic_ns(), arguments.once
    for entries, waited in polls(follower, wait):
        load.add(entries)
        now = monotonic_ns()
        if (once and not follower.behind) or (not once and now - shown >= arguments.interval * 1e9):
            shown = now
            show(load.snapshot(waited, is_recording), follower.wall(load.newest + waited))
            sys.stdout.flush()
            if once:
                return
        if is_over():
            return


def _show_json(snapshot: Snapshot, _: int) -> None:
    print(msgspec.json.encode(snapshot).decode())


def _text_printer(order: str) -> Show:
    def show(snapshot: Snapshot, wall: int) -> None:
        print(f"{clock_text(wall)[:8]}, rates of the last {snapshot.seconds:.0f} s\n")
        print_table(WORKER_COLUMNS, [worker_cells(worker) for worker in snapshot.workers])
        for title, rates in (("type", snapshot.types), ("from > to", snapshot.pairs)):
            print()
            print_table((title, *RATE_COLUMNS), [rate_cells(rate) for rate in in_order(rates, order)])

    return show


def in_order(rates: Sequence[Rate], order: str) -> list[Rate]:
    """The largest first."""
    return sorted(rates, key=_ORDERS[order], reverse=True)


def worker_cells(worker: WorkerLoad) -> tuple[str, ...]:
    """A row of the table of workers."""
    return (
        printable(worker.name),
        str(worker.queued),
        str(worker.running),
        duration(worker.oldest_ns) if worker.running else "-",
        str(worker.waiting),
        f"{worker.threads - worker.blocked} of {worker.working_limit}" if worker.working_limit else "-",
        str(worker.blocked),
        f"{worker.sent:.0f}",
        f"{worker.received:.0f}",
        size(worker.bytes_sent),
        size(worker.shared_memory_bytes),
        f"{size(worker.leased_bytes)} of {size(worker.leased_limit)}" if worker.leased_limit else "-",
        str(worker.dropped),
        str(worker.pid),
    )


def rate_cells(rate: Rate) -> tuple[str, ...]:
    """A row of the tables of types and pairs."""
    calls = f"{rate.calls:.0f}" if rate.calls else "-"
    return (
        printable(rate.name),
        f"{rate.messages:.0f}",
        size(rate.bytes),
        calls,
        duration(rate.p50),
        duration(rate.p99),
    )


class _Terminal:
    """The whole terminal; reads single keys. Use as a context manager: restores the terminal."""

    def __init__(self, order: str) -> None:
        if not sys.stdout.isatty():
            raise TraceError("top needs a terminal; --once and --json print to a file or pipe")
        self.is_over = False
        self._order = order
        self._paused = False
        self._last: tuple[Snapshot, int] | None = None
        self._keys = _keys()

    def show(self, snapshot: Snapshot, wall: int) -> None:
        """Draws a snapshot, unless paused."""
        if not self._paused:
            self._last = snapshot, wall
            self._draw()

    def wait(self, seconds: float) -> None:
        """Waits for a key."""
        if not sys.stdin.isatty():
            wait_for_closed_output(seconds)
        elif select.select([sys.stdin], [], [], seconds)[0]:
            # Not by sys.stdin, whose buffer select does not see. Nothing: the terminal was closed.
            for key in os.read(sys.stdin.fileno(), 64).decode(errors="replace") or "q":
                self._press(key)

    def _press(self, key: str) -> None:
        if key == "q":
            self.is_over = True
        elif key == "s":
            names = list(_ORDERS)
            self._order = names[(names.index(self._order) + 1) % len(names)]
            self._draw()
        elif key == " ":
            self._paused = not self._paused
            self._draw()

    def _draw(self) -> None:
        if self._last is not None:
            snapshot, wall = self._last
            state = "paused" if self._paused else f"by {self._order}"
            title = f"{clock_text(wall)[:8]}  rates of the last {snapshot.seconds:.0f} s, {state}"
            size = shutil.get_terminal_size()
            lines = picture(title, snapshot, self._order, *size)[: size.lines]
            self._write("\x1b[H" + "\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def __enter__(self) -> _Terminal:
        self._keys.__enter__()
        self._write("\x1b[?1049h\x1b[?25l")  # the alternate screen, without a cursor
        return self

    def __exit__(self, *exc: object) -> None:
        self._write("\x1b[?25h\x1b[?1049l")
        self._keys.__exit__(None, None, None)


@contextmanager
def _keys() -> Iterator[None]:
    """Has the terminal deliver each key at once, without showing it."""
    if not sys.stdin.isatty():
        yield
        return
    modes = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # otherwise the modes would stay
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, modes)


def picture(title: str, snapshot: Snapshot, order: str, width: int, height: int) -> list[str]:
    """Lines that fill a terminal of ``width`` columns and ``height`` rows."""
    workers = snapshot.workers[: max(1, height // 3)]
    left = height - len(workers) - 8  # titles, headers, empty lines
    types = in_order(snapshot.types, order)[: max(1, left // 2)]
    pairs = in_order(snapshot.pairs, order)[: max(1, left - len(types))]
    lines = [f"zmqgrad trace top  {title}"[:width], "q ends, s changes the order, space pauses"[:width]]
    for columns, rows in (
        (WORKER_COLUMNS, list(map(worker_cells, workers))),
        (("type", *RATE_COLUMNS), list(map(rate_cells, types))),
        (("from > to", *RATE_COLUMNS), list(map(rate_cells, pairs))),
    ):
        count = fitting(columns, rows, width)
        head, *rest = table(columns[:count], [row[:count] for row in rows], width)
        lines += ["", f"\x1b[1;7m{head:<{width}}\x1b[0m", *rest]
    return lines


def fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> int:
    """How many of the columns, with a space at each side, fit into ``width``; the first always does."""
    widths = itertools.accumulate(2 + max(map(len, cells)) for cells in zip(columns, *rows, strict=True))
    return max(1, sum(each <= width for each in widths))
