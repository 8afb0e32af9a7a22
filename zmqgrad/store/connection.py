"""One client's connection to a store's server: asking, being told, and saying what went wrong in words."""

from __future__ import annotations

import re
import secrets
import threading

from zmqgrad import environment
from zmqgrad.errors import (
    ClosedError,
    ProtocolError,
    QueueEmptyError,
    SecretError,
    StoreError,
    StoreTimeoutError,
)
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.addresses import connecting_address, same_host, why_unknown
from zmqgrad.store.followers import CallbackNotice, Registered
from zmqgrad.store.topics import Target, sync_topic, topic_of
from zmqgrad.store.watch import WatchBook, as_registered, watch_query
from zmqgrad.transport.notices import NoticeSubscriber
from zmqgrad.transport.request_client import RequestClient
from zmqgrad.transport.security import keys_of
from zmqgrad.wire.messages import (
    Message,
    Refusal,
    StoreCheck,
    StoreMultiGet,
    StoreMultiSet,
    StorePing,
    StorePong,
    StoreRefused,
    StoreWait,
)

LATE_SECONDS = 0.25
"""How much longer than its timeout a client waits, so that the server's own refusal can arrive."""

JOIN_SECONDS = 5.0


class Connection:
    """To the server at ``host:port``; ``timeout``, in seconds, is for what has none of its own.

    ``secret``: None for that of the environment.

    Safe to use from any thread. You must close it.
    """

    def __init__(self, host: str, port: int, timeout: float, secret: str | bytes | None = None) -> None:
        self.timeout = timeout
        self._host = host
        self._port = port
        self._address = connecting_address(host, port)
        self._keys = keys_of(secret)
        name = f"store-client-{secrets.token_hex(3)}"
        self._client = RequestClient(self._address, name=name, keys=self._keys)
        self._subscriber: NoticeSubscriber | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards _subscriber and _closed
        self.watches = WatchBook(self._client.name, self._register)

    def ask(self, query: Message, seconds: float) -> Message:
        """The answer to ``query``, which may take so long.

        Raises:
            StoreTimeoutError: if the server says that it took longer, or says nothing.
            StoreError: if the server refuses, or this is closed.
        """
        try:
            answer = self._client.request(query, Deadline.after(seconds + LATE_SECONDS))
        except TimeoutError:
            raise self._silence(query, seconds) from None
        except ClosedError as e:
            raise StoreError(f"{_name(query)}: {e}") from e
        except SecretError as e:
            raise StoreError(
                f"{_name(query)}: cannot talk to {self._host}:{self._port}: {e}. All processes must be given "
                f"the same {environment.SECRET} or {environment.SECRET_FILE} (or secret=..., --secret-file)"
            ) from e
        except ProtocolError as e:
            raise StoreError(f"{_name(query)}: not understood by, or from, {self._address}: {e}") from e
        if type(answer) is StoreRefused:
            raise self._refused(query, seconds, answer)
        return answer

    def _silence(self, query: Message, seconds: float) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"{_name(query)}: no store answered at {self._host}:{self._port} within {seconds:g} s: is the "
            f"master running, and is this its address?{why_unknown(self._host)}"
        )

    def _refused(self, query: Message, seconds: float, answer: StoreRefused) -> StoreError:
        where = f"the store at {self._host}:{self._port}"
        if answer.reason is Refusal.TIMEOUT:
            return StoreTimeoutError(f"{_name(query)}: after {seconds:g} s at {where}: {answer.text}")
        kind = QueueEmptyError if answer.reason is Refusal.MISSING else StoreError
        return kind(f"{_name(query)}: {where} refused: {answer.text}")

    def ping(self) -> str:
        """The address at which the store publishes notices."""
        pong = self.ask(StorePing(secrets.token_hex(8)), self.timeout)
        if type(pong) is not StorePong:
            raise StoreError(f"{self._address} answered a ping with {type(pong).__name__}")
        return same_host(self._address, pong.notices)

    def unsubscribe_if_unwatched(self, target: Target) -> None:
        """After a watch of ``target`` ended or failed."""
        # Under the same lock as subscribing: a watch that begins now comes wholly before or after.
        with self._lock:
            if self._subscriber is not None and not self._closed and not self.watches.watches(target):
                self._subscriber.unsubscribe(topic_of(target))

    def _subscribe(self, notices: str, *topics: bytes) -> NoticeSubscriber:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self!r} is closed")
            if self._subscriber is None:
                self._subscriber = NoticeSubscriber(
                    self._client.name, notices, self._noticed, self.watches.broken, self._keys
                )
            self._subscriber.move(notices)
            for topic in topics:
                self._subscriber.subscribe(topic)
            return self._subscriber

    def _noticed(self, message: Message) -> None:
        if isinstance(message, CallbackNotice):
            self.watches.noticed(message)

    def _register(self, target: Target) -> Registered:
        """Subscribe to ``target``, and know that the subscription is in place (DESIGN 16.1)."""
        nonce = secrets.token_hex(16)
        # A server that was started again publishes at another port: ask it each time.
        subscriber = self._subscribe(self.ping(), topic_of(target), sync_topic(nonce))
        try:
            return as_registered(self.ask(watch_query(target, nonce), self.timeout))
        finally:
            subscriber.unsubscribe(sync_topic(nonce))

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
    """``query`` as its caller wrote it: ``get('key')``."""
    if isinstance(query, StorePing):
        return "connecting to the store"
    words = re.findall("[A-Z][a-z]+", type(query).__name__.removeprefix("Store"))
    call = "_".join(words).lower().replace("get_num_keys", "num_keys")
    if isinstance(query, (StoreWait, StoreCheck, StoreMultiGet, StoreMultiSet)):
        shown = ", ".join(repr(key) for key in query.keys[:3]) + (", ..." if len(query.keys) > 3 else "")
        return f"{call}([{shown}])"
    key = getattr(query, "key", None)
    return f"{call}({'' if key is None else repr(key)})"
