"""The tests of torch's that do not pass, each with the reason."""

from __future__ import annotations

_PROFILER = "the legacy profiler: the caller does not get the events of the callee's profiler"
_SCRIPT = (
    "TorchScript: a script function that takes RRefs, or a scriptable RemoteModule, needs torch's C++ agent"
)
_AGENT = "reads or replaces an attribute of torch's C++ agent, which this library does not have"
_PRIVATE = "replaces a private function by which torch's rpc.api is built"

_TESTS_BY_REASON = {
    _PROFILER: (
        "test_profiler_export_trace",
        "test_profiler_remote_events_profiled",
        "test_profiler_remote_events_profiled_single_threaded",
        "test_profiler_rpc_memory",
        "test_profiler_rpc_record_shapes",
        "test_profiler_with_async_rpc_builtin",
        "test_profiler_with_async_rpc_builtin_single_threaded",
        "test_profiler_with_async_rpc_udf",
        "test_profiler_with_async_rpc_udf_single_threaded",
        "test_profiler_with_autograd_context",
        "test_profiler_with_autograd_context_single_threaded",
        "test_profiler_with_remote_builtin",
        "test_profiler_with_remote_builtin_single_threaded",
        "test_profiler_with_remote_udf",
        "test_profiler_with_remote_udf_single_threaded",
        "test_profiler_with_script_async_rpc",
        "test_profiler_with_script_async_rpc_single_threaded",
        "test_profiler_with_script_remote_rpc",
        "test_profiler_with_script_remote_rpc_single_threaded",
        "test_profiler_with_script_sync_rpc",
        "test_profiler_with_script_sync_rpc_single_threaded",
        "test_profiler_with_sync_rpc_builtin",
        "test_profiler_with_sync_rpc_builtin_single_threaded",
        "test_profiler_with_sync_rpc_udf",
        "test_profiler_with_sync_rpc_udf_single_threaded",
        "test_rpc_profiling_async_function",
        "test_rpc_profiling_async_function_single_threaded",
        "test_rpc_profiling_remote_record_function",
    ),
    _SCRIPT: (
        "test_trainer_ps_torchscript_functions",
        "test_forward_async",
        "test_forward_async_script",
        "test_forward_sync",
        "test_forward_sync_script",
        "test_remote_module_py_pickle_not_supported_script",
        "test_send_remote_module_over_the_wire_script_not_supported",
    ),
    _AGENT: (
        "test_disable_gil_profiling",
        "test_infer_backend_from_options",
        "test_register_rpc_backend_and_set_and_start_rpc_backend",
    ),
    _PRIVATE: (
        "test_duplicate_name",
        "test_ignore_rref_leak",
        "test_rref_leak",
        "test_shutdown_errors",
        "test_use_rpc_pickler",
        "test_wait_all_workers_timeout",
    ),
    "serializes an RRef by torch's private pickler; the documented part of the test passes": (
        "test_use_rref_after_shutdown",
    ),
    "expects that an exception cannot be rebuilt; this library rebuilds it, with its own type": (
        "test_custom_exception_throw_during_reconstruction",
    ),
    "expects an error; here a dynamic group beside a fixed one is a group of its own": (
        "test_dynamic_and_static_init_rpc_together",
    ),
    "expects that a backward pass hangs; here it completes": ("test_backward_unused_send_function",),
}

EXCEPTIONS: dict[str, str] = {test: reason for reason, tests in _TESTS_BY_REASON.items() for test in tests}
"""Reasons by names of tests."""
