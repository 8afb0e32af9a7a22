"""A client's connection to a store's server: queries, notifications, and readable errors."""

from __future__ import annotations

import logging
import re
import secrets
import threading

from zmqgrad import environment
from zmqgrad.errors import (
    AuthenticationError,
    ClosedError,
    ProtocolError,
    QueueEmptyError,
    StoreError,
    StoreTimeoutError,
    TransportError,
)
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.thread_pool import Task
from zmqgrad.store.addresses import connecting_address, doctor_hint, why_unknown
from zmqgrad.store.arguments import show_key
from zmqgrad.store.watch import RENEW_SECONDS, WatchRegistry, as_registration, unwatch_query, watch_query
from zmqgrad.store.watch_cache import ChangeNotification, Registration
from zmqgrad.store.watch_targets import Prefix, Target, topic_of
from zmqgrad.transport.query.client import QueryClient
from zmqgrad.transport.query.dealer import LocalAddress
from zmqgrad.transport.query.publisher import NONCE
from zmqgrad.transport.query.subscriber import Subscriber
from zmqgrad.transport.security import keys_for_store
from zmqgrad.wire.messages import (
    Message,
    Refusal,
    StoreChannel,
    StoreCheck,
    StoreMultiGet,
    StoreMultiSet,
    StorePing,
    StorePong,
    StoreRefused,
    StoreRenewWatches,
    StoreRevisions,
    StoreWait,
    StoreWatchChannel,
)

logger = logging.getLogger(__name__)

LATE_SECONDS = 0.25
"""How much longer than its timeout a client waits, to receive the server's own refusal."""

JOIN_SECONDS = 5.0

UNWATCH_SECONDS = 1.0
"""Time limit for ending a watch at the server."""


class NotSubscribedError(StoreError):
    """The server has not seen the subscription that a watch needs."""


_KINDS = {Refusal.MISSING: QueueEmptyError, Refusal.UNSUBSCRIBED: NotSubscribedError}


class Connection:
    """Connection to the server at ``host:port``; ``timeout`` (seconds) applies where none is given.

    ``secret`` and ``fast_path``: None for the value of the environment; ``local``: where a server of this
    process is reached.

    Safe to use from any thread. You must close it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        timeout: float,
        secret: str | bytes | None = None,
        fast_path: bool | None = None,
        local: LocalAddress | None = None,
    ) -> None:
        self.timeout = timeout
        self._host = host
        self._port = port
        self._address = connecting_address(host, port)
        self._keys = keys_for_store(secret)
        self._client = QueryClient(
            self._address,
            name=f"store-client-{secrets.token_hex(3)}",
            keys=self._keys,
            fast_path=environment.local_fast_path.resolve(fast_path),
        )
        if local is not None:  # without a route of this host to itself, nor a query to find out
            self._client.server.local = local
        self._watcher = secrets.randbits(63)
        self._subscriber: Subscriber | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards _subscriber and _closed
        self._publisher_lock = threading.Lock()  # guards the subscriber's connection, and what follows
        self._publisher_unknown = True  # or may have moved
        self._connected = 0  # how often the subscriber was connected
        self.watches = WatchRegistry(self._client.name, self._register, self._renew_watches)

    def request(self, query: Message, seconds: float) -> Message:
        """The reply to ``query`` within ``seconds``.

        Raises:
            StoreTimeoutError: if the server refuses for lack of time, or does not reply.
            StoreError: if the server refuses, or this is closed.
        """
        try:
            reply = self._client.request(query, seconds + LATE_SECONDS)
        except (TimeoutError, TransportError, ProtocolError) as e:
            raise self._translated(e, query, seconds) from e
        if type(reply) is StoreRefused:
            raise self._refused(query, seconds, reply)
        return reply

    def _translated(self, error: Exception, query: Message, seconds: float) -> StoreError:
        """An error of the transport as one about ``query``."""
        call = _name(query)
        if isinstance(error, TimeoutError):
            where = f"{self._host}:{self._port}"
            text = f"{call} timed out: no store answered at {where} within {seconds:.3g} s"
            if self._client.server.was_connected:
                return StoreTimeoutError(
                    f"{text}, though one did before: has its process ended, or was it stopped? [{error}]"
                )
            return StoreTimeoutError(
                f"{text}: is the master running, and is this its address?{why_unknown(self._host)} [{error}]"
                f"{doctor_hint(self._host, self._port)}"
            )
        if isinstance(error, AuthenticationError):
            return StoreError(
                f"{call}: cannot connect to {self._host}:{self._port}: {error}. Give all processes the same "
                f"{environment.SECRET} or {environment.SECRET_FILE} (or secret=..., --secret-file)"
            )
        if isinstance(error, ProtocolError):
            return StoreError(f"{call}: not understood by, or from, {self._address}: {error}")
        return StoreError(f"{call}: {error}")

    def _refused(self, query: Message, seconds: float, reply: StoreRefused) -> StoreError:
        where = f"the store at {self._host}:{self._port}"
        if reply.reason is Refusal.TIMEOUT:
            return StoreTimeoutError(
                f"{_name(query)}: wait timeout after {seconds:g} s at {where}: {reply.text}"
            )
        kind = _KINDS.get(reply.reason, StoreError)
        return kind(f"{_name(query)}: {where} refused: {reply.text}")

    def expect_no_restart(self) -> None:
        """As :meth:`~zmqgrad.store.TCPStore.expect_no_restart`."""
        self._client.server.restarts = False

    def ping(self) -> None:
        """Check that a store replies."""
        pong = self.request(StorePing(secrets.token_hex(8)), self.timeout)
        if type(pong) is not StorePong:
            raise StoreError(f"{self._address} replied to a ping with {type(pong).__name__}")

    # ---- watching ---------------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> list[Task]:
        tasks: list[Task] = []
        if isinstance(message, ChangeNotification):
            self.watches.on_notification(message, tasks.append)
        return tasks

    def _subscribe(self, *topics: bytes, deadline: Deadline) -> tuple[Subscriber, int]:
        """Subscribe to ``topics`` in that order, at the current address of the server's publisher.

        Returns:
            The subscriber, and the number of its connection.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self!r} is closed")
            if self._subscriber is None:
                self._subscriber = Subscriber(
                    self._client.name, self._on_message, self._on_broken, self.watches.serve_from
                )
            subscriber = self._subscriber
        with self._publisher_lock:  # one thread at a time requests the address
            if self._publisher_unknown:
                self._publisher_unknown = False
                try:
                    endpoint = self._find_publisher(deadline)
                    if endpoint != subscriber.endpoint:
                        subscriber.connect(endpoint, self._keys)
                        self._connected += 1
                except BaseException:
                    self._publisher_unknown = True
                    raise
            subscriber.subscribe(*topics)
            return subscriber, self._connected

    def _find_publisher(self, deadline: Deadline) -> str:
        """The endpoint of the server's publisher."""
        channel = self.request(StoreWatchChannel(), deadline.left())
        if type(channel) is not StoreChannel:
            raise StoreError(
                f"{self._address} replied with {type(channel).__name__} instead of a watch channel"
            )
        return connecting_address(self._host, channel.port)

    def _on_broken(self) -> None:
        """The connection for notifications broke; a restarted server may have another address."""
        self._publisher_unknown = True
        self.watches.on_disconnect()

    def _register(self, target: Target) -> Registration:
        """Watch ``target``. Each change after the returned state will be notified."""
        self._client.check_not_forked()
        deadline = Deadline.after(self.timeout)
        topic = topic_of(target)
        while True:
            nonce = secrets.token_hex(16)
            proof = NONCE + nonce.encode()
            subscriber, connection = self._subscribe(topic, proof, deadline=deadline)
            try:
                return as_registration(
                    self.request(watch_query(target, nonce, self._watcher), deadline.left())
                )
            except NotSubscribedError:
                # The subscription is late: the publisher has moved, or the connection is broken.
                with self._publisher_lock:
                    if connection != self._connected:
                        continue  # another thread has replaced the connection
                    subscriber.disconnect()
                    self._publisher_unknown = True
                self.watches.on_disconnect()  # the others' subscriptions are gone, too
            finally:
                subscriber.unsubscribe(proof)

    def unwatch_if_unwatched(self, target: Target) -> None:
        """Call this after a watch of ``target`` has ended or failed."""
        subscriber = self._subscriber
        if subscriber is None or self._client.is_inherited or self.watches.is_watched(target):
            return  # in a fork, a thread of the parent may hold the lock of its subscriber
        subscriber.unsubscribe(topic_of(target))
        try:
            self.request(unwatch_query(target, self._watcher), min(self.timeout, UNWATCH_SECONDS))
            if self.watches.is_watched(target):  # a watch began meanwhile, and this has ended it too
                self.watches.refresh(target)
        except (StoreError, ClosedError) as e:
            logger.debug("%r: the server will forget the watch of %r later: %s", self, target, e)

    def _renew_watches(self) -> None:
        """Renew watches at the server, and read missed changes again. Called every few seconds."""
        targets = self.watches.live_targets()
        keys = tuple(target for target in targets if isinstance(target, str))
        prefixes = tuple(target.text for target in targets if isinstance(target, Prefix))
        query = StoreRenewWatches(self._watcher, keys, prefixes)
        try:
            reply = self.request(query, RENEW_SECONDS)
        except (StoreError, ClosedError) as e:
            logger.debug("%r: watches were not renewed: %s", self, e)
            return
        if type(reply) is StoreRevisions and len(reply.revisions) == len(targets):
            ordered: list[Target] = [*keys, *map(Prefix, prefixes)]
            self.watches.check(dict(zip(ordered, reply.revisions, strict=True)))

    def close(self) -> None:
        """Disconnect. Idempotent. Calls under way end with ``StoreError``."""
        with self._lock:
            subscriber, self._closed = self._subscriber, True
        if subscriber is not None:
            subscriber.close()
        self._client.close()
        self.watches.close()
        if subscriber is not None:
            subscriber.join(Deadline.after(JOIN_SECONDS))

    def __repr__(self) -> str:
        return f"<Connection to the store at {self._host}:{self._port}{', closed' if self._closed else ''}>"


def _name(query: Message) -> str:
    """``query`` in the notation of a call: ``get('key')``."""
    if isinstance(query, StorePing):
        return "connecting to the store"
    words = re.findall("[A-Z][a-z]+", type(query).__name__.removeprefix("Store"))
    call = "_".join(words).lower().replace("get_num_keys", "num_keys")
    if isinstance(query, (StoreWait, StoreCheck, StoreMultiGet, StoreMultiSet)):
        shown = ", ".join(map(show_key, query.keys[:3])) + (", ..." if len(query.keys) > 3 else "")
        return f"{call}([{shown}])"
    key = getattr(query, "key", None)
    return f"{call}({'' if key is None else show_key(key)})"
