"""A server of queries for tests, and the service that it has."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from zmqgrad.runtime.clock import MONOTONIC, Clock
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.query.server import QueryServer, Route
from zmqgrad.transport.security import Keys, load_keys
from zmqgrad.wire.messages import Message, StoreAdd, StoreDone, StoreGet, StoreNumber, StoreValue

PATIENCE = 20.0
LOOPBACK = "tcp://127.0.0.1:*"

_ours = load_keys("the secret of this job, and no other")
_theirs = load_keys("the secret of another job altogether")
assert _ours is not None
assert _theirs is not None
OURS, THEIRS = _ours, _theirs


class Echo:
    """Replies to a ``get`` with its key; parks those of ``park`` until an ``add``, or until they are late.

    The value of key ``large <n>`` has n bytes. It does not know repeated queries from others, but replies to
    a parked one again as it did before, as a store does: the client may have reconnected meanwhile.
    """

    def __init__(self, server: QueryServer) -> None:
        self.server = server
        self.parked: list[tuple[Route, int, int]] = []
        self._replies: dict[tuple[int, int], StoreValue] = {}
        self.received: list[tuple[int, int]] = []
        self._late_at: list[float] = []
        self.arrived = threading.Semaphore(0)

    def handle(self, route: Route, client: int, number: int, query: Message) -> None:
        self.received.append((client, number))
        match query:
            case StoreGet("park") if (client, number) in self._replies:
                self.server.reply(route, number, self._replies[client, number])
            case StoreGet("park", timeout):
                self.parked.append((route, client, number))
                self._late_at.append(MONOTONIC.now() + timeout)
                self.server.wake_by(self._late_at[-1])
                self.arrived.release()
            case StoreGet("fail"):
                raise LookupError("a fault of the service")
            case StoreGet(key) if key.startswith("large"):
                self.server.reply(route, number, StoreValue(bytes(int(key.split()[1]))))
            case StoreGet(key):
                self.server.reply(route, number, StoreValue(key.encode()))
            case StoreAdd(_, amount):
                self._reply_to_parked(b"released")
                self.server.reply(route, number, StoreNumber(amount))

    def _reply_to_parked(self, value: bytes) -> None:
        for route, client, number in self.parked:
            reply = self._replies[client, number] = StoreValue(value)
            self.server.reply(route, number, reply)
        self.parked.clear()
        self._late_at.clear()

    def settle(self) -> None:
        pass

    def do_due(self, now: float) -> float:
        if min(self._late_at, default=math.inf) <= now:
            self._reply_to_parked(b"too late")
        return min(self._late_at, default=math.inf)

    def stopping(self) -> None:
        self._reply_to_parked(b"stopping")

    def stopped(self) -> None:
        pass


class Running:
    """A server, its service and its thread."""

    def __init__(
        self,
        address: str = LOOPBACK,
        keys: Keys | None = None,
        fast_path: bool = True,
        clock: Clock = MONOTONIC,
        listen_fd: int | None = None,
    ) -> None:
        self.server = QueryServer(
            "echo", address, keys=keys, listen_fd=listen_fd, fast_path=fast_path, clock=clock
        )
        self.service = Echo(self.server)
        self.thread = threading.Thread(target=self.server.serve, args=(self.service,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.stop()
        self.server.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def in_thread(call: Callable[[], Message]) -> Promise[Message]:
    """Runs ``call`` in another thread."""
    outcome: Promise[Message] = Promise()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as e:
            outcome.set_exception(e)

    threading.Thread(target=work, daemon=True).start()
    return outcome


DONE = StoreDone()
