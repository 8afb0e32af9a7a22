"""A context from the inside, under torch's names: for programs and tests that look at the graph.

    context = _current_context()
    for autograd_id, send in context._send_functions().items():
        print(show_id(autograd_id), [node.name() for node, _ in send.next_functions])

Torch keeps these names private and yet people use them, so they are kept here, with their meaning. New
programs have :func:`~zmqgrad.autograd.describe_context`, which shows all workers at once.
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
    """A node of torch's graph that is called as torch would call it. Equal to that node, and used like it."""

    __slots__ = ("_node",)

    def __init__(self, node: Any) -> None:
        self._node = node

    def name(self) -> str:
        """What kind of node it is."""
        return RECV_NAME if self._is_recv() else str(self._node.name())

    @property
    def next_functions(self) -> tuple[tuple[GraphNode | None, int], ...]:
        """For each input, the node that made it, and which of its outputs it is."""
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
    """The tensors of one message as a function of the graph: its inputs are their gradients, to come."""

    __slots__ = ("_send",)

    def __init__(self, send: Send) -> None:
        self._send = send

    def name(self) -> str:
        """As torch's function of that kind is called."""
        return SEND_NAME

    @property
    def next_functions(self) -> tuple[tuple[GraphNode, int], ...]:
        """For each tensor that was sent, the node that made it, and which of its outputs it is."""
        return tuple((GraphNode(edge[0]), edge[1]) for edge in map(edge_of, self._send.edges))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SendFunction) and self._send is other._send

    def __hash__(self) -> int:
        return id(self._send)

    def __repr__(self) -> str:
        send = self._send
        return f"<send {show_id(send.autograd_id)} to worker {send.peer}: {send.describe()}>"


class DistAutogradContext:
    """One context as one worker knows it. Two of the same context are equal."""

    __slots__ = ("_context",)

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        """The number that ``context()`` gives; 16 bits for the worker that made it, 48 counted up."""
        return self._context.id

    def _send_functions(self) -> dict[int, SendFunction]:
        """What was sent from here, by autograd id, in the order in which it was."""
        return {send.autograd_id: SendFunction(send) for send in self._context.sends()}

    def _recv_functions(self) -> dict[int, GraphNode]:
        """The nodes of the graph behind what came here, by autograd id, in the order in which it did."""
        return {autograd_id: GraphNode(node) for autograd_id, node in self._context.recvs().items()}

    def _known_worker_ids(self) -> set[int]:
        """The workers that this one exchanged messages of the context with."""
        return self._context.peers()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistAutogradContext) and self._context is other._context

    def __hash__(self) -> int:
        return id(self._context)

    def __repr__(self) -> str:
        return f"<DistAutogradContext of {self._context!r}>"


def is_available() -> bool:
    """It is."""
    return True


def _init(worker_id: int) -> None:
    """There is nothing left to do: ``init_rpc`` has set distributed autograd up for its worker.

    Raises:
        AutogradError: if the calling process is another worker. NotInitializedError: if it is none yet.
    """
    own = current_worker().id
    if worker_id != own:
        raise AutogradError(f"distributed autograd of this process is that of worker {own}, not {worker_id}")


def _new_context() -> DistAutogradContext:
    """A context that the calling thread records for until :func:`_release_context`. Prefer ``context()``.

    Raises:
        AutogradError: if the calling thread is inside a context already.
    """
    check_not_nested()
    made = autograd_of(current_worker()).begin()
    set_active_context(made)
    return DistAutogradContext(made)


def _release_context(context_id: int) -> None:
    """Forget a context here, and soon wherever it went; as leaving ``context()`` does.

    Raises:
        AutogradError: if it is not known here.
    """
    autograd = autograd_of(current_worker())
    autograd.contexts.find(context_id)
    autograd.releases.release(context_id)


def _current_context() -> DistAutogradContext:
    """The context that the calling thread records for.

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
    """The context of that number as this worker knows it.

    Raises:
        AutogradError: if it is not known here, saying why.
    """
    return DistAutogradContext(autograd_of(current_worker()).contexts.find(context_id))


def _is_valid_context(context_id: int) -> None:
    """Nothing, if the context of that number is known here.

    Raises:
        AutogradError: if it is not, saying why.
    """
    autograd_of(current_worker()).contexts.find(context_id)


def _get_max_id() -> int:
    """The largest number that a context, or a message with tensors, of this worker may get."""
    return join_id(current_worker().id, MAX_COUNTER)


def get_debug_info() -> dict[str, int]:
    """How many contexts are known here, and how many passes that began here are under way.

    ``zmqgrad.rpc.get_debug_info()`` has them among what it tells of the worker.

    Raises:
        NotInitializedError: if RPC is not initialized.
    """
    return autograd_of(current_worker()).debug_info()


def _get_debug_info() -> dict[str, str]:
    """As :func:`get_debug_info`, but as text, which is how torch gives it under this name."""
    return {name: str(value) for name, value in get_debug_info().items()}
