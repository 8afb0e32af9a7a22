"""``zmqgrad store serve``: runs a store's server in a process of its own, which outlives the workers."""

from __future__ import annotations

import argparse
import select
import sys

from zmqgrad.cli.limits import allow_many_files
from zmqgrad.cli.parser import EXIT_FAILED
from zmqgrad.elastic.agent.signals import SignalInbox
from zmqgrad.errors import ConfigurationError, JournalError, TransportError
from zmqgrad.store.addresses import check_port, listening_address
from zmqgrad.store.server import StoreServer
from zmqgrad.transport.security import load_keys, read_secret

DEFAULT_PORT = 29500

POLL_SECONDS = 1.0
"""Interval of the checks that the server still runs. Signals are handled immediately."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad store serve``."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of this host to listen on, or its name for all interfaces (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--port",
        type=int,
        help=f"the port (default: {DEFAULT_PORT}, or that of --listen-fd); 0: any free port",
    )
    parser.add_argument(
        "--watch-port",
        type=int,
        default=0,
        help="port of the watch channel, to be opened in a firewall; 0 (the default): any free port, which "
        "clients learn from the server",
    )
    parser.add_argument(
        "--journal",
        metavar="PATH",
        help="write each change to this file before replying, and load the file at start: the store survives "
        "if this process is killed, and clients continue with the next server",
    )
    parser.add_argument(
        "--sync",
        action="store_true",
        help="flush each change to the disk, to survive a power failure as well (needs --journal)",
    )
    parser.add_argument(
        "--listen-fd",
        type=int,
        metavar="N",
        help="serve at file descriptor N, a socket that is bound already (systemd's is 3)",
    )
    parser.add_argument(
        "--secret-file",
        metavar="PATH",
        help="file with the secret: clients without it are refused, and traffic is encrypted (default: the "
        "secret of ZMQGRAD_SECRET or ZMQGRAD_SECRET_FILE, if set)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Serve until a signal, and return the exit code.

    Raises:
        ConfigurationError: if the address or the secret is invalid.
    """
    if arguments.sync and arguments.journal is None:
        raise ConfigurationError("--sync requires --journal PATH")
    allow_many_files()  # one to three for each client
    secret = None if arguments.secret_file is None else read_secret(arguments.secret_file)
    port = arguments.port
    if port is None:
        port = DEFAULT_PORT if arguments.listen_fd is None else 0
    address = listening_address(arguments.host, check_port(port), load_keys(secret) is not None)
    with SignalInbox() as signals:
        try:
            server = StoreServer(
                address,
                journal=arguments.journal,
                sync=arguments.sync,
                secret=secret,
                listen_fd=arguments.listen_fd,
                watch_port=check_port(arguments.watch_port),
            )
        except (TransportError, JournalError) as error:
            print(f"zmqgrad store serve: {error}", file=sys.stderr)
            return EXIT_FAILED
        print(f"serving a store at {server.endpoint}", flush=True)
        while server.serves:
            select.select([signals], [], [], POLL_SECONDS)
            if signals.take():
                server.close()
                return 0
    print(f"zmqgrad store serve: the server at {server.endpoint} failed", file=sys.stderr)
    return EXIT_FAILED
