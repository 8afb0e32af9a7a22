"""``zmqgrad secret``: makes a secret for a job, as a file that only its owner can read, or as text."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from zmqgrad import environment
from zmqgrad.cli.parser import describe
from zmqgrad.errors import ConfigurationError

SECRET_BYTES = 32

_NOTES = f"""\
All processes of a job need the same secret. Give them its file by {environment.SECRET_FILE}: on a file
system that all hosts share, or copied to each (mode 600). Or give them the secret itself by the variable
{environment.SECRET}, which srun passes on, and mpirun with -x. A secret is never an argument: other users can
see those of any process."""

_EXAMPLES = (
    f"zmqgrad secret --write ~/job7.secret && export {environment.SECRET_FILE}=~/job7.secret",
    f"export {environment.SECRET}=$(zmqgrad secret)",
    f"{environment.SECRET_FILE}=~/job7.secret zmqgrad secret --role store --write ~/dashboard.secret",
    "zmqgrad secret | kubectl create secret generic job7 --from-file=secret=/dev/stdin",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad secret``."""
    parser.epilog = _NOTES
    describe(parser, _EXAMPLES)
    parser.add_argument(
        "--write", type=Path, metavar="PATH", help="create this file, with mode 600, instead of printing"
    )
    parser.add_argument(
        "--role",
        choices=("job", "store"),
        default="job",
        help="job: a new secret; store: one for clients of the store, which admits to no worker, derived "
        f"from the job's, which {environment.SECRET} or {environment.SECRET_FILE} has (default: job)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Make the secret, and return the exit code.

    Raises:
        ConfigurationError: if the file exists already, or cannot be written.
    """
    secret = secrets.token_hex(SECRET_BYTES) if arguments.role == "job" else _for_store()
    if arguments.write is None:
        print(secret)
    else:
        _write(arguments.write, f"{secret}\n")
    return 0


def _for_store() -> str:
    from zmqgrad.transport.security import find_secret, store_secret  # loads ZeroMQ

    secret = find_secret()
    if secret is None:
        raise ConfigurationError(
            f"--role store derives a secret from that of the job: set {environment.SECRET_FILE} (or "
            f"{environment.SECRET})"
        )
    return store_secret(secret).decode()


def _write(path: Path, text: str) -> None:
    try:
        # With O_EXCL, nobody can have opened the file, or a link to it, before its mode was set.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigurationError(
            f"{path} exists, and processes of a job may use its secret: remove it, or choose another path"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror or error}") from error
