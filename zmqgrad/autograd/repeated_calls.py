"""Random numbers of calls that a checkpointed function repeats.

``torch.utils.checkpoint`` runs a function again in the backward pass, with the state that the caller's random
generator had the first time. So a seed that the caller draws for a call is the same both times, and a callee
that begins with it draws the same numbers, for dropout for example.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def draw_seed() -> int:
    """Draw a seed for a call from the generator that a checkpoint restores."""
    return int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))


@contextmanager
def seeded(seed: int, outer: AbstractContextManager[object]) -> Iterator[None]:
    """Within ``outer``, set the random generators to ``seed``, and restore them on exit.

    They belong to the process: other calls that draw numbers at the same time disturb both.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with outer, torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield
