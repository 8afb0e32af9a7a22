"""Python values to payloads and back: the only pickle of the package.

A payload is a pickle (protocol 5) in which every tensor is replaced by its index; the tensors travel
beside it, as do out-of-band buffers (numpy arrays). Nothing is pickled where a reference will do: a
function that can be imported goes by name, arguments or results that are nothing but tensors go as they
are.

Lambdas, closures and whatever else cannot be imported go by value, through cloudpickle; their code is sent
to each peer once (:mod:`zmqgrad.rpc.packing.code`). Functions and classes of ``__main__`` go by reference
to peers that run the same program (their globals are then the callee's own, as with torch), and by value to
others.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import cloudpickle
import torch

from zmqgrad.errors import FunctionNotFoundError, PayloadError, PeerLostError, ProtocolError
from zmqgrad.rpc.packing.code import PeerCode
from zmqgrad.rpc.packing.code import __name__ as code_module
from zmqgrad.rpc.packing.culprit import name_culprit, shorten
from zmqgrad.rpc.packing.naming import find_function, in_main, main_attribute, reference_to
from zmqgrad.rpc.packing.plain import decode_arguments, decode_value, encode_arguments, encode_value
from zmqgrad.rpc.packing.scripts import check_script_arguments, reduce_script
from zmqgrad.wire.messages import NO_TENSORS, NOTHING, Blob, Form, Payload, Place
from zmqgrad.wire.tensors import Devices, blob_bytes, describe, rebuild
from zmqgrad.wire.unwritten import Buffer, Frame

INLINE = 64 << 10
"""Pickles of up to so many bytes travel in the header."""


class References(Protocol):
    """How RRefs, and the code of functions, enter and leave payloads; a worker does it."""

    @property
    def code(self) -> PeerCode:
        """How code travels to and from the peer."""
        ...

    def fork(self, rref: Any) -> tuple[Any, ...]:
        """Make a fork of ``rref`` for whoever reads the payload; gives what it is rebuilt from."""
        ...

    def unfork(self, fork: tuple[Any, ...]) -> None:
        """The message that ``fork`` was made for will never be sent."""
        ...

    def adopt(self, *fork: Any) -> Any:
        """The reader's RRef of such a fork."""
        ...

    def discard(self, forks: Sequence[tuple[int, int, int, int]]) -> None:
        """Let go of forks (their first four items) that came, and that nobody will adopt."""
        ...


class Terms(NamedTuple):
    """On which terms a value travels.

    ``main_by_reference``: the peer runs the same program, so what ``__main__`` defines goes by name.
    ``with_history``: Parameters that require grad go as tensors, so that autograd can follow them; a
    Parameter at the other end could not have a history. Those of a module that travels stay Parameters of
    the copy. ``devices``: where tensors of our devices arrive.
    """

    references: References | None = None
    main_by_reference: bool = True
    with_history: bool = False
    devices: Devices | None = None


class Packed(NamedTuple):
    """A value ready to send. ``tensors`` are those that travel beside it, in the order of their index."""

    payload: Payload
    frames: list[Frame]
    tensors: Sequence[torch.Tensor]


PACKED_NOTHING = Packed(NOTHING, [], ())


class TravelsInCalls:
    """Base of classes whose instances travel in calls and their results, and in no other pickle."""

    __slots__ = ()

    def reduce_for_call(self) -> tuple[Any, ...]:
        """As ``__reduce__``."""
        raise NotImplementedError


class TravelsAsReference(TravelsInCalls):
    """Base of classes whose instances are forked, not copied, when they travel (RRef)."""

    __slots__ = ()


def _tensor_at(index: int) -> torch.Tensor:
    raise AssertionError("stands in pickles only; the unpickler puts the tensors of the payload here")


def _adopt(*fork: Any) -> Any:
    raise AssertionError("stands in pickles only; the unpickler puts the worker's own function here")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        terms: Terms,
        buffer_callback: Callable[[pickle.PickleBuffer], object],
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.tensors: list[torch.Tensor] = []
        self.forks: list[tuple[Any, ...]] = []
        self._terms = terms
        self._of_modules: set[int] = set()  # ids of Parameters that stay what they are

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            self.tensors.append(obj)
            return _tensor_at, (len(self.tensors) - 1,)
        if self._terms.with_history and isinstance(obj, torch.nn.Module):
            self._of_modules.update(map(id, obj.parameters()))
        if (
            kind is torch.nn.Parameter
            and self._terms.with_history
            and obj.requires_grad
            and id(obj) not in self._of_modules
        ):
            self.tensors.append(obj)
            return _tensor_at, (len(self.tensors) - 1,)
        if isinstance(obj, TravelsInCalls):
            return self._reduce(obj)
        if kind is types.GeneratorType or kind is types.CoroutineType:
            raise PayloadError(f"{obj!r} cannot be sent: it runs here and cannot be copied; send a list")
        if kind is types.MethodType and getattr(obj.__self__, obj.__name__, None) == obj:
            # By name: behind a method that is decorated, or of a class, cloudpickle finds its bare function,
            # which has no name to be found by, and would send its code.
            return getattr, (obj.__self__, obj.__name__)
        if self._terms.main_by_reference and isinstance(obj, (types.FunctionType, type)) and in_main(obj):
            return main_attribute, (obj.__qualname__,)
        return self._reduce_code(obj) or self._reduce_script(obj) or super().reducer_override(obj)

    def _reduce_code(self, obj: Any) -> tuple[Any, ...] | None:
        """For code that its peer need not be sent again (:mod:`zmqgrad.rpc.packing.code`)."""
        references = self._terms.references
        if references is None:
            return None
        if type(obj) is types.CodeType:
            return references.code.reduce_code(obj)
        if type(obj) is types.FunctionType and "<" in obj.__qualname__:  # else it may be found by its name
            return references.code.reduce_function(obj)
        return None

    def _reduce_script(self, obj: Any) -> tuple[Any, ...] | None:
        if not isinstance(obj, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
            return None
        reference = reference_to(obj, self._terms.main_by_reference)
        return (find_function, (reference,)) if reference else reduce_script(obj)

    def _reduce(self, obj: TravelsInCalls) -> tuple[Any, ...]:
        if isinstance(obj, TravelsAsReference):
            return _adopt, self._fork(obj)
        return obj.reduce_for_call()

    def _fork(self, rref: Any) -> tuple[Any, ...]:
        if self._terms.references is None:
            raise PayloadError("an RRef can travel only inside a remote call or its result")
        fork = self._terms.references.fork(rref)
        self.forks.append(fork)
        return fork


class _Probe(_Pickler):
    """Finds out whether something can be pickled, and leaves no trace."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(_Nowhere(), terms, lambda buffer: None)

    def _fork(self, rref: Any) -> tuple[Any, ...]:
        if self._terms.references is None:
            raise PayloadError("an RRef can travel only inside a remote call or its result")
        return ()


def _travels(value: Any, terms: Terms) -> bool:
    try:
        _Probe(terms).dump(value)
    except Exception:
        return False
    return True


class _Nowhere(io.BytesIO):
    def write(self, data: Any) -> int:
        return len(data)


class _Adopted:
    """Notes which forks have been adopted. No part of the unpickler, whose memo keeps it: no cycle."""

    def __init__(self, references: References) -> None:
        self._references = references
        self.fork_ids: set[int] = set()

    def __call__(self, *fork: Any) -> Any:
        self.fork_ids.add(fork[2])
        return self._references.adopt(*fork)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: Buffer, buffers: Sequence[Any], tensors: list[torch.Tensor], references: References | None
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._tensors = tensors
        self._references = references
        self._adopted: _Adopted | None = None

    def discard_rest(self, payload: Payload) -> None:
        """Reading has failed: let go of the references that were not reached."""
        reached = () if self._adopted is None else self._adopted.fork_ids
        rest = [fork for fork in payload.forks if fork[2] not in reached]
        if rest and self._references is not None:
            self._references.discard(rest)

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            if name == "_tensor_at":
                return self._tensors.__getitem__
            if name == "_adopt" and self._references is not None:
                self._adopted = self._adopted or _Adopted(self._references)
                return self._adopted
        if module == code_module and self._references is not None:
            return getattr(self._references.code, name)
        if module == "__mp_main__":
            module = "__main__"
        return super().find_class(module, name)


# ---- packing --------------------------------------------------------------------------------------------


_TERMS = Terms()


def pack(value: Any, terms: Terms = _TERMS) -> Packed:
    """``value`` ready to send.

    Raises:
        PayloadError: naming what in ``value`` cannot be pickled.
    """
    if value is None:
        return PACKED_NOTHING
    kind = type(value)
    if kind is torch.Tensor:
        frames: list[Frame] = []
        return Packed(Payload(Form.TENSOR, describe((value,), frames, terms.devices)), frames, (value,))
    if kind is tuple and _only_tensors(value):
        return _pack_tensors(value, terms)
    plain = encode_value(value)
    if plain is not None:
        frames = []
        return Packed(Payload(Form.PLAIN, NO_TENSORS, _blob(plain, frames)), frames, ())
    if kind is list or kind is dict:
        return _pack_plain((value,), {}, Form.VALUE, terms) or _pickle(value, terms)
    return _pickle(value, terms)


def _pack_plain(args: tuple[Any, ...], kwargs: dict[str, Any], form: Form, terms: Terms) -> Packed | None:
    """``args`` and ``kwargs`` without a pickle, if that can be."""
    plain = encode_arguments(args, kwargs)
    if plain is None:
        return None
    data, tensors = plain
    frames: list[Frame] = []
    described = describe(tensors, frames, terms.devices)
    return Packed(Payload(form, described, _blob(data, frames)), frames, tensors)


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
    tensors = describe(value, frames, terms.devices)
    return Packed(Payload(Form.TUPLE, tensors, None, (), (), order), frames, value)


def pack_call(
    function: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, terms: Terms = _TERMS
) -> tuple[str, Packed]:
    """The reference of ``function`` (empty: it is in the payload) and the payload of a call.

    Raises:
        PayloadError: if ``function`` or its arguments are none, or naming what cannot be pickled.
    """
    if not callable(function):
        raise PayloadError(
            f"function should be callable. {shorten(function)} cannot be called; "
            f"a remote call needs a function"
        )
    if args.__class__ is not tuple:
        args = _arguments(args)
    kwargs = {} if kwargs is None else _keywords(kwargs)
    if function.__class__ is torch.jit.ScriptFunction:
        check_script_arguments(function, args, kwargs)
    reference = reference_to(function, terms.main_by_reference)
    if not reference:
        return "", _pickle((function, args, kwargs), terms, ("func", "args", "kwargs"))
    return reference, pack_arguments(args, kwargs, terms)


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
        raise PayloadError(f"kwargs must be a dict of arguments by name, not {shorten(kwargs)}")
    return dict(kwargs)


def pack_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], terms: Terms = _TERMS) -> Packed:
    """The payload of a call whose function goes by reference.

    Raises:
        PayloadError: naming what cannot be pickled.
    """
    if not args and not kwargs:
        return PACKED_NOTHING
    if not kwargs and _only_tensors(args):
        return _pack_tensors(args, terms)
    plain = _pack_plain(args, kwargs, Form.ARGUMENTS, terms)
    return plain or _pickle((args, kwargs), terms, ("args", "kwargs"))


def unpack_call(reference: str, payload: Payload, content: Any) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Function (None if ``reference`` names it), args and kwargs, from what :func:`unpack` gave.

    Raises:
        ProtocolError: if that is not what :func:`pack_call` makes.
    """
    if payload.form is Form.NOTHING:
        return None, (), {}
    if payload.form is Form.TUPLE:
        return None, content, {}
    if payload.form is Form.ARGUMENTS:
        return None, *content
    wanted = 2 if reference else 3
    if payload.form is not Form.PICKLE or not isinstance(content, tuple) or len(content) != wanted:
        raise ProtocolError(f"the payload of a call is no {wanted}-tuple")
    args, kwargs = content[-2:]
    return (None if reference else content[0]), args, kwargs


def _only_tensors(value: tuple[Any, ...]) -> bool:
    for item in value:
        if type(item) is not torch.Tensor:
            return False
    return len(value) > 0


def _pickle(value: Any, terms: Terms, names: tuple[str, ...] = ()) -> Packed:
    """``names``: what the parts of ``value`` are called, where it is a tuple that nobody but us has made."""
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    frames: list[Frame] = []
    pickler = _Pickler(file, terms, buffers.append)
    try:
        pickler.dump(value)
        tensors = describe(pickler.tensors, frames, terms.devices)
        outside = tuple(_blob(b.raw(), frames) for b in buffers)
    except BaseException as e:
        for fork in pickler.forks:
            assert terms.references is not None
            terms.references.unfork(fork)
        if not isinstance(e, Exception) or isinstance(e, PeerLostError):
            raise
        said = str(e) if isinstance(e, PayloadError) else f"{type(e).__name__}: {e}"
        culprit = name_culprit(value, lambda part: _travels(part, terms), names)
        raise PayloadError(f"cannot send {shorten(value)}: {culprit}{said}") from e
    forks = tuple([fork[:4] for fork in pickler.forks])
    payload = Payload(Form.PICKLE, tensors, _blob(file.getbuffer(), frames), outside, forks)
    return Packed(payload, frames, pickler.tensors)


def _blob(data: bytes | memoryview, frames: list[Frame]) -> Blob:
    if len(data) <= INLINE:
        return Blob(Place.INLINE, len(data), bytes(data))
    frames.append(data)
    return Blob(Place.FRAME, len(data), b"", len(frames) - 1)


def _in_order(tensors: list[torch.Tensor], order: Sequence[int]) -> tuple[torch.Tensor, ...]:
    if max(order) >= len(tensors):
        raise ProtocolError(f"a tuple of tensors {order[:8]} came with {len(tensors)}")
    return tuple([tensors[number] for number in order])


def _only(args: Sequence[Any]) -> Any:
    if len(args) != 1:
        raise ProtocolError(f"one value came as {len(args)}")
    return args[0]


# ---- unpacking ------------------------------------------------------------------------------------------


def unpack_tensors(
    payload: Payload, frames: Sequence[Buffer], differentiable: bool = True
) -> list[torch.Tensor]:
    """The tensors beside a payload; unless ``differentiable``, none of them requires grad yet.

    Raises:
        ProtocolError: if they do not fit their frames.
    """
    described = payload.tensors
    return rebuild(described, frames, differentiable) if described.tensors or described.rows else []


def unpack(
    payload: Payload,
    frames: Sequence[Buffer],
    tensors: list[torch.Tensor],
    references: References | None = None,
) -> Any:
    """The value of a payload whose tensors are ``tensors``.

    Raises:
        ProtocolError: if payload and frames do not fit.
        FunctionNotFoundError: if it names a function or class that cannot be imported here.
        PayloadError: if it cannot be rebuilt here for another reason.
    """
    form = payload.form
    if form is Form.NOTHING:
        return None
    if form is Form.TENSOR:
        if len(tensors) != 1:
            raise ProtocolError(f"a payload of one tensor came with {len(tensors)}")
        return tensors[0]
    if form is Form.TUPLE:
        return _in_order(tensors, payload.order) if payload.order else tuple(tensors)
    if payload.pickled is None:
        raise ProtocolError("a payload came without its pickle")
    data = blob_bytes(payload.pickled, frames)
    if form is Form.PLAIN:
        return decode_value(data)
    if form is Form.ARGUMENTS:
        return decode_arguments(data, tensors)
    if form is Form.VALUE:
        return _only(decode_arguments(data, tensors)[0])
    # A copy, so that arrays built on inline buffers can be written to.
    buffers = [
        bytearray(blob_bytes(b, frames)) if b.place is Place.INLINE else blob_bytes(b, frames)
        for b in payload.buffers
    ]
    unpickler = _Unpickler(data, buffers, tensors, references)
    complete = False
    try:
        value = unpickler.load()
        complete = True
    except (ProtocolError, PayloadError, FunctionNotFoundError):
        raise
    except (AttributeError, ModuleNotFoundError) as e:
        raise FunctionNotFoundError(
            f"{e}; the RPC pickler does not serialize what can be imported on the caller: "
            f"it must be importable on the callee as well"
        ) from e
    except (Exception, SystemExit, GeneratorExit) as e:  # what a class does here must not end this process
        raise PayloadError(f"cannot rebuild a value that was sent: {type(e).__name__}: {e}") from e
    finally:
        if not complete:
            unpickler.discard_rest(payload)
    return value
