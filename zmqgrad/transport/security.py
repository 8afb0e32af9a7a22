"""Who belongs to the job: whoever has its secret. The keys of CURVE, on every tcp socket, follow from that.

CURVE (https://rfc.zeromq.org/spec/26/) encrypts with keys that are made for each connection, so what was
recorded stays secret though the job's secret becomes known. Both ends prove that they have the secret before
either receives a message: one who connects must know the listener's public key, which is told to nobody, and
must have the job's other key, too, which :mod:`~zmqgrad.transport.zap` checks.

Sockets that only processes of this user can reach (ipc) are not keyed.
"""

from __future__ import annotations

import hashlib
import logging
import stat
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from zmqgrad import environment
from zmqgrad.errors import ConfigurationError

logger = logging.getLogger(__name__)

SHORTEST = 16
"""Bytes of a secret; whoever has recorded a connection can try out short ones at leisure."""

_MAKE_ONE = "`openssl rand -hex 32` makes one"


class KeyPair(NamedTuple):
    """A key that may be told, and the one that belongs to it."""

    public: bytes
    private: bytes


class Keys(NamedTuple):
    """A job's: of whoever listens, and of whoever connects. Every process of the job has both."""

    listener: KeyPair
    caller: KeyPair

    def __repr__(self) -> str:  # never to a log
        return "<Keys>"


def keys_of(secret: str | bytes | None = None) -> Keys | None:
    """The keys that follow from ``secret``; from that of the environment if it is None; None without any.

    Raises:
        TypeError, ConfigurationError: if it cannot be one, or is said twice, or its file cannot be read.
    """
    if secret is None:
        said, path = environment.secret(), environment.secret_file()
        if said is not None and path is not None:
            raise ConfigurationError(f"both {environment.SECRET} and {environment.SECRET_FILE} are set")
        if path is not None:
            return _derive(read_secret(path))
        return None if said is None else _derive(_checked(said.encode(), environment.SECRET))
    if not isinstance(secret, (str, bytes)):
        raise TypeError(f"a secret must be str or bytes, not {type(secret).__name__}")
    return _derive(_checked(secret.encode() if isinstance(secret, str) else secret, "the secret"))


def read_secret(path: str) -> bytes:
    """The secret in the file at ``path``, less blanks and line ends around it.

    Raises:
        ConfigurationError: if it cannot be read, or is too short.
    """
    try:
        secret = Path(path).read_bytes()
        mode = Path(path).stat().st_mode
    except OSError as e:
        raise ConfigurationError(f"cannot read the secret's file {path!r}: {e.strerror}") from e
    if mode & stat.S_IROTH:
        logger.warning("everybody on this host can read the secret in %s: chmod 600 %s", path, path)
    return _checked(secret.strip(), f"the secret in {path!r}")


def _checked(secret: bytes, name: str) -> bytes:
    if len(secret) < SHORTEST:
        raise ConfigurationError(f"{name} has {len(secret)} bytes (at least {SHORTEST}): {_MAKE_ONE}")
    return secret


@lru_cache(maxsize=8)
def _derive(secret: bytes) -> Keys:
    return Keys(_pair(secret, b"listener"), _pair(secret, b"caller"))


def _pair(secret: bytes, role: bytes) -> KeyPair:
    private = hashlib.blake2b(hashlib.sha512(secret).digest(), digest_size=32, person=b"zg-" + role).digest()
    public = z85.decode(zmq.curve_public(z85.encode(private)))
    return KeyPair(public, private)
