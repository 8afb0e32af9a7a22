"""Numbers, text and bytes without a pickle: as arguments, beside tensors, and as results.

Most calls carry nothing else, and a pickler that is ready for anything takes longer than all the rest of a
call. Values of exactly these types travel as msgpack; one of any other (a subclass, a container, an integer
of more than 64 bits) sends the whole call by way of the pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from zmqgrad.errors import ProtocolError

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))

_NO_MSGPACK = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What reading raises for bytes that are none, text that is no UTF-8, and containers too deep."""

_encode = msgspec.msgpack.Encoder().encode
_decode_value = msgspec.msgpack.Decoder().decode
_decode_arguments = msgspec.msgpack.Decoder(tuple[list[Any], list[str], list[int]]).decode


def encode_value(value: Any) -> bytes | None:
    """A plain ``value``; None if it is not plain."""
    return _try_to_encode(value) if type(value) in _PLAIN else None


def decode_value(data: Any) -> Any:
    """What :func:`encode_value` was given.

    Raises:
        ProtocolError: if ``data`` is nothing of the kind.
    """
    try:
        return _decode_value(data)
    except _NO_MSGPACK as e:
        raise ProtocolError(f"a plain value does not hold together: {e}") from e


def encode_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bytes, Sequence[torch.Tensor]] | None:
    """Arguments of which each is plain or a tensor, and the tensors; None if there are others.

    A tensor that is given twice is sent once, and is one tensor at the other end.
    """
    values = [*args, *kwargs.values()]
    places: list[int] = []
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}
    for place, value in enumerate(values):
        kind = type(value)
        if kind is torch.Tensor:
            number = numbers.setdefault(id(value), len(tensors))
            if number == len(tensors):
                tensors.append(value)
            values[place] = None
            places += (place, number)
        elif kind not in _PLAIN:
            return None
    data = _try_to_encode((values, list(kwargs), places))
    return None if data is None else (data, tensors)


def decode_arguments(data: Any, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
    """What :func:`encode_arguments` was given.

    Raises:
        ProtocolError: if ``data`` is nothing of the kind, or does not fit ``tensors``.
    """
    try:
        content, names, places = _decode_arguments(data)
    except _NO_MSGPACK as e:
        raise ProtocolError(f"the arguments of a call do not hold together: {e}") from e
    if len(names) > len(content) or len(places) % 2:
        raise ProtocolError(f"{len(content)} arguments came with {len(names)} names, {len(places)} places")
    for i in range(0, len(places), 2):
        place, number = places[i], places[i + 1]
        if not (0 <= place < len(content) and 0 <= number < len(tensors)):
            raise ProtocolError(
                f"tensor {number} of {len(tensors)} is to be argument {place} of {len(content)}"
            )
        content[place] = tensors[number]
    first = len(content) - len(names)
    return content[:first], dict(zip(names, content[first:], strict=True))


def _try_to_encode(content: Any) -> bytes | None:
    try:
        return _encode(content)
    except (OverflowError, ValueError):  # more than 64 bits, 4 GB, or half of a surrogate pair
        return None
