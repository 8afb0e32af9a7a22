"""The deliberate differences between the names of this library and those of torch, with reasons.

``tests/test_api_differences.py`` compares them with the installed torch and with ``docs/api-differences.md``,
which this module writes:

    python -m tools.api_differences
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

TORCH = "2.13"
"""The release of torch that the tables describe."""

PAGE = Path(__file__).parent.parent / "docs" / "api-differences.md"


class Missing(NamedTuple):
    """Names that torch has and this library does not.

    Args:
        what: what the names are.
        reason: why they are missing, or what to use instead.
        names: the names by torch's module, separated by blanks.
    """

    what: str
    reason: str
    names: Mapping[str, str]


class Signature(NamedTuple):
    """A function whose parameters differ from torch's so that some call of torch's is not accepted."""

    module: str
    name: str
    reason: str


class Used(NamedTuple):
    """A name that is not documented by torch, but used by libraries.

    Args:
        name: the name.
        users: some of its users.
        status: how it is supported, or why it is not.
    """

    name: str
    users: str
    status: str


class Behaviour(NamedTuple):
    """A name that exists in both and acts differently."""

    name: str
    torch: str
    here: str


_RREF_INTERNALS = " ".join(
    f"{kind}.{name}"
    for kind in ("PyRRef", "RRef")
    for name in ("_deserialize", "_serialize", "_get_profiling_future", "_set_profiling_future")
)
_CALLS = (
    "_invoke_remote_builtin _invoke_remote_python_udf _invoke_remote_torchscript _invoke_rpc_builtin "
    "_invoke_rpc_python_udf _invoke_rpc_torchscript"
)
_SHUTDOWN = (
    "_cleanup_python_rpc_handler _delete_all_user_and_unforked_owner_rrefs _destroy_rref_context "
    "_reset_current_rpc_agent _set_and_start_rpc_agent"
)
_CONSTANTS = "_DEFAULT_INIT_METHOD _DEFAULT_NUM_WORKER_THREADS _DEFAULT_RPC_TIMEOUT_SEC _UNSET_RPC_TIMEOUT"
_REMOTE_MODULE = " ".join(
    f"{{0}}.{name}"
    for name in (
        *("_check_attribute_picklability", "_init_template"),
        *("_install_generated_methods", "_prepare_init"),
    )
)

MISSING = (
    Missing(
        "Functions of the C++ agent that send calls",
        "They take torch's own serialized calls. Use `rpc_sync`, `rpc_async` and `remote`.",
        {"rpc": _CALLS, "rpc.api": f"{_CALLS} _invoke_rpc"},
    ),
    Missing(
        "Steps of starting and ending the C++ agent",
        "`init_rpc` and `shutdown` do all of them; one step alone would leave a partly started worker.",
        {
            "rpc": f"{_SHUTDOWN} _init_rpc_backend _validate_rpc_args _init_counter _utils",
            "rpc.api": f"{_SHUTDOWN} _finalize_shutdown _init_rpc_states _ignore_rref_leak "
            "_group_membership_management _update_group_membership",
            "rpc.backend_registry": "_group_membership_management _update_group_membership "
            "_init_process_group _tensorpipe_init_backend_handler "
            "_tensorpipe_construct_rpc_backend_options_handler",
        },
    ),
    Missing(
        "Classes of the C++ agent and of its options",
        "There is no C++ agent. `_get_current_rpc_agent()` returns an object with the methods that libraries "
        "use. Process groups import `Store` from `torch.distributed`.",
        {
            "rpc": "RpcAgent TensorPipeAgent Store _TensorPipeRpcBackendOptionsBase _is_tensorpipe_available "
            "TensorPipeRpcBackendOptions._set_device_map",
            "rpc.options": "_TensorPipeRpcBackendOptionsBase _is_tensorpipe_available _to_device "
            "_to_device_list _to_device_map TensorPipeRpcBackendOptions._set_device_map",
            "rpc.backend_registry": "_create_device_list _create_reverse_mapping _get_device_infos "
            "_set_devices_and_reverse_device_map _tensorpipe_exchange_and_check_all_device_maps "
            "_tensorpipe_validate_devices _validate_device_maps",
        },
    ),
    Missing(
        "Profiling of the C++ agent",
        "`torch.profiler` records calls, and `rpc._server_process_global_profile` those of a whole server.",
        {
            "rpc": "RemoteProfilerManager _disable_server_process_global_profiler "
            "_enable_server_process_global_profiler _set_profiler_node_id enable_gil_profiling",
            "rpc.api": "RemoteProfilerManager _build_rpc_profiling_key _enable_rpc_profiler "
            "_get_should_profile",
        },
    ),
    Missing(
        "Serialization of calls",
        "zmqgrad has its own serializer. A class chooses by `__reduce__` how it is sent.",
        {
            "rpc": "internal _disable_jit_rref_pickle _enable_jit_rref_pickle",
            "rpc.api": "PythonUDF RPCExecMode _default_pickler _internal_rpc_pickler _use_rpc_pickler",
            "nn.api.remote_module": "_internal_rpc_pickler _SerializedRemoteModule _remote_module_receiver "
            "_remote_module_reducer _recursive_script_module_receiver _recursive_script_module_reducer "
            "_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING",
        },
    ),
    Missing(
        "Serialization and profiling of one reference",
        "Calls serialize the references that they contain, and count them.",
        {"rpc": _RREF_INTERNALS, "rpc.api": _RREF_INTERNALS},
    ),
    Missing(
        "Parts of `_all_gather`",
        "The root gathers by an asynchronous function. A collective of your own can use `AllGatherStates`.",
        {
            "rpc.api": "_ALL_WORKER_NAMES _all_gather_sequence_id _all_gather_sequence_id_to_states "
            "_broadcast_to_followers _gather_to_leader"
        },
    ),
    Missing(
        "Helpers of public functions",
        "Use the public function: `get_worker_info`, `RRef` and its methods.",
        {
            "rpc": "method_factory new_method",
            "rpc.api": "method_factory new_method _rref_typeof_on_owner _rref_typeof_on_user _to_worker_info",
            "rpc.backend_registry": "_backend_type_doc _backend_type_repr",
            "optim": "_deprecation_warning",
        },
    ),
    Missing(
        "Private spellings of constants",
        "`rpc.constants` has them without the underscore.",
        {"rpc": _CONSTANTS, "rpc.constants": _CONSTANTS},
    ),
    Missing(
        "Parts of RemoteModule",
        "`forward` and `forward_async` are not generated from templates, and TorchScript interfaces are not "
        "supported.",
        {
            "nn": f"{_REMOTE_MODULE.format('RemoteModule')} jit",
            "nn.api.remote_module": f"{_REMOTE_MODULE.format('RemoteModule')} "
            f"{_REMOTE_MODULE.format('_RemoteModule')} _create_module_with_interface _instantiate_template "
            "_param_rrefs _raise_not_supported _remote_device",
        },
    ),
    Missing(
        "Variables that torch's modules use only while they are imported",
        "They have no other use.",
        {
            "rpc.api": "TYPE_CHECKING _P _R docstring method method_name",
            "autograd": "TYPE_CHECKING",
            "nn.api.remote_module": "T",
        },
    ),
)

SIGNATURES: tuple[Signature, ...] = ()

USED = (
    Used(
        "`rpc._get_current_rpc_agent()` with `get_worker_info`, `get_worker_infos`, `get_debug_info`, "
        "`_get_device_map`",
        "torch's ShardedTensor and RemoteModule, torzilla",
        "Supported, also as `rpc.api._get_current_rpc_agent`.",
    ),
    Used("`rpc.api._require_initialized`", "PyTorch Geometric, GraphLearn", "Supported."),
    Used(
        "`rpc.api._all_gather`, `rpc.AllGatherStates`",
        "PyTorch Geometric, GraphLearn, torzilla, torch's ShardedTensor",
        "Supported. None or an empty set of names means all workers.",
    ),
    Used(
        "`rpc.api._barrier`",
        "TorchOpt, public training scripts",
        "Supported. An empty set means all workers.",
    ),
    Used("`rpc.api._wait_all_workers`", "pipeline libraries, public scripts", "Supported."),
    Used("`rpc.api._is_current_rpc_agent_set`", "public training scripts", "Supported, also in `rpc`."),
    Used(
        "`isinstance(x, torch._C._distributed_rpc.PyRRef)`",
        "TorchRL, PiPPy, Colossal-AI",
        "Supported: `x.__class__` is that class. `type(x)` is `zmqgrad.rpc.RRef`, so `type(x) is PyRRef` "
        "is False, and `functools.singledispatch`, which reads `__class__`, chooses the function registered "
        "for torch's class. `torch.jit.script` of a module that has a reference as an attribute fails unless "
        "`__jit_ignored_attributes__` names it.",
    ),
    Used(
        "`torch._C._distributed_rpc._is_current_rpc_agent_set`",
        "PyTorch Geometric, GraphLearn, Colossal-AI",
        "A name of torch's C++ module: it is replaced by `zmqgrad.install()` only. Without it, import the "
        "function from `zmqgrad.rpc`.",
    ),
    Used(
        "`torch.distributed.nn.api.remote_module`",
        "torch's documentation, public scripts",
        "Supported as `zmqgrad.nn.api.remote_module`.",
    ),
    Used(
        "`RemoteModule.named_modules = nn.Module.named_modules`, and other patches of the class",
        "FairScale, public scripts",
        "Supported: they are attributes of the class, and `torch.fx` can record calls as those of a leaf.",
    ),
    Used(
        "`optim._apply_optimizer_in_backward`, `PostLocalSGDOptimizer`, `ZeroRedundancyOptimizer`, "
        "`as_functional_optim`; `nn.functional.all_gather` and the other collectives",
        "TorchRec, Lightning",
        "Supported: torch's own, loaded on first use.",
    ),
    Used(
        "`DistributedOptimizer.remote_optimizers`, and `optim` of their values",
        "public training scripts, for learning-rate schedulers",
        "Supported. `DistributedLRScheduler` does the same in one line.",
    ),
    Used(
        "`BackendType.PROCESS_GROUP`, `rpc.ProcessGroupRpcBackendOptions`",
        "programs for torch 1.10 and older",
        "Missing, as in torch: the error says what to write instead.",
    ),
    Used("`rpc.api._use_rpc_pickler`", "one project", "Missing: the serializer cannot be exchanged."),
    Used(
        "`rpc.timedelta`",
        "one script",
        "Missing: torch's module happens to import it. Import it from `datetime`.",
    ),
)

BEHAVIOURS = (
    Behaviour(
        "`RemoteModule.train(mode)`, `eval()`",
        "`train` ignores `mode`; both return a copy of the module.",
        "`mode` is set; both return the RemoteModule.",
    ),
    Behaviour(
        "a RemoteModule that was sent, or made by `init_from_module_rref`",
        "Calling it raises AttributeError, since the state of an `nn.Module` is missing; `forward` works.",
        "Both work.",
    ),
    Behaviour(
        "`RemoteModule` on an unknown device",
        "`RuntimeError` of `torch.device`",
        "`ConfigurationError`, a `ValueError`",
    ),
    Behaviour(
        "`_module_interface_cls`, `torch.jit.script(remote_module)`",
        "Makes a RemoteModule that TorchScript can compile.",
        "Raises `ConfigurationError`.",
    ),
    Behaviour(
        "`DistributedOptimizer` of `SGD` or `Adamax` without `lr`",
        "0.01 and 0.001, which its functional optimizers have as defaults.",
        "The defaults of the classes: 0.001 and 0.002.",
    ),
    Behaviour(
        "an exception of a remote function",
        "A `RuntimeError` with its name in the text, unless it is one of a few built-in classes.",
        "Its own class.",
    ),
    Behaviour(
        "`rpc.api._barrier(names)`",
        "Logs a failure and returns.",
        "Raises it.",
    ),
    Behaviour(
        "`rpc.api._all_gather(obj)` without a timeout",
        "The default timeout of calls bounds each message, and nothing bounds the wait for late workers.",
        "The default timeout of calls bounds the whole. Pass `timeout=0` for no limit.",
    ),
)


def missing_names() -> set[tuple[str, str]]:
    """All (module, name) of :data:`MISSING`."""
    return {
        (module, name) for each in MISSING for module, names in each.names.items() for name in names.split()
    }


def page() -> str:
    """The text of ``docs/api-differences.md``."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Differences from torch's API"
    yield ""
    yield "Every name of `torch.distributed.rpc`, `.autograd`, `.optim` and `.nn` exists in the module of the"
    yield "same path below `zmqgrad`, with torch's parameters and defaults, except those listed here. Extra"
    yield f"parameters are optional. A test compares this page with the installed torch ({TORCH})."
    yield ""
    yield "<!-- written by `python -m tools.api_differences`: change the tables there -->"
    yield ""
    yield "## Same name, different behaviour"
    yield ""
    yield "| name | torch | zmqgrad |"
    yield "|---|---|---|"
    yield from (f"| {each.name} | {each.torch} | {each.here} |" for each in BEHAVIOURS)
    yield ""
    yield "## Names that libraries use and torch does not document"
    yield ""
    yield "| name | used by, for example | zmqgrad |"
    yield "|---|---|---|"
    yield from (f"| {each.name} | {each.users} | {each.status} |" for each in USED)
    yield ""
    yield "## Different signatures"
    yield ""
    if SIGNATURES:
        yield "| function | reason |"
        yield "|---|---|"
        yield from (f"| `{each.module}.{each.name}` | {each.reason} |" for each in SIGNATURES)
    else:
        yield "None: zmqgrad accepts every call that torch's signatures accept."
    yield ""
    yield "## Missing names"
    for each in MISSING:
        yield ""
        yield f"**{each.what}.** {each.reason}"
        yield ""
        for module, names in each.names.items():
            yield f"- `{module}`: " + ", ".join(f"`{name}`" for name in names.split())


if __name__ == "__main__":
    PAGE.write_text(page())
