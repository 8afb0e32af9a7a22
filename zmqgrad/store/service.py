"""What a store's server does with queries: drives the state machine, replies, publishes notifications.

A change that is repeated, as its client cannot know whether it arrived, is not made again; with a journal,
no reply to a change leaves before the change is written down. A popped item counts as delivered when the
client has acknowledged it. Called in the server's thread alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from zmqgrad.errors import TransportError
from zmqgrad.runtime.clock import Clock
from zmqgrad.store.actions import ACTIONS, CHANGING
from zmqgrad.store.contents import Contents, Item
from zmqgrad.store.effects import DONE, Effect, Notification, Reply
from zmqgrad.store.journal import Journal
from zmqgrad.store.reply_cache import ReplyCache
from zmqgrad.store.requesters import Delivery, Requester, Requesters
from zmqgrad.store.state import State
from zmqgrad.store.watch_leases import WatchLeases
from zmqgrad.store.watch_targets import Prefix, Target, topic_of
from zmqgrad.transport.query.publisher import Publisher
from zmqgrad.transport.query.server import QueryServer, Route
from zmqgrad.wire.messages import (
    UNKNOWN_WATCH,
    Message,
    Refusal,
    StoreChannel,
    StoreItem,
    StoreNumber,
    StoreQueueAck,
    StoreQueuePop,
    StoreRefused,
    StoreRenewWatches,
    StoreRevisions,
    StoreUnwatchKey,
    StoreUnwatchPrefix,
    StoreWatchChannel,
    StoreWatchKey,
    StoreWatchPrefix,
)

SWEEP_SECONDS = 1.0
"""How often it is looked for clients that are gone, while there are any to be looked at."""

SUBSCRIBE_SECONDS = 2.0
"""How long a watch waits for its subscription. It is under way; if it is not, the client connects anew."""


class StoreService:
    """Serves ``contents`` to the clients of ``server``.

    Args:
        replies: those to the last changes.
        journal: where changes are written down; None: nowhere.
        max_waiting: how many queries may wait at a time, of all clients together.
        make_publisher: makes the publisher of notifications, which calls what it is given with each nonce. It
            is called when the first client wants to watch something.
    """

    def __init__(
        self,
        server: QueryServer,
        contents: Contents,
        replies: ReplyCache,
        journal: Journal | None,
        *,
        max_waiting: int,
        make_publisher: Callable[[Callable[[str], None]], Publisher],
        clock: Clock,
    ) -> None:
        self._server = server
        self.reply = server.reply
        """As the server has it: a method of this would cost each reply another call."""
        self.state = State(contents, self._hand_over)
        self._contents = contents
        self._replies = replies
        self._last = replies.last
        self._journal = journal
        self._now = clock.now
        self._held: list[Effect] = []  # until the journal has what they tell of
        self._requesters = Requesters(max_waiting)
        self._open = self._requesters.open
        self._watches = WatchLeases()
        self._make_publisher = make_publisher
        self._publisher: Publisher | None = None
        self._unsubscribed: dict[str, tuple[Requester, float]] = {}  # by nonce: watches that wait for it
        self._sweep_at = math.inf

    @property
    def published(self) -> int:
        """How many notifications were published."""
        return 0 if self._publisher is None else self._publisher.published

    # ---- queries ----------------------------------------------------------------------------------------

    def handle(self, route: Route, client: int, number: int, query: Message) -> None:
        """Reply to query ``number`` of ``client``, now or later."""
        entry = self._open.get(client)
        if entry is not None and self._is_repeated(entry, route, number, query):
            return
        _HANDLERS.get(type(query), StoreService._misplaced)(self, route, client, number, query)

    def _is_repeated(self, entry: Requester | Delivery, route: Route, number: int, query: Message) -> bool:
        """``client`` has an open query. True if this is that one again, or an earlier one."""
        if type(entry) is Delivery:
            requester = entry.requester
            if number == requester.number:
                requester.route = route
                self._carry_out([Reply(requester, self._hand_over(requester, entry.queue, entry.item))])
                return True
            if type(query) is StoreQueueAck and query.item == entry.item.id:
                return False
        else:
            assert type(entry) is Requester
            requester = entry
            if number == requester.number:
                self._requesters.renew(requester, route, self._now())
                return True
        if number > requester.number:
            self._give_up(entry)
        return number < requester.number

    def _give_up(self, entry: Requester | Delivery) -> None:
        """The client does not wait any more, or has not acknowledged its item, which returns to its queue."""
        if type(entry) is Requester:
            self._requesters.release(entry.client)
            self.state.cancel(entry)
        elif type(entry) is Delivery:
            self._requesters.release(entry.requester.client)
            others: list[Effect] = []
            self._contents.restore(entry.queue, entry.item)
            self.state.after_push(entry.queue, others)
            self._release(others)
            self._carry_out(others)

    def _read(self, route: Route, client: int, number: int, query: Message) -> None:
        """``query`` changes nothing; it may have to wait."""
        requester = Requester(route, client, number, query)
        reply = ACTIONS[type(query)](self.state, query, requester, self._now(), [])
        if reply is None:
            self._park(requester)
        elif self._journal is None:
            self.reply(route, number, reply)
        else:
            self._held.append(Reply(requester, reply))

    def _is_stale(self, route: Route, client: int, number: int, query: Message) -> bool:
        """Whether ``query``, which may change something, was carried out before. Repeats the reply, if so."""
        last = self._last.get(client)
        if last is None or number > last[0]:
            return False
        if number == last[0]:  # otherwise nobody waits for it any more
            self._carry_out([Reply(Requester(route, client, number, query), last[1])])
        return True

    def _change(self, route: Route, client: int, number: int, query: Message) -> None:
        """``query`` may change something, at once; what it has changed already is not changed again."""
        if client in self._last and self._is_stale(route, client, number, query):
            return
        others: list[Effect] = []
        contents = self._contents
        before = contents.changes
        reply = ACTIONS[type(query)](self.state, query, None, 0.0, others)
        assert reply is not None
        if contents.changes != before:
            self._replies.remember(client, number, reply)
            if self._journal is not None:
                self._journal.remember(client, number, reply)
        if others or self._journal is not None:
            self._release(others)
            self._carry_out([*others, Reply(Requester(route, client, number, query), reply)])
        else:
            self.reply(route, number, reply)

    def _pop(self, route: Route, client: int, number: int, query: StoreQueuePop) -> None:
        """As :meth:`_change`, but it may have to wait, and is not done before the item is acknowledged."""
        if self._is_stale(route, client, number, query):
            return
        requester = Requester(route, client, number, query)
        reply = self.state.execute(query, requester, self._now(), [])
        if reply is None:
            self._park(requester)
        else:
            self._carry_out([Reply(requester, reply)])

    def _hand_over(self, requester: Requester, queue: str, item: Item) -> Message:
        """``requester`` gets ``item``, for now."""
        self._requesters.deliver(requester, queue, item, self._now())
        self._sweep_later()
        return StoreItem(item.id, item.value)

    def _acknowledge(self, route: Route, client: int, number: int, query: StoreQueueAck) -> None:
        """The client has its item."""
        if self._is_stale(route, client, number, query):
            return
        entry = self._open.get(client)
        reply = StoreNumber(0)
        if type(entry) is Delivery and entry.item.id == query.item:
            self._requesters.release(client)
            self._contents.delivered(entry.item)
            reply = StoreNumber(1)
            self._replies.remember(client, number, reply)
            if self._journal is not None:
                self._journal.remember(client, number, reply)
        self._carry_out([Reply(Requester(route, client, number, query), reply)])

    def _park(self, requester: Requester) -> None:
        """The query of ``requester`` waits, as the state knows."""
        if self._requesters.is_full():
            self.state.cancel(requester)
            said = f"{self._requesters.max_waiting} queries wait there already, which is its limit"
            self._carry_out([Reply(requester, StoreRefused(Refusal.LIMIT, said))])
            return
        self._requesters.park(requester, self._now())
        self._server.wake_by(self.state.next_deadline())
        self._sweep_later()

    def _release(self, effects: list[Effect]) -> None:
        """Requesters to whom something is replied do not wait any more."""
        for effect in effects:
            if type(effect) is Reply:
                requester: Requester = effect.requester
                if self._open.get(requester.client) is requester:
                    self._requesters.release(requester.client)

    def _misplaced(self, route: Route, client: int, number: int, query: Message) -> None:
        """``query`` is none."""
        requester = Requester(route, client, number, query)
        self._carry_out(self.state.apply(query, requester, self._now()))

    # ---- watches ----------------------------------------------------------------------------------------

    def _tell_channel(self, route: Route, client: int, number: int, query: StoreWatchChannel) -> None:
        """A client is about to watch something."""
        if self._server.refuses_newcomers:
            return
        reply: Message
        try:
            publisher = self.open_publisher()
            reply = StoreChannel(publisher.endpoint, publisher.port)
        except TransportError as e:
            reply = StoreRefused(Refusal.LIMIT, f"it cannot publish notifications: {e}")
        self.reply(route, number, reply)

    def open_publisher(self) -> Publisher:
        """The publisher of notifications, made if there is none yet.

        Raises:
            AddressInUseError, ConfigurationError, TransportError: if it cannot be bound.
        """
        if self._publisher is None:
            self._publisher = self._make_publisher(self._note_subscription)
            self._server.register(self._publisher.number, self._publisher.read)
        return self._publisher

    def _watch(self, route: Route, client: int, number: int, query: StoreWatchKey | StoreWatchPrefix) -> None:
        """Watch, once the client's subscription is in place."""
        requester = Requester(route, client, number, query)
        if self._publisher is not None and self._publisher.has_seen(query.nonce):
            self._begin_watch(requester, query)
            return
        self._park(requester)
        if self._open.get(client) is requester:
            self._unsubscribed[query.nonce] = requester, self._now() + SUBSCRIBE_SECONDS

    def _note_subscription(self, nonce: str) -> None:
        """A client has subscribed to ``nonce``, and so before to what it wants to watch."""
        found = self._unsubscribed.pop(nonce, None)
        if found is None:
            return
        requester = found[0]
        if self._open.get(requester.client) is requester:
            self._requesters.release(requester.client)
            self._begin_watch(requester, requester.query)

    def _begin_watch(self, requester: Requester, query: Message) -> None:
        effects = self.state.apply(query, requester, self._now())
        if not any(type(e) is Reply and type(e.message) is StoreRefused for e in effects):
            assert isinstance(query, StoreWatchKey | StoreWatchPrefix)
            self._watches.add(_target_of(query), query.watcher, self._now())
            self._sweep_later()
        self._carry_out(effects)

    def _unwatch(
        self, route: Route, client: int, number: int, query: StoreUnwatchKey | StoreUnwatchPrefix
    ) -> None:
        target = _target_of(query)
        if self._watches.remove(target, query.watcher):
            self.state.unwatch(target)
        self.reply(route, number, DONE)

    def _renew(self, route: Route, client: int, number: int, query: StoreRenewWatches) -> None:
        targets: list[Target] = [*query.keys, *map(Prefix, query.prefixes)]
        now = self._now()
        revisions = tuple(
            self._contents.last_notification(target)
            if self._watches.renew(target, query.watcher, now)
            else UNKNOWN_WATCH
            for target in targets
        )
        requester = Requester(route, client, number, query)
        self._carry_out([Reply(requester, StoreRevisions(revisions))])  # not before what it tells of

    # ---- out --------------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        if self._journal is None:
            self._deliver(effects)
        else:
            self._held += effects

    def _deliver(self, effects: list[Effect]) -> None:
        for effect in effects:
            if type(effect) is Reply:
                requester: Requester = effect.requester
                if not self.reply(requester.route, requester.number, effect.message):
                    self._take_back(requester)
            elif type(effect) is Notification and self._publisher is not None:
                self._publisher.publish(topic_of(effect.target), effect.message)

    def _take_back(self, requester: Requester) -> None:
        """A reply did not reach ``requester``: if it was an item, that returns to its queue."""
        entry = self._open.get(requester.client)
        if type(entry) is Delivery and entry.requester is requester:
            self._give_up(entry)

    def settle(self) -> None:
        """Write down what has changed, all that came together at once, and only then reply."""
        if self._publisher is not None:
            self._publisher.read_if_unread()
        if self._journal is None or not self._held:
            return
        held, self._held = self._held, []
        try:
            self._journal.commit()
        except OSError as e:
            said = f"it ends, as its journal {self._journal.path} cannot be written: {e.strerror}"
            refusal = StoreRefused(Refusal.CLOSING, said)
            self._deliver([Reply(effect.requester, refusal) for effect in held if type(effect) is Reply])
            raise
        self._deliver(held)

    # ---- time -------------------------------------------------------------------------------------------

    def do_due(self, now: float) -> float:
        """Refuse queries whose time is up; forget clients that are gone."""
        self._refuse(self.state.expire(now))
        if now >= self._sweep_at:
            self._sweep_at = math.inf
            self._sweep(now)
            if self._open or len(self._watches):
                self._sweep_at = now + SWEEP_SECONDS
        return min(self.state.next_deadline(), self._sweep_at)

    def _sweep_later(self) -> None:
        if self._sweep_at == math.inf:
            self._sweep_at = self._now() + SWEEP_SECONDS
            self._server.wake_by(self._sweep_at)

    def _sweep(self, now: float) -> None:
        for entry in self._requesters.expired(now):
            self._give_up(entry)
        for target in self._watches.expire(now):
            self.state.unwatch(target)
        late = [nonce for nonce, (_, deadline) in self._unsubscribed.items() if deadline <= now]
        self._refuse_unsubscribed(late, Refusal.UNSUBSCRIBED, "the subscription has not arrived")

    def _refuse_unsubscribed(self, nonces: list[str], reason: Refusal, text: str) -> None:
        refusal = StoreRefused(reason, text)
        requesters = [self._unsubscribed.pop(nonce)[0] for nonce in nonces]
        self._refuse([Reply(r, refusal) for r in requesters if self._open.get(r.client) is r])

    def _refuse(self, refusals: list[Effect]) -> None:
        self._release(refusals)
        self._carry_out(refusals)

    def stopping(self) -> None:
        """Refuse all who wait; if there is a journal, they had better wait for the store's next life."""
        if self._journal is None:
            self._refuse(self.state.close())
            self._refuse_unsubscribed(list(self._unsubscribed), Refusal.CLOSING, "the store is closing")

    def stopped(self) -> None:
        """Serving has ended, however that came."""
        if self._publisher is not None:
            self._publisher.close()


def _target_of(query: StoreWatchKey | StoreWatchPrefix | StoreUnwatchKey | StoreUnwatchPrefix) -> Target:
    """What ``query`` is about."""
    return Prefix(query.prefix) if isinstance(query, StoreWatchPrefix | StoreUnwatchPrefix) else query.key


_HANDLERS: dict[type[Message], Callable[..., None]] = {
    **dict.fromkeys(ACTIONS, StoreService._read),
    **dict.fromkeys(CHANGING, StoreService._change),
    StoreQueuePop: StoreService._pop,
    StoreQueueAck: StoreService._acknowledge,
    StoreWatchChannel: StoreService._tell_channel,
    StoreWatchKey: StoreService._watch,
    StoreWatchPrefix: StoreService._watch,
    StoreUnwatchKey: StoreService._unwatch,
    StoreUnwatchPrefix: StoreService._unwatch,
    StoreRenewWatches: StoreService._renew,
}
"""What is done about queries, by their kind."""
