"""The token of a user on this host, which authenticates his processes where a job has no secret.

The first process makes it, at random, in a file that only its user can read. So processes need no setting to
meet at a loopback address, and no other user can take part. Processes of the same user could attach a
debugger to each other anyway; who must separate his own jobs gives each a secret.

It is kept below the home directory, or in the directory of temporary files where there is none.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Callable

from zmqgrad import environment
from zmqgrad.errors import ConfigurationError

TOKEN_BYTES = 32


def read_token() -> bytes:
    """Returns the token of this user, which is made if there is none.

    Raises:
        ConfigurationError: if no directory is fit for it: names each, and why.
    """
    problems: list[str] = []
    for directory in directories():
        try:
            return _read_or_make(directory)
        except OSError as e:
            problems.append(f"{directory}: {e.strerror or e}")
    raise ConfigurationError(
        f"there is no secret, and no place for a token that only processes of this user can read "
        f"({'; '.join(problems)}): give all processes of the job the same {environment.SECRET} "
        f"(`zmqgrad secret` makes one)"
    )


def directories() -> list[str]:
    """Returns where the token may be, in order; the same for all processes with the same environment."""
    state = environment.state_home() or os.path.expanduser(os.path.join("~", ".local", "state"))
    found = [os.path.join(state, "zmqgrad")] if os.path.isabs(state) else []
    return [*found, os.path.join(tempfile.gettempdir(), f"zmqgrad-{os.geteuid()}")]


def _read_or_make(directory: str) -> bytes:
    os.makedirs(directory, mode=0o700, exist_ok=True)
    _check(os.lstat(directory), stat.S_ISDIR, directory)
    path = os.path.join(directory, "token")
    try:
        return _read(path)
    except FileNotFoundError:
        _make(path)
    return _read(path)


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        _check(os.fstat(file.fileno()), stat.S_ISREG, path)
        token = file.read(TOKEN_BYTES + 1)
    if len(token) != TOKEN_BYTES:
        raise OSError(f"{path} has not {TOKEN_BYTES} bytes: remove it")
    return token


def _make(path: str) -> None:
    """Makes the file whole or not at all; another process may make it at the same time."""
    draft = f"{path}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(TOKEN_BYTES))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # the other was first
    finally:
        os.unlink(draft)


def _check(status: os.stat_result, is_kind: Callable[[int], bool], path: str) -> None:
    """Checks that only this user can change or read what is at ``path``."""
    if not is_kind(status.st_mode):
        raise OSError(f"{path} is a link, or another kind of file")
    if status.st_uid != os.geteuid():
        raise OSError(f"{path} belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise OSError(f"other users have access to {path}: chmod go= {path}")
