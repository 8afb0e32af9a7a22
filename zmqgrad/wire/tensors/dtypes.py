"""Dtypes by the names that descriptors use."""

from __future__ import annotations

import torch

NAMES = {d: str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
# Without the quantized ones: a strided tensor of such a dtype has no quantizer, and torch crashes on it.
DTYPES = {name: dtype for dtype, name in NAMES.items() if not name.startswith("q")}
