"""``zmqgrad store get``, ``set``, ``watch`` etc.: access to a running store from a terminal.

Results go to stdout, as text or (``--json``) one JSON value per line; errors go to stderr. Exit codes:
0 success; 1 the store cannot be reached, or refuses; 2 invalid arguments; 3 the key does not exist.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

from zmqgrad import environment
from zmqgrad.cli.colours import escaped, escaped_json
from zmqgrad.cli.parser import EXIT_FAILED
from zmqgrad.errors import ConfigurationError, StoreError, StoreTimeoutError
from zmqgrad.store.addresses import connecting_address
from zmqgrad.store.arguments import as_key
from zmqgrad.store.base import Store
from zmqgrad.store.client import TCPStore
from zmqgrad.transport.heartbeat.failure_detector import is_reachable
from zmqgrad.transport.security import read_secret

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 29500

EXIT_MISSING = 3

DEFAULT_SECONDS = 10.0
QUICK_SECONDS = 1.0
"""A server that is well answers within this time."""

MAX_SHOWN = 72
"""Length limit of the values shown by ``keys --values`` and ``watch``."""


@dataclass(frozen=True)
class Subcommand:
    """One subcommand: ``declare`` adds its arguments, ``run`` executes it on an open store."""

    name: str
    declare: Callable[[argparse.ArgumentParser], object]
    run: Callable[[Store, argparse.Namespace], int]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the command."""
        self.declare(parser)
        parser.add_argument(
            "--endpoint",
            metavar="HOST:PORT",
            help="where the store is served (default: MASTER_ADDR and MASTER_PORT of the environment, or "
            f"{DEFAULT_HOST}:{DEFAULT_PORT})",
        )
        parser.add_argument("--host", help="with --port: alternative to --endpoint")
        parser.add_argument("--port", type=int)
        parser.add_argument(
            "--timeout",
            type=float,
            metavar="SECONDS",
            help=f"time limit for connecting and waiting (default: {DEFAULT_SECONDS:g}, if a server listens)",
        )
        parser.add_argument(
            "--secret-file",
            metavar="PATH",
            help="the store's secret (default: that of ZMQGRAD_SECRET or ZMQGRAD_SECRET_FILE, if any)",
        )
        parser.add_argument("--json", action="store_true", help="print JSON, for programs")

    def execute(self, arguments: argparse.Namespace) -> int:
        """Query the store, and return the exit code.

        Raises:
            ConfigurationError: if the arguments are invalid.
        """
        host, port = endpoint_of(arguments.endpoint, arguments.host, arguments.port)
        secret = None if arguments.secret_file is None else read_secret(arguments.secret_file)
        try:
            with _connect(host, port, arguments.timeout, secret) as store:
                return self.run(store, arguments)
        except StoreError as error:
            print(f"zmqgrad store {self.name}: {error}", file=sys.stderr)
            return EXIT_FAILED


def _connect(host: str, port: int, seconds: float | None, secret: bytes | None) -> TCPStore:
    """Connect within ``seconds``; None: within the default, and at once if nothing listens there.

    Raises:
        ConfigurationError: if the arguments are invalid.
        StoreError: if no store answers.
    """
    if seconds is not None:
        return TCPStore(host, port, timeout=seconds, secret=secret)
    try:
        store = TCPStore(host, port, timeout=QUICK_SECONDS, secret=secret)
    except StoreTimeoutError:  # only now: a server takes a probe for a stranger, and logs it
        if is_reachable(connecting_address(host, port)):
            return TCPStore(host, port, timeout=DEFAULT_SECONDS, secret=secret)
        raise StoreError(
            f"no store is served at {host}:{port}, which refuses connections: name another --endpoint, start "
            "one by `zmqgrad store serve`, or wait for it with --timeout"
        ) from None
    store.set_timeout(timedelta(seconds=DEFAULT_SECONDS))
    return store


def endpoint_of(text: str | None, host: str | None = None, port: int | None = None) -> tuple[str, int]:
    """Host and port from ``--endpoint``, from ``--host`` and ``--port``, or from the environment.

    Raises:
        ConfigurationError: if ``text`` is not ``host:port``, or ``host`` or ``port`` is given as well.
    """
    if text is None:
        launch = environment.read_launch()
        host = launch.master_addr or DEFAULT_HOST if host is None else host
        return host, launch.master_port or DEFAULT_PORT if port is None else port
    if host is not None or port is not None:
        raise ConfigurationError("pass --endpoint, or --host and --port, not both")
    host, colon, number = text.rpartition(":")
    if not colon or not number.isascii() or not number.isdigit():
        raise ConfigurationError(f"--endpoint must be HOST:PORT, not {text!r}")
    return host or DEFAULT_HOST, int(number)


# ---- output -----------------------------------------------------------------------------------------------


def show(value: bytes, limit: int | None = None) -> str:
    """``value`` as text for a terminal, with control characters escaped as in ``\\x1b``.

    With a ``limit``, the result is one line of at most that many characters.
    """
    kept = "" if limit is not None else "\n\t"
    text = value[: None if limit is None else 4 * (limit + 1)].decode(errors="backslashreplace")
    text = escaped(text, kept)
    return text if limit is None or len(text) <= limit else f"{text[: limit - 3]}..."


def as_json(value: bytes | None, name: str = "value") -> dict[str, Any]:
    """``value`` as a field of a JSON object; binary values in base64, as ``<name>_base64``."""
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def _print(arguments: argparse.Namespace, text: str, found: object) -> None:
    print(escaped_json(json.dumps(found, ensure_ascii=False)) if arguments.json else text)


def _missing(name: str, keys: list[str], when: str = "") -> int:
    shown = ", ".join(map(repr, keys))
    print(f"zmqgrad store {name}: no such key{when}: {shown}", file=sys.stderr)
    return EXIT_MISSING


# ---- subcommands ------------------------------------------------------------------------------------------


def _get(store: Store, arguments: argparse.Namespace) -> int:
    key = as_key(arguments.key)
    if key not in store.list_keys(key):  # which check() would also say of a queue
        return _missing("get", [arguments.key])
    value = store.get(key)
    if arguments.raw:
        sys.stdout.buffer.write(value)
        return 0
    _print(arguments, show(value), {"key": arguments.key, **as_json(value)})
    return 0


def _set(store: Store, arguments: argparse.Namespace) -> int:
    if arguments.value != "-":
        value = os.fsencode(arguments.value)
    elif sys.stdin is not None:
        value = sys.stdin.buffer.read()
    else:
        raise ConfigurationError("the value - is read from stdin, which is closed")
    store.set(arguments.key, value)
    return 0


def _add(store: Store, arguments: argparse.Namespace) -> int:
    total = store.add(arguments.key, arguments.amount)
    _print(arguments, str(total), {"key": arguments.key, "value": total})
    return 0


def _delete(store: Store, arguments: argparse.Namespace) -> int:
    absent = [key for key in arguments.keys if not store.delete_key(key)]
    return _missing("delete", absent) if absent else 0


def _keys(store: Store, arguments: argparse.Namespace) -> int:
    keys = store.list_keys(arguments.prefix)
    if not arguments.values:
        for key in keys:
            _print(arguments, escaped(key), key)
        return 0
    width = max((len(escaped(key)) for key in keys), default=0)
    for key in keys:
        if store.check([key]):  # another client may have deleted it meanwhile
            value = store.get(key)
            _print(
                arguments,
                f"{escaped(key):<{width}}  {show(value, MAX_SHOWN)}",
                {"key": key, **as_json(value)},
            )
    return 0


def _wait(store: Store, arguments: argparse.Namespace) -> int:
    try:
        store.wait(arguments.keys)
    except StoreTimeoutError:
        absent = [key for key in arguments.keys if not store.check([key])]
        if absent:
            return _missing("wait", absent, f" after {store.timeout.total_seconds():g} s")
    return 0


def _watch(store: Store, arguments: argparse.Namespace) -> int:
    changes: SimpleQueue[tuple[str, bytes | None, bytes | None]] = SimpleQueue()
    for key in arguments.keys:
        if arguments.prefix:
            store.watch_prefix(key, partial(_enqueue, changes))
        else:
            store.watch_key(key, partial(_enqueue, changes, key))
    if not arguments.json:
        shown = ", ".join(f"{escaped(key)}*" if arguments.prefix else escaped(key) for key in arguments.keys)
        print(f"watching {shown}; Ctrl-C ends this", file=sys.stderr, flush=True)
    seen = 0
    try:
        while arguments.count is None or seen < arguments.count:
            key, old, new = changes.get()
            found = {"key": key, **as_json(old, "old"), **as_json(new, "new")}
            _print(arguments, _describe(key, old, new), found)
            sys.stdout.flush()
            seen += 1
    except KeyboardInterrupt:
        return 0
    return 0


def _enqueue(
    changes: SimpleQueue[tuple[str, bytes | None, bytes | None]],
    key: str,
    old: bytes | None,
    new: bytes | None,
) -> None:
    changes.put((key, old, new))


def _describe(key: str, old: bytes | None, new: bytes | None) -> str:
    key = escaped(key)
    if old is None:
        return f"+ {key} = {show(new or b'', MAX_SHOWN)}"
    if new is None:
        return f"- {key} (was {show(old, MAX_SHOWN)})"
    return f"~ {key}: {show(old, MAX_SHOWN // 2)} -> {show(new, MAX_SHOWN // 2)}"


# ---- arguments --------------------------------------------------------------------------------------------


def _get_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key")
    parser.add_argument("--raw", action="store_true", help="write the bytes as they are, without a newline")


def _set_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key")
    parser.add_argument("value", help="the new value; - reads it from stdin")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key")
    parser.add_argument("amount", type=int, nargs="?", default=1, help="(default: 1)")


def _keys_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("keys", nargs="+", metavar="key")


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    _keys_arguments(parser)
    parser.add_argument("--prefix", action="store_true", help="watch all keys that begin with one of these")
    parser.add_argument("--count", type=int, metavar="N", help="end after N changes")


def _prefix_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", nargs="?", default="", help="only keys with this prefix")
    parser.add_argument("--values", action="store_true", help="show the values, too")


SUBCOMMANDS = {
    subcommand.name: subcommand
    for subcommand in (
        Subcommand("get", _get_arguments, _get),
        Subcommand("set", _set_arguments, _set),
        Subcommand("add", _add_arguments, _add),
        Subcommand("delete", _keys_arguments, _delete),
        Subcommand("keys", _prefix_arguments, _keys),
        Subcommand("wait", _keys_arguments, _wait),
        Subcommand("watch", _watch_arguments, _watch),
    )
}
