"""How an agent agrees with the agents of other nodes: the interface, and the trivial case of a single node.

No call waits: results arrive as events, for which the agent waits together with everything else.
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from zmqgrad.elastic.agent.events import CoordinatorEvent, CoordinatorRequest, Join, Joined, Leave, Left
from zmqgrad.elastic.agent.ranks import NodeInfo, place
from zmqgrad.runtime.polling import SPENT, Wakeup

if TYPE_CHECKING:
    from zmqgrad.store import Store


class EventQueue:
    """Events that any thread posts, and a descriptor that is readable while there may be some."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[CoordinatorEvent] = queue.SimpleQueue()
        self._wakeup = Wakeup()

    def fileno(self) -> int:
        """The descriptor to select on."""
        return self._wakeup.fd

    def post(self, event: CoordinatorEvent) -> None:
        """Add ``event``."""
        self._events.put(event)
        self._wakeup.set()

    def take(self) -> list[CoordinatorEvent]:
        """Remove and return all events."""
        self._wakeup.clear()
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def close(self) -> None:
        """Close the descriptor. Later events are lost."""
        self._wakeup = SPENT


class Coordinator(ABC):
    """Connects an agent with the other agents of its job.

    Attributes:
        events: the results of the calls, and what happens on other nodes.
    """

    def __init__(self) -> None:
        self.events = EventQueue()

    @property
    def round_store(self) -> Store | None:
        """The store that the agents of the round share; None: there is no other agent, or no round."""
        return None

    @abstractmethod
    def carry_out(self, request: CoordinatorRequest) -> None:
        """Do what an agent requests, and post the events that its class names."""

    @abstractmethod
    def lease_left(self) -> float:
        """Seconds for which this node surely belongs to its round. Never blocks."""

    @abstractmethod
    def notice_seconds(self) -> float:
        """Within how many seconds the loss of a node is noticed."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and sockets."""


class SingleNode(Coordinator):
    """The only node of a job: needs no store, no socket and no thread.

    Args:
        describe: returns what this node would publish, given the number of restarts.
    """

    def __init__(self, describe: Callable[[int], NodeInfo]) -> None:
        super().__init__()
        self._describe = describe
        self._round = -1

    def carry_out(self, request: CoordinatorRequest) -> None:
        match request:
            case Join(restarts):
                self._round += 1
                self.events.post(Joined(place([self._describe(restarts)], 0, self._round)))
            case Leave():
                self.events.post(Left())

    def lease_left(self) -> float:
        return float("inf")

    def notice_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        self.events.close()
