"""``zmqgrad doctor``: checks whether this host can run workers, and whether it can work with another one.

Prints a table, or JSON. The exit code is 0 if workers can run here, or with ``--peer`` on both hosts,
otherwise 1. With ``--listen`` it waits for a doctor on another host until interrupted.
"""

from __future__ import annotations

import argparse
import json
import select
import shutil
import sys
import textwrap
from collections.abc import Sequence

from zmqgrad import environment
from zmqgrad.cli.checks import Check, Status, all_checks
from zmqgrad.cli.colours import GREEN, RED, YELLOW, escaped, paint
from zmqgrad.cli.parser import describe
from zmqgrad.elastic.agent.signals import SignalInbox
from zmqgrad.elastic.endpoint import parse_endpoint
from zmqgrad.errors import ConfigurationError, TransportError
from zmqgrad.transport.bind_policy import is_loopback
from zmqgrad.transport.interfaces import interface_addresses
from zmqgrad.transport.security import load_keys

DEFAULT_PORT = 29500

EXIT_UNFIT = 1

MIN_WIDTH, MAX_WIDTH = 60, 110
"""Bounds of the width of the table, in characters."""

_MARKS = {Status.OK: "ok", Status.NOTE: "--", Status.WARNING: "WARN", Status.BAD: "BAD"}
_COLOURS = {Status.OK: GREEN, Status.WARNING: YELLOW, Status.BAD: RED}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad doctor``."""
    parser.add_argument(
        "--no-self-test", action="store_true", help="start no workers (the self-test takes a few seconds)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--peer",
        metavar="HOST:PORT",
        help="check the network to another host instead: addresses, firewalls, NAT, MTU, round trip, "
        "bandwidth. At the port, `zmqgrad doctor --listen`, a store or a worker runs",
    )
    other.add_argument(
        "--listen",
        metavar="[HOST:]PORT",
        nargs="?",
        const="",
        help=f"wait for `zmqgrad doctor --peer` of other hosts until interrupted (default: port MASTER_PORT, "
        f"or {DEFAULT_PORT}, of all addresses)",
    )
    examples = (
        "zmqgrad doctor",
        "MASTER_ADDR=host0 MASTER_PORT=29500 zmqgrad doctor",
        "zmqgrad doctor --listen 29500",
        "zmqgrad doctor --peer host0:29500",
        "zmqgrad doctor --json",
    )
    describe(parser, examples, {"1": "workers cannot run (or not work together), see the checks marked BAD"})


def execute(arguments: argparse.Namespace) -> int:
    """Run the checks, print the report, and return the exit code."""
    if arguments.listen is not None:
        return _listen(arguments.listen)
    if arguments.peer is not None:
        from zmqgrad.cli.peer_checks import checked_back, peer_checks  # loads the store

        host, port = _endpoint(arguments.peer, "--peer")
        checks, fit = peer_checks(host, port), f"workers of this host and {host} can work together"
        if not checked_back(checks):
            fit = f"this host reaches {host}; whether {host} reaches this host was not tested"
    else:
        checks, fit = all_checks(self_test=not arguments.no_self_test), "workers can run here"
    bad = [check.name for check in checks if check.status is Status.BAD]
    if arguments.json:
        print(json.dumps({"fit": not bad, "checks": [as_json(check) for check in checks]}, indent=2))
    else:
        sys.stdout.write(table(checks, shutil.get_terminal_size((MAX_WIDTH, 0)).columns))
        unfit = "workers cannot run well here" if arguments.peer is None else "workers cannot work together"
        print(f"\n{unfit}: see {', '.join(dict.fromkeys(bad))}" if bad else f"\n{fit}")
    return EXIT_UNFIT if bad else 0


def as_json(check: Check) -> dict[str, object]:
    """``check`` as an object of JSON."""
    texts = {"name": check.name, "status": check.status.name.lower(), "found": check.found}
    return {**texts, "advice": check.advice, **(check.data or {})}


def table(checks: Sequence[Check], columns: int = MAX_WIDTH) -> str:
    """One paragraph for each check: status, name, findings; below it, the remedy.

    Args:
        columns: width of the terminal, to which paragraphs are wrapped.
    """
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        mark = paint(f"{_MARKS[check.status]:>4}", _COLOURS.get(check.status))
        start = f"{'':>4}  {check.name:<{width}}  "
        first, *rest = _wrapped(check.found, start, " " * len(start), columns)
        lines += [mark + first[4:], *rest]
        if check.advice:
            lines += _wrapped(check.advice, " " * len(start) + "-> ", " " * (len(start) + 3), columns)
    return "".join(f"{line}\n" for line in lines)


def _wrapped(text: str, first: str, others: str, columns: int) -> list[str]:
    width = max(MIN_WIDTH, min(columns, MAX_WIDTH))
    return textwrap.wrap(
        escaped(text, "\n\t"),  # a peer tells its name
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _endpoint(text: str, option: str) -> tuple[str, int]:
    malformed = f"{option} is {text!r}; it must be HOST:PORT, such as node1:{DEFAULT_PORT}"
    try:
        host, port = parse_endpoint(text, DEFAULT_PORT)
    except ConfigurationError:
        raise ConfigurationError(malformed) from None
    if "/" in host or any(c.isspace() for c in host):
        raise ConfigurationError(malformed)
    return host.strip("[]"), port


def _listen(text: str) -> int:
    from zmqgrad.cli.peer_listener import PeerListener

    host, port = ("", environment.read_launch().master_port or DEFAULT_PORT)
    if text:
        host, port = ("", int(text)) if text.isdecimal() else _endpoint(text, "--listen")
    if not 0 <= port <= environment.MAX_PORT:
        raise ConfigurationError(f"--listen {text}: the port is not between 0 and {environment.MAX_PORT}")
    keys = load_keys()
    with SignalInbox() as signals:
        try:
            listener = PeerListener(host, port, keys)
        except TransportError as error:
            print(f"zmqgrad doctor: {error}", file=sys.stderr)
            return EXIT_UNFIT
        try:
            print(f"waiting at port {listener.port}; on the other host, run one of:")
            for address in [host] if host else _addresses():
                shown = f"[{address}]" if ":" in address else address
                print(f"  zmqgrad doctor --peer {shown}:{listener.port}")
            if keys is None:
                warning = "without a secret: whoever reaches this port can use the bandwidth of this host"
                print(paint(warning, RED))
            print(f"secret: {'needed' if keys else 'none'}. Stop with Ctrl-C.", flush=True)
            while not signals.take():
                select.select([signals], [], [])
        finally:
            listener.close()
    return 0


def _addresses() -> list[str]:
    found = [each.address for each in interface_addresses()]
    return [each for each in found if not is_loopback(each)] or found
