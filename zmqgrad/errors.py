"""The one exception tree. A class answers "whose fault is it, and what can I do?".

    ZmqgradError
    |-- ConfigurationError (ValueError)        what you passed in, or the environment, cannot be right
    |   |-- ArgumentTypeError (TypeError)      an argument is of a class that it cannot be of
    |   |-- WorkerNameError (RuntimeError)     no worker can be called so
    |   `-- RendezvousError (RuntimeError)     the workers could not find each other
    |       |-- RendezvousTimeoutError (TimeoutError)
    |       `-- DuplicateWorkerError           a worker of that name or rank is already there
    |-- ProtocolError                          bytes from a peer that are not a message of ours
    |   `-- SecretError                        the two ends do not have the same secret
    |-- TransportError (RuntimeError)          sockets: closed, address in use, nobody there
    |   |-- AddressInUseError
    |   |-- ClosedError
    |   |-- CongestionError (TimeoutError)     a peer does not take in what it is sent
    |   `-- UnknownPeerError
    |-- StoreError (RuntimeError)
    |   |-- StoreTimeoutError (TimeoutError)   a key did not come, or the server did not answer
    |   |-- QueueEmptyError                    a pop that would not wait found nothing
    |   `-- JournalError                       the file that makes a store durable cannot be read or opened
    |-- RpcError (RuntimeError)
    |   |-- NotInitializedError                call init_rpc first
    |   |-- UnknownWorkerError (ValueError)    no worker of that name
    |   |-- RpcTimeoutError (TimeoutError)     the deadline of a call passed
    |   |-- PeerLostError (ConnectionError)    the other process is gone
    |   |-- PayloadError (TypeError)           something cannot be sent, or not be rebuilt here
    |   |-- FunctionNotFoundError (AttributeError)  the callee cannot import the function
    |   |-- OperatorError (TypeError)          a torch operator does not take these arguments
    |   |-- RRefError                          a reference used where it cannot be
    |   `-- RemoteError                        user code failed there; its exception cannot be rebuilt here
    `-- AutogradError (RuntimeError)           contexts and backward passes

The second base, in parentheses, is what the same mistake raises in ``torch.distributed``, or what
Python programs catch for it, so that an ``except`` written for torch goes on working.
"""

from __future__ import annotations


class ZmqgradError(Exception):
    """Whatever this library raises on its own account."""


class ConfigurationError(ZmqgradError, ValueError):
    """An argument or an environment variable cannot be right; nothing was started."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument is of a class that it cannot be of."""


class WorkerNameError(ConfigurationError, RuntimeError):
    """A name that no worker can have."""


class RendezvousError(ConfigurationError, RuntimeError):
    """The workers could not find each other."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """A worker did not come within the timeout; the message names it."""


class DuplicateWorkerError(RendezvousError):
    """Another worker has this name or this rank."""


class ProtocolError(ZmqgradError):
    """Bytes that are not a message of ours: wrong magic, version, type, size or field."""


class SecretError(ProtocolError):
    """The two ends of a connection do not have the same secret, or only one of them has any."""


class TransportError(ZmqgradError, RuntimeError):
    """A socket could not be opened or used."""


class AddressInUseError(TransportError):
    """Another socket listens on this address."""


class ClosedError(TransportError):
    """The transport was closed, or is being closed."""


class CongestionError(TransportError, TimeoutError):
    """A peer did not take in what was sent before, so that nothing more could be sent to it in time."""


class UnknownPeerError(TransportError):
    """Nobody told the transport where this peer is."""


class StoreError(ZmqgradError, RuntimeError):
    """The key-value store refused a query or cannot be reached."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key did not come, or the server did not answer, within the timeout."""


class QueueEmptyError(StoreError):
    """A queue was empty, and ``queue_pop`` was told not to wait."""


class JournalError(StoreError):
    """A store's journal is damaged, in use, or cannot be opened; the message says where and what to do."""


class RpcError(ZmqgradError, RuntimeError):
    """A remote call could not be made or did not come back."""


class NotInitializedError(RpcError):
    """There is no RPC worker in this process: call ``init_rpc`` first."""


class UnknownWorkerError(RpcError, ValueError):
    """No worker of this name or rank takes part."""


class RpcTimeoutError(RpcError, TimeoutError):
    """The deadline of a call passed before its result came."""


class PeerLostError(RpcError, ConnectionError):
    """The process at the other end is gone."""


class PayloadError(RpcError, TypeError):
    """A value cannot be sent, or cannot be rebuilt at this end."""


class FunctionNotFoundError(RpcError, AttributeError):
    """The callee cannot import the function that it was asked to run."""


class OperatorError(RpcError, TypeError):
    """A torch operator was called by RPC with arguments that it does not take."""


class RRefError(RpcError):
    """A remote reference was used where, or when, it cannot be."""


class RemoteError(RpcError):
    """User code failed on another worker with an exception that cannot be rebuilt here."""


class AutogradError(ZmqgradError, RuntimeError):
    """A distributed autograd context or backward pass was used in a way that cannot work."""
