"""What callers give to a store, checked: keys, values, timeouts.

A key is text. Bytes that are no UTF-8 are taken as well, as torch does: each such byte stands in the text as
the character from U+10FF80 on that ends in its two digits, so that ``list_keys`` can tell of it, and what it
tells can be given back. Names of files as Python writes them (``os.listdir``) mean the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from zmqgrad.errors import ConfigurationError
from zmqgrad.wire.messages import MAX_KEY, MAX_KEYS, MAX_VALUE

Timeout = timedelta | float

DEFAULT_TIMEOUT = timedelta(seconds=300)

_NO_TEXT = 0x10FF00
_SURROGATE = 0xDC00
"""By how much the characters that stand for bytes are above them: here, and in Python's names of files."""


def as_key(key: str | bytes) -> str:
    """``key``, checked, as text.

    Raises:
        TypeError, ConfigurationError: if it cannot be a key.
    """
    if type(key) is str and key.isascii() and len(key) <= MAX_KEY:  # as nearly always
        return key
    if type(key) is not str:
        if isinstance(key, (bytes, bytearray)):
            key = _as_text(bytes(key))
        elif not isinstance(key, str):
            raise TypeError(f"a key must be a str, not {type(key).__name__}")
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError:
            key = _as_text(_as_bytes(key))
    if len(key) > MAX_KEY:
        raise ConfigurationError(f"a key of {len(key)} characters (at most {MAX_KEY}): {key[:40]!r}...")
    return key


def as_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """``keys``, checked.

    Raises:
        TypeError, ConfigurationError: if they cannot be keys; one string is not taken for a list of letters.
    """
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"expected a list of keys, not the {type(keys).__name__} {keys[:40]!r}")
    checked = tuple(keys)
    if {*map(type, checked)} != {str} or not "".join(checked).isascii() or max(map(len, checked)) > MAX_KEY:
        checked = tuple([as_key(key) for key in checked])
    if len(checked) > MAX_KEYS:
        raise ConfigurationError(f"{len(checked)} keys in one query (at most {MAX_KEYS})")
    return checked


def as_value(value: object) -> bytes:
    """``value``, checked.

    Raises:
        TypeError, ConfigurationError: if it cannot be a value.
    """
    if not isinstance(value, bytes):
        if isinstance(value, str):
            value = value.encode()
        elif isinstance(value, (bytearray, memoryview)):
            value = bytes(value)
        else:
            raise TypeError(f"a value must be bytes or str, not {type(value).__name__}")
    if len(value) > MAX_VALUE:
        raise ConfigurationError(f"a value of {len(value)} bytes (at most {MAX_VALUE})")
    return value


def seconds_of(timeout: Timeout) -> float:
    """``timeout`` in seconds, checked.

    Raises:
        TypeError, ConfigurationError: if it is no time, or negative.
    """
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        seconds = float(timeout)
    else:
        raise TypeError(f"a timeout must be a timedelta or seconds, not {type(timeout).__name__}")
    if not seconds >= 0:
        raise ConfigurationError(f"a timeout cannot be negative, or no number: {timeout}")
    return seconds


def _as_bytes(name: str) -> bytes:
    """Those that a name of a file stands for."""
    try:
        return name.encode(errors="surrogateescape")
    except UnicodeEncodeError as e:
        raise ConfigurationError(f"the key {name[:40]!r} has a character that is but half of one") from e


def _as_text(key: bytes) -> str:
    text = key.decode(errors="surrogateescape")
    if text.isascii():
        return text
    return "".join(map(_as_character, text))


def _as_character(character: str) -> str:
    code = ord(character)
    if _SURROGATE + 0x80 <= code <= _SURROGATE + 0xFF:
        return chr(code - _SURROGATE + _NO_TEXT)
    if code >= _NO_TEXT + 0x80:  # or it would be taken for a byte
        return "".join(chr(byte + _NO_TEXT) for byte in character.encode())
    return character
