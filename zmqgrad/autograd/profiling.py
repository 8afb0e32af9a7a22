"""Backward passes in ``torch.profiler``, under the names that torch gives their parts.

Ranges are recorded in the threads that a profiler was told to record (see :mod:`zmqgrad.rpc.profiling`): the
whole pass where it begins; what gradients set off that come for a send; and the sending of those of a recv.
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
    """A range of that name, if a profiler is active."""
    return profiler.record_function(name) if profiled_anywhere() else _NOT_PROFILED
