"""``zmqgrad trace top``: rates, latencies, queues and threads of a running job, renewed each second."""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from zmqgrad.cli.trace_live import polls
from zmqgrad.cli.trace_output import (
    MIN_NAME_WIDTH,
    add_view_arguments,
    clock_text,
    directory_of,
    print_json,
    printable,
    table,
    terminal_width,
)
from zmqgrad.errors import TraceError
from zmqgrad.runtime.clock import monotonic_ns
from zmqgrad.trace.follow import Follower
from zmqgrad.trace.labels import show_time, size
from zmqgrad.trace.live import is_recording
from zmqgrad.trace.load import Load, Rate, Snapshot, WorkerLoad

_T = TypeVar("_T")

INTERVAL_NANOSECONDS = 1_000_000_000

WORKER_COLUMNS: dict[str, Callable[[WorkerLoad], str]] = {
    "worker": lambda w: printable(w.name),
    "queued": lambda w: str(w.queued),
    "running": lambda w: str(w.running),
    "longest": lambda w: show_time(w.oldest_ns) if w.running else "-",
    "waiting": lambda w: str(w.waiting),
    "threads": lambda w: f"{w.threads - w.blocked} of {w.working_limit}" if w.working_limit else "-",
    "blocked": lambda w: str(w.blocked),
    "out/s": lambda w: f"{w.sent:.0f}",
    "in/s": lambda w: f"{w.received:.0f}",
    "bytes out/s": lambda w: size(w.bytes_sent),
    "shm/s": lambda w: size(w.shared_memory_bytes),
    "shm used": lambda w: f"{size(w.leased_bytes)} of {size(w.leased_limit)}" if w.leased_limit else "-",
    "dropped": lambda w: str(w.dropped),
    "pid": lambda w: str(w.pid),
}
"""By importance: the last ones are left out where they do not fit."""

RATE_COLUMNS: dict[str, Callable[[Rate], str]] = {
    "msg/s": lambda rate: f"{rate.messages:.0f}",
    "bytes/s": lambda rate: size(rate.bytes),
    "calls/s": lambda rate: f"{rate.calls:.0f}" if rate.calls else "-",
    "p50": lambda rate: show_time(rate.p50),
    "p99": lambda rate: show_time(rate.p99),
}

_ORDERS: dict[str, Callable[[Rate], float]] = {
    "messages": lambda rate: rate.messages,
    "bytes": lambda rate: rate.bytes,
    "p99": lambda rate: rate.p99 or 0,
}

Show = Callable[[Snapshot, int], None]
"""Shows a snapshot, given its wall time in nanoseconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad trace top``."""
    add_view_arguments(parser, stores=True, json=True)
    parser.epilog = "Ends with the job, or with Ctrl-C. Rates are of the last 10 s."
    parser.add_argument("--sort", choices=_ORDERS, default="messages", help="order (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print one snapshot as text, and end")


def execute(arguments: argparse.Namespace) -> int:
    """Show the load of a job until it ends."""

    def show_text(snapshot: Snapshot, wall: int) -> None:
        print(*text_of(snapshot, wall, arguments.sort, terminal_width()), sep="\n")

    def draw(snapshot: Snapshot, wall: int) -> None:
        width, height = shutil.get_terminal_size()
        lines = text_of(snapshot, wall, arguments.sort, width, height)
        print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J", end="")

    with Follower(directory_of(arguments), arguments.job) as follower:
        if not follower.is_recording():
            raise TraceError(
                f"no process records into {follower.directory} any more; "
                "`zmqgrad trace stats` shows what they did"
            )
        if arguments.json or arguments.once:
            _run(follower, _show_json if arguments.json else show_text, arguments)
            return 0
        if not sys.stdout.isatty():
            raise TraceError("top needs a terminal; --once and --json print to a file or pipe")
        before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
        print("\x1b[?1049h\x1b[?25l", end="")  # the alternate screen, without a cursor
        try:
            _run(follower, draw, arguments)
        finally:
            print("\x1b[?25h\x1b[?1049l", end="", flush=True)
            signal.signal(signal.SIGTERM, before)
    return 0


def _run(follower: Follower, show: Show, arguments: argparse.Namespace) -> None:
    load, shown, once = Load(arguments.stores), monotonic_ns(), arguments.once
    for entries, waited in polls(follower):
        load.add(entries)
        now = monotonic_ns()
        if (once and not follower.behind) or (not once and now - shown >= INTERVAL_NANOSECONDS):
            shown = now
            show(load.snapshot(waited, is_recording), follower.wall(load.newest + waited))
            sys.stdout.flush()
            if once:
                return


def _show_json(snapshot: Snapshot, _: int) -> None:
    print_json(snapshot)


def text_of(
    snapshot: Snapshot, wall: int, order: str, width: float, height: float = math.inf
) -> Iterator[str]:
    """Yields the lines of a snapshot, the largest first; at most ``height`` - 1."""
    yield f"{clock_text(wall)[:8]}, rates of the last {snapshot.seconds:.0f} s, by {order}"
    left = height - 8  # titles, headers, empty lines
    types, pairs = (sorted(r, key=_ORDERS[order], reverse=True) for r in (snapshot.types, snapshot.pairs))
    for columns, rows, share in (
        (*_cells(WORKER_COLUMNS, snapshot.workers), 3),
        (*_cells({"type": _name, **RATE_COLUMNS}, types), 2),
        (*_cells({"from > to": _name, **RATE_COLUMNS}, pairs), 1),
    ):
        shown = rows if math.isinf(height) else rows[: max(1, int(left) // share)]
        left -= len(shown)
        count = len(columns) if math.isinf(height) else fitting(columns, shown, width)
        yield ""
        yield from table(columns[:count], [row[:count] for row in shown], width)


def _name(rate: Rate) -> str:
    return printable(rate.name)


def _cells(
    columns: Mapping[str, Callable[[_T], str]], values: Iterable[_T]
) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and the rows of a table of ``values``."""
    return list(columns), [[cell(value) for cell in columns.values()] for value in values]


def fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], width: float) -> int:
    """How many of the columns, with a space at each side, fit into ``width``; the first always does.

    If its names take more than half of it, they are counted as half: the table cuts them.
    """
    widths = [2 + max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if sum(widths) > width:
        widths[0] = min(widths[0], 2 + max(MIN_NAME_WIDTH, int(width) // 2))
    return max(1, sum(each <= width for each in itertools.accumulate(widths)))
