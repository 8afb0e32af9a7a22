"""Access to the internals of a context under torch's names, for programs and tests that inspect the graph.

    context = _current_context()
    for autograd_id, send in context._send_functions().items():
        print(show_id(autograd_id), [node.name() for node, _ in send.next_functions])

These names are private in torch but programs use them, so they exist here with the same meaning. New programs
should use :func:`~zmqgrad.autograd.describe_context`, which covers all workers.
"""

from __future__ import annotations

from typing import Any

from zmqgrad.autograd.context import Context, active_context, check_not_nested, set_active_context
from zmqgrad.autograd.forwarding import autograd_of
from zmqgrad.autograd.profiling import RECV_NAME, SEND_NAME
from zmqgrad.autograd.send_recv import RECV_NODE, Send, edge_of, recv_metadata
from zmqgrad.errors import AutogradError
from zmqgrad.rpc.current import current_worker
from zmqgrad.wire.ids import MAX_COUNTER, join_id, show_id


class GraphNode:
    """A node of torch's graph under torch's name for it. Compares equal to that node."""

    __slots__ = ("_node",)

    def __init__(self, node: Any) -> None:
        self._node = node

    def name(self) -> str:
        """Return the type name of the node."""
        return RECV_NAME if self._is_recv() else str(self._node.name())

    @property
    def next_functions(self) -> tuple[tuple[GraphNode | None, int], ...]:
        """For each input, the node that produced it and the index of its output."""
        if self._is_recv():
            return ()
        return tuple((node and GraphNode(node), i) for node, i in self._node.next_functions)

    def _is_recv(self) -> bool:
        return type(self._node) is RECV_NODE and recv_metadata(self._node) is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node is (other._node if isinstance(other, GraphNode) else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return f"<node {self.name()}>"


class SendFunction:
    """The tensors of one message as a function of the graph, like torch's ``SendRpcBackward``."""

    __slots__ = ("_send",)

    def __init__(self, send: Send) -> None:
        self._send = send

    def name(self) -> str:
        """Return the name of torch's function."""
        return SEND_NAME

    @property
    def next_functions(self) -> tuple[tuple[GraphNode, int], ...]:
        """For each tensor that was sent, the node that produced it and the index of its output."""
        return tuple((GraphNode(edge[0]), edge[1]) for edge in map(edge_of, self._send.edges))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SendFunction) and self._send is other._send

    def __hash__(self) -> int:
        return id(self._send)

    def __repr__(self) -> str:
        send = self._send
        return f"<send {show_id(send.autograd_id)} to worker {send.peer}: {send.describe()}>"


class DistAutogradContext:
    """One context on one worker. Objects of the same context are equal."""

    __slots__ = ("_context",)

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        """Return the id that ``context()`` yields: 16 bits for the creating worker, 48 for a counter."""
        return self._context.id

    def _send_functions(self) -> dict[int, SendFunction]:
        """Return the sends of this worker by autograd id, in the order of sending."""
        return {send.autograd_id: SendFunction(send) for send in self._context.sends()}

    def _recv_functions(self) -> dict[int, GraphNode]:
        """Return the recv nodes of this worker by autograd id, in the order of arrival."""
        return {autograd_id: GraphNode(node) for autograd_id, node in self._context.recvs().items()}

    def _known_worker_ids(self) -> set[int]:
        """Return the workers that this one has exchanged messages of the context with."""
        return self._context.peers()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistAutogradContext) and self._context is other._context

    def __hash__(self) -> int:
        return id(self._context)

    def __repr__(self) -> str:
        return f"<DistAutogradContext of {self._context!r}>"


def is_available() -> bool:
    """Return True: distributed autograd is always available.

    Example:
        >>> dist_autograd.is_available()
        True
    """
    return True


def _init(worker_id: int) -> None:
    """Do nothing: ``init_rpc`` has enabled distributed autograd for its worker.

    Raises:
        AutogradError: if ``worker_id`` is not the id of this worker.
        NotInitializedError: if RPC is not initialized.
    """
    own = current_worker().id
    if worker_id != own:
        raise AutogradError(f"distributed autograd of this process is that of worker {own}, not {worker_id}")


def _new_context() -> DistAutogradContext:
    """Create a context and make it active until :func:`_release_context`. Prefer ``context()``.

    Raises:
        AutogradError: if the calling thread is inside a context already.
    """
    check_not_nested()
    made = autograd_of(current_worker()).begin()
    set_active_context(made)
    return DistAutogradContext(made)


def _release_context(context_id: int) -> None:
    """Release a context on all workers, as leaving ``context()`` does.

    Raises:
        AutogradError: if it is not known here.
    """
    autograd = autograd_of(current_worker())
    autograd.contexts.find(context_id)
    autograd.releases.release(context_id)


def _current_context() -> DistAutogradContext:
    """Return the context that the calling thread records for.

    Raises:
        AutogradError: if there is none.
    """
    current = active_context()
    if current is None:
        raise AutogradError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with zmqgrad.autograd.context() as context_id`"
        )
    return DistAutogradContext(current)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """Return a context by its id.

    Raises:
        AutogradError: if it is not known here; the message says why.
    """
    return DistAutogradContext(autograd_of(current_worker()).contexts.find(context_id))


def _is_valid_context(context_id: int) -> None:
    """Check that a context is known here.

    Raises:
        AutogradError: if it is not; the message says why.
    """
    autograd_of(current_worker()).contexts.find(context_id)


def _get_max_id() -> int:
    """Return the largest id that a context, or a message with tensors, of this worker may get."""
    return join_id(current_worker().id, MAX_COUNTER)


def get_debug_info() -> dict[str, int]:
    """Return the number of contexts here, and of those with a running pass that this worker is part of.

    A worker is part of a pass that began on it, and of another one while it has gradients to handle or waits
    for more of them.

    ``zmqgrad.rpc.get_debug_info()`` includes them.

    Raises:
        NotInitializedError: if RPC is not initialized.

    Example:
        >>> with dist_autograd.context():
        ...     dist_autograd.get_debug_info()["num_autograd_contexts"]
        1
    """
    return autograd_of(current_worker()).debug_info()


def _get_debug_info() -> dict[str, str]:
    """Return :func:`get_debug_info` with its values as text, as torch does under this name."""
    return {name: str(value) for name, value in get_debug_info().items()}
