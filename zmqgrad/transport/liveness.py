"""Does a peer live? What is heard of it, over time, becomes a judgement. Pure, but for :func:`answers`.

Four things can be the matter with a peer, and they are told apart:

    dead          its kernel has closed the connection, and refuses another: lost at once
    unreachable   its host does not acknowledge what is sent: lost after ``Limits.remote``
    frozen, slow  its kernel acknowledges, but the process says nothing: *suspected*, and lost only after
                  ``Limits.frozen``, for a machine under load can keep a process waiting for long
    alive         it answers

Silence is counted in the watcher's own waking time: a watcher that was itself stopped, or kept waiting, holds
that against nobody.
"""

from __future__ import annotations

import enum
import logging
import socket as sockets
from typing import NamedTuple

from zmqgrad.errors import ConfigurationError

logger = logging.getLogger(__name__)

PINGS = 3
"""A peer is suspected when so many pings in a row went unanswered."""

PROBE_SECONDS = 1.0
"""How long a tcp connection may take; a host that does not answer at all proves nothing."""


class Limits(NamedTuple):
    """Seconds of silence: until suspicion on one host, until loss between hosts, until a frozen peer is lost.

    ``frozen`` 0: never.
    """

    local: float = 3.0
    remote: float = 10.0
    frozen: float = 120.0

    def check(self) -> Limits:
        """Itself.

        Raises:
            ConfigurationError: if a limit cannot be right.
        """
        for name, value in self._asdict().items():
            if not (value > 0 or (name == "frozen" and value == 0)):
                raise ConfigurationError(
                    f"the liveness limit {name!r} must be above 0 seconds, not {value!r}"
                )
        return self


class Judgement(enum.Enum):
    """What has changed about a peer."""

    NOTHING = enum.auto()
    SUSPECTED = enum.auto()
    RECOVERED = enum.auto()
    FROZEN = enum.auto()


class Vital:
    """What is known of one peer: fed with what is heard, and with the time.

    Args:
        patience: seconds of silence until it is suspected.
        frozen: seconds of silence until it is lost; 0 for never.
    """

    def __init__(self, patience: float, frozen: float, now: float) -> None:
        self.interval = patience / PINGS
        self.suspected = False
        self.last_heard = now
        self._patience = patience
        self._frozen = frozen
        self.silence = 0.0
        self._ticked = now

    def heard(self, now: float) -> Judgement:
        """The peer said something."""
        self.silence = 0.0
        self._ticked = self.last_heard = now
        if self.suspected:
            self.suspected = False
            return Judgement.RECOVERED
        return Judgement.NOTHING

    def tick(self, now: float) -> Judgement:
        """Time has passed; what was heard before ``now`` has been taken in."""
        # Had this thread run, it would have been here twice by then: what is beyond was its own absence.
        self.silence += min(now - self._ticked, 2 * self.interval)
        self._ticked = now
        if self._frozen and self.silence >= self._frozen:
            return Judgement.FROZEN
        if self.silence >= self._patience and not self.suspected:
            self.suspected = True
            return Judgement.SUSPECTED
        return Judgement.NOTHING


def answers(endpoint: str) -> bool:
    """Does anybody listen at ``endpoint``? True as well if that cannot be told."""
    if endpoint.startswith("ipc://"):
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
            probe.setblocking(False)
            return probe.connect_ex(unix_path(endpoint)) == 0
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("tcp", "pulse"):
        return True
    try:
        sockets.create_connection(host_and_port(address), PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except OSError as e:
        logger.debug("cannot tell whether %s answers: %s", endpoint, e)
    return True


def unix_path(endpoint: str) -> str:
    """The path of an ipc endpoint as the system takes it."""
    path = endpoint.removeprefix("ipc://")
    return "\0" + path[1:] if path.startswith("@") else path


def host_and_port(address: str) -> tuple[str, int]:
    """Of ``host:port``, or ``host:port/anything``."""
    host, _, port = address.partition("/")[0].rpartition(":")
    return host.strip("[]"), int(port)
