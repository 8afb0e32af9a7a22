"""What a store's server does with queries: the state machine driven, answers and notices given.

A change that a client asks for again, as it has lost its connection, is not made again; with a journal,
nobody is told of a change before it is written down. Called in the server's thread alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

from zmqgrad.runtime.clock import Clock
from zmqgrad.store.actions import ACTIONS, CHANGING
from zmqgrad.store.answers import Answers
from zmqgrad.store.askers import Asker, WaitingAskers
from zmqgrad.store.effects import Effect, Notice, Reply, refuse
from zmqgrad.store.journal import Journal
from zmqgrad.store.state import State
from zmqgrad.store.topics import Prefix, Target
from zmqgrad.store.watchers import Watchers
from zmqgrad.transport.requests.connection import Client
from zmqgrad.transport.requests.server import RequestServer
from zmqgrad.transport.requests.short import Handler
from zmqgrad.wire.messages import (
    Message,
    Refusal,
    StoreDone,
    StoreListen,
    StorePing,
    StorePong,
    StoreQueuePop,
    StoreRefused,
    StoreUnwatchKey,
    StoreUnwatchPrefix,
    StoreWatchKey,
    StoreWatchPrefix,
)

_new = tuple.__new__  # quicker than the class itself


class StoreService:
    """Serves ``state`` to those who ask ``requests``.

    Args:
        answers: what has been answered to changes already.
        journal: where changes are written down; None: nowhere.
        max_waiting: how many queries may wait at a time, of all clients together.
    """

    def __init__(
        self,
        requests: RequestServer,
        state: State,
        answers: Answers,
        journal: Journal | None,
        *,
        max_waiting: int,
        clock: Clock,
    ) -> None:
        self._requests = requests
        self.reply = requests.reply
        """As the server has it: a method of this would cost each answer another call."""
        self._state = state
        self._contents = state.contents
        self._answers = answers
        self._answered = answers.last
        self._remember = answers.remember
        self._journal = journal
        self._now = clock.now
        self._held: list[Effect] = []  # until the journal has what they tell of
        self._waiting = WaitingAskers(state, max_waiting)
        self._unpark = self._waiting.unpark
        self._watchers: Watchers[Client] = Watchers()
        self.refuses_newcomers = False
        """Are no pings answered any more? May be set in any thread."""
        self.published = 0
        """How many notices have been given."""

    def handler(self, kind: type[Message]) -> Handler:
        """What answers queries of ``kind``, now or later."""
        return MethodType(_HANDLERS.get(kind, StoreService._misplaced), self)

    def _look(self, client: Client, line: int, number: int, query: Message) -> None:
        """``query`` changes nothing; it may have to wait."""
        asker = _new(Asker, (client, line, number))
        answer = ACTIONS[type(query)](self._state, query, asker, self._now(), [])
        if answer is None:
            self._park(asker, query)
        elif self._journal is None:
            self.reply(client, number, answer)
        else:
            self._held.append(Reply(asker, answer))

    def _change(self, client: Client, line: int, number: int, query: Message) -> None:
        """``query`` may change something, at once; what it has changed already is not changed again."""
        last = self._answered.get(line)
        if last is not None and number <= last[0]:
            self._repeat(Asker(client, line, number), *last)
            return
        others: list[Effect] = []
        contents = self._contents
        before = contents.changes
        answer = ACTIONS[type(query)](self._state, query, None, 0.0, others)
        if others or self._journal is not None or answer is None:
            self._conclude(_new(Asker, (client, line, number)), query, answer, others, before)
            return
        if contents.changes != before:
            self._remember(line, number, answer)
        self.reply(client, number, answer)

    def _pop(self, client: Client, line: int, number: int, query: StoreQueuePop) -> None:
        """As :meth:`_change`, but it may have to wait."""
        asker = Asker(client, line, number)
        last = self._answered.get(line)
        if last is not None and number <= last[0]:
            self._repeat(asker, *last)
            return
        before = self._contents.changes
        answer = self._state.answer(query, asker, self._now(), [])
        self._conclude(asker, query, answer, [], before)

    def _repeat(self, asker: Asker, number: int, answer: Message) -> None:
        """What ``asker`` asks for has been done: ``answer`` is what question ``number`` was answered with."""
        if number == asker.number:  # otherwise nobody waits for it any more
            self._carry_out([Reply(asker, answer)])

    def _conclude(
        self, asker: Asker, query: Message, answer: Message | None, others: list[Effect], before: int
    ) -> None:
        """``query`` is to be answered like this, if at all, and ``others`` are to be told.

        Before it there had been so many changes.
        """
        if answer is None:
            self._park(asker, query)
            return
        try:
            if self._journal is None:
                self._deliver(others)  # who waits goes first
        finally:
            if self._contents.changes != before:
                self._note(asker, query, answer)
        self._release(others)
        if self._journal is None:
            self.reply(asker.client, asker.number, answer)
        else:
            self._held += (*others, Reply(asker, answer))

    def _note(self, asker: Asker, query: Message, answer: Message) -> None:
        """``query`` has changed something: it is not to be done again."""
        self._remember(asker.line, asker.number, answer)
        if self._journal is not None:
            self._journal.remember(asker.line, asker.number, answer)

    def _release(self, effects: list[Effect]) -> None:
        """Who is answered waits no more; a value that one has taken from a queue is another change."""
        for effect in effects:
            if type(effect) is Reply:
                query = self._unpark(effect.asker)
                if type(query) is StoreQueuePop:
                    self._note(effect.asker, query, effect.message)

    def _park(self, asker: Asker, query: Message) -> None:
        refusal = self._waiting.park(asker, query)
        if refusal is None:
            self._requests.wake_by(self._state.next_deadline())
        else:
            self._carry_out([refusal])

    def gone(self, client: Client) -> None:
        """Nobody waits or listens there any more."""
        self._waiting.forget(client)
        for target in self._watchers.forget(client):
            self._state.unwatch(target)

    def misunderstood(self, client: Client, message_id: int, why: str) -> None:
        """Refuse what could not be read."""
        self.reply(client, message_id, StoreRefused(Refusal.INVALID, why))

    def unwelcome(self, client: Client, message_id: int, limit: int) -> None:
        """Refuse a client too many."""
        said = f"it serves {limit} connections already, which is its limit"
        self.reply(client, message_id, StoreRefused(Refusal.LIMIT, said))

    def _pong(self, client: Client, line: int, number: int, query: StorePing) -> None:
        if not self.refuses_newcomers:  # otherwise its client asks the next store here when this has hung up
            self.reply(client, number, StorePong(query.nonce, self._state.revision))

    def _listen(self, client: Client, line: int, number: int, query: StoreListen) -> None:
        """From now on its connection is one for notices."""
        if not self.refuses_newcomers:
            self._watchers.introduce(client, query.nonce)
            self.reply(client, number, StoreDone())

    def _watch(self, client: Client, line: int, number: int, query: StoreWatchKey | StoreWatchPrefix) -> None:
        """Give notice of what is asked for, on the connection that the asker has for that."""
        asker = Asker(client, line, number)
        ear = self._watchers.known(query.nonce)
        if ear is None:
            said = "your connection for notices has ended, or is about to begin"
            self._carry_out([refuse(asker, Refusal.UNKNOWN, said)])
            return
        effects = self._state.apply(query, asker, self._now())
        if any(type(e) is Reply and type(e.message) is not StoreRefused for e in effects):
            self._watchers.add(_target_of(query), ear)
        self._carry_out(effects)

    def _unwatch(
        self, client: Client, line: int, number: int, query: StoreUnwatchKey | StoreUnwatchPrefix
    ) -> None:
        target, ear = _target_of(query), self._watchers.known(query.nonce)
        if ear is not None and self._watchers.remove(target, ear):
            self._state.unwatch(target)
        self._look(client, line, number, query)

    def _misplaced(self, client: Client, line: int, number: int, query: Message) -> None:
        """``query`` is none."""
        self._carry_out(self._state.apply(query, Asker(client, line, number), self._now()))

    def _carry_out(self, effects: list[Effect]) -> None:
        if self._journal is None:
            self._deliver(effects)
        else:
            self._held += effects

    def _deliver(self, effects: list[Effect]) -> None:
        for effect in effects:
            if type(effect) is Reply:
                asker: Asker = effect.asker
                self.reply(asker.client, asker.number, effect.message)
            elif type(effect) is Notice:
                self.published += 1
                self._requests.notify(self._watchers.of(effect.target), effect.message)

    def settle(self) -> None:
        """Write down what has changed, all that came together at once, and only then tell."""
        if self._journal is None or not self._held:
            return
        held, self._held = self._held, []
        try:
            self._journal.commit()
        except OSError as e:
            said = f"it ends, as its journal {self._journal.path} cannot be written: {e.strerror}"
            refusal = StoreRefused(Refusal.CLOSING, said)
            self._deliver([Reply(effect.asker, refusal) for effect in held if type(effect) is Reply])
            raise
        self._deliver(held)

    def do_due(self, now: float) -> float:
        """Refuse those whose time is up."""
        self._refuse_waiting(self._state.expire(now))
        return self._state.next_deadline()

    def stopping(self) -> None:
        """Refuse all who wait; if there is a journal, they had better wait for the store's next life."""
        if self._journal is None:
            self._refuse_waiting(self._state.close())

    def _refuse_waiting(self, refusals: list[Effect]) -> None:
        for refusal in refusals:
            assert type(refusal) is Reply
            self._unpark(refusal.asker)
        self._carry_out(refusals)


def _target_of(query: StoreWatchKey | StoreWatchPrefix | StoreUnwatchKey | StoreUnwatchPrefix) -> Target:
    """What ``query`` is about."""
    return Prefix(query.prefix) if isinstance(query, StoreWatchPrefix | StoreUnwatchPrefix) else query.key


_HANDLERS: dict[type[Message], Callable[..., None]] = {
    **dict.fromkeys(ACTIONS, StoreService._look),
    **dict.fromkeys(CHANGING, StoreService._change),
    StoreQueuePop: StoreService._pop,
    StorePing: StoreService._pong,
    StoreListen: StoreService._listen,
    StoreWatchKey: StoreService._watch,
    StoreWatchPrefix: StoreService._watch,
    StoreUnwatchKey: StoreService._unwatch,
    StoreUnwatchPrefix: StoreService._unwatch,
}
"""What is done about queries, by their kind."""
