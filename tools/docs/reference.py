"""What the reference shows: the public names by what they are for, and on which page.

A test compares this with what the public modules offer.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.docs.sources import ROOT, to_markdown


class Group(NamedTuple):
    """One page of the reference."""

    path: str
    title: str
    about: str
    names: str
    """The names with their modules below ``zmqgrad``, in the order of the page."""


GROUPS = (
    Group(
        "calls",
        "Calls",
        "Join a group, and run functions on other workers. [Guide](../rpc.md).",
        "rpc.init_rpc rpc.rpc_sync rpc.rpc_async rpc.RpcFuture rpc.broadcast rpc.as_completed rpc.wait_all "
        "rpc.functions.async_execution rpc.checkpoint rpc.checkpoint_async rpc.cancelled rpc.time_left "
        "rpc.get_rpc_timeout rpc.set_rpc_timeout",
    ),
    Group(
        "references",
        "References",
        "Objects that stay on another worker. [How they are kept alive](../concepts/references.md).",
        "rpc.remote rpc.RRef rpc.get_ref rpc.remove_ref rpc.watch_ref nn.RemoteModule",
    ),
    Group(
        "groups",
        "Groups",
        "Calls to many workers at once. [Guide](../one-to-many.md).",
        "rpc.group rpc.WorkerGroup rpc.GroupFuture rpc.RRefGroup rpc.all_gather rpc.barrier",
    ),
    Group(
        "published",
        "Published tensors",
        "Versions of tensors that one worker publishes and any worker reads. [Guide](../published.md).",
        "rpc.publish rpc.subscribe rpc.Subscription rpc.PublishedTensors",
    ),
    Group(
        "autograd",
        "Autograd",
        "Backward passes through calls. [Guide](../autograd.md).",
        "autograd.context autograd.backward autograd.get_gradients autograd.grad "
        "autograd.allreduce_gradients autograd.describe_context autograd.draw_context "
        "autograd.get_debug_info",
    ),
    Group(
        "optimizers",
        "Optimizers",
        "Steps on the workers that own the parameters. [Guide](../autograd.md).",
        "optim.DistributedOptimizer optim.StepResult optim.DistributedLRScheduler optim.clip_grad_norm",
    ),
    Group(
        "lifecycle",
        "Lifecycle",
        "Leave a group, see who is in it, and set its options. [Guide](../groups.md).",
        "rpc.shutdown rpc.RpcBackendOptions rpc.WorkerInfo rpc.get_worker_info rpc.get_worker_infos "
        "rpc.wait_for_workers rpc.on_join rpc.on_loss rpc.get_stats rpc.get_debug_info",
    ),
    Group(
        "store",
        "Stores",
        "Keys and queues that processes share, and watches of them. [Guide](../store.md).",
        "store.TCPStore store.Store store.Watch store.WatchEvent store.StoreServer store.FileStore "
        "store.EtcdStore store.EtcdOptions store.HashStore store.PrefixStore",
    ),
    Group(
        "launching",
        "Rendezvous and elastic jobs",
        "How processes find each other, and start again after a failure. "
        "[Rendezvous](../concepts/rendezvous.md), [elastic jobs](../elastic.md), [Ray](../ray.md).",
        "rendezvous.rendezvous rendezvous.register_rendezvous_handler elastic.State elastic.Sharded "
        "elastic.launch elastic.LaunchConfig elastic.Streams elastic.Std elastic.create_handler "
        "elastic.RendezvousHandler elastic.Rendezvous "
        "elastic.RendezvousSettings elastic.RendezvousTimeout elastic.RendezvousBackend elastic.StoreBackend "
        "elastic.EtcdBackend elastic.register_backend elastic.Parameters ray.RayLauncher",
    ),
    Group(
        "trace",
        "Traces",
        "Record what a job does, and read it. [Guide](../tracing.md).",
        "trace.record trace.launch_environment trace.Job trace.Call trace.Message trace.Actor trace.Process "
        "trace.Stamped trace.prometheus.count trace.prometheus.serve trace.prometheus.stop "
        "trace.otel.instrument trace.otel.uninstrument",
    ),
    Group(
        "testing",
        "Tests",
        "Workers in one process, faults, and races by number. [Guide](../howto/testing.md), "
        "[races](../howto/races.md).",
        "testing.cluster testing.Cluster testing.simulation.simulate testing.simulation.Faults "
        "testing.simulation.Run testing.simulation.Failure testing.simulation.SimulationFailed",
    ),
    Group(
        "compatibility",
        "Compatibility with torch",
        "What lets programs and libraries written for torch run unchanged. [Coming from "
        "torch](../porting/index.md).",
        "install uninstall init_process_group interop.as_torch_store interop.TorchStore "
        "interop.register_with_torch rpc.TensorPipeRpcBackendOptions "
        "rpc.register_backend rpc.backend_registered rpc.construct_rpc_backend_options rpc.init_backend "
        "rpc.is_available autograd.is_available",
    ),
)

NOT_SHOWN = {
    "zmqgrad": "__version__ autograd errors interop nn optim rendezvous rpc store testing",
    "zmqgrad.rpc": "AllGatherStates BackendType BackendValue PyRRef backend_registry constants functions",
    "zmqgrad.autograd": "DistAutogradContext install",
    "zmqgrad.optim": "PostLocalSGDOptimizer ZeroRedundancyOptimizer as_functional_optim",
    "zmqgrad.nn": "all_gather all_reduce all_to_all all_to_all_single broadcast gather reduce reduce_scatter "
    "scatter",
    "zmqgrad.store": "DistError DistNetworkError DistStoreError PrefixCallback QueueEmptyError WatchCallback",
    "zmqgrad.interop": "init_process_group rendezvous_handler",
    "zmqgrad.elastic": "EtcdOptions NodeDesc OperatorExecutor RendezvousState RoundStores ServedByRankZero "
    "SharedStore StateHolder",
    "zmqgrad.trace": "Recorder",
}
"""Other names of public modules: modules, torch's own functions, errors (which have a page), and what only
libraries need that extend this one or torch's RPC. Porting/names.md lists those of torch."""


MEMBERS = {
    "elastic.RendezvousHandler": "next_rendezvous num_nodes_waiting spares nodes is_closed set_closed "
    "shutdown get_backend get_run_id close",
    "elastic.RendezvousSettings": "",
    "nn.RemoteModule": "remote_parameters get_module_rref init_from_module_rref with_timeout train eval",
    "optim.DistributedOptimizer": "step param_groups add_param_group state_dict load_state_dict",
    "rpc.RpcBackendOptions": "set_device_map set_devices",
    "rpc.RpcFuture": "wait add_done_callback",
    "store.FileStore": "path close",
    "store.StoreServer": "endpoint port close statistics",
    "store.TCPStore": "host port is_master close",
    "trace.Job": "workers actors calls messages events span choose_part time wall",
    "trace.Process": "is_live has_end damage",
}
"""Members that a page shows, of classes whose other ones are for the library itself."""

HIDDEN = {
    "install": "replacement.install",
    "uninstall": "replacement.uninstall",
    "init_process_group": "interop.process_groups.init_process_group",
    "autograd.context": "autograd.api.context",
}
"""Where griffe finds names that are imported on first access, or named like a submodule."""


def shown() -> dict[str, Any]:
    """The objects of all pages by their names below ``zmqgrad``; those for Ray only where it is installed."""
    names = [name for group in GROUPS for name in group.names.split()]
    return {name: _object(name) for name in names if name[:4] != "ray." or importlib.util.find_spec("ray")}


def _object(name: str) -> Any:
    module, _, last = f"zmqgrad.{name}".rpartition(".")
    return getattr(importlib.import_module(module), last)


def _path(name: str) -> str:
    return f"zmqgrad.{HIDDEN.get(name, name)}"


def page(group: Group) -> str:
    """The page of one group, which mkdocstrings fills from the docstrings."""
    parts = []
    for name in group.names.split():
        options = f'heading: "{name}", toc_label: "{name.rpartition(".")[2]}"'
        if name in MEMBERS:
            options += f", members: [{', '.join(MEMBERS[name].split())}]"
        parts.append(f"\n::: {_path(name)}\n    options: {{{options}}}\n")
    return f"# {group.title}\n\n{group.about}\n{''.join(parts)}"


def overview() -> str:
    """The first page: every name, with the first sentence of its docstring."""
    return "\n".join(_overview()) + "\n"


def _overview() -> Iterator[str]:
    yield "# Reference"
    yield ""
    yield "Examples run on `worker0`, beside a `worker1`, after these imports, and others of this library:"
    yield from ("", "```python", "import torch", "import zmqgrad.autograd as dist_autograd")
    yield from ("from zmqgrad import rpc", "```", "")
    yield "Pages of their own have [errors](errors.md), [settings](../settings.md), the [command"
    yield "line](command-line.md), [metrics](metrics.md) and [messages](messages.md). [Every public name of"
    yield "torch](../porting/names.md) is listed with its differences."
    import griffe  # it reads the sources, as the pages do, so that Ray need not be installed

    package = griffe.load("zmqgrad", search_paths=[ROOT], resolve_aliases=True)
    for group in GROUPS:
        yield from ("", f"## {group.title}", "", group.about, "", "| name | in short |", "|---|---|")
        for name in group.names.split():
            first = (
                to_markdown(package[_path(name).partition(".")[2]].docstring.value)
                .split("\n\n")[0]
                .replace("\n", " ")
            )
            sentence = re.split(r"(?<=[.:])\s", first)[0].replace("|", "&#124;")
            yield f"| [`{name}`]({group.path}.md#{_path(name)}) | {sentence} |"
