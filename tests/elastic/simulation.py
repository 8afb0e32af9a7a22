"""Nodes of a rendezvous in one process: a backend in memory, clocks that drift, and agents run in steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from zmqgrad.elastic.executor import OperatorExecutor
from zmqgrad.elastic.handler import LEASE_MARGIN
from zmqgrad.elastic.operators import Action, Operator, join, joining, keep_alive, return_to_line
from zmqgrad.elastic.settings import RendezvousSettings
from zmqgrad.elastic.state import NodeDesc, RendezvousState, decode
from zmqgrad.elastic.state_holder import RendezvousBackend, StateHolder, Token
from zmqgrad.elastic.transitions import num_admissible
from zmqgrad.errors import RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError


class Fault(Enum):
    """What happens to a request to the backend, whose sender gets an error."""

    REQUEST_LOST = auto()
    REPLY_LOST = auto()


class SimulatedBackend(RendezvousBackend):
    """Keeps the state in memory, and every state that it ever had."""

    name = "simulated"

    def __init__(self) -> None:
        self.history: list[bytes] = []
        self.lose_next = 0
        """How many of the next writes lose against another node's, which changes nothing."""
        self.requests = 0
        self.faults: dict[int, Fault] = {}
        """By the number of the request."""

    @property
    def state(self) -> RendezvousState:
        return decode(self.history[-1]) if self.history else RendezvousState()

    @contextmanager
    def _request(self) -> Iterator[None]:
        fault = self.faults.pop(self.requests, None)
        self.requests += 1
        if fault is Fault.REQUEST_LOST:
            raise RendezvousConnectionError("the request was lost")
        yield
        if fault is Fault.REPLY_LOST:
            raise RendezvousConnectionError("the reply was lost")

    def get_state(self) -> tuple[bytes, Token] | None:
        with self._request():
            return self._read()

    def _read(self) -> tuple[bytes, Token] | None:
        return (self.history[-1], len(self.history)) if self.history else None

    def set_state(
        self, state: bytes, token: Token = None, announce: bool = True
    ) -> tuple[bytes, Token, bool] | None:
        with self._request():
            return self._write(state, token)

    def _write(self, state: bytes, token: Token) -> tuple[bytes, Token, bool] | None:
        if self.lose_next and self.history:
            self.lose_next -= 1
            self.history.append(self.history[-1])
        if (token or 0) != len(self.history):
            found = self._read()
            return None if found is None else (*found, found[0] == state)
        self.history.append(state)
        return state, len(self.history), True

    def wait_for_change(self, token: Token, seconds: float) -> bool:
        raise AssertionError("a simulated node is stepped, it does not wait")


class DriftingClock:
    """Starts anywhere, and advances at a rate of its own."""

    def __init__(self, start: float, rate: float) -> None:
        self.time, self.rate = start, rate

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds * self.rate


class Phase(Enum):
    EXITING = auto()
    JOINING = auto()
    RUNNING = auto()
    CLOSED = auto()
    TIMED_OUT = auto()


class SimulatedAgent:
    """What an agent does: joins, keeps its node alive, and joins again when the group changes."""

    def __init__(
        self, number: int, backend: SimulatedBackend, settings: RendezvousSettings, clock: DriftingClock
    ) -> None:
        self.node = NodeDesc(f"host{number}", 1, number)
        self.clock = clock
        self.settings = settings
        self.holder = StateHolder(self.node, backend, settings, clock)
        self.executor = OperatorExecutor(self.node, self.holder, settings)
        self.phase = Phase.EXITING
        self._idle = True  # no operator is under way
        self.formed: list[tuple[int, dict[NodeDesc, int]]] = []
        """The rounds that this node took part in, with the ranks of all nodes."""
        self._begin_rendezvous()

    def _begin_rendezvous(self) -> None:
        self.phase = Phase.EXITING
        self.deadline = self.clock.now() + self.settings.timeout.join
        self._joining = joining(join)

    def step(self) -> Action | None:
        """One step of the operator that is under way. None if the agent has ended."""
        if self.phase in (Phase.CLOSED, Phase.TIMED_OUT):
            return None
        operators: dict[Phase, Operator] = {
            Phase.EXITING: return_to_line,
            Phase.JOINING: self._joining,
            Phase.RUNNING: keep_alive,
        }
        if self.phase is Phase.RUNNING and self._idle:  # each keep-alive has its own deadline
            self.deadline = self.clock.now() + self.settings.timeout.heartbeat
        self._idle = False
        try:
            action = self.executor.step(operators[self.phase], self.deadline)
        except RendezvousClosedError:  # or a graceful exit
            self.phase = Phase.CLOSED
            return None
        except RendezvousTimeoutError:
            if self.phase is Phase.RUNNING:
                self._idle = True  # the next keep-alive follows
            else:
                self.phase = Phase.TIMED_OUT
            return None
        except RendezvousConnectionError:
            if self.phase is Phase.RUNNING:
                self._idle = True
            else:
                self._begin_rendezvous()  # as an agent that is restarted
            return None
        if action is Action.FINISH:
            self._finish()
        return action

    def lease_left(self) -> float:
        """As :meth:`RendezvousHandler.lease_left`, while the workers of this node run."""
        if self.phase is not Phase.RUNNING or self.node not in self.holder.state.participants:
            return 0.0
        expiry = self.settings.expiry_seconds * (1 - LEASE_MARGIN)
        return self.holder.renewed + expiry - self.clock.now()

    def _finish(self) -> None:
        state = self.holder.state
        self._idle = True
        if self.phase is Phase.EXITING:
            self.phase = Phase.JOINING
        elif self.phase is Phase.JOINING:
            self.formed.append((state.round, dict(state.completed_ranks)))
            self.phase = Phase.RUNNING
        elif (
            self.node not in state.participants
            or num_admissible(state, self.settings)
            or self._is_incomplete()
        ):
            self._begin_rendezvous()  # removed by others, or the group changes

    def _is_incomplete(self) -> bool:
        """Whether a node of the running round has left or died."""
        return set(self.holder.state.participants) != set(self.formed[-1][1])
