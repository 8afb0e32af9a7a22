"""An etcd cluster as transactions and watches. A member that does not reply is replaced by the next one.

The client is ``etcd3gw``, which uses etcd's JSON gateway over HTTP. Reads are linearizable: a member that was
cut off from the others cannot return what is outdated. A transaction may be applied although its reply is
lost, and is then repeated at another member: callers make it recognize itself.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import math
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from zmqgrad import environment
from zmqgrad.errors import ClosedError, ConfigurationError, TransportError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.bind_policy import is_loopback

logger = logging.getLogger(__name__)

T = TypeVar("T")

ETCD_PORT = 2379

RETRY_SECONDS = 0.1
"""Pause before the members are tried again, after all of them have failed."""

MIN_REQUEST_SECONDS = 0.5
"""The least that one member is given to reply."""

API_PATH = "/v3/"
"""Of all versions since 3.4."""

NO_TOKEN = ("invalid auth token", "user name is empty", "revision of auth store is old")
"""How etcd refuses a request that has to log in anew: a member has restarted, or users have changed."""

NO_SPACE = "database space exceeded"
"""How every member refuses changes until an operator has made room, and has disarmed the alarm."""

CONNECTIONS = 64
"""HTTP connections that are kept open to each member."""

INVALID, NOT_FOUND, DENIED, OUT_OF_RANGE = 3, 5, 7, 11
"""Codes of gRPC with which etcd refuses what no other member would accept."""


class EtcdOptions(NamedTuple):
    """How to connect to the members of a cluster.

    Args:
        timeout: seconds after which the cluster counts as unreachable. Electing a leader takes 1 to 2 s.
        protocol: ``http`` or ``https``.
        ca_cert: file of the certificate authority of the members.
        ssl_cert, ssl_cert_key: files of the certificate of this client, and of its key.
        user: name for authentication.
        password: of ``user``.
    """

    timeout: float = 9.0
    protocol: str = "http"
    ca_cert: str | None = None
    ssl_cert: str | None = None
    ssl_cert_key: str | None = None
    user: str | None = None
    password: str = ""


def read_options(settings: Mapping[str, Any]) -> EtcdOptions:
    """The options in ``settings``: ``read_timeout`` (the timeout), ``password_file``, and the others by name.

    Raises:
        ConfigurationError: if one is invalid, or unknown.
    """
    given = {name: str(value) for name, value in settings.items()}
    for name in given:
        if name not in SETTINGS:
            raise ConfigurationError(f"etcd has no setting {name!r}; it has {', '.join(sorted(SETTINGS))}")
    try:
        timeout = float(given.pop("read_timeout", EtcdOptions().timeout))
    except ValueError as e:
        raise ConfigurationError(f"the setting 'read_timeout' of etcd is no number: {e}") from None
    password_file, password = given.pop("password_file", None), ""
    if password_file is not None:
        try:
            password = Path(password_file).read_text().strip()
        except OSError as e:
            raise ConfigurationError(f"the setting 'password_file' cannot be read: {e}") from e
    options = EtcdOptions(timeout, password=password, **given)
    if options.protocol not in ("http", "https"):
        raise ConfigurationError(f"the setting 'protocol' is {options.protocol!r}; it must be http or https")
    return options


SETTINGS = ("read_timeout", "password_file", *EtcdOptions._fields[1:-1])
"""What :func:`read_options` understands."""


class EtcdRefusedError(TransportError):
    """The cluster refused a request, for a reason that does not depend on the member."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(f"etcd refused: {text}")
        self.code = code


class Event(NamedTuple):
    """A change of a key; ``value`` is None if it was deleted."""

    key: bytes
    value: bytes | None
    revision: int


class TransactionReply(NamedTuple):
    """What a member has replied to a transaction."""

    revision: int
    """Of the cluster."""
    content: dict[str, Any]
    repeated: bool
    """Whether another member, which did not reply, may have applied it, or may still do so."""


class EtcdCluster:
    """The members of a cluster, the one that replied last first. Safe to use from any thread.

    Args:
        members: (host, port) of each member; one is enough, more survive the loss of a member.
        options: how to connect.

    Raises:
        ConfigurationError: if ``etcd3gw`` is not installed, or an option is invalid.
    """

    def __init__(self, members: Sequence[tuple[str, int]], options: EtcdOptions | None = None) -> None:
        options = options or EtcdOptions()
        if options.protocol == "http" and (options.user is not None or options.ssl_cert):
            others = [host for host, _ in members if not is_loopback(host)]
            if others and not environment.allows_insecure():
                raise ConfigurationError(
                    f"a password or a certificate for etcd at {others[0]} needs protocol=https: by http, the "
                    f"network can read it"
                )
        _check(options)
        self._lock = threading.Lock()  # guards _members and _watches
        self._members = [_Member(host, port, options, len(members)) for host, port in members]
        self._watches: set[EtcdWatch] = set()
        self._closed = threading.Event()

    def transact(self, transaction: dict[str, Any], deadline: Deadline) -> TransactionReply:
        """Returns the reply to ``transaction``. Errors as :meth:`post`."""
        tries = 0

        def request(member: _Member) -> TransactionReply:
            nonlocal tries
            tries += 1
            content = member.transact(transaction, deadline)
            return TransactionReply(int(content["header"]["revision"]), content, tries > 1)

        return self._call(request, deadline)

    def post(self, path: str, content: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """The reply to another request.

        Raises:
            EtcdRefusedError: if the request is invalid, or not allowed.
            TransportError: if no member could be used before ``deadline``.
            ClosedError: after :meth:`close`.
        """
        return self._call(lambda member: member.post(path, content, deadline), deadline)

    def _call(self, request: Callable[[_Member], T], deadline: Deadline) -> T:
        """Try the members, the one that replied last first, until one replies or the time is over."""
        began = deadline.left()
        while True:
            errors: list[str] = []
            for member in list(self._members):
                if self._closed.is_set():
                    raise ClosedError("the connection to etcd is closed")
                try:
                    return request(member)
                except member.errors as e:
                    if (refused := _as_refusal(e)) is not None:
                        raise refused from e
                    errors.append(f"{member.address}: {_describe(e)}")
                    self.retire(member)
                if deadline.passed():
                    break
            if self._closed.wait(min(RETRY_SECONDS, deadline.left())) or deadline.passed():
                raise TransportError(
                    f"no member of etcd could be used within {began:.3g} s ({'; '.join(errors)})"
                )

    def first(self) -> _Member:
        """The member that is tried first."""
        return self._members[0]

    def retire(self, member: _Member) -> None:
        """Try ``member`` last from now on."""
        with self._lock:
            if self._members[0] is member:
                self._members = [*self._members[1:], member]

    def pause(self) -> bool:
        """Wait before members are tried again. Returns whether the cluster was closed."""
        return self._closed.wait(RETRY_SECONDS)

    def watch(self, start: bytes, end: bytes | None, after: int) -> EtcdWatch:
        """The changes of ``start`` (``end``: of all keys from it to that) behind revision ``after``."""
        watch = EtcdWatch(self, start, end, after, self._forget)
        with self._lock:
            if self._closed.is_set():
                raise ClosedError("the connection to etcd is closed")
            self._watches.add(watch)
        return watch

    def _forget(self, watch: EtcdWatch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def close(self) -> None:
        """End all requests and watches. Idempotent; from any thread."""
        self._closed.set()
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            watch.close()
        for member in self._members:
            member.close()


class EtcdWatch:
    """The changes of some keys, in order. Read by one thread, closed by any.

    It raises ``EtcdRefusedError`` if etcd has dropped the revision from which it was to continue.
    """

    def __init__(
        self,
        cluster: EtcdCluster,
        start: bytes,
        end: bytes | None,
        after: int,
        forget: Callable[[EtcdWatch], None],
    ) -> None:
        self._cluster = cluster
        self._keys = {"key": encode(start)} | ({} if end is None else {"range_end": encode(end)})
        self._after = after
        self._forget = forget
        self._lock = threading.Lock()  # guards the next two
        self._stream: Any = None  # the reply under way, of requests
        self.closed = False
        self.failed = False
        """Whether :meth:`batches` ended because of its member."""

    def batches(self, seconds: float) -> Iterator[list[Event]]:
        """Yields changes, those of one revision together, until nothing has changed for ``seconds``.

        It also ends if the member fails, or when the watch was closed. Call it again to continue.
        """
        member, created, self.failed = self._cluster.first(), False, False
        query = {"create_request": {**self._keys, "start_revision": self._after + 1}}
        try:
            with member.open("/watch", query, seconds) as stream:
                with self._lock:
                    if self.closed:
                        return
                    self._stream = stream
                for line in stream.iter_lines(chunk_size=None):
                    result = json.loads(line)["result"]
                    if result.get("compact_revision"):
                        raise EtcdRefusedError("the revision to continue from was dropped", OUT_OF_RANGE)
                    if result.get("canceled"):
                        raise ValueError(str(result.get("cancel_reason", "the watch was canceled")))
                    created = True
                    if events := [_as_event(event) for event in result.get("events", ())]:
                        yield events
                        self._after = events[-1].revision
        except member.errors as e:
            if self.closed or (created and _timed_out(e)):
                return
            self.failed = True
            member.forget_token()  # etcd does not say whether that is why, or a lack of permission
            logger.debug("a watch at %s ends: %s", member.address, _describe(e))
            self._cluster.retire(member)
            self._cluster.pause()
        finally:
            with self._lock:
                self._stream = None

    def close(self) -> None:
        """End :meth:`batches`, in whatever thread it runs. Idempotent."""
        with self._lock:
            self.closed = True
            stream = self._stream
            if stream is not None:
                try:
                    stream.raw.shutdown()
                except (ValueError, RuntimeError, OSError) as e:
                    logger.debug("a watch of etcd was ending already: %s", e)
        self._forget(self)


def _check(options: EtcdOptions) -> None:
    """Raises ``ConfigurationError`` if nothing could be reached with ``options``."""
    if not 0 < options.timeout < math.inf:
        raise ConfigurationError(f"the timeout of etcd is {options.timeout}; it must be a positive number")
    for name in ("ca_cert", "ssl_cert", "ssl_cert_key"):
        path = getattr(options, name)
        if path and not Path(path).exists():
            raise ConfigurationError(f"the setting {name!r} of etcd names {path!r}, which does not exist")


class _Member:
    """The connections to one member of the cluster.

    Args:
        count: how many members share the time of a request.
    """

    def __init__(self, host: str, port: int, options: EtcdOptions, count: int) -> None:
        etcd3gw, requests = _import_client()
        self.address = f"{host}:{port}"
        # Besides errors of the client: what it raises if another kind of server replies.
        self.errors: tuple[type[Exception], ...] = (
            etcd3gw.exceptions.Etcd3Exception,
            requests.RequestException,
            ValueError,
            KeyError,
            TypeError,
        )
        self._error = etcd3gw.exceptions.Etcd3Exception
        self._login = None if options.user is None else {"name": options.user, "password": options.password}
        self._seconds = max(MIN_REQUEST_SECONDS, options.timeout / count)
        self._session = requests.Session()
        self._session.mount(f"{options.protocol}://", requests.adapters.HTTPAdapter(pool_maxsize=CONNECTIONS))
        self._session.headers["Authorization"] = None  # sends none; a new name would disturb other threads
        self._session.trust_env = False  # a proxy of this host does not lead to a cluster
        self._session.verify = options.ca_cert or True
        if options.ssl_cert:
            self._session.cert = (options.ssl_cert, options.ssl_cert_key)
        self._client = etcd3gw.Etcd3Client(
            host.strip("[]"),
            port,
            options.protocol,
            timeout=self._seconds,
            api_path=API_PATH,
            session=self._session,
        )

    def transact(self, transaction: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Returns the reply to ``transaction``."""
        client = self._client_until(deadline)
        reply: dict[str, Any] = self._authenticated(client, lambda: client.transaction(transaction))
        return reply

    def post(self, path: str, content: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Returns the reply to a request of another kind."""
        client = self._client_until(deadline)
        url = client.get_url(path)
        reply: dict[str, Any] = self._authenticated(client, lambda: client.post(url, json=content))
        return reply

    def _client_until(self, deadline: Deadline) -> Any:
        """The client; it waits no longer than until ``deadline``, if that is not too short for a reply."""
        if deadline.left() >= self._seconds:
            return self._client
        client = copy.copy(self._client)
        client.timeout = max(MIN_REQUEST_SECONDS, deadline.left())
        return client

    def open(self, path: str, content: dict[str, Any], seconds: float) -> Any:
        """Returns a reply that is a stream; reading it fails after ``seconds`` of silence.

        The client's own watch would start a thread for each call.
        """
        self._authenticated(self._client, lambda: None)
        return self._session.post(
            self._client.get_url(path),
            json=content,
            stream=True,
            timeout=(self._seconds, seconds),
            headers={"Grpc-Metadata-hasleader": "true"},  # a member without a leader ends the watch
        )

    def _authenticated(self, client: Any, request: Callable[[], T]) -> T:
        """Log in before the first request, and again if the token is no longer valid."""
        if self._login is None:
            return request()
        if self._session.headers["Authorization"] is not None:
            try:
                return request()
            except self._error as e:
                if not any(text in (e.detail_text or "") for text in NO_TOKEN):
                    raise
        # The token is sent with other requests until it is replaced, but not with this one.
        url = client.get_url("/auth/authenticate")
        reply = client.post(url, json=self._login, headers={"Authorization": None})
        self._session.headers["Authorization"] = reply["token"]
        return request()

    def forget_token(self) -> None:
        """Log in before the next request: the token may have expired."""
        self._session.headers["Authorization"] = None

    def close(self) -> None:
        self._session.close()


def encode(data: bytes) -> str:
    """``data`` as etcd's gateway expects it."""
    return b64encode(data).decode()


def decode(text: str | None) -> bytes:
    """The bytes that ``encode`` was given; empty ones are left out of replies."""
    return b64decode(text or "")


def after_prefix(prefix: bytes) -> bytes:
    """The first key behind those that begin with ``prefix``, whose last byte is not 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def range_of(prefix: bytes, **options: Any) -> dict[str, Any]:
    """The keys that begin with ``prefix``, for a request."""
    return {"key": encode(prefix), "range_end": encode(after_prefix(prefix)), **options}


def unchanged(place: bytes, revision: int) -> dict[str, Any]:
    """The comparison that the key ``place`` was last changed at ``revision``; 0: that it is missing."""
    return {"key": encode(place), "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def _as_event(event: dict[str, Any]) -> Event:
    kv = event["kv"]
    value = None if event.get("type") == "DELETE" else decode(kv.get("value"))
    return Event(decode(kv["key"]), value, int(kv["mod_revision"]))


def _timed_out(error: Exception) -> bool:
    """Whether nothing was received in time, though the connection works as far as is known."""
    return bool(error.args) and type(error.args[0]).__name__ == "ReadTimeoutError"


def _as_refusal(error: Exception) -> EtcdRefusedError | None:
    """``error`` as one that another member would return, too; None if it may not."""
    try:
        reply = json.loads(getattr(error, "detail_text", None) or "null")
    except ValueError:
        return None
    if not isinstance(reply, dict) or not isinstance(code := reply.get("code"), int):
        return None
    text = str(reply.get("message") or reply.get("error"))
    if NO_SPACE in text:
        return EtcdRefusedError(f"{text}. Free it: etcdctl compact, defrag, and alarm disarm", code)
    return EtcdRefusedError(text, code) if code in (INVALID, NOT_FOUND, DENIED, OUT_OF_RANGE) else None


def _describe(error: Exception) -> str:
    text = f"{error} {getattr(error, 'detail_text', None) or ''}".strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _import_client() -> tuple[ModuleType, ModuleType]:
    """etcd3gw and requests; imported on first use because most programs need neither."""
    try:
        return importlib.import_module("etcd3gw"), importlib.import_module("requests")
    except ImportError as e:
        raise ConfigurationError(
            f"etcd needs the package etcd3gw ({e}); install it with `pip install zmqgrad[etcd]`"
        ) from e
