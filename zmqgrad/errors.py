"""The exception hierarchy. One class per kind of fault and remedy.

    ZmqgradError
    |-- ConfigurationError (ValueError)        invalid arguments or environment
    |   |-- ArgumentTypeError (TypeError)      an argument has the wrong type
    |   |-- OptionError (RuntimeError)         an option or a timeout is out of range
    |   |-- WorkerNameError (RuntimeError)     an invalid worker name
    |   `-- RendezvousError (RuntimeError)     the workers could not find each other
    |       |-- RendezvousTimeoutError (TimeoutError)
    |       |-- DuplicateWorkerError           a worker of that name or rank already exists
    |       |-- WorldSizeError                 the workers passed different world sizes
    |       |-- RendezvousClosedError          no further round of an elastic rendezvous begins
    |       |   `-- RendezvousGracefulExitError  and the node, which waited for one, was not needed
    |       |-- RendezvousStateError           the shared state is malformed
    |       `-- RendezvousConnectionError      the backend cannot be reached
    |-- ProtocolError                          malformed bytes from a peer
    |   `-- AuthenticationError                the two ends do not have the same secret
    |-- TransportError (RuntimeError)          sockets: closed, address in use, unknown peer
    |   |-- AddressInUseError
    |   |-- ClosedError
    |   |-- CongestionError (TimeoutError)     a peer does not receive fast enough
    |   `-- UnknownPeerError
    |-- StoreError (RuntimeError)
    |   |-- StoreTimeoutError (TimeoutError)   a key is missing, or the server did not reply
    |   |-- QueueEmptyError                    a non-blocking pop of an empty queue
    |   `-- JournalError                       the journal of a store cannot be read or opened
    |-- WorkerFailedError (RuntimeError)       a worker of a launcher failed or died
    |-- LaunchTimeoutError (TimeoutError)      workers did not start, or did not end, in time
    |-- CommitError (RuntimeError)             a commit cannot be made, restored or saved
    |-- RpcError (RuntimeError)
    |   |-- NotInitializedError                call init_rpc first
    |   |-- UnknownWorkerError (ValueError)    no worker of that name
    |   |-- RpcTimeoutError (TimeoutError)     the deadline of a call passed
    |   |-- PeerLostError (ConnectionError)    the other process has died
    |   |-- PayloadError (TypeError)           a value cannot be serialized or deserialized
    |   |-- FunctionNotFoundError (AttributeError)  the callee cannot import the function
    |   |-- OperatorError (TypeError)          a torch operator does not take these arguments
    |   |-- RRefError                          invalid use of an RRef
    |   |-- GroupError                         a group call failed on some members
    |   |   `-- GroupTimeoutError (RpcTimeoutError)  all of them did not reply in time
    |   |-- DuplicateNameError (ValueError)    another object has this name
    |   `-- RemoteError                        user code failed remotely; its exception type is not available
    |-- AutogradError (RuntimeError)           contexts and backward passes
    `-- TraceError (RuntimeError)              a trace cannot be recorded or read

The second base class, in parentheses, is the exception that ``torch.distributed`` or Python raises for the
same mistake, so that an ``except`` written for torch still works.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ZmqgradError(Exception):
    """Base class of all exceptions of this library."""


class ConfigurationError(ZmqgradError, ValueError):
    """An argument or an environment variable is invalid; nothing was started."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument has the wrong type."""


class OptionError(ConfigurationError, RuntimeError):
    """An option of ``init_rpc``, or a timeout, is out of range."""


class WorkerNameError(ConfigurationError, RuntimeError):
    """An invalid worker name."""


class RendezvousError(ConfigurationError, RuntimeError):
    """The workers could not find each other."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """A worker did not arrive within the timeout; the message names it."""


class DuplicateWorkerError(RendezvousError):
    """Another worker has this name or this rank."""


class WorldSizeError(RendezvousError):
    """The workers of a group passed different world sizes; the message has both, and who passed them."""


class RendezvousClosedError(RendezvousError):
    """An elastic rendezvous was closed: no further round begins."""


class RendezvousGracefulExitError(RendezvousClosedError):
    """The job has ended while a node waited for its first round, as a spare: it was not needed."""


class RendezvousStateError(RendezvousError):
    """The shared state of an elastic rendezvous is malformed, or of another version."""


class RendezvousConnectionError(RendezvousError):
    """The backend of an elastic rendezvous cannot be reached."""


class ProtocolError(ZmqgradError):
    """A malformed message: wrong magic, version, type, size or field."""


class AuthenticationError(ProtocolError):
    """The two ends of a connection have different secrets, or only one of them has a secret."""


class TransportError(ZmqgradError, RuntimeError):
    """A socket could not be opened or used."""


class AddressInUseError(TransportError):
    """Another socket listens on this address."""


class ClosedError(TransportError):
    """The transport was closed, or is being closed."""


class CongestionError(TransportError, TimeoutError):
    """A peer did not receive earlier messages, so the next one could not be sent in time."""


class UnknownPeerError(TransportError):
    """The transport has no address for this peer."""


class StoreError(ZmqgradError, RuntimeError):
    """The key-value store refused a query or cannot be reached."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key was missing, or the server did not reply, within the timeout."""


class QueueEmptyError(StoreError):
    """A queue was empty, and ``queue_pop`` was called with ``block=False``."""


class JournalError(StoreError):
    """A store's journal is damaged, in use, or cannot be opened; the message names file and remedy."""


class WorkerFailedError(ZmqgradError, RuntimeError):
    """A worker of a launcher failed or died, and no restart was left.

    Args:
        message: contains the worker's traceback, if it has one.
        rank: of the worker that failed first; None: it had no rank yet.
        restarts: how often the group had been restarted before.
        exit_code: of the worker's process, or minus the signal that killed it; None: unknown.
    """

    def __init__(
        self, message: str, rank: int | None = None, restarts: int = 0, exit_code: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.restarts = restarts
        self.exit_code = exit_code


class LaunchTimeoutError(ZmqgradError, TimeoutError):
    """The workers of a launcher did not start, or did not end, in time."""


class CommitError(ZmqgradError, RuntimeError):
    """A commit of :class:`zmqgrad.elastic.State` cannot be made, restored or saved."""


class RpcError(ZmqgradError, RuntimeError):
    """A remote call failed."""


class NotInitializedError(RpcError):
    """This process has no RPC worker: call ``init_rpc`` first."""


class UnknownWorkerError(RpcError, ValueError):
    """No worker has this name or rank."""


class RpcTimeoutError(RpcError, TimeoutError):
    """The deadline of a call passed before its result arrived."""


class PeerLostError(RpcError, ConnectionError):
    """The process of the peer has died, or was declared lost."""


class PayloadError(RpcError, TypeError):
    """A value cannot be serialized, or cannot be deserialized here."""


class FunctionNotFoundError(RpcError, AttributeError):
    """The callee cannot import the function that was called."""


class OperatorError(RpcError, TypeError):
    """A torch operator was called by RPC with invalid arguments."""


class RRefError(RpcError):
    """A remote reference was used where, or when, this is not supported."""


class GroupError(RpcError):
    """A call to a group failed on some of its members; the message names them.

    Args:
        message: the text.
        results: of the members that replied, by name.
        errors: of the others, by name.
    """

    def __init__(
        self,
        message: str,
        results: Mapping[str, Any] | None = None,
        errors: Mapping[str, Exception] | None = None,
    ) -> None:
        super().__init__(message)
        self.results: dict[str, Any] = dict(results or {})
        self.errors: dict[str, Exception] = dict(errors or {})


class GroupTimeoutError(GroupError, RpcTimeoutError):
    """A call to a group failed only because some of its members did not reply in time."""


class DuplicateNameError(RpcError, ValueError):
    """Another object of the group has this name; the message says where it is."""


class RemoteError(RpcError):
    """User code failed on another worker with an exception whose type is not available here."""


class AutogradError(ZmqgradError, RuntimeError):
    """Invalid use of a distributed autograd context or backward pass."""


class TraceError(ZmqgradError, RuntimeError):
    """A trace log cannot be written, or is not one that this release can read; the message names it."""
