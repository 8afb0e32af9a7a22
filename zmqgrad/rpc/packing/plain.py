"""Numbers, text and bytes without a pickle: as arguments, beside tensors, and as results.

So, too, go lists, tuples and dicts that hold nothing but tensors. Most calls carry nothing else, and a
pickler that is ready for anything takes longer than all the rest of a call. Values of exactly these types
travel as msgpack; one of any other (a subclass, another container, an integer of more than 64 bits) sends the
whole call by way of the pickle.
"""

from __future__ import annotations

import enum
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


class _Kind(enum.IntEnum):
    """What stands at a place."""

    TENSOR = 0
    LIST = 1  # of tensors
    TUPLE = 2
    DICT = 3  # its keys, which are text, stand there


_CONTAINERS: dict[type, _Kind] = {list: _Kind.LIST, tuple: _Kind.TUPLE, dict: _Kind.DICT}
_TENSORS = {torch.Tensor}
_KEYS = {str}


class _Places:
    """Where the tensors are: (place, kind, number of the first tensor, how many) for each, in one list."""

    __slots__ = ("flat", "numbers", "tensors")

    def __init__(self) -> None:
        self.flat: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}  # by id

    def add(self, place: int, tensor: torch.Tensor) -> None:
        """``tensor`` stands at ``place``."""
        number = self.numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        self.flat += (place, _Kind.TENSOR, number, 1)

    def add_all(self, place: int, kind: _Kind, value: Any) -> bool:
        """A container of tensors stands at ``place``; False if it has something else in it.

        Or one of them is there twice, or the whole of it may be: only a pickle knows that.
        """
        tensors = list(value.values()) if kind is _Kind.DICT else value
        if set(map(type, tensors)) != _TENSORS:  # an empty one is left to the pickle, too
            return False
        first, known = len(self.tensors), len(self.numbers)
        self.numbers.update(zip(map(id, tensors), range(first, first + len(tensors)), strict=True))
        if len(self.numbers) != known + len(tensors):
            return False
        self.tensors += tensors
        self.flat += (place, kind, first, len(tensors))
        return True


def encode_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bytes, Sequence[torch.Tensor]] | None:
    """Arguments of which each is plain, a tensor, or a container of tensors alone, and the tensors.

    None if there are others. A tensor that is given twice is sent once, and is one tensor at the other end.
    """
    values = [*args, *kwargs.values()]
    places = _Places()
    for place, value in enumerate(values):
        kind = type(value)
        if kind is torch.Tensor:
            places.add(place, value)
            values[place] = None
        elif kind in _CONTAINERS:
            if not places.add_all(place, _CONTAINERS[kind], value):
                return None
            values[place] = None
            if kind is dict:
                values[place] = list(value)
                if set(map(type, value)) != _KEYS:
                    return None
        elif kind not in _PLAIN:
            return None
    data = _try_to_encode((values, list(kwargs), places.flat))
    return None if data is None else (data, places.tensors)


def decode_arguments(data: Any, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
    """What :func:`encode_arguments` was given.

    Raises:
        ProtocolError: if ``data`` is nothing of the kind, or does not fit ``tensors``.
    """
    try:
        content, names, places = _decode_arguments(data)
    except _NO_MSGPACK as e:
        raise ProtocolError(f"the arguments of a call do not hold together: {e}") from e
    if len(names) > len(content) or len(places) % 4:
        raise ProtocolError(f"{len(content)} arguments came with {len(names)} names, {len(places)} places")
    for i in range(0, len(places), 4):
        place, kind, number, count = places[i : i + 4]
        if not (
            0 <= place < len(content) and 0 <= number < len(tensors) and 0 < count <= len(tensors) - number
        ):
            raise ProtocolError(
                f"tensors {number} to {number + count} of {len(tensors)} are to be argument {place} of "
                f"{len(content)}"
            )
        content[place] = (
            tensors[number]
            if kind == _Kind.TENSOR
            else _container(kind, tensors[number : number + count], content[place])
        )
    first = len(content) - len(names)
    return content[:first], dict(zip(names, content[first:], strict=True))


def _container(kind: int, tensors: Sequence[torch.Tensor], keys: Any) -> Any:
    if kind == _Kind.LIST:
        return list(tensors)
    if kind == _Kind.TUPLE:
        return tuple(tensors)
    if kind != _Kind.DICT or not isinstance(keys, list) or set(map(type, keys)) != _KEYS:
        raise ProtocolError(f"tensors are to be a container of kind {kind} with keys {type(keys).__name__}")
    if len(set(keys)) != len(tensors) or len(keys) != len(tensors):
        raise ProtocolError(f"{len(tensors)} tensors came with {len(keys)} keys")
    return dict(zip(keys, tensors, strict=True))


def _try_to_encode(content: Any) -> bytes | None:
    try:
        return _encode(content)
    except (OverflowError, ValueError):  # more than 64 bits, 4 GB, or half of a surrogate pair
        return None
