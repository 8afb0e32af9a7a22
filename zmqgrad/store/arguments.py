"""Validation of the keys, values and timeouts of stores.

A key is text. As in torch, it may also be bytes that are not valid UTF-8: the character U+10FF00 + ``b``
represents an invalid byte ``b``, so that ``list_keys`` can return the key, and calls accept the result. The
surrogate escapes of Python's file names (``os.listdir``) are accepted for the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from zmqgrad.errors import ArgumentTypeError, ConfigurationError
from zmqgrad.runtime.arguments import as_list
from zmqgrad.wire.messages import MAX_KEY, MAX_KEYS, MAX_VALUE

Timeout = timedelta | float

DEFAULT_TIMEOUT = timedelta(seconds=300)

MAX_SHOWN = 200
"""How many characters of a key an error shows."""

_ESCAPE = 0x10FF00
_PYTHON_ESCAPE = 0xDC00
"""Offsets of the characters that represent bytes: here, and in Python's surrogate escapes."""


def as_key(key: str | bytes) -> str:
    """Check ``key``, and return it as text.

    Raises:
        ArgumentTypeError, ConfigurationError: if it is not a valid key.
    """
    if type(key) is str and key.isascii() and len(key) <= MAX_KEY:  # as nearly always
        return key
    if type(key) is not str:
        if isinstance(key, (bytes, bytearray)):
            key = _as_text(bytes(key))
        elif isinstance(key, str):
            key = str.__str__(key)  # of a subclass, such as NumPy's
        else:
            raise ArgumentTypeError(f"a key must be a str, not {type(key).__name__}")
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError:
            key = _as_text(_as_bytes(key))
    if len(key) > MAX_KEY:
        raise ConfigurationError(f"a key of {len(key)} characters (at most {MAX_KEY}): {key[:40]!r}...")
    return key


def show_key(key: str) -> str:
    """``key`` as errors show it: its beginning, if it is long."""
    return repr(key) if len(key) <= MAX_SHOWN else f"{key[:MAX_SHOWN]!r}..."


def as_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Check ``keys``, and return them as text.

    Raises:
        ArgumentTypeError, ConfigurationError: if one is not a valid key, or ``keys`` is a single string.
    """
    checked = tuple(as_list(keys, "expected a list of keys"))
    if {*map(type, checked)} != {str} or not "".join(checked).isascii() or max(map(len, checked)) > MAX_KEY:
        checked = tuple([as_key(key) for key in checked])
    if len(checked) > MAX_KEYS:
        raise ConfigurationError(f"{len(checked)} keys in one query (at most {MAX_KEYS})")
    return checked


def as_value(value: object) -> bytes:
    """Check ``value``, and return it as bytes.

    Raises:
        ArgumentTypeError, ConfigurationError: if it is not a valid value.
    """
    if type(value) is not bytes:
        if isinstance(value, str):
            try:
                value = value.encode()
            except UnicodeEncodeError as e:
                raise ConfigurationError(
                    f"a value that is no Unicode text: {value[:40]!r}. Pass bytes, or replace its surrogates"
                ) from e
        elif isinstance(value, (bytes, bytearray, memoryview)):
            value = bytes(value)
        else:
            raise ArgumentTypeError(f"a value must be bytes or str, not {type(value).__name__}")
    if len(value) > MAX_VALUE:
        raise ConfigurationError(f"a value of {len(value)} bytes (at most {MAX_VALUE})")
    return value


def seconds_of(timeout: Timeout) -> float:
    """Check ``timeout``, and return it in seconds.

    Raises:
        ArgumentTypeError, ConfigurationError: if it is not a duration, or negative.
    """
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        try:
            seconds = float(timeout)
        except OverflowError as e:
            raise ConfigurationError(f"a timeout is too long: {e}") from None
    else:
        raise ArgumentTypeError(f"a timeout must be a timedelta or seconds, not {type(timeout).__name__}")
    if not seconds >= 0:
        raise ConfigurationError(f"a timeout cannot be negative, or no number: {timeout}")
    return seconds


def _as_bytes(name: str) -> bytes:
    """The bytes of a key with surrogate escapes."""
    try:
        return name.encode(errors="surrogateescape")
    except UnicodeEncodeError as e:
        raise ConfigurationError(f"the key {name[:40]!r} contains an unpaired surrogate") from e


def _as_text(key: bytes) -> str:
    text = key.decode(errors="surrogateescape")
    if text.isascii():
        return text
    return "".join(map(_as_character, text))


def _as_character(character: str) -> str:
    code = ord(character)
    if _PYTHON_ESCAPE + 0x80 <= code <= _PYTHON_ESCAPE + 0xFF:
        return chr(code - _PYTHON_ESCAPE + _ESCAPE)
    if code >= _ESCAPE + 0x80:  # otherwise it would represent a byte
        return "".join(chr(byte + _ESCAPE) for byte in character.encode())
    return character
