"""Side by side with ``torch.distributed``: our stores for its process groups, and its store for our groups.

    import torch.distributed as dist
    import zmqgrad.interop

    zmqgrad.init_process_group("gloo")     # torch's process group; its rendezvous uses a store of ours
    dist.init_process_group("gloo", init_method="zmq://10.0.0.1:29500", rank=rank, world_size=4)
    dist.init_process_group("gloo", store=zmqgrad.interop.as_torch_store(store), rank=rank, world_size=4)

Importing this registers ``zmq://`` with torch; so do ``import zmqgrad.rpc``, and ``import zmqgrad`` after
torch. It is a separate layer because it imports torch, which the stores do not need.

:mod:`~zmqgrad.interop.stores` makes a store of ours usable by torch's C++ code,
:mod:`~zmqgrad.interop.process_groups` joins process groups through such stores, and
:mod:`~zmqgrad.interop.torch_store` shares the address of RPC with process groups of torch.
"""

from __future__ import annotations

from zmqgrad.interop.process_groups import init_process_group, register_with_torch, rendezvous_handler
from zmqgrad.interop.stores import TorchStore, as_torch_store
from zmqgrad.interop.torch_store import open_torch_store
from zmqgrad.rendezvous.sidecar import set_torch_store_opener

__all__ = ["TorchStore", "as_torch_store", "init_process_group", "register_with_torch", "rendezvous_handler"]

register_with_torch()
set_torch_store_opener(open_torch_store)
