"""Python values to payloads: the way out.

Nothing is pickled where a reference will do: a function that can be imported goes by name, arguments or
results that are nothing but tensors go as they are, and so do numbers, text and bytes
(:mod:`zmqgrad.rpc.packing.plain`). The rest goes by :mod:`zmqgrad.rpc.packing.pickling`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zmqgrad.errors import PayloadError
from zmqgrad.rpc.packing.naming import reference_to
from zmqgrad.rpc.packing.pickling import blob, pack_pickled
from zmqgrad.rpc.packing.plain import encode_arguments, encode_value
from zmqgrad.rpc.packing.scripts import check_script_arguments
from zmqgrad.rpc.packing.terms import DEFAULT_TERMS, PACKED_NOTHING, Packed, Terms
from zmqgrad.wire.lazy_frame import Frame
from zmqgrad.wire.messages import NO_TENSORS, Payload, PayloadFormat
from zmqgrad.wire.tensors import encode_tensors


def pack(value: Any, terms: Terms = DEFAULT_TERMS) -> Packed:
    """``value`` ready to send.

    Raises:
        PayloadError: naming what in ``value`` cannot be pickled.
    """
    if value is None:
        return PACKED_NOTHING
    kind = type(value)
    if kind is torch.Tensor:
        frames: list[Frame] = []
        return Packed(
            Payload(PayloadFormat.TENSOR, encode_tensors((value,), frames, terms.devices)), frames, (value,)
        )
    if kind is tuple and _only_tensors(value):
        return _pack_tensors(value, terms)
    plain = encode_value(value)
    if plain is not None:
        frames = []
        return Packed(Payload(PayloadFormat.PLAIN, NO_TENSORS, blob(plain, frames)), frames, ())
    if kind is list or kind is dict:
        return _pack_plain((value,), {}, PayloadFormat.VALUE, terms) or pack_pickled(value, terms)
    return pack_pickled(value, terms)


def _pack_plain(
    args: tuple[Any, ...], kwargs: dict[str, Any], form: PayloadFormat, terms: Terms
) -> Packed | None:
    """``args`` and ``kwargs`` without a pickle, if that can be."""
    plain = encode_arguments(args, kwargs)
    if plain is None:
        return None
    data, tensors = plain
    frames: list[Frame] = []
    described = encode_tensors(tensors, frames, terms.devices)
    return Packed(Payload(form, described, blob(data, frames)), frames, tensors)


def _pack_tensors(value: tuple[torch.Tensor, ...], terms: Terms) -> Packed:
    """A tuple of tensors. One that is there twice is sent once, and is one tensor at the other end."""
    frames: list[Frame] = []
    order: tuple[int, ...] = ()
    if len(value) > 1:
        numbers: dict[int, int] = {}
        order = tuple([numbers.setdefault(id(t), len(numbers)) for t in value])
        if len(numbers) == len(value):
            order = ()
        else:
            value = tuple({id(t): t for t in value}.values())
    tensors = encode_tensors(value, frames, terms.devices)
    return Packed(Payload(PayloadFormat.TUPLE, tensors, None, (), (), order), frames, value)


def pack_call(
    function: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, terms: Terms = DEFAULT_TERMS
) -> tuple[str, Packed]:
    """The reference of ``function`` (empty: it is in the payload) and the payload of a call.

    Raises:
        PayloadError: if ``function`` or its arguments are none, or naming what cannot be pickled.
    """
    if not callable(function):
        raise PayloadError(
            f"function should be callable. {reprlib.repr(function)} cannot be called; "
            f"a remote call needs a function"
        )
    if args.__class__ is not tuple:
        args = _arguments(args)
    kwargs = {} if kwargs is None else _keywords(kwargs)
    if function.__class__ is torch.jit.ScriptFunction:
        check_script_arguments(function, args, kwargs)
    reference = reference_to(function, terms.main_by_reference)
    if not reference:
        return "", pack_pickled((function, args, kwargs), terms, lambda: _parts(args, kwargs, function))
    return reference, pack_arguments(args, kwargs, terms)


def _parts(args: Sequence[Any], kwargs: Mapping[str, Any], function: Any = None) -> dict[str, Any]:
    """The arguments of a call by name, as an error message shows them."""
    parts = {} if function is None else {"func": function}
    parts.update((f"args[{i}]", value) for i, value in enumerate(args))
    parts.update((f"kwargs[{name!r}]", value) for name, value in kwargs.items())
    return parts


def _arguments(args: Any) -> tuple[Any, ...]:
    if args is None:
        return ()
    if not isinstance(args, (tuple, list)):  # a tensor or a string would be taken apart
        raise PayloadError(
            f"args must be a tuple of arguments, not {type(args).__name__}; for one argument write args=(x,)"
        )
    return tuple(args)


def _keywords(kwargs: Any) -> dict[str, Any]:
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise PayloadError(f"kwargs must be a dict of arguments by name, not {reprlib.repr(kwargs)}")
    return dict(kwargs)


def pack_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], terms: Terms = DEFAULT_TERMS) -> Packed:
    """The payload of a call whose function goes by reference.

    Raises:
        PayloadError: naming what cannot be pickled.
    """
    if not args and not kwargs:
        return PACKED_NOTHING
    if not kwargs and _only_tensors(args):
        return _pack_tensors(args, terms)
    plain = _pack_plain(args, kwargs, PayloadFormat.ARGUMENTS, terms)
    return plain or pack_pickled((args, kwargs), terms, lambda: _parts(args, kwargs))


def _only_tensors(value: tuple[Any, ...]) -> bool:
    for item in value:
        if type(item) is not torch.Tensor:
            return False
    return len(value) > 0
