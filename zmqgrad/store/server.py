"""The store's server: one thread that drives the state machine over a request socket and a notice socket."""

from __future__ import annotations

import logging
import threading
from collections import deque

from zmqgrad.errors import StoreError
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.store.state import Effect, Notice, Reply, State
from zmqgrad.store.topics import key_of, sync_topic, topic_of
from zmqgrad.transport.notices import NoticePublisher
from zmqgrad.transport.requests import RequestServer
from zmqgrad.wire.messages import Message, Refusal, StorePing, StorePong, StoreRefused, StoreWatchKey

logger = logging.getLogger(__name__)

SUBSCRIPTION_SECONDS = 30.0
"""How long a watch may wait for its subscription to take effect; that is a matter of milliseconds."""

CLOSE_SECONDS = 10.0
"""How long closing may take; it is a matter of milliseconds, too."""

Asker = tuple[bytes, int]


class StoreServer:
    """Serves a store at ``address`` (see :func:`~zmqgrad.store.addresses.listening_address`).

    Notices are published at a port beside it, that the system picks; clients are told by ``STORE_PONG``.

    Raises:
        AddressInUseError, ConfigurationError, TransportError: if it cannot listen there.
    """

    def __init__(self, address: str, *, name: str = "zmqgrad-store", clock: Clock = MONOTONIC) -> None:
        self.name = name
        self._clock = clock
        self._no_newcomers = False
        self._state = State()
        self._registrations: deque[tuple[float, bytes, Asker, StoreWatchKey]] = deque()  # by deadline
        self._requests = RequestServer(name, address, clock=clock)
        interface = self._requests.endpoint.rpartition(":")[0]
        try:
            self._publisher = NoticePublisher(
                self._requests.context, f"{interface}:*", self._requests.incarnation, self._abandoned
            )
        except BaseException:
            self._requests.stop()
            self._requests.context.term()
            raise
        self._thread = threading.Thread(target=self._run, name=f"{name}-server", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where it listens, as ZeroMQ writes it."""
        return self._requests.endpoint

    @property
    def port(self) -> int:
        """The tcp port at which it listens."""
        return self._requests.port

    def _run(self) -> None:
        try:
            self._requests.serve(self, self._publisher)
        except Exception:
            logger.exception("the store at %s is lost", self.endpoint)
        finally:
            self._publisher.close()

    # ---- the service, called in the server's thread -----------------------------------------------------

    def handle(self, client: bytes, message_id: int, message: Message) -> None:
        """Answer a query, now or later."""
        asker = (client, message_id)
        match message:
            case StorePing() if self._no_newcomers:
                pass  # its client asks again, until another store listens here
            case StorePing(nonce=nonce):
                pong = StorePong(nonce, self._publisher.endpoint, self._state.revision)
                self._requests.reply(client, message_id, pong)
            case StoreWatchKey():
                self._register(message, asker)
            case _:
                self._carry_out(self._state.apply(message, asker, self._clock.now()))

    def misunderstood(self, client: bytes, message_id: int, why: str) -> None:
        """Refuse what could not be read."""
        self._requests.reply(client, message_id, StoreRefused(Refusal.INVALID, why))

    def _register(self, query: StoreWatchKey, asker: Asker) -> None:
        """Answer once the subscription of the asker is known to be in place (DESIGN 16.1)."""
        topic = sync_topic(query.nonce)
        deadline = self._clock.now() + SUBSCRIPTION_SECONDS
        self._registrations.append((deadline, topic, asker, query))
        self._publisher.when_subscribed(
            topic, lambda: self._carry_out(self._state.apply(query, asker, self._clock.now()))
        )

    def _abandoned(self, topic: bytes) -> None:
        key = key_of(topic)
        if key is not None:
            self._state.unwatch(key)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if type(effect) is Reply:
                client, message_id = effect.asker
                self._requests.reply(client, message_id, effect.message)
            elif type(effect) is Notice:
                self._publisher.publish(topic_of(effect.key), effect.message)

    def next_due(self) -> float:
        """When the time of a parked query or of a registration is up."""
        due = self._state.next_deadline()
        return min(due, self._registrations[0][0]) if self._registrations else due

    def do_due(self, now: float) -> None:
        """Refuse those whose time is up."""
        self._carry_out(self._state.expire(now))
        while self._registrations and self._registrations[0][0] <= now:
            _, topic, (client, message_id), query = self._registrations.popleft()
            if self._publisher.expect_no_more(topic):
                said = f"no subscription came to {self._publisher.endpoint} for {query.key!r}"
                self._requests.reply(client, message_id, StoreRefused(Refusal.TIMEOUT, said))

    def stopping(self) -> None:
        """Refuse all who wait."""
        self._carry_out(self._state.close())

    # ---- from any thread --------------------------------------------------------------------------------

    def refuse_newcomers(self) -> None:
        """Answer no pings from now on: a client's first question, and a new watch's."""
        self._no_newcomers = True

    def close(self) -> None:
        """Stop serving; who waits is refused. Idempotent; waits for the thread and the sockets.

        Raises:
            StoreError: if the thread does not end in time.
        """
        self._requests.stop()
        self._thread.join(Deadline.after(CLOSE_SECONDS).left_or_none())
        if self._thread.is_alive():
            raise StoreError(f"the thread {self._thread.name} has not ended within {CLOSE_SECONDS} s")
        self._requests.context.term()

    def statistics(self) -> dict[str, int]:
        """Counters and sizes, read without a lock: each is right, all together perhaps not of one moment."""
        requests = self._requests
        return {
            **self._state.statistics(),
            "requests": requests.requests,
            "malformed": requests.malformed,
            "undeliverable": requests.undeliverable,
            "published": self._publisher.published,
        }

    def __repr__(self) -> str:
        return f"<StoreServer at {self.endpoint}: {self._state.statistics()}>"


class Servers:
    """The servers of this process by address, so that several masters can share one if they ask to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _shared
        self._shared: dict[str, tuple[StoreServer, int]] = {}  # and how many use it

    def lend(self, address: str, shared: bool) -> StoreServer:
        """A server at ``address``: with ``shared`` the one that is there, if it is shared, too."""
        if not shared or address.endswith(":*"):
            return StoreServer(address)
        with self._lock:
            server, users = self._shared.get(address) or (StoreServer(address), 0)
            self._shared[address] = (server, users + 1)
            return server

    def give_back(self, server: StoreServer) -> None:
        """Close ``server``, unless others still use it."""
        with self._lock:
            for address, (shared, users) in self._shared.items():
                if shared is server and users > 1:
                    self._shared[address] = (server, users - 1)
                    return
                if shared is server:
                    del self._shared[address]
                    break
            server.close()


servers = Servers()
