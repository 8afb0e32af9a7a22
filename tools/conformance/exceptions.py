"""The tests of torch's that do not pass, each with the reason."""

from __future__ import annotations

_PROFILER = "the legacy profiler: the caller does not get the events of the callee's profiler"
_SCRIPT_CALLS = (
    "TorchScript: RPC and distributed autograd from inside a script function go to torch's C++ agent"
)
_SCRIPT_RREFS = "TorchScript: script functions and modules know only references of torch's C++ agent"
_SCRIPT_MODULES = "TorchScript: a RemoteModule with a module interface needs torch's C++ agent"
_AGENT = "reads or replaces an attribute of torch's C++ agent, which this library does not have"
_PRIVATE = "replaces a private function by which torch's rpc.api is built"

_TESTS_BY_REASON: dict[str, dict[str, tuple[str, ...]]] = {
    _PROFILER: {
        "rpc": (
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
    },
    _SCRIPT_CALLS: {
        "jit": (
            "test_all_kwargs_are_populated_by_defaults",
            "test_args_and_kwargs_contain_different_types",
            "test_args_kwargs_are_neither_passed",
            "test_async_function_remote",
            "test_async_function_remote_multi",
            "test_async_function_simple",
            "test_call_python_function_remotely_from_script_not_supported",
            "test_call_rpc_with_profiling",
            "test_call_script_function_that_not_exists_remotely_from_script",
            "test_call_script_function_that_raises_remotely_from_script",
            "test_future_passed_between_python_and_jit",
            "test_kwargs_not_passed",
            "test_no_kwargs_are_populated_by_defaults",
            "test_record_function_on_caller_rpc_async",
            "test_rpc_async_jit_profiled",
            "test_rpc_torchscript_record_function",
            "test_some_kwargs_are_populated_by_defaults",
            "test_dist_backward",
            "test_get_gradients",
            "test_jit_fork_within_context",
            "test_restore_context_after_swtich_to_jit_thread",
        ),
    },
    _SCRIPT_RREFS: {
        "dist_autograd": ("test_trainer_ps_torchscript_functions",),
        "jit": (
            "test_load_script_module_with_pickled_rref",
            "test_local_rref_local_value",
            "test_my_script_module_with_rrefs",
            "test_remote_script_module",
            "test_return_local_script_class_rref_in_py_and_use_in_script",
            "test_return_local_script_module_rref_in_py_and_use_in_script",
            "test_rref_as_arg_and_return",
            "test_rref_is_owner",
            "test_rref_jit_pickle_not_supported",
            "test_rref_list_mutate",
            "test_rref_local_value",
            "test_rref_python_annotation",
            "test_user_rrefs_confirmed",
            "test_user_rrefs_confirmed_remote",
        ),
    },
    _SCRIPT_MODULES: {
        "remote_module": (
            "test_forward_async",
            "test_forward_async_script",
            "test_forward_sync",
            "test_forward_sync_script",
            "test_remote_module_py_pickle_not_supported_script",
            "test_send_remote_module_over_the_wire_script_not_supported",
        ),
    },
    _AGENT: {
        "rpc": (
            "test_disable_gil_profiling",
            "test_infer_backend_from_options",
            "test_register_rpc_backend_and_set_and_start_rpc_backend",
        ),
    },
    _PRIVATE: {
        "rpc": (
            "test_duplicate_name",
            "test_ignore_rref_leak",
            "test_rref_leak",
            "test_shutdown_errors",
            "test_use_rpc_pickler",
            "test_wait_all_workers_timeout",
        ),
    },
    "serializes an RRef by torch's private pickler; the documented part of the test passes": {
        "rpc": ("test_use_rref_after_shutdown",),
    },
    "expects that an exception cannot be rebuilt; this library rebuilds it, with its own type": {
        "rpc": ("test_custom_exception_throw_during_reconstruction",),
    },
    "expects an error; here a dynamic group beside a fixed one is a group of its own": {
        "rpc": ("test_dynamic_and_static_init_rpc_together",),
    },
    "expects that a backward pass hangs; here it completes": {
        "dist_autograd": ("test_backward_unused_send_function",),
    },
    "expects an error; here a reference to a script module needs no interface": {
        "jit": ("test_create_local_script_module_rref_in_py",),
    },
    "expects words of torch's C++ agent; the error is that of a Python function which returns no future": {
        "jit": (
            "test_async_function_wrong_return_type",
            "test_async_function_wrong_return_type_remote",
        ),
    },
}

EXCEPTIONS: dict[str, str] = {
    f"{suite} {test}": reason
    for reason, by_suite in _TESTS_BY_REASON.items()
    for suite, tests in by_suite.items()
    for test in tests
}
"""Reasons by suite and name of a test."""
