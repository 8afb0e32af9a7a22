"""Tensors on CUDA devices: staged to the host by the sender, copied to the mapped device by the receiver.

Both sides use pinned host memory. Every copy runs on the current stream of its device in the calling thread,
so it is ordered after work queued there before, and before work queued there afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from zmqgrad.errors import PayloadError, ProtocolError
from zmqgrad.wire.tensors.memory import check_parts, materialized
from zmqgrad.wire.tensors.streams import record_copy

Devices = Mapping[torch.device, torch.device]
"""Device map: the peer's device for each device of this worker. A :class:`Route`, or a plain mapping."""


class Route(dict[torch.device, torch.device]):
    """A device map; ``missing`` names the workers for the error about a device without an entry."""

    missing = ""


class NoDeviceMapping(Exception):
    """The device map has no entry for ``device``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.device = device


CPU = torch.device("cpu")

_CUDA = re.compile(r"cuda:(\d{1,4})")


# ---- sending --------------------------------------------------------------------------------------------


def stage_to_host(tensors: Sequence[torch.Tensor], devices: Devices) -> tuple[list[torch.Tensor], list[str]]:
    """Copy ``tensors`` to host memory.

    Returns:
        The copies, and the name of the peer's device for each.

    Raises:
        NoDeviceMapping: for a tensor on a device that ``devices`` does not map.
    """
    targets = [devices.get(t.device) for t in tensors]
    staged_tensors: list[torch.Tensor] = []
    sources: set[torch.device] = set()
    for t, target in zip(tensors, targets, strict=True):
        if target is None and t.device.type not in ("cpu", "meta"):
            raise NoDeviceMapping(t.device)
        if t.is_cuda:
            sources.add(t.device)
            t = _stage(t)
        staged_tensors.append(t)
    for device in sources:
        torch.cuda.current_stream(device).synchronize()  # wait for the copies
    return staged_tensors, [
        str(t.device if target is None else target) for t, target in zip(tensors, targets, strict=True)
    ]


def _stage(t: torch.Tensor) -> torch.Tensor:
    """Copy to host memory, asynchronously if possible: torch caches pinned memory for reuse."""
    if t.layout is not torch.strided or t.is_quantized:
        check_parts(t)
        return t.detach().cpu()
    plain = materialized(t.detach()).resolve_conj().resolve_neg()
    pinned = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=True)
    return pinned.copy_(plain, non_blocking=True)


def no_mapping_text(device: torch.device, devices: Devices | None) -> str:
    """Error text for a tensor on ``device``, which ``devices`` does not map."""
    missing = getattr(devices, "missing", "")
    return (
        f"a tensor on {device} cannot be sent: no device of the other worker is mapped to it"
        f"{f' ({missing})' if missing else ''}. Move it with .cpu(), or call `set_device_map` on "
        f"`TensorPipeRpcBackendOptions` before init_rpc"
    )


# ---- receiving ------------------------------------------------------------------------------------------


def copy_to_device(t: torch.Tensor, name: str) -> torch.Tensor:
    """Copy ``t`` from host memory to the device named by its sender.

    Raises:
        PayloadError: if this process does not have the device, or its memory is exhausted.
        ProtocolError: if ``name`` is not a CUDA device.
    """
    device = _device(name)
    try:
        if t.layout is torch.strided and not t.is_quantized:
            # From pinned memory the copy is asynchronous. Torch reuses that memory only after the copy.
            # Without device(), pinning may initialize CUDA on another device, which takes memory there.
            with torch.cuda.device(device):
                copied = t.pin_memory().to(device, non_blocking=True)
        else:
            copied = t.to(device)
    except RuntimeError as e:
        raise PayloadError(f"cannot copy a received tensor to {name}: {e}") from e
    record_copy(copied)
    return copied


def _device(name: str) -> torch.device:
    known = _CUDA.fullmatch(name)
    if known is None:
        raise ProtocolError(f"received a tensor for unknown device {name!r}")
    count = torch.cuda.device_count()
    if int(known[1]) >= count:
        raise PayloadError(f"received a tensor for device {name}, but this process sees {count} CUDA devices")
    return torch.device(name)
