"""Encodes tensors as descriptors and blobs."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import itemgetter

import msgspec
import torch

from zmqgrad.errors import PayloadError
from zmqgrad.wire.lazy_frame import Frame
from zmqgrad.wire.messages import MAX_DIMENSIONS, NO_TENSORS, Layout, TensorDescriptor, Tensors
from zmqgrad.wire.tensors.batches import MIN_TENSORS, make_batches
from zmqgrad.wire.tensors.blobs import MAX_INLINE_BYTES, Blobs, Place, blob_of
from zmqgrad.wire.tensors.devices import CPU, Devices, NoDeviceMapping, no_mapping_text, stage_to_host
from zmqgrad.wire.tensors.dtypes import NAMES
from zmqgrad.wire.tensors.memory import check_parts, extent, materialized, unusual_strides
from zmqgrad.wire.tensors.modes import modes_disabled
from zmqgrad.wire.tensors.sharing import Sharing
from zmqgrad.wire.tensors.torch_internals import dispatch_modes, function_modes, in_dual_level, is_dual

MAX_GAPPED_BYTES = 8 << 10
"""A view of at most this size, gaps included, is sent with its gaps and keeps its strides."""


def encode_tensors(
    tensors: Sequence[torch.Tensor], frames: list[Frame], devices: Devices | None = None
) -> Tensors:
    """Encode ``tensors``; blobs that are too large for the header are appended to ``frames``.

    A frame may be a view of the memory of its tensor, which it keeps alive.

    Args:
        devices: device map from the devices of this worker to those of the peer.

    Raises:
        PayloadError: for a tensor that cannot be sent, for example on a device that is not mapped.
    """
    if not tensors:
        return NO_TENSORS
    if in_dual_level() and any(map(is_dual, tensors)):
        raise PayloadError(
            "cannot send a dual tensor: its tangent would be lost, as forward-mode AD ends at a call. Send "
            "both parts of torch.autograd.forward_ad.unpack_dual(t), and make the dual tensor there"
        )
    try:
        if function_modes() or dispatch_modes():
            with modes_disabled():
                return _encode_for(devices, tensors, frames)
        return _encode_for(devices, tensors, frames) if devices else _encode_all(tensors, frames)
    except PayloadError:
        raise
    except NoDeviceMapping as e:
        raise PayloadError(no_mapping_text(e.device, devices)) from None
    except RuntimeError as e:  # raised by torch for tensors without memory (nested, fake, ...)
        if any([t.is_nested for t in tensors]):
            raise PayloadError(
                "cannot send a nested tensor of layout torch.strided: send its components "
                "(t.unbind()), or create it with layout=torch.jagged"
            ) from e
        if any([t.is_mkldnn for t in tensors]):
            raise PayloadError("cannot send a tensor of layout torch._mkldnn: send t.to_dense()") from e
        raise PayloadError(f"cannot send a tensor of type {type(tensors[0]).__name__}: {e}") from e


def _encode_for(devices: Devices | None, tensors: Sequence[torch.Tensor], frames: list[Frame]) -> Tensors:
    if not devices or _all_on_host(tensors, devices):
        return _encode_all(tensors, frames)
    staged, names = stage_to_host(tensors, devices)
    encoded = _encode_all(staged, frames, separate=True)
    return Tensors(
        tuple(
            msgspec.structs.replace(d, device=name, requires_grad=t.requires_grad)
            for d, name, t in zip(encoded.tensors, names, tensors, strict=True)
        ),
        encoded.blobs,
    )


def _all_on_host(tensors: Sequence[torch.Tensor], devices: Devices) -> bool:
    """Whether all tensors are and stay in host memory."""
    return devices.get(CPU, CPU) == CPU and all([t.is_cpu for t in tensors])


def _encode_all(tensors: Sequence[torch.Tensor], frames: list[Frame], separate: bool = False) -> Tensors:
    """``separate``: a descriptor for each tensor, as each may have another target device."""
    if len(tensors) == 1 and (place := _place(t := tensors[0])) is not None:
        blob = blob_of(*place, frames)
        return Tensors(
            (TensorDescriptor(NAMES[t.dtype], tuple(t.shape), unusual_strides(t), 0, 0, t.requires_grad),),
            (blob,),
        )
    places = _places(tensors)
    if places is not None:
        out = Blobs(frames, sum(map(_size_of, places)) > MAX_INLINE_BYTES)
        if separate or len(tensors) < MIN_TENSORS:
            return out.finish(list(map(_encode_plain, tensors, places, repeat(out))))
        batches, others = make_batches(tensors, places, out)
        return out.finish([_encode_plain(tensors[n], places[n], out) for n in others], batches)
    shared = Sharing(tensors)
    out = Blobs(frames, sum([t.numel() * t.itemsize for t in tensors]) > MAX_INLINE_BYTES)
    return out.finish(
        [shared.encode_tensors(t, out) if shared.shares(t) else _encode_any(t, out) for t in tensors]
    )


_address_of: Callable[[Place], int] = itemgetter(1)
_size_of: Callable[[Place], int] = itemgetter(2)


def _places(tensors: Sequence[torch.Tensor]) -> list[Place] | None:
    """The place of each tensor; None unless all have one, and do not overlap."""
    places = list(filter(None, map(_place, tensors)))
    if len(places) < len(tensors):
        return None
    end = 0
    for _, address, size in sorted(places, key=_address_of):
        if address < end:
            return None
        end = address + size
    return places


def _place(t: torch.Tensor) -> Place | None:
    """The place of a contiguous tensor in host memory; None for others."""
    if (
        t.is_cpu
        and t.layout is torch.strided
        and t.is_contiguous()
        and t.dim() <= MAX_DIMENSIONS
        and not (t.is_conj() or t.is_neg() or t._is_zerotensor() or t.is_quantized)
    ):
        size = t.nbytes
        if not size:
            return None, 0, 0
        # As memory.holds(): this is done for each tensor. The address is that of the storage, as another
        # thread may give the tensor other memory (``.data``) between any two of these lines.
        storage = t.untyped_storage()
        start: int = t.storage_offset() * t.itemsize  # type: ignore[assignment]  # never symbolic
        try:
            if start + size <= storage.nbytes() and (address := storage.data_ptr()):
                return storage, address + start, size
        except RuntimeError:  # the storage of a wrapper has no address
            return None
    return None


def _encode_any(t: torch.Tensor, out: Blobs) -> TensorDescriptor:
    place = _place(t)
    return _encode_other(t, out) if place is None else _encode_plain(t, place, out)


def _encode_plain(t: torch.Tensor, place: Place, out: Blobs) -> TensorDescriptor:
    number = out.add(*place)
    return TensorDescriptor(NAMES[t.dtype], tuple(t.shape), unusual_strides(t), 0, number, t.requires_grad)


def _encode_other(t: torch.Tensor, out: Blobs) -> TensorDescriptor:
    """Encode a tensor that is not a contiguous tensor in host memory."""
    if t.dim() > MAX_DIMENSIONS:
        raise PayloadError(f"a tensor of {t.dim()} dimensions cannot be sent (at most {MAX_DIMENSIONS})")
    if t.layout is torch.sparse_coo and t.is_cpu:
        return _encode_coo(t, out)
    if t.device.type == "meta":
        if t.layout is not torch.strided:
            raise PayloadError(f"cannot send a tensor of layout {t.layout} on the meta device")
        return TensorDescriptor(
            NAMES[t.dtype], tuple(t.shape), tuple(t.stride()), 0, 0, t.requires_grad, "meta"
        )
    if not t.is_cpu:
        raise NoDeviceMapping(t.device)
    if t.layout is not torch.strided or t.is_quantized:
        return _encode_opaque(t, out)
    plain = materialized(t.detach()).resolve_conj().resolve_neg()
    if _dense(plain):
        number = out.add(plain, plain.data_ptr(), extent(plain) * plain.itemsize)
        strides = tuple(plain.stride())
    else:
        number = out.add_packed(plain)
        strides = ()
    return TensorDescriptor(NAMES[t.dtype], tuple(t.shape), strides, 0, number, t.requires_grad)


def _encode_coo(t: torch.Tensor, out: Blobs) -> TensorDescriptor:
    flat = t.detach()
    parts = tuple(_encode_any(part, out) for part in (flat._indices(), flat._values()))
    return TensorDescriptor(
        NAMES[t.dtype],
        tuple(t.shape),
        requires_grad=t.requires_grad,
        layout=Layout.COO,
        coalesced=t.is_coalesced(),
        parts=parts,
    )


def _encode_opaque(t: torch.Tensor, out: Blobs) -> TensorDescriptor:
    whole = t.detach() if check_parts(t) else t.detach().clone()  # torch.save writes all of a storage
    file = io.BytesIO()
    torch.save(whole, file)
    number = out.add_bytes(file.getvalue())
    return TensorDescriptor(
        NAMES[t.dtype],
        tuple(t.shape),
        blob=number,
        requires_grad=t.requires_grad,
        layout=Layout.OPAQUE,
    )


def _dense(t: torch.Tensor) -> bool:
    """Whether sending the memory with gaps costs little more than packing (transposed, expanded)."""
    reach = extent(t)
    return reach <= t.numel() or reach * t.itemsize <= MAX_GAPPED_BYTES
