"""Notices: what a request server says unasked, on a connection that a client opens for nothing else.

One connection carries them in order, so none is lost while it holds: a client that asks for notices of
something, once it has been told that the connection is known, gets all that follow the answer. (Through a PUB
socket the first could be lost, and each took two hops more to a thread.) When it breaks, what was said
meanwhile is lost; the client is told, so that it can look again.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable

from zmqgrad.errors import ClosedError, ProtocolError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.requests.line import FIRST_PAUSE, LONGEST_PAUSE, Line
from zmqgrad.transport.security import Keys
from zmqgrad.wire.codec import decode
from zmqgrad.wire.messages import Message

logger = logging.getLogger(__name__)

MEETING_SECONDS = 10.0
"""How long one attempt to be known may take."""


class NoticeListener:
    """Listens to the server at ``address`` in a thread named ``<name>-notices``; connects anew by itself.

    Args:
        keys: those of the job; None: nothing is encrypted.
        introduce: called there with a way to ask and a name, on each new connection: has the server know the
            connection by that name. Raises ``ProtocolError`` if the server would not.
        on_notice: called there with each notice: must be quick, and must not raise.
        on_broken: called there when a connection that was known breaks, but by :meth:`close`.
    """

    def __init__(
        self,
        name: str,
        address: str,
        keys: Keys | None,
        introduce: Callable[[Callable[[Message], Message], str], None],
        on_notice: Callable[[Message], None],
        on_broken: Callable[[], None],
    ) -> None:
        self.name = name
        self.address = address
        self.malformed = 0
        self._introduce = introduce
        self._on_notice = on_notice
        self._on_broken = on_broken
        self._closing = threading.Event()
        self._line = Line(address, name, keys, self._closing)
        self._changed = threading.Condition()  # guards the two that follow
        self._known_as = ""
        self._failure: ProtocolError | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name}-notices", daemon=True)
        self._thread.start()

    @property
    def known_as(self) -> str:
        """By what name the server knows the connection; empty while it does not."""
        return self._known_as

    def wait_known(self, deadline: Deadline, but_not: str = "") -> str:
        """The name by which the server knows the connection, once it does, and it is not ``but_not``.

        Raises:
            TimeoutError: if that has not come by ``deadline``.
            ClosedError: after, or by, :meth:`close`.
            ProtocolError: if the server does not understand, or (``SecretError``) has another secret.
        """
        with self._changed:
            while self._known_as in ("", but_not):
                if self._closing.is_set():
                    raise ClosedError(f"{self.name} does not listen to {self.address} any more")
                if self._failure is not None:
                    raise self._failure
                if deadline.passed():
                    raise TimeoutError(f"no notices from {self.address}")
                self._changed.wait(deadline.left_or_none())
            return self._known_as

    def _become(self, known_as: str, failure: ProtocolError | None = None) -> None:
        with self._changed:
            self._known_as, self._failure = known_as, failure
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._listen()
        except Exception:
            logger.exception("%s: the notices of %s are lost from here on", self.name, self.address)
        finally:
            self._line.disconnect()
            self._closing.set()
            self._become("")

    def _listen(self) -> None:
        """Through the life of one connection."""
        failure = None
        name = secrets.token_hex(16)
        try:
            self._introduce(self._ask, name)
            self._become(name)
            while True:
                for frame in self._line.hear():
                    self._take(frame)
        except ProtocolError as e:
            logger.warning("%s: left %s: %s", self.name, self.address, e)
            failure = e
        except (OSError, ClosedError) as e:  # a TimeoutError is one, too
            logger.debug("%s: the connection to %s has ended: %s", self.name, self.address, e)
        self._line.disconnect()
        was_known = self._known_as
        self._become("", failure)
        if was_known and not self._closing.is_set():
            self._on_broken()
        self._closing.wait(FIRST_PAUSE if failure is None else LONGEST_PAUSE)

    def _ask(self, message: Message) -> Message:
        return self._line.request(message, MEETING_SECONDS)

    def _take(self, frame: bytes | memoryview | None) -> None:
        try:
            if frame is None:
                raise ProtocolError("a notice of several frames (expected one)")
            message = decode(frame)[1]
        except ProtocolError as e:
            self.malformed += 1
            if self.malformed == 1:
                logger.warning("%s: dropped a malformed notice from %s (%s)", self.name, self.address, e)
            return
        self._on_notice(message)

    def close(self) -> None:
        """Stop listening. Idempotent; safe from any thread."""
        self._closing.set()
        self._line.hang_up()
        with self._changed:
            self._changed.notify_all()

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the thread; gives its name if it has not ended by ``deadline``."""
        if self._thread is not threading.current_thread():
            self._thread.join(deadline.left_or_none())
        return [self._thread.name] if self._thread.is_alive() else []
