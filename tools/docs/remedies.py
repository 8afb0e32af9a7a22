"""What to do about each exception. What it means is the first line of its docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from zmqgrad import errors

REMEDIES = {
    "ZmqgradError": "Catch it to handle every error of this library at one place.",
    "ConfigurationError": (
        "Correct the argument or the environment variable that the text names; [settings](../settings.md) "
        "lists what is accepted."
    ),
    "ArgumentTypeError": "Pass a value of the type that the text names.",
    "OptionError": "Choose a value within the bounds that the text names.",
    "WorkerNameError": "Use 1 to 127 letters, digits, `_`, `-`, `:` and `.`.",
    "RendezvousError": (
        "Compare MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE of all workers; `zmqgrad doctor` shows the "
        "addresses that this host would use."
    ),
    "RendezvousTimeoutError": (
        "Look at the log of the worker that the text names: it has not started, has ended, or cannot reach "
        "MASTER_ADDR at MASTER_PORT."
    ),
    "DuplicateWorkerError": (
        "Give each worker a rank and a name of its own. If an earlier run is still alive, end it or use "
        "another port."
    ),
    "WorldSizeError": (
        "Pass the same world_size to all workers, or none to any if a launcher sets WORLD_SIZE. If another "
        "job uses this address, choose another port."
    ),
    "RendezvousClosedError": "The job has ended, or was shut down: start it again with another id.",
    "RendezvousGracefulExitError": "Nothing: the job has ended and did not need this node, a spare.",
    "RendezvousStateError": "Use the same release on all nodes, and an id that no other program uses.",
    "RendezvousConnectionError": (
        "Check that the store or etcd is running, and that its address can be reached from this host."
    ),
    "ProtocolError": (
        "Use the same release of zmqgrad in all processes. If they are the same, another program sends to "
        "this port."
    ),
    "AuthenticationError": (
        "Give all processes of the job the same ZMQGRAD_SECRET, or the same file; see "
        "[security](../security.md)."
    ),
    "TransportError": "The text names the socket and the reason of the operating system.",
    "AddressInUseError": (
        "Another program, or an earlier run, listens there: end it, or set another MASTER_PORT."
    ),
    "ClosedError": "Do not use a worker or a store after `shutdown()` or `close()`.",
    "CongestionError": (
        "The peer is slower than the sender, or stopped. See [flow control](../flow-control.md)."
    ),
    "UnknownPeerError": "Send to workers that have joined; `rpc.get_worker_infos()` lists them.",
    "StoreError": "Check that the server of the store is running and reachable; the text has the reason.",
    "StoreTimeoutError": (
        "Check that some process sets the key that the text names; or pass a longer timeout."
    ),
    "QueueEmptyError": "Try again later, or call `queue_pop(key)`, which blocks.",
    "JournalError": (
        "The text names the file. Stop the other server that uses it, or restore or remove the file."
    ),
    "WorkerFailedError": (
        "Read the traceback in the text, or the log of the worker; `rank` and `exit_code` tell which worker "
        "failed, and how."
    ),
    "CommitError": "Let all ranks call restore() first, and commit() equally often; the text says more.",
    "LaunchTimeoutError": "Raise the timeout, or find out from the workers' logs what they wait for.",
    "RpcError": (
        "Catch it to handle every failure of a call that is not an exception of the called function."
    ),
    "NotInitializedError": "Call `init_rpc` in this process. A forked child has to call it itself.",
    "UnknownWorkerError": (
        "Check the name; the text lists the workers. In a dynamic group, call `rpc.wait_for_workers` first."
    ),
    "DuplicateNameError": (
        "Use another name, the object that has it (`rpc.get_ref`), or take the name back (`rpc.remove_ref`)."
    ),
    "RpcTimeoutError": (
        "Raise the timeout of the call, of `rpc.set_rpc_timeout`, or of the options; or find out with "
        "`rpc.get_debug_info()` on the callee what it does. See [timeouts](../howto/timeouts.md)."
    ),
    "PeerLostError": (
        "Look at the log and the exit code of the worker that the text names. Continue without it, or let a "
        "launcher restart the job. If it was only stalled, raise `frozen_timeout`."
    ),
    "PayloadError": (
        "The text names the argument or the part of it. Send something that can be pickled, or keep it on "
        "its worker and send an `RRef`."
    ),
    "FunctionNotFoundError": (
        "Use the same code on both workers, and put the function into a module that both can import."
    ),
    "OperatorError": "Call the operator with arguments that it accepts in one process, too.",
    "RRefError": (
        "The text says which operation is not possible: for example `local_value()` at a worker that is not "
        "the owner, where `to_here()` works."
    ),
    "GroupError": (
        "`errors` has the error of each member that failed, `results` the results of the others, by name. "
        'With `errors="return"` the call returns both in one list instead.'
    ),
    "GroupTimeoutError": (
        "The text names the members that did not reply. As for `RpcTimeoutError`; `results` has what the "
        "others returned."
    ),
    "RemoteError": (
        "The text has the remote traceback. To get the exception itself, define its class in a module that "
        "both workers can import."
    ),
    "AutogradError": (
        "The text says what is missing: a context, a root that requires grad, or a gradient in mode `fast`. "
        "See [modes of backward](../concepts/modes.md)."
    ),
    "TraceError": (
        "Check the directory that the text names, and read the trace with the release that wrote it."
    ),
}


def classes() -> Iterator[type[errors.ZmqgradError]]:
    """All exceptions of :mod:`zmqgrad.errors`, in the order of the module."""
    for value in vars(errors).values():
        if inspect.isclass(value) and issubclass(value, errors.ZmqgradError):
            yield value
