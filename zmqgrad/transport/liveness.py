"""Does a peer live? What is heard of it, over time, becomes a judgement. Pure, but for :func:`answers`.

Four things can be the matter with a peer, and they are told apart:

    dead          its kernel refuses a connection: lost at once on one host, where that is the kernel's word.
                  Between hosts a firewall may have said so: lost when it has lasted for ``Limits.refused``
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
import threading
from typing import NamedTuple

from zmqgrad.errors import ConfigurationError
from zmqgrad.runtime.clock import Deadline

logger = logging.getLogger(__name__)

PINGS = 3
"""A peer is suspected when so many pings in a row went unanswered."""

PROBE_SECONDS = 1.0
"""How long a tcp connection may take; a host that does not answer at all proves nothing."""


REFUSED_SECONDS = 3.0

RETRY_SECONDS = 0.25
"""How often a connection that was refused is tried again."""


class Limits(NamedTuple):
    """Seconds of silence: until suspicion on one host, until loss between hosts, until a frozen peer is lost.

    ``frozen`` 0: never. ``refused``: between hosts, a peer is lost that has refused connections for so long.
    """

    local: float = 3.0
    remote: float = 10.0
    frozen: float = 120.0
    refused: float = REFUSED_SECONDS

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


class Refusals:
    """Counts for how long the connections to a peer have been refused, in the watcher's own waking time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: float | None = None

    def refused(self, now: float) -> float:
        """Another one was refused. Returns for how many seconds that has been so."""
        if self._last is not None:
            self.seconds += min(now - self._last, 2 * RETRY_SECONDS)
        self._last = now
        return self.seconds

    def clear(self) -> None:
        """One was accepted."""
        self.seconds, self._last = 0.0, None


def answers(endpoint: str, refused_seconds: float = 0.0) -> bool:
    """Does anybody listen at ``endpoint``? True as well if that cannot be told.

    An endpoint of another host has to refuse connections for ``refused_seconds``.
    """
    if endpoint.startswith("ipc://"):
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
            probe.setblocking(False)
            return probe.connect_ex(unix_path(endpoint)) == 0
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("tcp", "pulse"):
        return True
    deadline = Deadline.after(0.0 if is_on_this_host(endpoint) else refused_seconds)
    while True:
        try:
            sockets.create_connection(host_and_port(address), PROBE_SECONDS).close()
        except ConnectionRefusedError:
            if deadline.passed():
                return False
            threading.Event().wait(RETRY_SECONDS)  # nothing tells when it will be accepted
            continue
        except OSError as e:
            logger.debug("cannot tell whether %s answers: %s", endpoint, e)
        return True


def is_on_this_host(endpoint: str) -> bool:
    """Is no network in between: ipc, or a loopback address?"""
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("tcp", "pulse"):
        return True
    host = host_and_port(address)[0]
    return host == "::1" or host.startswith("127.")


def unix_path(endpoint: str) -> str:
    """The path of an ipc endpoint as the system takes it."""
    path = endpoint.removeprefix("ipc://")
    return "\0" + path[1:] if path.startswith("@") else path


def host_and_port(address: str) -> tuple[str, int]:
    """Of ``host:port``, or ``host:port/anything``."""
    host, _, port = address.partition("/")[0].rpartition(":")
    return host.strip("[]"), int(port)
