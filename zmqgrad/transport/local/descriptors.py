"""Names of local endpoints, which tell the process that listens there; and descriptors that are free."""

from __future__ import annotations

import errno
import os
import re
import secrets

from zmqgrad.errors import TransportError

_PROCESS = re.compile(r"@zmqgrad-[a-z]+-(\d+)-")
_LIMIT = re.compile(r"^Max open files +(\d+)", re.MULTILINE)


def abstract_endpoint(purpose: str) -> str:
    """Returns a new ipc endpoint without a file, which names this process and cannot be guessed."""
    return f"ipc://@zmqgrad-{purpose}-{os.getpid()}-{secrets.token_hex(16)}"


def named_process(endpoint: str) -> int:
    """Returns the id of the process that ``endpoint`` names; 0 if it has another form."""
    named = _PROCESS.search(endpoint)
    return 0 if named is None else int(named[1])


def check_can_open(needed: int, what: str) -> None:
    """Checks that this process can open ``needed`` descriptors: libzmq aborts it if a few are missing.

    Raises:
        TransportError: if it cannot; the text begins with ``what``, which then fails.
    """
    try:
        with open("/proc/self/limits") as limits:
            limit = _LIMIT.search(limits.read())
        used = len(os.listdir("/proc/self/fd"))
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):  # there is none
            raise TransportError(f"{what}: {e.strerror}") from e
        return
    if limit is not None and used + needed > int(limit[1]):
        raise TransportError(
            f"{what}: this process has {used} open files of {limit[1]} allowed, and {needed} more must be "
            f"free: raise the limit (ulimit -n)"
        )
