"""One client's connection to a store's server: asking, being told, and saying what went wrong in words."""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Callable

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
from zmqgrad.runtime.engine_pool import Task
from zmqgrad.store.addresses import connecting_address, why_unknown
from zmqgrad.store.followers import CallbackNotice, Registered
from zmqgrad.store.topics import Target
from zmqgrad.store.watch import WatchBook, as_registered, unwatch_query, watch_query
from zmqgrad.transport.notices import NoticeListener
from zmqgrad.transport.requests.client import RequestClient
from zmqgrad.transport.security import keys_of
from zmqgrad.wire.messages import (
    Message,
    Refusal,
    StoreCheck,
    StoreListen,
    StoreMultiGet,
    StoreMultiSet,
    StorePing,
    StorePong,
    StoreRefused,
    StoreWait,
)

logger = logging.getLogger(__name__)

LATE_SECONDS = 0.25
"""How much longer than its timeout a client waits, so that the server's own refusal can arrive."""

JOIN_SECONDS = 5.0

UNWATCH_SECONDS = 1.0
"""How long it is tried to tell the server that something is watched no more."""


class UnknownEarError(StoreError):
    """The server knows no connection for notices by that name."""


_KINDS = {Refusal.MISSING: QueueEmptyError, Refusal.UNKNOWN: UnknownEarError}


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
        self._listener: NoticeListener | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards _listener and _closed
        self.watches = WatchBook(self._client.name, self._register)

    def ask(self, query: Message, seconds: float) -> Message:
        """The answer to ``query``, which may take so long.

        Raises:
            StoreTimeoutError: if the server says that it took longer, or says nothing.
            StoreError: if the server refuses, or this is closed.
        """
        try:
            answer = self._client.request(query, seconds + LATE_SECONDS)
        except (TimeoutError, ClosedError, ProtocolError) as e:
            raise self._explained(e, query, seconds) from e
        if type(answer) is StoreRefused:
            raise self._refused(query, seconds, answer)
        return answer

    def _explained(self, error: Exception, query: Message, seconds: float) -> StoreError:
        """An error of the transport, in words about ``query``."""
        if isinstance(error, TimeoutError):
            return self._silence(query, seconds)
        if isinstance(error, SecretError):
            return StoreError(
                f"{_name(query)}: cannot talk to {self._host}:{self._port}: {error}. Give all processes the "
                f"same {environment.SECRET} or {environment.SECRET_FILE} (or secret=..., --secret-file)"
            )
        if isinstance(error, ProtocolError):
            return StoreError(f"{_name(query)}: not understood by, or from, {self._address}: {error}")
        return StoreError(f"{_name(query)}: {error}")

    def _silence(self, query: Message, seconds: float) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"{_name(query)}: no store answered at {self._host}:{self._port} within {seconds:g} s: is the "
            f"master running, and is this its address?{why_unknown(self._host)}"
        )

    def _refused(self, query: Message, seconds: float, answer: StoreRefused) -> StoreError:
        where = f"the store at {self._host}:{self._port}"
        if answer.reason is Refusal.TIMEOUT:
            return StoreTimeoutError(f"{_name(query)}: after {seconds:g} s at {where}: {answer.text}")
        kind = _KINDS.get(answer.reason, StoreError)
        return kind(f"{_name(query)}: {where} refused: {answer.text}")

    def ping(self) -> None:
        """Is there a store?"""
        pong = self.ask(StorePing(secrets.token_hex(8)), self.timeout)
        if type(pong) is not StorePong:
            raise StoreError(f"{self._address} answered a ping with {type(pong).__name__}")

    def _noticed(self, message: Message) -> list[Task]:
        to_do: list[Task] = []
        if isinstance(message, CallbackNotice):
            self.watches.noticed(message, to_do.append)
        return to_do

    def _listen(self) -> NoticeListener:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self!r} is closed")
            if self._listener is None:
                self._listener = NoticeListener(
                    self._client.name,
                    self._address,
                    self._keys,
                    _introduce,
                    self._noticed,
                    self.watches.broken,
                    self.watches.attend,
                )
            return self._listener

    def _register(self, target: Target) -> Registered:
        """Have notice given of ``target``: each change after what this gives will be heard of."""
        deadline, known_as = Deadline.after(self.timeout), ""
        listener = self._listen()
        query: Message = watch_query(target)
        while True:
            try:
                known_as = listener.wait_known(deadline, but_not=known_as)
            except (TimeoutError, ClosedError, ProtocolError) as e:
                raise self._explained(e, query, self.timeout) from e
            query = watch_query(target, known_as)
            try:
                return as_registered(self.ask(query, deadline.left()))
            except UnknownEarError:
                pass  # the connection for notices broke, and is made anew

    def unwatch_if_unwatched(self, target: Target) -> None:
        """After a watch of ``target`` ended or failed."""
        listener = self._listener
        if listener is None or not listener.known_as or self.watches.watches(target):
            return
        try:
            self.ask(unwatch_query(target, listener.known_as), min(self.timeout, UNWATCH_SECONDS))
            if self.watches.watches(target):  # since a moment ago: that is undone, too
                self.watches.refresh(target)
        except (StoreError, ClosedError) as e:
            # Then that connection breaks, and all is looked at anew; or notices come that nobody wants.
            logger.debug("%r: the watch of %r was not ended: %s", self, target, e)

    def close(self) -> None:
        """Disconnect. Idempotent. Calls under way end with ``StoreError``."""
        with self._lock:
            listener, self._closed = self._listener, True
        if listener is not None:
            listener.close()
        self._client.close()
        self.watches.close()
        if listener is not None:
            listener.join(Deadline.after(JOIN_SECONDS))

    def __repr__(self) -> str:
        return f"<Connection to the store at {self._host}:{self._port}{', closed' if self._closed else ''}>"


def _introduce(ask: Callable[[Message], Message], name: str) -> None:
    """Have the server give notices on this connection."""
    answer = ask(StoreListen(name))
    if type(answer) is StoreRefused:
        raise ProtocolError(answer.text)


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
