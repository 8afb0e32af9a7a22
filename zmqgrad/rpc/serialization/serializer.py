"""Outgoing calls and values to payloads.

A function that can be imported is sent by name. Arguments that are all tensors, and a result that is one
tensor, need no pickle.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zmqgrad.errors import PayloadError, PeerLostError
from zmqgrad.rpc.serialization.context import (
    DEFAULT_CONTEXT,
    SERIALIZED_NONE,
    SerializationContext,
    SerializedPayload,
)
from zmqgrad.rpc.serialization.naming import reference_to
from zmqgrad.rpc.serialization.pickler import ModuleFollowsError, RpcPickler, tensors_of
from zmqgrad.rpc.serialization.scripts import check_script_arguments
from zmqgrad.wire.lazy_frame import Frame
from zmqgrad.wire.messages import Blob, BlobLocation, Payload, PayloadFormat
from zmqgrad.wire.tensors import encode_tensors

MAX_INLINE_PICKLE_BYTES = 64 << 10
"""Larger pickles and buffers travel in frames of their own instead of in the header."""


def serialize(
    value: Any, context: SerializationContext = DEFAULT_CONTEXT, function: str = ""
) -> SerializedPayload:
    """Serialize the result of a call, or the value of an RRef.

    Args:
        value: what to serialize.
        context: of the peer.
        function: ``module:qualified.name`` of what returned ``value``, for the error; empty: unknown.

    Raises:
        PayloadError: if ``value`` cannot be pickled.
    """
    if value is None:
        return SERIALIZED_NONE
    if type(value) is torch.Tensor:
        return _serialize_tensors((value,), context)
    if not function:
        return _serialize_pickle(value, context)
    return _serialize_pickle(value, context, lambda: {f"the result of {function.partition(':')[2]}": value})


def serialize_call(
    function: Any,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    context: SerializationContext = DEFAULT_CONTEXT,
) -> tuple[str, SerializedPayload]:
    """Serialize a call of ``function``.

    Returns:
        The reference of ``function``, empty if the payload contains the function; and the payload.

    Raises:
        PayloadError: if ``function`` is not callable or ``args`` and ``kwargs`` are no arguments; or naming
            the argument that cannot be pickled.
        OperatorError: if ``function`` is a script function, and its schema does not match the arguments.
    """
    if not callable(function):
        raise PayloadError(
            f"function should be callable. {reprlib.repr(function)} cannot be called; "
            f"a remote call needs a function"
        )
    if args.__class__ is not tuple:
        args = to_args(args)
    kwargs = {} if kwargs is None else to_kwargs(kwargs)
    if function.__class__ is torch.jit.ScriptFunction:
        check_script_arguments(function, args, kwargs)
    reference = reference_to(function, context.main_by_reference)
    if reference:
        return reference, serialize_arguments(args, kwargs, context)
    content = (function, args, kwargs)
    return "", _serialize_pickle(content, context, lambda: _name_arguments(args, kwargs, function))


def serialize_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], context: SerializationContext = DEFAULT_CONTEXT
) -> SerializedPayload:
    """Serialize the arguments of a call whose function is sent by reference.

    Raises:
        PayloadError: naming the argument that cannot be pickled.
    """
    if not kwargs:
        if not args:
            return SERIALIZED_NONE
        if all([type(value) is torch.Tensor for value in args]):
            return _serialize_tensors(args, context)
    return _serialize_pickle((args, kwargs), context, lambda: _name_arguments(args, kwargs))


_TEXTS = (str, bytes, bytearray, memoryview)


def to_args(args: Any) -> tuple[Any, ...]:
    """The arguments of a call as a tuple.

    Raises:
        PayloadError: if ``args`` are no sequence, or a text, which is one argument.
    """
    if args is None:
        return ()
    if not isinstance(args, Sequence) or isinstance(args, _TEXTS):  # iterating over a text would split it
        raise PayloadError(
            f"args must be a tuple of arguments, not {type(args).__name__}; for one argument write args=(x,)"
        )
    return tuple(args)


def to_kwargs(kwargs: Any) -> dict[str, Any]:
    """The keyword arguments of a call as a dict.

    Raises:
        PayloadError: if ``kwargs`` are no mapping from names.
    """
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise PayloadError(f"kwargs must be a dict of arguments by name, not {reprlib.repr(kwargs)}")
    return dict(kwargs)


def _name_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], function: Any = None) -> dict[str, Any]:
    """The arguments of a call by name, as an error message shows them."""
    named = {} if function is None else {"func": function}
    named.update((f"args[{i}]", value) for i, value in enumerate(args))
    named.update((f"kwargs[{name!r}]", value) for name, value in kwargs.items())
    return named


def _serialize_tensors(tensors: tuple[torch.Tensor, ...], context: SerializationContext) -> SerializedPayload:
    frames: list[Frame] = []
    order: tuple[int, ...] = ()
    if len(tensors) > 1:
        # A tensor that is passed twice is sent once, so that it is one tensor on the peer as well.
        indices: dict[int, int] = {}
        order = tuple([indices.setdefault(id(t), len(indices)) for t in tensors])
        if len(indices) == len(tensors):
            order = ()
        else:
            tensors = tuple({id(t): t for t in tensors}.values())
    encoded = encode_tensors(tensors, frames, context.devices)
    return SerializedPayload(Payload(PayloadFormat.TENSORS, encoded, None, (), (), order), frames, tensors)


def _serialize_pickle(
    value: Any, context: SerializationContext, arguments: Callable[[], Mapping[str, Any]] = dict
) -> SerializedPayload:
    """Pickle ``value``; ``arguments`` returns its parts by name, for the error message."""
    try:
        return _pickle(value, context)
    except (PeerLostError, TimeoutError):  # the latter of a signal handler, as a rule
        raise
    except Exception as e:
        if not context.main_by_reference:  # what cannot be sent may be code that the peer has
            with contextlib.suppress(Exception):
                return _pickle(value, context._replace(main_by_reference=True))
        reason = str(e) if isinstance(e, PayloadError) else f"{type(e).__name__}: {e}"
        what = _find_unpicklable(arguments(), context) or f"a value of type {type(value).__name__}"
        raise PayloadError(f"cannot serialize {what}: {reason}") from e


def _pickle(
    value: Any, context: SerializationContext, module_parameters: set[int] | None = None
) -> SerializedPayload:
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    frames: list[Frame] = []
    pickler = RpcPickler(file, context, buffers.append, module_parameters)
    try:
        pickler.dump(value)
        tensors = encode_tensors(pickler.tensors, frames, context.devices)
        buffer_blobs = tuple([_to_blob(b.raw(), frames) for b in buffers])
    except BaseException as e:
        for fork in pickler.forks:
            assert context.references is not None
            context.references.unfork(fork)
        if isinstance(e, ModuleFollowsError):
            return _pickle(value, context, pickler.module_parameters)
        raise
    forks = tuple([fork[:4] for fork in pickler.forks])  # the rest of a fork is in the pickle only
    pickled = _to_blob(file.getbuffer(), frames)
    payload = Payload(PayloadFormat.PICKLE, tensors, pickled, buffer_blobs, forks)
    return SerializedPayload(payload, frames, pickler.tensors)


def _find_unpicklable(arguments: Mapping[str, Any], context: SerializationContext) -> str:
    """Name and type of the first argument that cannot be pickled by itself; empty if all can."""
    for name, value in arguments.items():
        try:
            tensors_of(value, context)
        except Exception:
            return f"{name} ({type(value).__name__})"
    return ""


def _to_blob(data: memoryview, frames: list[Frame]) -> Blob:
    """``data`` in the header, or appended to ``frames`` if it is large."""
    if len(data) <= MAX_INLINE_PICKLE_BYTES:
        return Blob(BlobLocation.INLINE, len(data), bytes(data))
    frames.append(data)
    return Blob(BlobLocation.FRAME, len(data), b"", len(frames) - 1)
