"""Notices: what a request server says unasked, on a connection that a client opens for nothing else.

One connection carries them in order, so none is lost while it holds: a client that asks for notices of
something, once it has been told that the connection is known, gets all that follow the answer. (Through a PUB
socket the first could be lost, and each took two hops more to a thread.) When it breaks, what was said
meanwhile is lost; the client is told, so that it can look again.

What is to be done about a notice is done by the thread that has read it, while another reads on: so nothing
wakes a thread but the notice itself.
"""

from __future__ import annotations

import logging
import secrets
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable

from zmqgrad.errors import ClosedError, ProtocolError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.engine_pool import Source, Task
from zmqgrad.transport.gate import make_gate
from zmqgrad.transport.requests.line import FIRST_PAUSE, LONGEST_PAUSE, Line
from zmqgrad.transport.security import Keys
from zmqgrad.wire.codec import decode
from zmqgrad.wire.messages import Message

logger = logging.getLogger(__name__)

MEETING_SECONDS = 10.0
"""How long one attempt to be known may take."""


class NoticeListener:
    """Listens to the server at ``address``, and connects anew by itself. A :class:`Source` of tasks.

    Args:
        keys: those of the job; None: nothing is encrypted.
        introduce: called with a way to ask and a name, on each new connection: has the server know the
            connection by that name. Raises ``ProtocolError`` if the server would not.
        on_notice: called with each notice, in order: must be quick, and must not raise. Gives what is to be
            done about it, which may take its time, and in which nothing must be raised.
        on_broken: called when a connection that was known breaks, but by :meth:`close`.
        attend: has threads of others read this, and do what is to be done (``EnginePool.attend``); None: a
            thread named ``<name>-notices`` does all that, one after the other.
    """

    def __init__(
        self,
        name: str,
        address: str,
        keys: Keys | None,
        introduce: Callable[[Callable[[Message], Message], str], None],
        on_notice: Callable[[Message], Iterable[Task] | None],
        on_broken: Callable[[], None],
        attend: Callable[[Source], None] | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.malformed = 0
        self._introduce = introduce
        self._on_notice = on_notice
        self._on_broken = on_broken
        self._closing = threading.Event()
        self._line = Line(address, name, keys, self._closing)
        self._gate = make_gate()
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()  # guards the three that follow
        self._known_as = ""
        self._failure: ProtocolError | None = None
        self._ended = False
        if attend is None:
            threading.Thread(target=self._run, name=f"{name}-notices", daemon=True).start()
        else:
            attend(self)

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
        while (task := self.read()) is not None:
            task()

    # ---- a source of tasks ------------------------------------------------------------------------------

    def stand_by(self) -> bool:
        """As :class:`Source`."""
        return self._gate.wait()

    def take(self) -> bool:
        """As :class:`Source`."""
        return self._gate.take()

    def pass_on(self) -> None:
        """As :class:`Source`."""
        self._gate.open(at_once=bool(self._tasks) or not self._known_as)

    def has_more(self) -> bool:
        """As :class:`Source`."""
        return bool(self._tasks)

    def read(self) -> Task | None:
        """As :class:`Source`. Connects, if need be."""
        try:
            while not self._closing.is_set():
                if self._tasks:
                    return self._tasks.popleft()
                self._live_on()
        except Exception:
            logger.exception("%s: the notices of %s are lost from here on", self.name, self.address)
        self._end()
        return None

    def _live_on(self) -> None:
        """Hear what comes next, after connecting if there is no connection; or find that it has ended."""
        failure = None
        try:
            if not self._known_as:
                self._meet()
            if self._gate.poll(None):
                for frame in self._line.hear():
                    self._take(frame)
            return
        except ProtocolError as e:
            logger.warning("%s: left %s: %s", self.name, self.address, e)
            failure = e
        except (OSError, ClosedError) as e:  # a TimeoutError is one, too
            logger.debug("%s: the connection to %s has ended: %s", self.name, self.address, e)
        was_known = self._known_as
        self._part(failure)
        if was_known and not self._closing.is_set():
            self._on_broken()
        self._closing.wait(FIRST_PAUSE if failure is None else LONGEST_PAUSE)

    def _meet(self) -> None:
        name = secrets.token_hex(16)
        self._introduce(self._ask, name)
        self._gate.register(self._line.fileno(), select.POLLIN)
        self._become(name)

    def _part(self, failure: ProtocolError | None) -> None:
        if self._known_as:
            self._gate.unregister(self._line.fileno())
        self._line.disconnect()
        self._become("", failure)

    def _end(self) -> None:
        """Nobody reads any more."""
        self._part(None)
        self._closing.set()
        self._gate.close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

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
        self._tasks.extend(self._on_notice(message) or ())

    def close(self) -> None:
        """Stop listening. Idempotent; safe from any thread."""
        self._closing.set()
        self._line.hang_up()
        with self._changed:
            self._changed.notify_all()

    def join(self, deadline: Deadline) -> list[str]:
        """Wait until nobody reads any more; gives a name if that has not come by ``deadline``."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self._ended, deadline.left_or_none())
        return [] if ended else [f"{self.name}-notices"]
