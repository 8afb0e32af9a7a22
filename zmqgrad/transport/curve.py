"""CURVE, for those who speak ZMTP themselves: both ends prove that they have the secret, and encrypt.

    caller     HELLO      its key for this connection, in a box for the listener's key: who does not know
                          that key, which is told to nobody, cannot make one
    listener   WELCOME    its own key for this connection, and a cookie
    caller     INITIATE   the cookie; the job's key of callers, and what proves that it has it; properties
    listener   READY      properties
    both       MESSAGE    flags and frame, in a box for the keys of this connection

Boxes are numbered, each end counting up: one that comes again, or was changed, ends the connection. Nothing
is kept for, and no more than four kilobytes are read from, one who has not come through to READY. libzmq at
the other end is understood, and understands (RFC 26, https://rfc.zeromq.org/spec/26/).

Whoever has no secret does not load what this needs (PyNaCl). Pure; no socket.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import ClassVar

from nacl.bindings import (
    crypto_box_afternm,
    crypto_box_beforenm,
    crypto_box_keypair,
    crypto_box_open_afternm,
)
from nacl.exceptions import CryptoError

from zmqgrad.errors import ProtocolError, SecretError
from zmqgrad.transport.security import Keys
from zmqgrad.transport.zmtp import (
    HEAD_ROOM,
    Frame,
    Unpacker,
    command,
    greeting,
    properties,
    split_command,
    write_head,
)

_MESSAGE = b"\x07MESSAGE"
_FLAG_MORE, _FLAG_COMMAND = 1, 2
_BOX = 16
"""Bytes by which a box is larger than what is in it."""

_HELLO_SIZE = 194
_WELCOME_SIZE = 160
_COOKIE_SIZE = 96
_VOUCH_SIZE = 96
_LAST_NUMBER = (1 << 64) - 1

_ANOTHER_SECRET = b"another secret"


class Curve(Unpacker, ABC):
    """What both ends have in common. Use :class:`CurveCaller` or :class:`CurveListener`.

    Args:
        own, expected: socket types of the two ends.
    """

    MECHANISM = b"CURVE"
    _SENDS: ClassVar[bytes]
    _HEARS: ClassVar[bytes]

    __slots__ = ("_heard", "_keys", "_multipart", "_own", "_private", "_public", "_sent", "_shared")

    def __init__(self, keys: Keys, own: str, expected: str) -> None:
        super().__init__(expected)
        self._keys = keys
        self._own = own
        self._public = self._private = b""  # for this connection alone
        self._shared = b""  # of both ends' keys for this connection
        self._sent = 0  # the number of the last box
        self._heard = 0
        self._multipart = False

    @abstractmethod
    def opening(self) -> bytes:
        """What this end says first."""

    # ---- the handshake ----------------------------------------------------------------------------------

    def _obey(self, said: bytes) -> None:
        if self.ready:
            raise ProtocolError("a command in the clear")
        name, data = split_command(said)
        try:
            self._shake_hands(name, data)
        except CryptoError:
            raise self._no_secret() from None

    @abstractmethod
    def _shake_hands(self, name: bytes, data: bytes) -> None:
        """The other end says ``name``. Raises ``CryptoError`` if it has not the keys for what it says."""

    def _no_secret(self) -> SecretError:
        return SecretError("the other end has another secret")

    # ---- messages ---------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> list[Frame | None]:
        """As :meth:`Unpacker.feed`; what comes is decrypted."""
        return self._open_all(super().feed(data))

    def filled(self, size: int) -> list[Frame | None]:
        """As :meth:`Unpacker.filled`; what comes is decrypted."""
        return self._open_all(super().filled(size))

    def _open_all(self, frames: list[Frame | None]) -> list[Frame | None]:
        found: list[Frame | None] = []
        for frame in frames:
            if frame is None or len(frame) < len(_MESSAGE) + 8 + _BOX + 1 or frame[:8] != _MESSAGE:
                raise ProtocolError("a message in the clear")
            try:
                plain = self._open(self._HEARS, self._count(frame[8:16]), bytes(frame[16:]), self._shared)
            except CryptoError:
                raise ProtocolError("a message that was changed on its way") from None
            flags = plain[0]
            if flags & _FLAG_COMMAND:
                self._obey_in_private(plain[1:])
            elif flags & _FLAG_MORE:
                self._multipart = True
            elif self._multipart:
                self._multipart = False
                found.append(None)
            else:
                found.append(plain[1:])
        return found

    def _obey_in_private(self, said: bytes) -> None:
        name, data = split_command(said)
        if name == b"PING":
            self.answers += self._seal(b"\x02\x04PONG" + data[2:18])

    def pack(self, message: bytearray) -> bytearray:
        """A message to be sent, whose first ``HEAD_ROOM`` bytes are free, encrypted and with its head."""
        message[HEAD_ROOM - 1] = 0  # its flags
        return self._seal(bytes(memoryview(message)[HEAD_ROOM - 1 :]))

    def _seal(self, plain: bytes) -> bytearray:
        number = self._next_number()
        box = crypto_box_afternm(plain, self._SENDS + number, self._shared)
        return write_head(bytearray().join((bytes(HEAD_ROOM), _MESSAGE, number, box)))

    # ---- boxes ------------------------------------------------------------------------------------------

    def _next_number(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(8, "big")  # a connection does not live to see the last one

    def _count(self, number: bytes | memoryview) -> bytes:
        """``number`` of what the other end says, if that is new."""
        said = int.from_bytes(number, "big")
        if said <= self._heard:
            raise ProtocolError(f"message {said} after message {self._heard}: said again")
        self._heard = said
        return bytes(number)

    @staticmethod
    def _open(prefix: bytes, number: bytes, box: bytes, shared: bytes) -> bytes:
        return crypto_box_open_afternm(box, prefix + number, shared)


class CurveCaller(Curve):
    """Of who connects."""

    _SENDS, _HEARS = b"CurveZMQMESSAGEC", b"CurveZMQMESSAGES"

    __slots__ = ("_welcomed",)

    def __init__(self, keys: Keys, own: str, expected: str) -> None:
        super().__init__(keys, own, expected)
        self._welcomed = False

    def opening(self) -> bytes:
        """Greeting and HELLO: nothing needs to be heard before."""
        self._public, self._private = crypto_box_keypair()
        number = self._next_number()
        shared = crypto_box_beforenm(self._keys.listener.public, self._private)
        box = crypto_box_afternm(bytes(64), b"CurveZMQHELLO---" + number, shared)
        hello = b"\x01\x00" + bytes(72) + self._public + number + box
        return greeting(b"CURVE") + command(b"HELLO", hello)

    def _shake_hands(self, name: bytes, data: bytes) -> None:
        if name == b"WELCOME" and not self._welcomed:
            self._welcomed = True
            self.answers += command(b"INITIATE", self._initiate(data))
        elif name == b"READY" and self._welcomed:
            if len(data) < 8 + _BOX:
                raise ProtocolError(f"a READY of {len(data)} bytes")
            self._take_properties(
                self._open(b"CurveZMQREADY---", self._count(data[:8]), data[8:], self._shared)
            )
        elif name == b"ERROR":
            if data[1:] == _ANOTHER_SECRET:
                raise self._no_secret()
            raise ProtocolError(f"the other end refused: {data[1:].decode(errors='replace')}")
        else:
            raise ProtocolError(f"a {name[:16]!r} in the middle of a handshake")

    def _initiate(self, welcome: bytes) -> bytes:
        if len(welcome) != _WELCOME_SIZE:
            raise ProtocolError(f"a WELCOME of {len(welcome)} bytes (expected {_WELCOME_SIZE})")
        keys = self._keys
        with_listener = crypto_box_beforenm(keys.listener.public, self._private)
        found = self._open(b"WELCOME-", welcome[:16], welcome[16:], with_listener)
        theirs, cookie = found[:32], found[32:]
        self._shared = crypto_box_beforenm(theirs, self._private)
        nonce = secrets.token_bytes(16)
        vouched = crypto_box_beforenm(theirs, keys.caller.private)
        vouch = nonce + crypto_box_afternm(self._public + keys.listener.public, b"VOUCH---" + nonce, vouched)
        number = self._next_number()
        plain = keys.caller.public + vouch + properties(self._own)
        return cookie + number + crypto_box_afternm(plain, b"CurveZMQINITIATE" + number, self._shared)


class CurveListener(Curve):
    """Of who is connected to."""

    _SENDS, _HEARS = b"CurveZMQMESSAGES", b"CurveZMQMESSAGEC"

    __slots__ = ("_caller", "_cookie")

    def __init__(self, keys: Keys, own: str, expected: str) -> None:
        super().__init__(keys, own, expected)
        self._caller = b""  # the caller's key for this connection
        self._cookie = b""

    def opening(self) -> bytes:
        """The greeting."""
        return greeting(b"CURVE", as_server=True)

    def _shake_hands(self, name: bytes, data: bytes) -> None:
        if name == b"HELLO" and not self._caller:
            self.answers += command(b"WELCOME", self._welcome(data))
        elif name == b"INITIATE" and self._caller:
            self._take_initiate(data)
        else:
            raise ProtocolError(f"a {name[:16]!r} in the middle of a handshake")

    def _no_secret(self) -> SecretError:
        self.answers += command(b"ERROR", bytes([len(_ANOTHER_SECRET)]) + _ANOTHER_SECRET)
        return super()._no_secret()

    def _welcome(self, hello: bytes) -> bytes:
        if len(hello) != _HELLO_SIZE or hello[:2] != b"\x01\x00":
            raise ProtocolError(f"a HELLO of {len(hello)} bytes (expected {_HELLO_SIZE}, and version 1.0)")
        caller, number, box = hello[74:106], hello[106:114], hello[114:]
        shared = crypto_box_beforenm(caller, self._keys.listener.private)
        if any(self._open(b"CurveZMQHELLO---", self._count(number), box, shared)):
            raise ProtocolError("a HELLO that says something")
        self._public, self._private = crypto_box_keypair()  # not for whoever has no more than connected
        self._caller = caller
        self._cookie = secrets.token_bytes(_COOKIE_SIZE)  # what it is of is kept here, not in it
        nonce = secrets.token_bytes(16)
        return nonce + crypto_box_afternm(self._public + self._cookie, b"WELCOME-" + nonce, shared)

    def _take_initiate(self, initiate: bytes) -> None:
        least = _COOKIE_SIZE + 8 + 32 + _VOUCH_SIZE + _BOX
        cookie, number = initiate[:_COOKIE_SIZE], initiate[_COOKIE_SIZE : _COOKIE_SIZE + 8]
        if len(initiate) < least or not secrets.compare_digest(cookie, self._cookie):
            raise ProtocolError(f"an INITIATE of {len(initiate)} bytes that does not follow from our WELCOME")
        self._shared = crypto_box_beforenm(self._caller, self._private)
        box = initiate[_COOKIE_SIZE + 8 :]
        plain = self._open(b"CurveZMQINITIATE", self._count(number), box, self._shared)
        who, nonce, vouch = plain[:32], plain[32:48], plain[48:128]
        if not secrets.compare_digest(who, self._keys.caller.public):
            raise self._no_secret()
        vouched = self._open(b"VOUCH---", nonce, vouch, crypto_box_beforenm(who, self._private))
        if not secrets.compare_digest(vouched, self._caller + self._keys.listener.public):
            raise self._no_secret()
        self._take_properties(plain[128:])
        number = self._next_number()
        box = crypto_box_afternm(properties(self._own), b"CurveZMQREADY---" + number, self._shared)
        self.answers += command(b"READY", number + box)
