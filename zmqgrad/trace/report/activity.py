"""What the processes of a job did besides sending messages: requests served, waits, autograd contexts."""

from __future__ import annotations

from collections import deque

from zmqgrad.trace.contexts import Contexts
from zmqgrad.trace.events import PeerDeclared, SendRecorded, StackDumped
from zmqgrad.trace.model import Actor, Call, Process, Stamped
from zmqgrad.trace.report.columns import HAS_FAILED, NO_ROW, Messages
from zmqgrad.trace.waits import Reader, Wait

MAX_STACKS = 2_000
"""How many recorded stacks are kept: the latest."""


class Activity(Reader):
    """What happened besides messages; calls note at ``messages`` when they were served."""

    def __init__(self, messages: Messages) -> None:
        self.waits: list[Wait] = []
        self.contexts = Contexts()
        self.send_rows: dict[tuple[str, int], int] = {}
        """The row of the message of each send of an autograd context, by the group of its worker."""
        self.stacks: deque[tuple[int, Process, StackDumped]] = deque(maxlen=MAX_STACKS)
        self._messages = messages
        self._incarnations: dict[tuple[int, int], int] = {}

    def add_event(self, stamped: Stamped) -> None:
        """Adds the event ``stamped``."""
        time, process, actor, event = stamped
        self.contexts.add(stamped)
        if isinstance(event, StackDumped):
            self.stacks.append((time, process, event))
        elif isinstance(event, PeerDeclared):
            self._incarnations[id(actor), event.peer] = event.incarnation
        elif isinstance(event, SendRecorded) and actor is not None:
            self.send_rows[actor.job, event.autograd_id] = self._row_of_send(actor, event)

    def add_wait(self, wait: Wait) -> None:
        """Adds ``wait``."""
        self.waits.append(wait)

    def add_call(self, call: Call) -> None:
        """Notes when a call was served, and what its messages do not tell."""
        messages, row = self._messages, self._messages.requests.get(call.request.key, NO_ROW)
        if row == NO_ROW:
            return
        if call.started is not None:
            messages.started[row] = call.started
            target = call.request.target  # the thread that received it only passed it on
            messages.receiver_thread[row] = messages.thread(target, call.thread)
        if call.finished is not None:
            messages.finished[row] = call.finished
        messages.flags[row] |= HAS_FAILED if call.failed or call.given_up else 0
        for each in (row, messages.pair[row]):
            if each != NO_ROW and not messages.name[each]:
                messages.name[each] = messages.names[call.function]
        if call.arguments:
            messages.arguments[row] = call.arguments

    def _row_of_send(self, actor: Actor, event: SendRecorded) -> int:
        """The row of the message in which the tensors were sent."""
        source = actor.incarnation
        if event.is_reply:
            source = self._incarnations.get((id(actor), event.peer), 0)
        row = self._messages.requests.get((source, event.message_id), NO_ROW)
        return self._messages.pair[row] if event.is_reply and row != NO_ROW else row
