"""Names of dtypes in descriptors."""

from __future__ import annotations

import torch

NAMES = {d: str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
# Without quantized dtypes: torch crashes on a strided tensor of such a dtype, which has no quantizer.
DTYPES = {name: dtype for dtype, name in NAMES.items() if not name.startswith("q")}
