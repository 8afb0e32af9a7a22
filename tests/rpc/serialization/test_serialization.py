"""Values to payloads and back: by reference, by value, beside the pickle, and not at all."""

from __future__ import annotations

import functools
import gc
import math
import operator
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.errors import FunctionNotFoundError, PayloadError, ProtocolError
from zmqgrad.rpc.serialization.context import SerializationContext, SerializedByReference
from zmqgrad.rpc.serialization.deserializer import deserialize, deserialize_call, deserialize_tensors
from zmqgrad.rpc.serialization.naming import find_function, reference_to
from zmqgrad.rpc.serialization.serializer import MAX_INLINE_PICKLE_BYTES, serialize, serialize_call
from zmqgrad.transport.bulk import BufferPool
from zmqgrad.wire.messages import (
    NONE_PAYLOAD,
    Blob,
    BlobLocation,
    Payload,
    PayloadFormat,
    TensorDescriptor,
    Tensors,
)

CONTEXT = SerializationContext()


def travel(value: Any, context: SerializationContext = CONTEXT, references: Any = None) -> Any:
    """What arrives, through bytes and in memory of its own."""
    packed = serialize(value, context)
    payload, frames = through_bytes(packed.payload, packed.frames)
    return deserialize(payload, frames, deserialize_tensors(payload, frames), references)


def through_bytes(payload: Payload, frames: list[Any]) -> tuple[Payload, list[bytearray]]:
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(payload), type=Payload)
    return there, [bytearray(memoryview(f)) for f in frames]


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a remote call of it returns."""
    reference, packed = serialize_call(function, args, kwargs, SerializationContext())
    payload, frames = through_bytes(packed.payload, packed.frames)
    tensors = deserialize_tensors(payload, frames)
    function, args, kwargs = deserialize_call(reference, payload, frames, tensors)
    return (find_function(reference) if reference else function)(*args, **kwargs)


def plain(x: Any, y: Any = 1) -> Any:
    """A function of a module."""
    return x + y


class Thing:
    """With methods of all kinds."""

    def __init__(self, size: int) -> None:
        self.size = size

    def grow(self, by: int) -> int:
        """An instance's."""
        return self.size + by

    @staticmethod
    def double(x: int) -> int:
        """A class's."""
        return 2 * x

    @classmethod
    def make(cls, size: int) -> Thing:
        """A class's, too."""
        return cls(size)

    def __call__(self, x: int) -> int:
        return self.size * x


class NoRepr:
    """Cannot even be shown."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        raise RuntimeError("no")


@dataclass
class Pair:
    """Holds two things."""

    left: Any
    right: Any


# ---- functions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        plain,
        Thing,
        Thing.double,
        torch.add,
        torch.nn.functional.relu,
        torch.relu,
        math.sqrt,
        operator.add,
        len,
    ],
    ids=lambda f: f.__name__,
)
def test_importable_functions_are_sent_by_name(function: Callable[..., Any]) -> None:
    reference = reference_to(function)
    assert reference
    assert find_function(reference) is function


def test_functions_of_all_kinds() -> None:
    factor = 3
    assert call(plain, 1, y=2) == 3
    assert call(Thing, 4).size == 4
    assert call(Thing.double, 4) == 8
    assert call(Thing.make, 4).size == 4
    assert call(Thing(2).grow, 3) == 5
    assert call(Thing(2), 3) == 6
    assert call(lambda x: x * factor, 2) == 6
    assert call(functools.partial(plain, 1), 2) == 3
    assert call(torch.Tensor.add, torch.ones(2), 1).tolist() == [2, 2]
    assert call(operator.attrgetter("size"), Thing(9)) == 9
    assert call(torch.ones(2).add, 1).tolist() == [2, 2]


def test_a_local_function_that_its_module_has_by_its_qualified_name_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for pickle. No peer finds it there: a reference leads from attribute to attribute."""

    def inner(x: int) -> int:
        return x + 1

    monkeypatch.setitem(globals(), inner.__qualname__, inner)
    assert call(inner, 1) == 2


def test_a_closure_arrives_with_a_state_of_its_own() -> None:
    seen: list[int] = []

    def note(x: int) -> list[int]:
        seen.append(x)
        return seen

    assert call(note, 1) == [1]
    assert seen == []


def test_a_local_class_is_sent_by_value() -> None:
    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

    got = travel(Local(3))
    assert got.x == 3
    assert call(Local, 4).x == 4


def test_a_decorated_function_is_the_decorated_one() -> None:
    def twice(f: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(f)
        def inner(*args: Any) -> int:
            return 2 * f(*args)

        return inner

    assert call(twice(plain), 1) == 4


def test_a_non_callable_is_refused() -> None:
    with pytest.raises(PayloadError, match="3 cannot be called"):
        serialize_call(3, (), {}, SerializationContext())


@pytest.mark.parametrize(
    ("reference", "missing"),
    [("no_such:f", "no_such"), ("math:no_such", "no_such"), ("math:", "math"), (":f", "f")],
)
def test_a_function_that_is_not_there(reference: str, missing: str) -> None:
    with pytest.raises(FunctionNotFoundError, match=missing):
        find_function(reference)


# ---- values ----------------------------------------------------------------------------------------------

atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    atoms,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(values)
def test_plain_values(value: Any) -> None:
    assert travel(value) == value


@given(values, st.integers(0, 3))
def test_tensors_anywhere_in_a_value(value: Any, n: int) -> None:
    sent = {"value": value, "tensors": [torch.full((k,), float(k)) for k in range(n)]}
    got = travel(sent)
    assert got["value"] == value
    assert all(torch.equal(s, g) for s, g in zip(sent["tensors"], got["tensors"], strict=True))


@pytest.mark.parametrize("where", ["tuple", "list", "call"])
def test_one_tensor_twice_is_one_tensor_there(where: str) -> None:
    t = torch.zeros(3)
    if where == "call":
        one, two = call(lambda a, b: (a, b), t, t)
    else:
        one, two = travel((t, t) if where == "tuple" else [t, t])
    assert one is two


def test_a_call_with_one_tensor_twice_and_no_pickle_otherwise() -> None:
    t = torch.ones(2)
    assert call(operator.is_, t, t) is True
    assert call(operator.is_, t, torch.ones(2)) is False


def test_views_in_a_value_stay_shared() -> None:
    base = torch.zeros(10)
    got = travel({"base": base, "view": base[:5]})
    got["view"].fill_(1)
    assert got["base"].sum() == 5


def test_modules_and_parameters() -> None:
    layer = torch.nn.Linear(2, 3)
    got = travel(layer)
    assert isinstance(got.weight, torch.nn.Parameter)
    assert got.weight.requires_grad
    x = torch.ones(1, 2)
    assert torch.equal(got(x), layer(x))


@pytest.mark.parametrize("n", [3, 100_000], ids=["inline", "frame"])
def test_numpy_arrays_arrive_writable_and_independent(n: int) -> None:
    sent = np.arange(n)
    (got,) = travel([sent])
    assert np.array_equal(sent, got)
    got[0] = 77
    assert sent[0] == 0
    turned = travel({"a": np.ones((3, n)).T})["a"]
    assert turned.shape == (n, 3)


class Keeper:
    """In a cycle, and kept by its own finalizer."""

    kept: ClassVar[list[Any]] = []

    def __init__(self, data: Any) -> None:
        self.data = data
        self.itself = self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Keeper, (pickle.PickleBuffer(self.data),)

    def __del__(self) -> None:
        self.kept.append(self.data)


def test_memory_that_a_finalizer_keeps_is_not_used_again() -> None:
    """The collector tells of the end of what is in a cycle before it calls the finalizers there."""
    size = 2 << 20
    packed = serialize(Keeper(bytearray(b"x" * size)))
    payload, frames = through_bytes(packed.payload, list(packed.frames))
    pool = BufferPool()
    received = pool.empty(size)
    received[:] = frames.pop()
    del packed
    gc.collect()
    Keeper.kept.clear()
    value = deserialize(payload, [received], [])
    assert bytes(value.data) == b"x" * size
    del received, value
    gc.collect()
    (kept,) = Keeper.kept
    pool.empty(size)[:] = b"y" * size
    assert bytes(kept) == b"x" * size
    del kept
    Keeper.kept.clear()
    assert pool.kept() == 2 * size
    pool.close()


@pytest.mark.parametrize("n", [3, 100_000], ids=["inline", "frame"])
def test_numpy_arrays_that_are_read_only_arrive_writable(n: int) -> None:
    sent = np.broadcast_to(np.arange(3.0)[:, None], (3, n))
    first, second = travel([sent, sent])
    assert first is second
    assert np.array_equal(sent, first)
    first += 1
    assert sent[0, 0] == 0
    turned = np.ones((3, n)).T
    turned.flags.writeable = False
    got = travel({"a": turned})["a"]
    assert got.flags.writeable
    assert got.flags.f_contiguous


def test_large_pickles_travel_in_a_frame() -> None:
    small, large = serialize("x" * 100), serialize("x" * (MAX_INLINE_PICKLE_BYTES + 1))
    assert small.frames == []
    assert len(large.frames) == 1
    assert large.payload.pickled is not None
    assert large.payload.pickled.location is BlobLocation.FRAME
    assert travel("x" * (MAX_INLINE_PICKLE_BYTES + 1)) == "x" * (MAX_INLINE_PICKLE_BYTES + 1)


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1, threading.Lock()], r"type list: TypeError: cannot pickle '_thread\.lock' object"),
        (Pair(1, Pair(threading.Lock(), 2)), r"type Pair: TypeError: cannot pickle '_thread\.lock' object"),
        ([1, (n for n in "ab")], r"type list: .*generator.*send a list"),
        (threading.Lock(), r"type lock: TypeError: cannot pickle '_thread\.lock' object"),
        (NoRepr(), r"type NoRepr: TypeError: cannot pickle '_thread\.lock' object"),
    ],
    ids=["list", "attributes", "generator", "itself", "no repr"],
)
def test_a_value_that_cannot_be_pickled_is_refused_with_the_reason(value: Any, reason: str) -> None:
    with pytest.raises(PayloadError, match=f"cannot serialize a value of {reason}"):
        serialize(value)


def test_the_argument_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    here = {"LOCK": lock}
    exec("def uses_a_global(): return LOCK", here)
    for function in (lambda: lock, lambda x=lock: x, here["uses_a_global"]):
        with pytest.raises(PayloadError, match=r"serialize func \(function\): TypeError: cannot pickle"):
            serialize_call(function, (), {}, SerializationContext())
    with pytest.raises(PayloadError, match=r"serialize args\[1\] \(dict\): TypeError: cannot pickle"):
        serialize_call(len, (1, {"a": lock}), {}, SerializationContext())
    with pytest.raises(PayloadError, match=r"serialize kwargs\['b'\] \(lock\): TypeError: cannot pickle"):
        serialize_call(lambda: 1, (1,), {"b": lock}, SerializationContext())


def time_out() -> None:
    """As the handler of SIGALRM, which may run in any function of Python that a pickler calls."""
    raise TimeoutError("the time is over")


class TimesOut:
    """So it does where it is sent, the first time, and where it is rebuilt."""

    sent = 0

    def __reduce__(self) -> Any:
        self.sent += 1
        if self.sent == 1:
            time_out()
        return time_out, ()


def test_a_timeout_is_neither_lost_nor_taken_for_an_error_of_the_value() -> None:
    """Sending was tried another way, which succeeded."""
    value = TimesOut()
    with pytest.raises(TimeoutError, match="the time is over"):
        serialize([value])
    payload = serialize([value]).payload
    with pytest.raises(TimeoutError, match="the time is over"):
        deserialize(payload, [], [])


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_scripted_function_is_sent_by_name() -> None:
    reference, packed = serialize_call(scripted, (torch.ones(1),), {}, SerializationContext())
    assert reference == f"{__name__}:scripted"
    assert find_function(reference) is scripted
    assert packed.payload.pickled is None


def test_a_value_that_holds_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    got = travel(loop)
    assert got[1] is got
    loop.append(threading.Lock())
    with pytest.raises(PayloadError, match="lock"):
        serialize(loop)


def test_a_huge_value_is_not_shown_whole() -> None:
    with pytest.raises(PayloadError) as caught:
        serialize([list(range(100_000)), threading.Lock()])
    assert len(str(caught.value)) < 1000


def test_a_tensor_that_cannot_be_sent_inside_a_value() -> None:
    with pytest.raises(PayloadError, match="65 dimensions"):
        serialize({"deep": torch.ones((1,) * 65)})
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    with pytest.raises(PayloadError):
        serialize(nested)


class Reference(SerializedByReference):
    """Stands for an RRef."""


class Book:
    """Notes forks made and undone."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.adopted: list[int] = []
        self.discarded: list[int] = []
        self.made = 0

    def fork(self, rref: Any) -> tuple[Any, ...]:
        """Number the forks."""
        self.made += 1
        self.open.append(self.made)
        return (0, 0, self.made, 0)

    def unfork(self, fork: tuple[Any, ...]) -> None:
        """It was not sent."""
        self.open.remove(fork[2])

    def adopt(self, *fork: Any) -> Any:
        """What arrives."""
        self.adopted.append(fork[2])
        return ("adopted", fork[2])

    def discard(self, forks: Any) -> None:
        """A fork that is never adopted."""
        self.discarded += [fork[2] for fork in forks]


def test_references_are_forked_as_they_leave_and_adopted_as_they_come() -> None:
    book = Book()
    r = Reference()
    assert travel([r, {"again": r}], SerializationContext(book), book) == [
        ("adopted", 1),
        {"again": ("adopted", 1)},
    ]
    assert book.open == [1]


def test_forks_of_a_message_that_cannot_be_sent_are_undone() -> None:
    book = Book()
    for bad in (threading.Lock(), torch.ones((1,) * 65)):
        with pytest.raises(PayloadError, match=r"cannot pickle|65"):
            serialize_call(print, (Reference(), Reference(), bad), {}, SerializationContext(book))
    assert book.open == []
    assert book.made == 4, "looking for the argument that cannot be pickled makes no forks"


def break_here() -> None:
    """Fails where it is rebuilt."""
    raise ValueError("cannot be rebuilt")


class Breaks:
    """Can be sent, and not be rebuilt."""

    def __reduce__(self) -> Any:
        return break_here, ()


def test_references_after_an_undeserializable_object_are_released() -> None:
    book = Book()
    payload = serialize([Reference(), Breaks(), Reference(), Reference()], SerializationContext(book)).payload
    assert [fork[2] for fork in payload.forks] == [1, 2, 3]
    with pytest.raises(PayloadError, match="cannot be rebuilt"):
        deserialize(payload, [], [], book)
    assert (book.adopted, book.discarded) == ([1], [2, 3])


def test_references_outside_of_calls_are_refused() -> None:
    with pytest.raises(PayloadError, match="only inside a remote call"):
        serialize([Reference()])
    payload = serialize([Reference()], SerializationContext(Book())).payload
    with pytest.raises(PayloadError, match="used in pickles only"):
        deserialize(payload, [], [])


@pytest.mark.parametrize("last", [False, True])
def test_parameters_of_a_module_stay_parameters_wherever_it_is_in_a_value(last: bool) -> None:
    book, layer, alone = Book(), torch.nn.Linear(2, 3), torch.nn.Parameter(torch.ones(2))
    parts = {"optimizer": torch.optim.SGD(layer.parameters(), 0.1), "alone": alone, "layer": layer}
    value = [Reference(), parts if last else dict(reversed(parts.items()))]
    _, got = travel(value, SerializationContext(book, parameters_as_tensors=True), book)
    held = got["optimizer"].param_groups[0]["params"]
    assert [type(p) for p in held] == [torch.nn.Parameter] * 2
    assert all(there is p for there, p in zip(held, got["layer"].parameters(), strict=True))
    assert type(got["alone"]) is torch.Tensor
    assert len(book.open) == 1


# ---- damage ----------------------------------------------------------------------------------------------


def test_damaged_payloads_are_refused() -> None:
    tensor = Tensors((TensorDescriptor("float32", (1,)),), (Blob(BlobLocation.INLINE, 4, bytes(4)),))
    two = [torch.ones(1), torch.ones(1)]
    good = serialize([1]).payload
    assert good.pickled is not None
    for payload, tensors in (
        (Payload(PayloadFormat.TENSORS, tensor), two),
        (Payload(PayloadFormat.TENSORS, tensor), []),
        (Payload(PayloadFormat.PICKLE), []),
        (msgspec.structs.replace(good, pickled=Blob(BlobLocation.FRAME, 3, b"", 0)), []),
        (msgspec.structs.replace(good, pickled=Blob(BlobLocation.INLINE, 3, b"1")), []),
        (msgspec.structs.replace(good, buffers=(Blob(BlobLocation.FRAME, 3, b"", 5),)), []),
    ):
        with pytest.raises(ProtocolError):
            deserialize(payload, [], tensors)
    for order, tensors in (((0, 0, 1), two[:1]), ((1 << 62,), two), ((0,), [])):
        with pytest.raises(ProtocolError):
            deserialize_call("m:f", Payload(PayloadFormat.TENSORS, tensor, order=order), [], tensors)
    cut = msgspec.structs.replace(good.pickled, data=good.pickled.data[:-3], size=good.pickled.size - 3)
    with pytest.raises(PayloadError, match="cannot rebuild"):
        deserialize(msgspec.structs.replace(good, pickled=cut), [], [])


def test_payloads_that_are_no_calls_are_refused() -> None:
    assert deserialize_call("m:f", NONE_PAYLOAD, [], []) == (None, (), {})
    for reference, value in (("m:f", 3), ("m:f", (1,)), ("", ((), {})), ("m:f", (1, 2, 3))):
        payload = serialize(value).payload
        with pytest.raises(ProtocolError, match="tuple"):
            deserialize_call(reference, payload, [], [])


def test_a_pickle_that_names_a_tensor_which_did_not_come() -> None:
    payload = serialize([[torch.ones(1)]]).payload
    with pytest.raises(PayloadError, match="IndexError"):
        deserialize(payload, [], [])


def test_an_unimportable_function_is_named() -> None:
    payload = serialize([Thing(1)]).payload
    assert payload.pickled is not None
    data = payload.pickled.data.replace(b"Thing", b"Thong")
    with pytest.raises(FunctionNotFoundError, match="Thong"):
        deserialize(
            msgspec.structs.replace(payload, pickled=Blob(BlobLocation.INLINE, len(data), data)), [], []
        )


def test_errors_show_large_arguments_in_one_line() -> None:
    """Modules show themselves in many."""
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(PayloadError, match=r"^cannot serialize a value of type Sequential: TypeError: .*$"):
        serialize(module)


async def give_nothing() -> None:
    """Runs nowhere by itself."""


def test_the_error_for_unpicklable_state_names_an_alternative() -> None:
    coroutine = give_nothing()
    with pytest.raises(PayloadError, match=r"send its result, by asyncio\.run"):
        serialize(coroutine)
    coroutine.close()
    with pytest.raises(PayloadError, match="send a list"):
        serialize(n for n in range(3))
