"""Tensors on the wire: what goes in comes out, and what was damaged on the way is refused."""

from __future__ import annotations

import ctypes
import gc
import io
import math
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.messages import messages_of
from zmqgrad.errors import PayloadError, ProtocolError
from zmqgrad.wire.lazy_frame import Frame, materialize
from zmqgrad.wire.messages import Blob, BlobLocation, Layout, TensorDescriptor, Tensors
from zmqgrad.wire.tensors import batches, decode_tensors, encode_tensors
from zmqgrad.wire.tensors.blobs import MAX_INLINE_BYTES, MAX_SHARED_BYTES

# torch is not sure of half-precision complex numbers, of CSR and of quantized tensors; we only carry them.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def send(*tensors: torch.Tensor) -> tuple[Tensors, list[bytearray]]:
    """Descriptors and frames as they are on the other side: through bytes, in memory of its own."""
    frames: list[Any] = []
    described = encode_tensors(tensors, frames)
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(described), type=Tensors)
    return there, [bytearray(materialize(f)) for f in frames]


def travel(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """What arrives."""
    return decode_tensors(*send(*tensors))


def sent_bytes(*tensors: torch.Tensor) -> int:
    """How many bytes of data are sent for these."""
    described, frames = send(*tensors)
    return sum(len(b.data) for b in described.blobs) + sum(map(len, frames))


def bits(t: torch.Tensor) -> bytes:
    """The elements, bit for bit, in order."""
    plain = t.detach().resolve_conj().resolve_neg()
    if t.dtype is torch.uint4:  # torch copies no elements of it
        plain = plain.view(torch.uint8)
    packed = plain.clone(memory_format=torch.contiguous_format)
    return ctypes.string_at(packed.data_ptr(), packed.nbytes)


def assert_same(sent: torch.Tensor, got: torch.Tensor) -> None:
    """All that shall survive."""
    assert type(got) is torch.Tensor
    assert got.dtype is sent.dtype
    assert got.shape == sent.shape
    assert got.layout is sent.layout
    assert got.requires_grad is sent.requires_grad
    assert got.is_leaf
    assert bits(got) == bits(sent)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 5) | st.sampled_from([17, 130]), max_size=3)))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any strided tensor, seen in some way or other."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(shapes())
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    t = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    for look in draw(st.lists(st.sampled_from(LOOKS), max_size=3)):
        t = look(t)
    if t.dtype.is_floating_point or t.dtype.is_complex:
        t = t.detach().requires_grad_(draw(st.booleans()))
    return t


def _middle(t: torch.Tensor) -> torch.Tensor:
    return t[1:-1] if t.dim() and len(t) > 2 else t


def _every_second(t: torch.Tensor) -> torch.Tensor:
    return t[..., ::2] if t.dim() else t


def _conj(t: torch.Tensor) -> torch.Tensor:
    return t.conj() if t.dtype in (torch.complex64, torch.complex128) else t


def _neg(t: torch.Tensor) -> torch.Tensor:
    return t.conj().imag if t.dtype in (torch.complex64, torch.complex128) else t


LOOKS = [
    lambda t: t.transpose(0, -1) if t.dim() else t,
    _middle,
    _every_second,
    lambda t: t.unsqueeze(0).expand(3, *t.shape),
    lambda t: t.narrow(-1, 0, t.shape[-1] // 2) if t.dim() else t,
    lambda t: t.select(0, 0) if t.dim() and len(t) else t,
    _conj,
    _neg,
]


# ---- round trips -----------------------------------------------------------------------------------------


@given(tensors())
def test_one_tensor(t: torch.Tensor) -> None:
    (got,) = travel(t)
    assert_same(t, got)


@given(st.lists(tensors(), max_size=5))
def test_several_tensors(sent: list[torch.Tensor]) -> None:
    got = travel(*sent)
    assert len(got) == len(sent)
    for s, g in zip(sent, got, strict=True):
        assert_same(s, g)


@pytest.mark.parametrize("n", [7, MAX_INLINE_BYTES], ids=["inline", "frame"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_inline_and_in_a_frame(dtype: torch.dtype, n: int) -> None:
    raw = torch.randint(0, 2, (n * dtype.itemsize,), dtype=torch.uint8)
    t = raw.view(dtype)
    (got,) = travel(t)
    assert_same(t, got)


@pytest.mark.parametrize(
    "t",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(2, 0, 3),
        torch.empty(3, 0).t(),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(40000.0).view(200, 200).t(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(12.0).as_strided((3, 3), (2, 1)),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.ones(1).as_strided((1, 1), (77, 99)),
    ],
    ids=["0-dim", "empty", "empty3", "empty-t", "t", "t-frame", "channels-last", "overlap", "nan", "ones"],
)
def test_shapes_of_note(t: torch.Tensor) -> None:
    (got,) = travel(t)
    assert_same(t, got)


def test_dense_strides_survive() -> None:
    for t in (torch.ones(3, 4).t(), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        assert travel(t)[0].stride() == t.stride()
    many = torch.zeros(1).expand(1000, 1000)
    assert travel(many)[0].stride() == (0, 0)


@pytest.mark.parametrize("count", [1, 2, 20])
@pytest.mark.parametrize("size", [3, 100])
def test_strides_of_contiguous_tensors_survive(size: int, count: int) -> None:
    """Where the size is 1 they tell the memory format, which those of other dimensions do not."""
    image = torch.randn(2, 1, size, size).to(memory_format=torch.channels_last)
    column = torch.randn(size, 1).t()
    for sent in ([image] * count, [image + i for i in range(count)], [column * i for i in range(count)]):
        for t, got in zip(sent, travel(*sent), strict=True):
            assert_same(t, got)
            assert got.stride() == t.stride()


def test_a_view_sends_only_what_it_shows() -> None:
    huge = torch.zeros(1_000_000)
    assert sent_bytes(huge[5:10]) == 20
    assert sent_bytes(huge[::1000]) == 4000
    assert sent_bytes(huge.view(1000, 1000)[:, 3]) == 4000
    assert sent_bytes(huge[:1].expand(1000, 1000)) == 4
    assert sent_bytes(huge[0:5], huge[-5:]) == 40
    assert sent_bytes(huge[0:5], huge[500_000:]) == 20 + 2_000_000


def test_overlapping_tensors_are_sent_once_and_stay_shared() -> None:
    base = torch.arange(100.0)
    assert sent_bytes(base, base[10:20], base.view(10, 10).t()) == 400
    whole, part, turned = travel(base, base[10:20], base.view(10, 10).t())
    part.fill_(-1)
    assert torch.equal(whole[10:20], torch.full((10,), -1.0))
    assert torch.equal(turned[:, 1], torch.full((10,), -1.0))
    whole[0] = 7
    assert turned[0, 0] == 7


def test_shared_storage_of_several_dtypes_stays_shared() -> None:
    base = torch.zeros(8, dtype=torch.int32)
    numbers, raw = travel(base, base.view(torch.uint8)[4:8])
    raw.fill_(1)
    assert numbers.tolist() == [0, 0x01010101, 0, 0, 0, 0, 0, 0]


def test_views_of_any_alignment_stay_shared() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    views = raw[3:41], raw[8:24].view(torch.float32), raw[16:48].view(torch.complex128), raw[5:9]
    got = travel(*views)
    for view, there in zip(views, got, strict=True):
        assert bits(view) == bits(there)
    got[0].fill_(0)
    assert got[1].tolist() == [0, 0, 0, 0]
    assert bits(got[3]) == bytes(4)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 64)), min_size=2, max_size=4), st.integers(0, 3))
def test_what_is_shared_here_is_shared_there(windows: list[tuple[int, int]], written: int) -> None:
    base = torch.arange(64.0)
    # With the whole among them, all are windows on one blob; else those that barely overlap may go apart.
    views = [base, *(base[start : start + length] for start, length in windows)]
    got = travel(*views)
    got[written % len(views)].fill_(-1)
    views[written % len(views)].fill_(-1)
    for view, there in zip(views, got, strict=True):
        assert torch.equal(view, there)


def test_tensors_that_require_grad_do_not_share() -> None:
    base = torch.zeros(10, requires_grad=True)
    one, two = travel(base, base.detach())
    with torch.no_grad():
        one.fill_(1)
    assert two.sum() == 0
    assert one.requires_grad
    assert not two.requires_grad


@pytest.mark.parametrize("n", [10, MAX_INLINE_BYTES])
def test_results_are_the_receivers_own(n: int) -> None:
    t = torch.zeros(n)
    described, frames = send(t, torch.ones(n))
    one, two = decode_tensors(described, frames)
    one.fill_(5)
    assert t.sum() == 0
    assert two.sum() == n
    del frames, described
    gc.collect()
    assert one.sum() == 5 * n


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.rand(300, 400)[:, ::2]],
        [torch.rand(300, 400, dtype=torch.complex64)[:, 1:200]],
        [torch.rand(300, 400).to(torch.bfloat16).t()[::3]],
        [(torch.rand(300, 400) > 0.5)[:, :100]],
        [torch.randint(0, 16, (300, 400), dtype=torch.uint8).view(torch.uint4)[:, ::2]],
        [torch.rand(1000, requires_grad=True) for _ in range(100)],
    ],
    ids=["gaps", "complex", "transposed", "bool", "uint4", "many"],
)
def test_what_must_be_packed_is_packed_where_it_is_to_lie(tensors: list[torch.Tensor]) -> None:
    """Written to the room of another, the frames are what they are by themselves."""
    frames: list[Any] = []
    described = encode_tensors(tensors, frames)
    rooms = [bytearray(len(f)) for f in frames]
    for frame, room in zip(frames, rooms, strict=True):
        assert not isinstance(frame, memoryview), "it would be copied once more"
        frame.write_to(memoryview(room))
    assert rooms == [bytearray(materialize(f)) for f in frames]
    assert list(map(bits, decode_tensors(described, rooms))) == list(map(bits, tensors))
    rooms[0].append(0)  # not possible while anything refers to it


def test_a_frame_keeps_the_memory_of_its_tensor() -> None:
    t = torch.full((MAX_INLINE_BYTES,), 3.0)
    frames: list[Any] = []
    described = encode_tensors([t], frames)
    gone = weakref.ref(t)
    del t
    assert (
        decode_tensors(described, [bytearray(materialize(f)) for f in frames])[0].sum()
        == 3 * MAX_INLINE_BYTES
    )
    frames.clear()
    gc.collect()
    assert gone() is None


def test_a_frame_keeps_the_memory_though_its_tensor_gets_another() -> None:
    """As when an optimizer steps a parameter that is being sent."""
    t = torch.full((MAX_INLINE_BYTES,), 1.0)
    frames: list[Any] = []
    encode_tensors([t], frames)
    t.data = torch.full((3,), 2.0)
    del t
    others = [
        torch.full((MAX_INLINE_BYTES,), 3.0) for _ in range(20)
    ]  # where freed memory would be used again
    assert set(torch.frombuffer(bytearray(frames[0]), dtype=torch.float32).tolist()) == {1.0}
    del others


class _Stepped(list[torch.Tensor]):
    """Tensors that get other memory whenever somebody looks at all of them; new ones get what they had."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for t in super().__iter__():
            t.data = t.data.clone()
        self.others = [torch.full((MAX_INLINE_BYTES,), 3.0) for _ in range(20)]
        return super().__iter__()


@pytest.mark.parametrize("count", [2, 9])
def test_tensors_that_get_other_memory_while_they_are_encoded_keep_their_values(count: int) -> None:
    """As when another thread steps the parameters that are being sent: bytes of freed memory were sent."""
    tensors = _Stepped(torch.full((MAX_INLINE_BYTES,), 1.0) for _ in range(count))
    frames: list[Any] = []
    encode_tensors(tensors, frames)
    assert len(frames) == count
    for frame in frames:
        assert set(torch.frombuffer(bytearray(frame), dtype=torch.float32).tolist()) == {1.0}


def test_a_non_leaf_arrives_as_a_leaf() -> None:
    x = torch.ones(3, requires_grad=True)
    (got,) = travel(x * 2)
    assert got.is_leaf
    assert got.requires_grad
    assert got.grad_fn is None


def test_in_place_work_on_an_arrived_view_is_seen_by_autograd() -> None:
    (got,) = travel(torch.ones(4, 4).t())
    w = torch.ones(4, 4, requires_grad=True)
    product = w * got
    got.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# ---- other layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_coo(coalesced: bool) -> None:
    t = torch.sparse_coo_tensor([[0, 2, 2], [1, 0, 0]], [1.0, 2.0, 3.0], (3, 4), check_invariants=False)
    t = t.coalesce() if coalesced else t
    (got,) = travel(t)
    assert got.layout is torch.sparse_coo
    assert got.is_coalesced() is coalesced
    assert torch.equal(got.to_dense(), t.to_dense())
    assert got.shape == t.shape


def test_sparse_coo_of_note() -> None:
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 3), (2, 3), requires_grad=True)
    empty = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (10**9, 10**9))
    big = torch.sparse_coo_tensor(torch.arange(9000).view(1, -1), torch.ones(9000), (9000,))
    for t in (hybrid, empty, big):
        (got,) = travel(t)
        assert got.requires_grad is t.requires_grad
        assert got.shape == t.shape
        assert torch.equal(got._indices(), t._indices())
        assert torch.equal(got._values(), t._values())


def test_compressed_and_quantized() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for t in (dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((1, 1))):
        (got,) = travel(t)
        assert got.layout is t.layout
        assert torch.equal(got.to_dense(), dense)
    q = _quantized()
    (got,) = travel(q)
    assert got.is_quantized
    assert got.q_scale() == 0.5
    assert torch.equal(got.int_repr(), q.int_repr())


def test_of_a_storage_of_compressed_and_quantized_tensors_the_visible_part_is_sent() -> None:
    column = torch.ones(100_000, 2)[:, 1][-2:]
    sparse = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), column, (2, 2))
    (got,) = travel(sparse)
    assert torch.equal(got.to_dense(), torch.eye(2))
    q = _quantized().repeat(50_000)[-3:]
    (other,) = travel(q)
    assert torch.equal(other.int_repr(), q.int_repr())
    assert max(sent_bytes(sparse), sent_bytes(q)) < 10_000


@pytest.mark.filterwarnings("ignore")  # as above; torch.load, too
@pytest.mark.parametrize("columns", [1, 3, 4])
def test_quantized_to_less_than_a_byte(columns: int) -> None:
    values, scales, zeros = torch.arange(2.0 * columns).view(2, columns), torch.ones(2), torch.zeros(2)
    for dtype in (torch.quint4x2, torch.quint2x4):
        q = torch.quantize_per_channel(values, scales, zeros, 0, dtype)
        (got,) = travel(q)
        assert (got.dtype, got.shape, got.qscheme()) == (dtype, q.shape, q.qscheme())
        assert list(got.untyped_storage()) == list(q.untyped_storage())
        with pytest.raises(PayloadError, match=r"its storage holds 0 bytes"):
            encode_tensors([freed(q)], [])


def test_meta() -> None:
    for t in (
        torch.empty(3, 4, device="meta").t(),
        torch.empty((), device="meta"),
        torch.empty(10**9, device="meta"),
    ):
        got, other = travel(t, torch.ones(3))
        assert got.device.type == "meta"
        assert (got.shape, got.stride(), got.dtype) == (t.shape, t.stride(), t.dtype)
        assert torch.equal(other, torch.ones(3))
        assert sent_bytes(t) == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_without_data_are_refused_where_they_are_sent(layout: torch.layout) -> None:
    with pytest.raises(PayloadError, match=rf"layout {layout} on the meta device"):
        encode_tensors([torch.eye(3).to_sparse(layout=layout).to("meta")], [])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("beside", [[], [torch.ones(2)], [torch.ones(3, 2).t()]])
def test_nested_tensors_are_refused_where_they_are_sent(beside: list[torch.Tensor]) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    with pytest.raises(PayloadError, match=r"t\.unbind\(\).*torch\.jagged"):
        encode_tensors([*beside, nested], [])


@pytest.mark.parametrize("beside", [[], [torch.ones(2)]])
def test_mkldnn_tensors_are_refused_where_they_are_sent(beside: list[torch.Tensor]) -> None:
    with pytest.raises(PayloadError, match=r"layout torch\._mkldnn: send t\.to_dense\(\)"):
        encode_tensors([*beside, torch.ones(2, 3).to_mkldnn()], [])


# ---- tensors without memory ------------------------------------------------------------------------------


def zero(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor as autograd makes them for gradients that are known to be zero: it has no memory."""
    made: torch.Tensor = torch._efficientzerotensor(shape, dtype=dtype)  # type: ignore[attr-defined]
    assert made._is_zerotensor()
    return made


@pytest.mark.parametrize("n", [5, 100_000])
@pytest.mark.parametrize("beside", [0, 1, 10])
@pytest.mark.parametrize(
    "make",
    [
        zero,
        lambda n: zero(n)[1:],
        lambda n: zero(n, 2).t(),
        lambda n: zero(n, dtype=torch.complex64).conj(),
        lambda n: zero(1).expand(n),
        lambda n: torch.sparse_coo_tensor(torch.arange(n)[None], zero(n), (n,), check_invariants=False),
        lambda n: zero(n).requires_grad_(),
    ],
    ids=["whole", "offset", "transposed", "conj", "expanded", "sparse", "requiring_grad"],
)
def test_a_zero_tensor_arrives_as_zeros(make: Callable[[int], torch.Tensor], beside: int, n: int) -> None:
    t = make(n)
    got, *others = travel(t, *[torch.ones(3) for _ in range(beside)])
    assert_same(t.detach().to_dense().clone(), got.detach().to_dense())
    assert got.requires_grad is t.requires_grad
    assert all([torch.equal(other, torch.ones(3)) for other in others])
    if t.layout is torch.strided:
        got.detach().add_(1)  # it is writable


def freed(t: torch.Tensor, keep: int = 0) -> torch.Tensor:
    t.untyped_storage().resize_(keep)
    return t


@pytest.mark.parametrize("n", [5, 100_000])
@pytest.mark.parametrize("beside", [0, 1, 10])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: freed(torch.ones(n)),
        lambda n: freed(torch.ones(n), 4 * n - 1),
        lambda n: freed(torch.ones(n, 2).t()),
        lambda n: freed(torch.ones(n, dtype=torch.complex64).conj()),
        lambda n: freed(torch.ones(n + 2)[2:]),
        lambda n: freed(torch.ones(n).requires_grad_()),
        lambda n: freed(torch.quantize_per_tensor(torch.ones(n), 1.0, 0, torch.quint8)),
        lambda n: torch.sparse_coo_tensor(torch.arange(n)[None], freed(torch.ones(n)), (n,)),
    ],
    ids=["whole", "shrunk", "transposed", "conj", "offset", "requiring_grad", "quantized", "sparse"],
)
def test_a_tensor_whose_storage_was_freed_is_refused_where_it_is_sent(
    make: Callable[[int], torch.Tensor], beside: int, n: int
) -> None:
    made = make(n)
    with pytest.raises(PayloadError, match=r"a tensor of shape \(.*its storage holds \d+ bytes"):
        encode_tensors([*[torch.ones(3) for _ in range(beside)], made], [])


class Wrapper(torch.Tensor):
    """A tensor that is made of another one, and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


@pytest.mark.parametrize("n", [1, 5, 100_000])
@pytest.mark.parametrize("beside", [0, 1, 10])
def test_a_tensor_that_is_made_of_others_is_refused(beside: int, n: int) -> None:
    with pytest.raises(PayloadError, match=r"type Wrapper: it has no memory of its own"):
        encode_tensors([*[torch.ones(3) for _ in range(beside)], Wrapper(torch.ones(n))], [])


def test_views_of_a_shrunk_storage_are_sent_while_they_lie_in_it() -> None:
    whole = torch.arange(10.0)
    first, last = whole[:5], whole[5:]
    whole.untyped_storage().resize_(5 * 4)
    assert [t.tolist() for t in travel(first, first[1:3])] == [[0, 1, 2, 3, 4], [1, 2]]
    with pytest.raises(PayloadError, match=r"shape \(5,\) .*holds 20 bytes"):
        encode_tensors([first, last], [])
    assert travel(freed(torch.ones(0, 3)))[0].shape == (0, 3)


def test_too_many_dimensions_are_refused_where_they_are_sent() -> None:
    with pytest.raises(PayloadError, match="65 dimensions"):
        encode_tensors([torch.ones((1,) * 65)], [])
    with pytest.raises(PayloadError, match="65 dimensions"):
        encode_tensors([torch.ones(2, 3).t()[(None,) * 63]], [])
    assert travel(torch.ones((1,) * 64))[0].dim() == 64


# ---- batches -------------------------------------------------------------------------------------------


def many(n: int, size: int = 100, **options: Any) -> list[torch.Tensor]:
    return [torch.rand(size, **options) + i for i in range(n)]


@given(
    st.lists(
        tensors() | st.sampled_from(DTYPES).map(lambda d: torch.ones(3, dtype=d)), min_size=8, max_size=20
    )
)
def test_any_many_tensors(sent: list[torch.Tensor]) -> None:
    got = travel(*sent)
    assert len(got) == len(sent)
    for s, g in zip(sent, got, strict=True):
        assert_same(s, g)


@pytest.mark.parametrize("size", [1, 100, 4000])
def test_many_small_tensors_are_rows_and_each_is_its_own(size: int) -> None:
    sent = [torch.full((size,), float(i)) for i in range(20)]
    sent[3] = sent[3].requires_grad_()
    sent[6], sent[7], sent[8] = torch.rand(MAX_INLINE_BYTES), torch.tensor(7), torch.rand(0, 3)
    sent[9] = torch.rand(size, 1)
    described, frames = send(*sent)
    assert len(described.batches) == 3
    assert len(described.tensors) == 2
    assert described.requiring_grad() == [3]
    got = decode_tensors(described, frames)
    for s, g in zip(sent, got, strict=True):
        assert_same(s, g)
    versions = [g._version for g in got]
    got[0].fill_(9.0)
    assert [g._version for g in got[1:]] == versions[1:]
    assert all(map(torch.equal, got[1:], sent[1:]))
    assert got[0].untyped_storage().nbytes() == got[0].nbytes
    del got[1:], described, frames
    assert torch.equal(got[0], torch.full((size,), 9.0))


def test_a_tensor_with_gaps_among_many() -> None:
    sent = [*many(10), torch.ones(3, 4).t(), x := torch.rand(50), x[10:20]]
    got = travel(*sent)
    assert all(map(torch.equal, got, sent))
    got[-2].zero_()
    assert not got[-1].any()


def test_a_row_ends_so_that_no_tensor_keeps_much_more_than_itself() -> None:
    sent = many(1000, 1024)
    described, frames = send(*sent)
    assert len(described.batches) == 4
    assert max(map(len, frames)) < batches.MAX_BATCH_BYTES + batches.MAX_MEMBER_BYTES
    assert all(map(torch.equal, decode_tensors(described, frames), sent))


def test_a_shared_frame_ends_so_that_no_tensor_keeps_much_more_than_itself() -> None:
    sent = [torch.ones(3, 4).t(), *many(1000, 1024)]  # of which the first has gaps: there are no batches
    described, frames = send(*sent)
    assert not described.batches
    assert max(map(len, frames)) < MAX_SHARED_BYTES + MAX_INLINE_BYTES
    assert all(map(torch.equal, decode_tensors(described, frames), sent))


BATCH_DAMAGE: dict[str, list[Any]] = {
    "dtype": ["float64", "uint8", "quint8", "no such", ""],
    "blob": [1, 7, (1 << 63) - 1],
    "shapes": [
        (),
        ((100,),),
        ((100,),) * 11,
        ((0,),) * 10,
        ((10, 10),) * 10,
        ((99,), (101,)) * 5,
        ((1000, 0),),
        ((1 << 62, 1 << 62),) * 10,
        ((),) * 1000,
    ],
    "indices": [(0,), (0,) * 10, tuple(range(1, 11)), (1 << 62,) * 10, tuple(range(9, -1, -1))],
    "requires_grad": [True],
}


@pytest.mark.parametrize("field", BATCH_DAMAGE)
@pytest.mark.parametrize("size", [100, 2000])
def test_each_field_of_a_batch_damaged(field: str, size: int) -> None:
    described, frames = send(*many(10, size))
    (batch,) = described.batches
    single = TensorDescriptor("float32", (1,), (), 0, 0)
    for value in BATCH_DAMAGE[field]:
        damaged = msgspec.structs.replace(batch, **{field: value})
        for tensors in ((), (single,)):
            try_rebuild(Tensors(tensors, described.blobs, (damaged,)), frames)
            try_rebuild(Tensors(tensors, described.blobs, (batch, damaged)), frames)
            try_rebuild(Tensors(tensors, described.blobs, (damaged,)), [f[:-1] for f in frames])
        damaged_tensors = Tensors((single,), described.blobs, (damaged,))
        assert isinstance(damaged_tensors.requiring_grad(), list)
    for wrong in ({"indices": tuple(range(9))}, {"shapes": ((100,),) * 9}, {"dtype": "float64"}, {"blob": 1}):
        with pytest.raises(ProtocolError):
            decode_tensors(Tensors((), described.blobs, (msgspec.structs.replace(batch, **wrong),)), frames)
    with pytest.raises(ProtocolError, match="one blob"):
        decode_tensors(Tensors((), described.blobs, (batch, batch)), frames)
    twice = msgspec.structs.replace(batch, indices=(0,) * 10)
    with pytest.raises(ProtocolError, match="two tensors"):
        decode_tensors(Tensors((), described.blobs, (twice,)), frames)


# ---- damage ----------------------------------------------------------------------------------------------


def try_rebuild(described: Tensors, frames: Sequence[Any]) -> None:
    """Damaged or not: tensors that can be looked at, or an error of ours."""
    try:
        got = decode_tensors(described, frames)
    except (ProtocolError, PayloadError):  # the latter: for a device that is not here
        return
    for t in got:
        if t.device.type == "cpu" and t.layout is torch.strided:
            if t.dtype in DTYPES and t.numel() < 10_000:
                bits(t)
            reached = (
                0 if not t.numel() else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            )
            assert (t.storage_offset() + reached) * t.itemsize <= t.untyped_storage().nbytes()


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to move these elsewhere some day
        return torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8)


SAMPLES = {
    "plain": [torch.ones(3, 4)],
    "frame": [torch.ones(MAX_INLINE_BYTES)],
    "strided": [torch.ones(3, 4).t(), torch.ones(4, requires_grad=True)],
    "strided frame": [torch.ones(200, 200).t()],
    "shared": [x := torch.arange(100.0), x[10:20], x.view(10, 10).t()],
    "shared frame": [y := torch.arange(10_000.0), y[10:20]],
    "coo": [torch.eye(3).to_sparse()],
    "opaque": [_quantized()],
    "meta": [torch.empty(3, 4, device="meta")],
}

BAD: dict[str, list[Any]] = {
    "dtype": [
        "float64",
        "uint8",
        "quint8",
        "qint32",
        "complex128",
        "bits16",
        "no such",
        "",
        "device",
        "uint1",
    ],
    "shape": [(), (0,), (5,), (1 << 40,), (3, 4, 5), (0, 1 << 62, 1 << 62), ((1 << 63) - 1,) * 3, (2,) * 64],
    "strides": [(1,), (0, 0), (1 << 62, 1), ((1 << 63) - 1,) * 2, (5, 1), (1, 5), (100, 100)],
    "offset": [1, 4, 36, 48, 1 << 40, (1 << 63) - 1],
    "blob": [1, 7, (1 << 63) - 1],
    "requires_grad": [True],
    "device": ["meta", "cuda:0", "", "no such device", "cpu:1"],
    "layout": list(Layout),
    "coalesced": [True, False],
    "parts": [(), (TensorDescriptor("int64", (1, 3)),), (TensorDescriptor("int64", (2, 3)),) * 2],
}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("field", BAD)
def test_each_field_damaged(field: str, sample: str) -> None:
    described, frames = send(*SAMPLES[sample])
    for n, original in enumerate(described.tensors):
        for value in BAD[field]:
            damaged = msgspec.structs.replace(original, **{field: value})
            tensors = (*described.tensors[:n], damaged, *described.tensors[n + 1 :])
            try_rebuild(Tensors(tensors, described.blobs), frames)
            try_rebuild(Tensors((damaged,), ()), [])


@pytest.mark.parametrize("sample", SAMPLES)
def test_each_blob_damaged(sample: str) -> None:
    described, frames = send(*SAMPLES[sample])
    for n, original in enumerate(described.blobs):
        for change in (
            {"location": BlobLocation.FRAME, "index": 0},
            {"location": BlobLocation.FRAME, "index": 99},
            {"location": BlobLocation.INLINE},
            {"size": original.size + 1},
            {"size": 0},
            {"data": original.data[:-1]},
            {"data": b"", "size": 0},
            {"data": bytes(original.size + 8), "size": original.size + 8},
            {"data": b"\xff" * original.size},
        ):
            blobs = (
                *described.blobs[:n],
                msgspec.structs.replace(original, **change),
                *described.blobs[n + 1 :],
            )
            try_rebuild(Tensors(described.tensors, blobs), frames)
    try_rebuild(described, [f[:-1] for f in frames])
    try_rebuild(described, [])
    try_rebuild(Tensors(described.tensors, ()), frames)


@given(messages_of(Tensors), st.lists(st.binary(max_size=64), max_size=3))
def test_arbitrary_input_raises_only_protocol_errors(described: Tensors, frames: list[bytes]) -> None:
    try_rebuild(described, [bytearray(materialize(f)) for f in frames])


@given(st.data())
def test_descriptors_that_nearly_fit(data: st.DataObject) -> None:
    number = st.integers(0, 9) | st.sampled_from([1 << 31, 1 << 61, (1 << 63) - 1])
    size = data.draw(st.integers(0, 64))
    d = TensorDescriptor(
        data.draw(st.sampled_from(["float32", "uint8", "complex128", "quint8", "bool"])),
        tuple(data.draw(st.lists(number, max_size=3))),
        tuple(data.draw(st.lists(number, max_size=3))),
        data.draw(number),
        data.draw(st.integers(0, 1)),
        data.draw(st.booleans()),
    )
    twin = TensorDescriptor("uint8", (1,), (), 0, 0)
    inline = data.draw(st.booleans())
    blob = Blob(BlobLocation.INLINE, size, bytes(size)) if inline else Blob(BlobLocation.FRAME, size, b"", 0)
    frames = [] if inline else [bytearray(size)]
    try_rebuild(Tensors((d,), (blob,)), frames)
    try_rebuild(Tensors((d, twin), (blob,)), frames)


def test_sparse_indices_out_of_range_are_refused() -> None:
    described, frames = send(torch.eye(3).to_sparse())
    (d,) = described.tensors
    small = msgspec.structs.replace(d, shape=(2, 2))
    with pytest.raises(ProtocolError, match="malformed sparse tensor"):
        decode_tensors(Tensors((small,), described.blobs), frames)


def test_compressed_indices_out_of_range_are_refused() -> None:
    bad = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2]), torch.tensor([0, 5]), torch.ones(2), (2, 2), check_invariants=False
    )
    described, frames = send(bad)
    with pytest.raises(ProtocolError):
        decode_tensors(described, frames)


def test_an_opaque_blob_that_is_something_else() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("unpickled",)

    file = io.BytesIO()
    torch.save({"a": 1}, file)
    for data in (file.getvalue(), b"", b"garbage", pickle.dumps(Evil())):
        d = TensorDescriptor("float32", (1,), layout=Layout.OPAQUE)
        with pytest.raises(ProtocolError):
            decode_tensors(Tensors((d,), (Blob(BlobLocation.INLINE, len(data), data),)), [])


# ---- what goes to devices ---------------------------------------------------------------------------------


def test_many_small_tensors_beside_a_device_map() -> None:
    """A peer has a map for its device; what lies in main memory goes as ever, batches and all."""
    gpu, cpu = torch.device("cuda:0"), torch.device("cpu")
    sent = [torch.rand(3) for _ in range(12)]
    for devices in ({gpu: gpu}, {gpu: gpu, cpu: cpu}):
        frames: list[Frame] = []
        described = encode_tensors(sent, frames, devices)
        assert described.batches
        assert all(map(torch.equal, decode_tensors(described, frames), sent))
    described = encode_tensors(sent, [], {cpu: gpu})
    assert [d.device for d in described.tensors] == ["cuda:0"] * 12


def test_too_many_tensors_are_refused_by_the_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zmqgrad.wire.tensors.blobs.MAX_TENSORS", 5)
    with pytest.raises(PayloadError, match="6 tensors cannot be sent at once"):
        encode_tensors([torch.rand(2, 3).t() for _ in range(6)], [])
    assert len(encode_tensors([torch.rand(2, 3).t() for _ in range(5)], []).tensors) == 5
    assert encode_tensors([torch.rand(2) for _ in range(99)], []).batches  # of which each holds many


@pytest.mark.slow
def test_a_tensor_on_a_device_without_a_map_is_refused() -> None:
    """With tensors that have no memory; torch has them for devices that are not there."""
    here, there = torch.device("cuda:0"), torch.device("cuda:1")
    with FakeTensorMode():
        tensor = torch.empty(100, 100, device=here)
    for devices in (None, {}, {there: here}):
        with pytest.raises(PayloadError, match=r"a tensor on cuda:0 cannot be sent.*`set_device_map`"):
            encode_tensors([tensor], [], devices)
