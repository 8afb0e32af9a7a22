"""CURVE keys derived from the job's secret, and the ZAP authenticator that admits only their holders.

CURVE (https://rfc.zeromq.org/spec/26/) encrypts every tcp connection with keys of its own, so recorded
traffic stays secret even if the job's secret leaks later. Both ends prove that they have the secret before
either receives a message: a client must know the server's public key, which is never published, and must
itself have the job's client key, which the authenticator checks (https://rfc.zeromq.org/spec/27/).

Connections within a host (:mod:`~zmqgrad.transport.local`) are authenticated, and not encrypted: no other
user can read them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from functools import lru_cache
from typing import NamedTuple

import zmq
from zmq.utils import z85

from zmqgrad import environment
from zmqgrad.errors import ArgumentTypeError, ConfigurationError
from zmqgrad.runtime.repeat_log import RepeatLog
from zmqgrad.transport.reader import BURST, Reader
from zmqgrad.transport.sockets import get_int
from zmqgrad.transport.user_token import read_token

logger = logging.getLogger(__name__)

OF_STORE = b"store-"
"""What a secret begins with that admits to the store of a job, and not to its workers."""

MIN_SECRET_BYTES = 16
"""Shorter secrets can be guessed from recorded traffic by trying them all."""

# As for the keys of PostgreSQL's libpq: a secret that root mounts may belong to the group of its reader.
_OF_GROUP = stat.S_IRWXG
_OF_OTHERS = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP

_OWN_HOST = ("localhost", "127.0.0.1", "0.0.0.0", "[::]")  # as clients and servers write it

_ZAP_DOMAIN = b"zmqgrad"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class KeyPair(NamedTuple):
    """A CURVE key pair."""

    public: bytes
    private: bytes


class Keys(NamedTuple):
    """The keys of a job, which all its processes have.

    Attributes:
        server: of sockets that bind.
        client: of sockets that connect.
        local: of connections within a host.
        from_secret: whether they are derived from a secret, which other hosts may have; otherwise from the
            token of this user, or the random name of the job.
    """

    server: KeyPair
    client: KeyPair
    local: bytes
    from_secret: bool

    def __repr__(self) -> str:  # keys must not appear in logs
        return "<Keys>"


def load_keys(secret: str | bytes | None = None) -> Keys | None:
    """Derives the job's keys from ``secret``, or from the environment's if it is None.

    Returns:
        The keys; None if there is no secret.

    Raises:
        ArgumentTypeError, ConfigurationError: as :func:`find_secret`.
    """
    found = find_secret(secret)
    return None if found is None else _derive(found)


def find_secret(secret: str | bytes | None = None) -> bytes | None:
    """Returns ``secret``, or that of the environment if it is None; None if there is none.

    Raises:
        ArgumentTypeError: if ``secret`` is neither str nor bytes.
        ConfigurationError: if the secret is too short, no text, set twice, or its file cannot be read safely.
    """
    if secret is None:
        value, path = environment.secret(), environment.secret_file()
        if value is not None and path is not None:
            raise ConfigurationError(f"both {environment.SECRET} and {environment.SECRET_FILE} are set")
        if path is not None:
            return read_secret(path)
        return None if value is None else _checked(os.fsencode(value), environment.SECRET)
    if not isinstance(secret, (str, bytes)):
        raise ArgumentTypeError(f"a secret must be str or bytes, not {type(secret).__name__}")
    try:
        return _checked(secret if isinstance(secret, bytes) else os.fsencode(secret), "the secret")
    except UnicodeEncodeError as e:
        raise ConfigurationError(f"a secret that is no Unicode text: {e.reason}") from None


def store_secret(secret: bytes) -> bytes:
    """Returns the secret that clients of the job's store need: it does not tell ``secret`` itself."""
    if secret.startswith(OF_STORE):
        return secret
    return OF_STORE + _key(secret, b"store").hex().encode()


def read_secret(path: str) -> bytes:
    """Reads the secret from the file at ``path``, without surrounding white space.

    Raises:
        ConfigurationError: if the file cannot be read, other users have access to it, or the secret is too
            short.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read()
    except OSError as e:
        raise ConfigurationError(f"cannot read the secret's file {path!r}: {e.strerror}") from e
    if status.st_mode & (_OF_OTHERS if status.st_uid == 0 else _OF_GROUP | _OF_OTHERS):
        raise ConfigurationError(
            f"other users have access to the secret in {path!r} (mode {stat.S_IMODE(status.st_mode):04o}): "
            f"chmod 600 {path}, and use a new secret if they may have read it"
        )
    return _checked(secret.strip(), f"the secret in {path!r}")


def _checked(secret: bytes, name: str) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigurationError(
            f"{name} has {len(secret)} bytes (at least {MIN_SECRET_BYTES}): `zmqgrad secret` makes one"
        )
    return secret


@lru_cache(maxsize=8)
def _derive(secret: bytes, from_secret: bool = True) -> Keys:
    return Keys(_pair(secret, b"listener"), _pair(secret, b"caller"), _key(secret, b"local"), from_secret)


def _key(secret: bytes, role: bytes) -> bytes:
    return hashlib.blake2b(hashlib.sha512(secret).digest(), digest_size=32, person=b"zg-" + role).digest()


def _pair(secret: bytes, role: bytes) -> KeyPair:
    private = _key(secret, role)
    public = z85.decode(zmq.curve_public(z85.encode(private)))
    return KeyPair(public, private)


def job_keys(job: bytes) -> Keys:
    """Returns the keys of a job without a secret, from its random name, which only its processes know."""
    return _derive(job, False)


def local_key(keys: Keys | None, job: bytes) -> bytes:
    """Returns the key of the local connections of ``job``."""
    return hmac.digest(b"" if keys is None else keys.local, b"job" + job, "sha256")


def store_endpoint(keys: Keys | None, address: str) -> str:
    """Returns the ipc endpoint beside a store's tcp ``address``, which only holders of ``keys`` know.

    Empty if ``address`` may be of another host, or is one of several that this host has for itself.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if keys is None or host not in _OWN_HOST:
        return ""
    return f"ipc://@zmqgrad-store-{hmac.digest(keys.local, f'port {port}'.encode(), 'sha256').hex()[:32]}"


def keys_for_store(secret: str | bytes | None = None) -> Keys | None:
    """Returns the keys of a store and its clients: of the secret, or else of this user on this host.

    Returns:
        None if there is no secret, and the user allows connections without authentication.

    Raises:
        ArgumentTypeError, ConfigurationError: as :func:`load_keys`; or no place for the user's token.
    """
    found = find_secret(secret)
    if found is not None:
        return _derive(store_secret(found))
    return None if environment.allows_insecure() else _derive(read_token(), False)


def keys_for_worker(job: bytes) -> Keys | None:
    """Returns the keys of the workers of ``job``, its random name; None if there is no secret.

    Workers of another job with the same secret have other keys.

    Raises:
        ConfigurationError: as :func:`load_keys`; or if the secret is one for clients of the store.
    """
    found = find_secret()
    if found is not None and found.startswith(OF_STORE):
        raise ConfigurationError(
            "this secret is one for clients of the store (`zmqgrad secret --role store`): a worker needs "
            "that of the job itself"
        )
    return None if found is None else _derive(hmac.digest(found, b"workers of " + job, "sha512"))


def secure_server(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Requires the job's keys of every peer at addresses that ``socket`` binds from now on.

    A :class:`ZapAuthenticator` must be running in its context.
    """
    socket.curve_server = True
    socket.curve_secretkey = keys.server.private
    _require_authenticator(socket)


def secure_client(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Requires the job's keys of every server that ``socket`` connects to from now on."""
    socket.curve_serverkey = keys.server.public
    socket.curve_publickey = keys.client.public
    socket.curve_secretkey = keys.client.private


def password_server(socket: zmq.Socket[bytes]) -> None:
    """Requires a password of every peer (RFC 24), as :attr:`ZapAuthenticator.passwords` has it.

    It protects no data: an observer of the network reads it. It keeps everybody else from connecting.
    """
    socket.plain_server = True
    _require_authenticator(socket)


def _require_authenticator(socket: zmq.Socket[bytes]) -> None:
    """Refuses every peer unless the authenticator admits it, also if there is none."""
    socket.zap_domain = _ZAP_DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def password_client(socket: zmq.Socket[bytes], password: bytes) -> None:
    """Sends ``password`` to every server that ``socket`` connects to from now on."""
    socket.plain_username = b"zmqgrad"
    socket.plain_password = password


class ZapAuthenticator:
    """Authenticates the peers of all sockets of ``context``. Read by ``reader``, and closed with it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, reader: Reader) -> None:
        self._client_key = keys.client.public
        self.passwords: set[bytes] = set()
        """Admitted at sockets of :func:`password_server`."""
        self._refusals = RepeatLog(logger, "strangers")
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        try:
            self._socket.bind(_ZAP_ENDPOINT)
        except BaseException:
            self._socket.close()
            raise
        self._reader = reader
        reader.at_end.append(self.close)
        reader.watch(get_int(self._socket, zmq.FD), self.read)
        reader.post(self.read)  # its descriptor does not report what came before

    def read(self) -> None:
        """Replies to requests: to some of them now, if there are many."""
        if self._socket.closed:
            return
        try:
            for _ in range(BURST):
                # RFC 27: version, request, domain, address, identity, mechanism, credentials
                request = self._socket.recv_multipart(zmq.NOBLOCK)
                version, number, _, address, _, mechanism, *credentials = request
                accepted = self._accepts(mechanism, credentials)
                if not accepted:  # it may try as often as it can
                    self._refusals.warning(
                        f"refused {address.decode(errors='replace')}, which has not the job's key"
                    )
                code, text = (b"200", b"OK") if accepted else (b"400", b"another secret")
                self._socket.send_multipart([version, number, code, text, b"", b""])
            self._reader.call_again(self.read)
        except (zmq.Again, zmq.ContextTerminated):
            pass

    def _accepts(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        if mechanism == b"PLAIN":
            return any(hmac.compare_digest(credentials[-1], password) for password in self.passwords.copy())
        return mechanism == b"CURVE" and credentials == [self._client_key]

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        self._refusals.close()
        self._socket.close(linger=0)
