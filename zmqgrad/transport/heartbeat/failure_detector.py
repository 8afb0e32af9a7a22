"""The failure detector: what silence and connection errors mean for a peer.

Pure, except for :func:`is_reachable`. It distinguishes four states of a peer:

    dead          its kernel refuses connections: lost at once on one host. Between hosts a firewall may have
                  refused them: lost when that has lasted for ``LivenessTimeouts.refused``
    unreachable   its host does not acknowledge packets: lost after ``LivenessTimeouts.remote``
    frozen, slow  its kernel acknowledges, but the process does not reply: *suspected*, and lost only after
                  ``LivenessTimeouts.frozen``, as a loaded machine can delay a process for long
    alive         it replies

Silence is counted in the time that the monitoring thread was running: a process that was itself stopped or
delayed does not suspect its peers for that.
"""

from __future__ import annotations

import enum
import logging
import socket as sockets
import threading
from typing import NamedTuple

from zmqgrad.errors import ConfigurationError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.local import is_listening
from zmqgrad.transport.local.channels import channel_endpoint

logger = logging.getLogger(__name__)

PINGS = 3
"""A peer is suspected after this many pings in a row without a reply."""

PROBE_SECONDS = 1.0
"""Timeout of a tcp connection attempt. A timeout does not prove that the peer is dead."""


REFUSED_SECONDS = 3.0
"""Default of ``LivenessTimeouts.refused``."""

RETRY_SECONDS = 0.25
"""How long after a refused connection, or one for which there was no network, the next attempt follows."""


class LivenessTimeouts(NamedTuple):
    """Timeouts of the failure detector, in seconds.

    Args:
        local: silence until a peer on this host is suspected.
        remote: how long a host may be unreachable until its peers are lost.
        frozen: silence until a peer is lost whose kernel still acknowledges; 0 means never.
        refused: how long a peer on another host may refuse connections until it is lost.
    """

    local: float = 3.0
    remote: float = 10.0
    frozen: float = 120.0
    refused: float = REFUSED_SECONDS

    def check(self) -> LivenessTimeouts:
        """Validates the values and returns this object.

        Raises:
            ConfigurationError: if a timeout is not positive.
        """
        for name, value in self._asdict().items():
            if not (value > 0 or (name == "frozen" and value == 0)):
                raise ConfigurationError(
                    f"the liveness limit {name!r} must be above 0 seconds, not {value!r}"
                )
        return self


class LivenessChange(enum.Enum):
    """A change in the state of a peer."""

    NOTHING = enum.auto()
    SUSPECTED = enum.auto()
    RECOVERED = enum.auto()
    FROZEN = enum.auto()


class FailureDetector:
    """The state of one peer, updated by its replies and by time.

    Args:
        suspect_after: seconds of silence after which the peer is suspected.
        frozen: seconds of silence until it is lost; 0 means never.
    """

    def __init__(self, suspect_after: float, frozen: float, now: float) -> None:
        self.interval = suspect_after / PINGS
        self.suspected = False
        self.last_reply_at = now
        self._suspect_after = suspect_after
        self._frozen = max(frozen, 2 * self.interval) if frozen else 0.0  # one ping may be under way
        self.silence = 0.0
        self._ticked = now

    def on_reply(self, now: float) -> LivenessChange:
        """Records a reply of the peer."""
        self.silence = 0.0
        self._ticked = self.last_reply_at = now
        if self.suspected:
            self.suspected = False
            return LivenessChange.RECOVERED
        return LivenessChange.NOTHING

    def restart(self, now: float) -> None:
        """Counts silence from now on: nothing could be sent to the peer."""
        self.silence, self._ticked = 0.0, now

    def tick(self, now: float) -> LivenessChange:
        """Updates the silence. All replies that arrived before ``now`` must have been recorded."""
        # A running thread ticks in this time. Anything beyond means that this thread was stopped, and sent no
        # ping that the peer could have replied to.
        self.silence += min(now - self._ticked, self.interval)
        self._ticked = now
        if self._frozen and self.silence >= self._frozen:
            return LivenessChange.FROZEN
        if self.silence >= self._suspect_after and not self.suspected:
            self.suspected = True
            return LivenessChange.SUSPECTED
        return LivenessChange.NOTHING


class Refusals:
    """Measures for how long a peer has refused connections, in the time that this thread was running."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: float | None = None

    def refused(self, now: float) -> float:
        """Records a refused connection. Returns for how many seconds all of them were refused."""
        if self._last is not None:
            self.seconds += min(now - self._last, 2 * RETRY_SECONDS)
        self._last = now
        return self.seconds

    def clear(self) -> None:
        """Records an accepted connection."""
        self.seconds, self._last = 0.0, None


def is_reachable(endpoint: str, refused_seconds: float = 0.0) -> bool:
    """Whether a process listens at ``endpoint``. True if that is unknown.

    An endpoint of another host counts as unreachable after it refused connections for ``refused_seconds``.
    """
    if endpoint.startswith("ipc://"):
        return is_listening(channel_endpoint(endpoint))
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("tcp", "heartbeat"):
        return True
    deadline = Deadline.after(0.0 if is_on_this_host(endpoint) else refused_seconds)
    while True:
        try:
            sockets.create_connection(host_and_port(address), PROBE_SECONDS).close()
        except ConnectionRefusedError:
            if deadline.passed():
                return False
            threading.Event().wait(RETRY_SECONDS)  # no event reports when it would be accepted
            continue
        except OSError as e:
            logger.debug("cannot determine whether %s is reachable: %s", endpoint, e)
        return True


def is_on_this_host(endpoint: str) -> bool:
    """Whether ``endpoint`` is an ipc or loopback address."""
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("tcp", "heartbeat"):
        return True
    host = host_and_port(address)[0]
    return host == "::1" or host.startswith("127.")


def host_and_port(address: str) -> tuple[str, int]:
    """Splits ``host:port`` or ``host:port/anything``."""
    host, _, port = address.partition("/")[0].rpartition(":")
    return host.strip("[]"), int(port)
