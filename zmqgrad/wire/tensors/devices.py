"""Tensors on CUDA devices: they travel through main memory, and arrive on the device that was agreed on.

Both copies are made on the current stream of their device in the calling thread, so they come after the work
that was queued there before, and work queued there afterwards sees them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from zmqgrad.errors import PayloadError, ProtocolError

Devices = Mapping[torch.device, torch.device]
"""Where tensors of each of our devices go."""

_CUDA = re.compile(r"cuda:(\d{1,4})")


def leave(tensors: Sequence[torch.Tensor], devices: Devices) -> tuple[list[torch.Tensor], list[str]]:
    """``tensors`` in main memory, and the name of the device where each goes.

    Raises:
        PayloadError: for a tensor on a device of which nobody said where its tensors go.
    """
    homes = [devices.get(t.device) for t in tensors]
    staged: list[torch.Tensor] = []
    for t, home in zip(tensors, homes, strict=True):
        if home is None and t.device.type not in ("cpu", "meta"):
            raise PayloadError(no_way(t.device))
        staged.append(_stage(t) if t.device.type == "cuda" else t)
    for device in {t.device for t in tensors if t.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()  # the copies are complete
    return staged, [str(t.device if home is None else home) for t, home in zip(tensors, homes, strict=True)]


def _stage(t: torch.Tensor) -> torch.Tensor:
    """A copy in main memory, on its way where that can be: it is pinned, and torch keeps it for the next."""
    if t.layout is not torch.strided or t.is_quantized:
        return t.detach().cpu()
    plain = t.detach().resolve_conj().resolve_neg()
    room = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=True)
    return room.copy_(plain, non_blocking=True)


def no_way(device: torch.device) -> str:
    """What to say of a tensor on ``device`` that cannot be sent."""
    return (
        f"a tensor on {device} cannot be sent: nobody said on which device of the other worker it shall "
        f"arrive. Move it with .cpu() before the call, or say so by set_device_map on the options of init_rpc"
    )


def arrive(t: torch.Tensor, name: str) -> torch.Tensor:
    """``t`` on the device that its sender named.

    Raises:
        PayloadError: if there is none such here. ProtocolError: if that is no name of one.
    """
    known = _CUDA.fullmatch(name)
    if known is None:
        raise ProtocolError(f"a tensor came for device {name!r}, which nobody agreed on")
    count = torch.cuda.device_count()
    if int(known[1]) >= count:
        raise PayloadError(f"a tensor came for device {name}, but this process sees {count} CUDA devices")
    return t.to(torch.device(name))
