"""Random numbers of calls that a checkpointed function repeats, and of checkpointed calls.

``torch.utils.checkpoint`` runs a function again in the backward pass, with the state that the caller's random
generator had the first time; so does the callee of a checkpointed call. So a seed that the function draws for
a call of its own is the same both times, and a callee that begins with it draws the same numbers, for dropout
for example; so do those that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from zmqgrad.autograd.torch_internals import in_checkpoint

is_repeated: ContextVar[bool] = ContextVar("zmqgrad_autograd_is_repeated", default=False)
"""Whether the function that the calling thread runs runs twice, or is called by one that does."""


def seed_for_call() -> int | None:
    """Draw a seed for a call from the generator that the repetition restores; None if nothing repeats it."""
    if not (is_repeated.get() or in_checkpoint()):
        return None
    return int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))


Run = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Runs a function with its arguments."""


def run_seeded(
    seed: int, run: Run | None, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Set the random generators to ``seed``, let ``run`` run the function, if it is given, and restore them.

    They are restored before the result is sent: its receiver may be the next that draws. They belong to the
    process: other calls that draw numbers at the same time disturb both.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return function(*args, **kwargs) if run is None else run(function, args, kwargs)


def random_states() -> list[torch.Tensor]:
    """Return the states of the random generators of this process: of the CPU, and of all devices in use."""
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *on_devices]


@contextmanager
def restored(states: Sequence[torch.Tensor]) -> Iterator[None]:
    """Set the random generators to earlier ``states``, if any, and restore them on exit."""
    before = random_states() if states else []
    _set(states)
    try:
        yield
    finally:
        _set(before)


def _set(states: Sequence[torch.Tensor]) -> None:
    if states:
        torch.set_rng_state(states[0])
        torch.cuda.set_rng_state_all(states[1:])
