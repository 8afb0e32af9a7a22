"""The implementation that the scenarios of this process use: torch's or ours, by the environment."""

from __future__ import annotations

import os

VARIABLE = "ZMQGRAD_TEST_ORACLE"
"""Set it to "torch" before this module is imported to run the scenarios on torch."""

IS_TORCH = os.environ.get(VARIABLE) == "torch"

if IS_TORCH:
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    from torch.distributed.optim import DistributedOptimizer
else:
    import zmqgrad.autograd as dist_autograd  # type: ignore[no-redef]
    import zmqgrad.rpc as rpc  # type: ignore[no-redef]
    from zmqgrad.optim import DistributedOptimizer  # type: ignore[assignment]

__all__ = ["IS_TORCH", "VARIABLE", "DistributedOptimizer", "dist_autograd", "rpc"]
