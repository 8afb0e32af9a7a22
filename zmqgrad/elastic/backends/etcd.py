"""A rendezvous backend in etcd (version 3.4 or newer), which survives the loss of any host.

The state is the value of one key. A second one is written with it if more than heartbeats changed; the nodes
watch that one. The fencing token is the revision at which the key was last modified; a
write is a transaction that compares it. Reads are linearizable: a member that was cut off from the others
cannot return an old state. The client is ``etcd3gw``, which uses etcd's JSON gateway over HTTP.
"""

from __future__ import annotations

import importlib
import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from zmqgrad import environment
from zmqgrad.elastic.state_holder import RendezvousBackend, Token
from zmqgrad.errors import ConfigurationError, RendezvousConnectionError, RendezvousStateError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.bind_policy import is_loopback

T = TypeVar("T")

PREFIX, ANNOUNCEMENTS = "zmqgrad/rendezvous/", "zmqgrad/announcements/"
"""Keys of etcd begin with these. The rest is the id of the job."""

RETRY_SECONDS = 0.1
"""Pause before the members are tried again, after all of them have failed."""

MIN_REQUEST_SECONDS = 0.5
"""The least that one member is given to reply."""


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


class EtcdBackend(RendezvousBackend):
    """Keeps the state under a key of an etcd cluster.

    A request to which a member does not reply is repeated at the next one. That is safe: a transaction
    compares the revision, and what it finds instead is compared with what was to be written.

    Args:
        members: (host, port) of each member; one is enough, more survive the loss of a member.
        run_id: identifies the job.
        options: how to connect.

    Raises:
        ConfigurationError: if ``etcd3gw`` is not installed, or an option is invalid.
    """

    name = "etcd"

    def __init__(
        self, members: Sequence[tuple[str, int]], run_id: str, options: EtcdOptions | None = None
    ) -> None:
        self._key = b64encode(f"{PREFIX}{run_id}".encode()).decode()
        self._announcements = b64encode(f"{ANNOUNCEMENTS}{run_id}".encode()).decode()
        options = options or EtcdOptions()
        if options.protocol == "http" and (options.user is not None or options.ssl_cert):
            others = [host for host, _ in members if not is_loopback(host)]
            if others and not environment.allows_insecure():
                raise ConfigurationError(
                    f"a password or a certificate for etcd at {others[0]} needs protocol=https: by http, the "
                    f"network can read it"
                )
        self._timeout = options.timeout
        self._members = [_Member(host, port, options, len(members)) for host, port in members]
        self._closed = threading.Event()
        self._seen = 0  # revision of the cluster when the state was last read or written

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._transact({"success": [{"request_range": {"key": self._key}}]})
        return self._found(found)

    def set_state(
        self, state: bytes, token: Token = None, announce: bool = True
    ) -> tuple[bytes, Token, bool] | None:
        if token is not None and type(token) is not int:
            raise RendezvousStateError(f"a token of another backend: {token!r}")
        compare = {"key": self._key, "target": "MOD", "result": "EQUAL", "mod_revision": token or 0}
        puts = [{"request_put": {"key": self._key, "value": b64encode(state).decode()}}]
        if announce:
            puts.append({"request_put": {"key": self._announcements, "value": ""}})
        reply = self._transact(
            {
                "compare": [compare],
                "success": puts,
                "failure": [{"request_range": {"key": self._key}}],
            }
        )
        if reply.get("succeeded"):
            return state, self._seen, True
        found = self._found(reply)
        return None if found is None else (*found, found[0] == state)  # the reply to a first try may be lost

    def wait_for_change(self, token: Token, seconds: float) -> bool:
        after = (self._seen if token is None else token) + 1
        changed = self._members[0].watch(self._announcements, after, seconds)
        if changed is None:
            self._closed.wait(min(seconds, RETRY_SECONDS))  # the next read tries the members
        return changed is not False

    def close(self, in_use: bool = False) -> None:
        self._closed.set()
        for member in self._members:
            member.close()

    def _found(self, reply: dict[str, Any]) -> tuple[bytes, int] | None:
        kvs = reply["responses"][0]["response_range"].get("kvs")
        return None if not kvs else (b64decode(kvs[0].get("value", "")), int(kvs[0]["mod_revision"]))

    def _transact(self, transaction: dict[str, Any]) -> dict[str, Any]:
        self._seen, reply = self._call(lambda member: member.transact(transaction))
        return reply

    def _call(self, request: Callable[[_Member], T]) -> T:
        """Try the members, the one that replied last first, until one replies or the time is over."""
        deadline = Deadline.after(self._timeout)
        while True:
            errors: list[str] = []
            for member in list(self._members):
                try:
                    return request(member)
                except member.errors as e:
                    errors.append(f"{member.address}: {_describe(e)}")
                    self._members.append(self._members.pop(0))
                if deadline.left() <= 0:
                    break
            if self._closed.wait(min(RETRY_SECONDS, deadline.left())) or deadline.left() <= 0:
                raise RendezvousConnectionError(
                    f"no member of etcd could be used within {self._timeout:g} s ({'; '.join(errors)})"
                )


def _describe(error: Exception) -> str:
    text = f"{error} {getattr(error, 'detail_text', None) or ''}".strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
        self._credentials = None if options.user is None else (options.user, options.password)
        seconds = max(MIN_REQUEST_SECONDS, options.timeout / count)
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy of this host does not lead to a cluster
        self._session.verify = options.ca_cert or True
        if options.ssl_cert:
            self._session.cert = (options.ssl_cert, options.ssl_cert_key)
        self._client = etcd3gw.Etcd3Client(
            host.strip("[]"), port, options.protocol, timeout=seconds, session=self._session
        )

    def transact(self, transaction: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns the revision of the cluster, and the reply."""
        reply = self._authenticated(lambda: self._client.transaction(transaction))
        return int(reply["header"]["revision"]), reply

    def watch(self, key: str, after: int, seconds: float) -> bool | None:
        """Wait for a change of ``key`` at revision ``after`` or later. Returns None if watching did not work.

        The client's own watch would start a thread for each call.
        """
        query = {"create_request": {"key": key, "start_revision": after}}
        timeouts = (self._client.timeout, seconds)
        try:
            url = self._client.get_url("/watch")
            with self._session.post(url, json=query, stream=True, timeout=timeouts) as stream:
                for line in stream.iter_lines():
                    result = json.loads(line)["result"]
                    if result.get("events") or result.get("canceled"):
                        return None if result.get("canceled") else True
        except self.errors as e:
            if e.args and type(e.args[0]).__name__ == "ReadTimeoutError":
                return False
        return None

    def _authenticated(self, request: Callable[[], T]) -> T:
        """Log in before the first request, and again if the token has expired."""
        if self._credentials is None:
            return request()
        if "Authorization" in self._session.headers:
            try:
                return request()
            except self._error as e:
                if "invalid auth token" not in (e.detail_text or ""):
                    raise
        self._log_in(*self._credentials)
        return request()

    def _log_in(self, user: str, password: str) -> None:
        self._session.headers.pop("Authorization", None)
        url = self._client.get_url("/auth/authenticate")
        token = self._client.post(url, json={"name": user, "password": password})["token"]
        self._session.headers["Authorization"] = token

    def close(self) -> None:
        self._session.close()


def _import_client() -> tuple[ModuleType, ModuleType]:
    """etcd3gw and requests; imported on first use because most programs need neither."""
    try:
        return importlib.import_module("etcd3gw"), importlib.import_module("requests")
    except ImportError as e:
        raise ConfigurationError(
            f"the rendezvous backend etcd needs the package etcd3gw ({e}); install it with "
            f"`pip install zmqgrad[etcd]`"
        ) from e
