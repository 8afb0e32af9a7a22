"""``zmqgrad trace tail``: messages as they are sent, one per line, as tcpdump shows packets."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable

from zmqgrad.cli.colours import CYAN, GREEN, RED, paint
from zmqgrad.cli.trace_live import polls
from zmqgrad.cli.trace_output import (
    MAX_NAMED,
    add_view_arguments,
    chooses_part,
    clock_text,
    directory_of,
    note,
    open_job,
    print_json,
    printable,
)
from zmqgrad.runtime.clock import wall_ns
from zmqgrad.trace.events import Path, PeerDeclared
from zmqgrad.trace.follow import Follower
from zmqgrad.trace.kinds import is_store
from zmqgrad.trace.labels import ends, id_label, show_time, size
from zmqgrad.trace.tail import Filter, Line, LiveMessages, recorded
from zmqgrad.wire.ids import parse_id, show_id
from zmqgrad.wire.messages import REQUEST, RESPONSE, MessageType

CONTEXT_NANOSECONDS = 10_000_000_000
"""What is read of the time before the start: the requests, whose functions their replies do not name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad trace tail``."""
    add_view_arguments(parser, window=True, last=True, stores=True, json=True)
    parser.epilog = (
        "Follows a running job, from now on, until it has ended or Ctrl-C; prints all of one that has ended. "
        "Patterns are those of a shell, such as 'STORE_*'; options may be repeated."
    )
    parser.add_argument("--from-start", action="store_true", help="of a running job too: all from its start")
    parser.add_argument("--no-follow", action="store_true", help="print what is recorded by now, and end")
    for name, what in (
        ("--type", "message types, such as CALL"),
        ("--not-type", "types to leave out"),
        ("--function", "functions; with --stores, also keys"),
        ("--worker", "workers that send or receive"),
        ("--peer", "workers at the other end"),
    ):
        parser.add_argument(name, action="append", default=[], metavar="PATTERN", help=what)
    parser.add_argument(
        "--context", type=parse_id, action="append", default=[], metavar="ID", help="autograd contexts"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Print messages until the job ends."""
    types, without = ([each.upper() for each in one] for one in (arguments.type, arguments.not_type))
    ends_of = (arguments.worker, arguments.peer)
    wanted = Filter(types, without, arguments.function, arguments.context, *ends_of, arguments.stores)
    printer = _Printer(wanted, arguments.json)
    if not (arguments.no_follow or chooses_part(arguments)):
        with Follower(directory_of(arguments), arguments.job) as follower:
            if follower.is_recording():
                try:
                    _follow(follower, printer, arguments.from_start)
                finally:
                    printer.note()
                return 0
    job = open_job(arguments)
    printer.print(recorded(job.messages()), job.wall)
    printer.note()
    return 0


class _Printer:
    """Prints the messages that are ``wanted``, and counts those that are left out."""

    def __init__(self, wanted: Filter, as_json: bool) -> None:
        self._wanted = wanted
        self._show = _show_json if as_json else _show_text
        self._is_empty = True
        self._names: Counter[str] = Counter()
        self._types: Counter[str] = Counter()

    def print(self, lines: Iterable[Line], wall: Callable[[int], int]) -> None:
        for line in lines:
            message = line.message
            if self._wanted.matches(message):
                self._is_empty = False
                self._show(line, wall(message.time))
            elif self._wanted.stores or not is_store(message.kind):
                self._types[message.type] += 1
                if message.name and not is_store(message.kind):
                    self._names[message.name] += 1

    def note(self) -> None:
        """Notes what there was, if nothing was printed."""
        if self._types and self._is_empty:
            names, types = (
                ", ".join(n for n, _ in c.most_common(MAX_NAMED)) for c in (self._names, self._types)
            )
            note(f"0 of {self._types.total()} messages match; functions: {names or 'none'}; types: {types}")


def _follow(follower: Follower, printer: _Printer, from_start: bool) -> None:
    messages, caught_up = LiveMessages(), from_start
    begin = wall_ns() - CONTEXT_NANOSECONDS
    for entries, waited in polls(follower):
        if not caught_up:
            entries = [e for e in entries if type(e[3]) is PeerDeclared or follower.wall(e[0]) >= begin]
        lines = messages.add(entries, waited)
        if caught_up:
            printer.print(lines, follower.wall)
            sys.stdout.flush()
        caught_up = caught_up or not follower.behind
    printer.print(messages.rest(), follower.wall)
    note("the job has ended")


def _show_json(line: Line, wall: int) -> None:
    message = line.message
    source, target = ends(message)
    shown = {
        "wall": wall,
        "type": message.type,
        "source": source,
        "target": target,
        "id": message.message_id,
        "context": message.context,
        "name": message.name,
        "bytes": message.size,
        "path": Path(message.path).name.lower(),
        "sent": message.sent,
        "received": message.received,
        "latency": line.latency,
    }
    print_json(shown)


def _show_text(line: Line, wall: int) -> None:
    kind = line.message.kind
    colour = CYAN if kind & REQUEST else GREEN if kind & RESPONSE else None
    sys.stdout.write(paint(text_of(line, wall), RED if kind == MessageType.EXCEPTION else colour) + "\n")


def text_of(line: Line, wall: int) -> str:
    """A line of text: time, ends, type, function, id, context, bytes, path, transit, latency of the call."""
    message = line.message
    source, target = ends(message)
    parts = [
        clock_text(wall),
        f"{source} > {target}",
        message.type,
        message.name,
        f"#{id_label(message)}",
        f"ctx={show_id(message.context)}" if message.context else "",
        size(message.size),
        "shm" if message.path is Path.SHARED_MEMORY else "",
        _transit(message.sent, message.received),
        f"call={show_time(line.latency)}" if line.latency is not None else "",
    ]
    return printable(" ".join(part for part in parts if part))


def _transit(sent: int | None, received: int | None) -> str:
    if sent is None:
        return "(send not recorded)"
    if received is None:
        return "(not received yet)"
    return f"transit={show_time(received - sent)}"
