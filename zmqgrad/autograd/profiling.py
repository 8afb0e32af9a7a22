"""Profiler ranges of backward passes, under the names that torch uses.

Ranges are recorded in the threads that a profiler records (see :mod:`zmqgrad.rpc.profiling`): the whole pass
on the worker where it begins; the run that the gradients of a send cause; and the sending of a recv's
gradients.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

from zmqgrad.rpc.profiling import profiled_anywhere

PASS_NAME = "torch::distributed::autograd::backward"
SEND_NAME = "torch::distributed::autograd::SendRpcBackward"
RECV_NAME = "torch::distributed::autograd::RecvRpcBackward"

_NOT_PROFILED: AbstractContextManager[Any] = nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """Return a profiler range, or a null context if no profiler is active."""
    return profiler.record_function(name) if profiled_anywhere() else _NOT_PROFILED
