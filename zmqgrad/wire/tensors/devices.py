"""Tensors on CUDA devices: how they leave, and how they arrive on the device that was agreed on.

They are staged through pinned host memory on both sides. Every copy is made on the current stream of its
device in the calling thread, so it comes after the work that was queued there before, and work queued there
afterwards sees it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from zmqgrad.errors import PayloadError, ProtocolError
from zmqgrad.wire.tensors.streams import note_arrival

Devices = Mapping[torch.device, torch.device]
"""Where tensors of each of our devices go; a :class:`Route`, or a plain one."""


class Route(dict[torch.device, torch.device]):
    """Where tensors of each of our devices go; ``missing`` says for people which way it is."""

    missing = ""


class NoDeviceMapping(Exception):
    """A tensor on ``device`` cannot go."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.device = device


CPU = torch.device("cpu")

_CUDA = re.compile(r"cuda:(\d{1,4})")


# ---- leaving --------------------------------------------------------------------------------------------


def stage_to_host(tensors: Sequence[torch.Tensor], devices: Devices) -> tuple[list[torch.Tensor], list[str]]:
    """``tensors`` ready to leave, and the name of the device where each goes.

    Raises:
        NoDeviceMapping: for a tensor on a device of which nobody said where its tensors go.
    """
    homes = [devices.get(t.device) for t in tensors]
    leaving: list[torch.Tensor] = []
    staged: set[torch.device] = set()
    for t, home in zip(tensors, homes, strict=True):
        if home is None and t.device.type not in ("cpu", "meta"):
            raise NoDeviceMapping(t.device)
        if t.is_cuda:
            staged.add(t.device)
            t = _stage(t)
        leaving.append(t)
    for device in staged:
        torch.cuda.current_stream(device).synchronize()  # the copies are complete
    return leaving, [str(t.device if home is None else home) for t, home in zip(tensors, homes, strict=True)]


def _stage(t: torch.Tensor) -> torch.Tensor:
    """A copy in main memory, on its way where that can be: it is pinned, and torch keeps it for the next."""
    if t.layout is not torch.strided or t.is_quantized:
        return t.detach().cpu()
    plain = t.detach().resolve_conj().resolve_neg()
    room = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=True)
    return room.copy_(plain, non_blocking=True)


def no_mapping_text(device: torch.device, devices: Devices | None) -> str:
    """What to say of a tensor on ``device`` that cannot be sent by ``devices``."""
    missing = getattr(devices, "missing", "")
    return (
        f"a tensor on {device} cannot be sent: nobody said on which device of the other worker it shall "
        f"arrive{f' ({missing})' if missing else ''}. Move it with .cpu(), or call `set_device_map` on "
        f"`TensorPipeRpcBackendOptions` before init_rpc"
    )


# ---- arriving -------------------------------------------------------------------------------------------


def copy_to_device(t: torch.Tensor, name: str) -> torch.Tensor:
    """``t``, which came to main memory, on the device that its sender named.

    Raises:
        PayloadError: if there is none such here, or no room on it. ProtocolError: if that is no name of one.
    """
    device = _device(name)
    try:
        if t.layout is torch.strided and not t.is_quantized:
            # By pinned memory this thread need not wait for what is queued on the device. Torch does not
            # give that memory to others before the copy is complete.
            with torch.cuda.device(
                device
            ):  # else pinning may begin CUDA on another, which takes memory there
                there = t.pin_memory().to(device, non_blocking=True)
        else:
            there = t.to(device)
    except RuntimeError as e:
        raise PayloadError(f"a tensor that came cannot be brought to {name}: {e}") from e
    note_arrival(there)
    return there


def _device(name: str) -> torch.device:
    known = _CUDA.fullmatch(name)
    if known is None:
        raise ProtocolError(f"a tensor came for device {name!r}, which nobody agreed on")
    count = torch.cuda.device_count()
    if int(known[1]) >= count:
        raise PayloadError(f"a tensor came for device {name}, but this process sees {count} CUDA devices")
    return torch.device(name)
