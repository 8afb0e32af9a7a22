"""``TCPStore``: the client, and on the master the server beside it."""

from __future__ import annotations

import atexit
import re
import secrets
import threading
import weakref

from zmqgrad.errors import ClosedError, ConfigurationError, ProtocolError, StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.addresses import check_port, connecting_address, listening_address, same_host, why_unknown
from zmqgrad.store.base import DEFAULT_TIMEOUT, QueryStore, Timeout, WatchCallback, as_key
from zmqgrad.store.server import servers
from zmqgrad.store.state import HIDDEN
from zmqgrad.store.topics import sync_topic, topic_of
from zmqgrad.store.watch import CallbackNotice, WatchBook
from zmqgrad.transport.notices import NoticeSubscriber
from zmqgrad.transport.requests import RequestClient
from zmqgrad.wire.messages import (
    KeyCallbackRegistered,
    Message,
    Refusal,
    StoreAdd,
    StoreCheck,
    StoreMultiGet,
    StoreMultiSet,
    StoreNumber,
    StorePing,
    StorePong,
    StoreRefused,
    StoreSet,
    StoreUnwatchKey,
    StoreWait,
    StoreWatchKey,
)

LATE_SECONDS = 0.25
"""How much longer than its timeout a client waits, so that the server's own refusal can arrive."""

JOIN_SECONDS = 5.0

_JOINED = f"{HIDDEN}workers/joined"
_COMPLETE = f"{HIDDEN}workers/complete"


class TCPStore(QueryStore):
    """A store that one process, the master, serves over TCP. Arguments as ``torch.distributed.TCPStore``'s.

    Args:
        host_name: where the master runs. The master listens there, or on all interfaces for a name.
        port: where it listens; 0 on the master lets the system pick (see :attr:`port`).
        world_size: how many clients there will be, the master's own included; None: nobody knows.
        is_master: serve the store, too.
        timeout: how long connecting and the calls wait.
        wait_for_workers: on the master: wait until ``world_size`` clients have connected.
        multi_tenant: on the master: share the server with another master of this process at that port.

    Raises:
        AddressInUseError, ConfigurationError, TransportError: if the master cannot listen.
        StoreTimeoutError: if no store answers there, or the workers do not come, within ``timeout``.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
    ) -> None:
        super().__init__(timeout)
        if not isinstance(host_name, str):
            raise TypeError(f"the host name must be a str, not {type(host_name).__name__}")
        connecting_address(host_name, check_port(port))
        if port == 0 and not is_master:
            raise ConfigurationError("a client must be told the port of its master; 0 is none")
        self._host = host_name
        self._server = servers.lend(listening_address(host_name, port), multi_tenant) if is_master else None
        self._port = self._server.port if self._server is not None else port
        self._address = connecting_address(host_name, self._port)
        self._client = RequestClient(self._address, name=f"store-client-{secrets.token_hex(3)}")
        self._subscriber: NoticeSubscriber | None = None
        self._subscriber_lock = threading.Lock()
        self._watches = WatchBook(self._client.name, self._register)
        self._closed = False
        _open_stores.add(self)
        try:
            self._ping()
            if world_size is not None and world_size > 0:
                self._join_in(world_size, wait=is_master and wait_for_workers)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        """The host on which the store listens, as given."""
        return self._host

    @property
    def port(self) -> int:
        """The port at which the store listens."""
        return self._port

    # ---- asking -----------------------------------------------------------------------------------------

    def _ask(self, query: Message, seconds: float) -> Message:
        try:
            answer = self._client.request(query, Deadline.after(seconds + LATE_SECONDS))
        except TimeoutError:
            raise self._silence(query, seconds) from None
        except ClosedError as e:
            raise StoreError(f"{_name(query)}: {e}") from e
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
        return StoreError(f"{_name(query)}: {where} refused: {answer.text}")

    def _ping(self) -> str:
        """The address at which the store publishes notices."""
        pong = self._ask(StorePing(secrets.token_hex(8)), self._timeout)
        if type(pong) is not StorePong:
            raise self._expect(StorePong, pong)
        return same_host(self._address, pong.notices)

    def _join_in(self, world_size: int, wait: bool) -> None:
        """Count this client, and as the master wait until there are ``world_size``."""
        deadline = Deadline.after(self._timeout)
        if self._number(StoreAdd(_JOINED, 1)) == world_size:
            self._ask(StoreSet(_COMPLETE, b""), deadline.left())
        if not wait:
            return
        try:
            left = deadline.left()
            self._ask(StoreWait((_COMPLETE,), left), left)
        except StoreTimeoutError as e:
            joined = self._ask(StoreAdd(_JOINED, 0), self._timeout)
            there = joined.number if type(joined) is StoreNumber else "?"
            raise StoreTimeoutError(
                f"{there} of {world_size} workers have connected to {self._host}:{self._port} within "
                f"{self._timeout:g} s"
            ) from e

    # ---- watching ---------------------------------------------------------------------------------------

    def watch_key(self, key: str, callback: WatchCallback) -> None:
        key = as_key(key)
        try:
            self._watches.add(key, callback)
        except ClosedError as e:
            raise StoreError(f"watch_key({key!r}): {e}") from e
        finally:
            self._unsubscribe_if_unwatched(key)

    def unwatch_key(self, key: str, callback: WatchCallback | None = None) -> None:
        key = as_key(key)
        if self._watches.remove(key, callback):
            self._unsubscribe_if_unwatched(key)
            self._ask(StoreUnwatchKey(key), self._timeout)

    def _unsubscribe_if_unwatched(self, key: str) -> None:
        # Under the same lock as subscribing: a watch that begins now comes wholly before or after.
        with self._subscriber_lock:
            if self._subscriber is not None and not self._watches.watches(key):
                self._subscriber.unsubscribe(topic_of(key))

    def _subscribe(self, notices: str, *topics: bytes) -> NoticeSubscriber:
        with self._subscriber_lock:
            if self._closed:
                raise ClosedError(f"{self!r} is closed")
            if self._subscriber is None:
                self._subscriber = NoticeSubscriber(
                    self._client.name, notices, self._noticed, self._watches.broken
                )
            self._subscriber.move(notices)
            for topic in topics:
                self._subscriber.subscribe(topic)
            return self._subscriber

    def _noticed(self, message: Message) -> None:
        if isinstance(message, CallbackNotice):
            self._watches.noticed(message)

    def _register(self, key: str) -> KeyCallbackRegistered:
        """Subscribe to ``key``, and know that the subscription is in place (DESIGN 16.1)."""
        nonce = secrets.token_hex(16)
        # A server that was started again publishes at another port: ask it each time.
        subscriber = self._subscribe(self._ping(), topic_of(key), sync_topic(nonce))
        try:
            answer = self._ask(StoreWatchKey(key, nonce), self._timeout)
        finally:
            subscriber.unsubscribe(sync_topic(nonce))
        if type(answer) is not KeyCallbackRegistered:
            raise self._expect(KeyCallbackRegistered, answer)
        return answer

    # ---- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnect; on the master, stop serving. Idempotent. Calls under way end with ``StoreError``."""
        _open_stores.discard(self)
        with self._subscriber_lock:
            subscriber, self._closed = self._subscriber, True
        if subscriber is not None:
            subscriber.close()
        self._client.close()
        self._watches.close()
        if subscriber is not None:
            subscriber.join(Deadline.after(JOIN_SECONDS))
        server, self._server = self._server, None
        if server is not None:
            servers.give_back(server)

    def __repr__(self) -> str:
        return f"<TCPStore at {self._host}:{self._port}{', master' if self._server is not None else ''}>"


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


_open_stores: weakref.WeakSet[TCPStore] = weakref.WeakSet()


@atexit.register
def _close_forgotten() -> None:
    """At the interpreter's end, before it takes modules and threads apart."""
    for store in list(_open_stores):
        store.close()
