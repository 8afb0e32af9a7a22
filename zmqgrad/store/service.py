"""Request handling of a store's server: drives the state machine, replies, publishes notifications.

A repeated change is not applied again. With a journal, the reply to a change leaves after the change has been
committed. A popped item counts as delivered once the client has acknowledged it. Only the server's thread
calls this.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from zmqgrad.errors import TransportError
from zmqgrad.runtime.clock import Clock
from zmqgrad.store.actions import CHANGES, READS
from zmqgrad.store.contents import Contents, Item
from zmqgrad.store.effects import DONE, Effect, Notification, Reply
from zmqgrad.store.journal import Journal
from zmqgrad.store.leases import Requester, Requesters, WatchLeases
from zmqgrad.store.reply_cache import ReplyCache
from zmqgrad.store.state import State
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
"""Interval of the checks for expired clients."""

SUBSCRIBE_SECONDS = 2.0
"""How long a watch waits for its subscription to arrive. After that, the client reconnects."""


class StoreService:
    """Serves ``contents`` to the clients of ``server``.

    Args:
        replies: the reply cache.
        journal: records changes; None: nothing does.
        max_waiting: limit of blocked queries, over all clients.
        make_publisher: makes the publisher of notifications, given the callback for the nonces of
            subscriptions. Called at the first watch.
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
        """The server's method itself: a wrapper would cost one more call for each reply."""
        self.state = State(contents, self._deliver_item)
        self._contents = contents
        self._replies = replies
        self._last = replies.last  # by client id: id of its last change, and the reply
        self._journal = journal
        self._now = clock.now
        self._uncommitted: list[Effect] = []  # not carried out before the journal has committed
        self._requesters = Requesters(max_waiting)
        self._open = self._requesters.open  # by client id: what it waits for, or may not have received
        self._watches = WatchLeases()
        self._make_publisher = make_publisher
        self._publisher: Publisher | None = None
        # Watches that wait for their subscription, and until when, by nonce.
        self._unsubscribed: dict[str, tuple[Requester, float]] = {}
        self._sweep_at = math.inf
        self.refuses_watches = False
        """Set to leave a client's request for its first watch unanswered. From any thread."""

    @property
    def published(self) -> int:
        """Number of published notifications."""
        return 0 if self._publisher is None else self._publisher.published

    # ---- queries ----------------------------------------------------------------------------------------

    def handle(self, route: Route, client_id: int, request_id: int, query: Message) -> None:
        """Reply to query ``request_id`` of ``client_id``, now or later."""
        entry = self._open.get(client_id)
        if entry is not None and self._is_repeated(entry, route, request_id, query):
            return
        _HANDLERS.get(type(query), StoreService._handle_unknown)(self, route, client_id, request_id, query)

    def _is_repeated(self, entry: Requester, route: Route, request_id: int, query: Message) -> bool:
        """Whether ``query`` is the open query of its client again, or an earlier one."""
        if request_id == entry.request_id:
            if entry.reply is not None:
                entry.route = route
                self._carry_out([Reply(entry, entry.reply)])
            elif entry.item is None:
                now = self._now()
                self._requesters.renew(entry, route, now)
                self.state.repeat(query, entry, now)
                self._server.wake_by(self.state.next_deadline())
            else:
                entry.route = route
                self._carry_out([Reply(entry, self._deliver_item(entry, entry.queue, entry.item))])
            return True
        if type(query) is StoreQueueAck and entry.item is not None and query.item == entry.item.id:
            return False
        if request_id > entry.request_id:
            self._give_up(entry)
        return request_id < entry.request_id

    def _give_up(self, entry: Requester) -> None:
        """Cancel a blocked query, forget its reply, or return an unacknowledged item to its queue."""
        self._requesters.release(entry.client_id)
        if entry.item is None:
            self.state.cancel(entry)
            return
        others: list[Effect] = []
        self._contents.restore(entry.queue, entry.item)
        self.state.after_push(entry.queue, others)
        self._carry_out(others)

    def _read(self, route: Route, client_id: int, request_id: int, query: Message) -> None:
        """Handle a query that changes nothing, but may block."""
        requester = Requester(route, client_id, request_id, query)
        reply = READS[type(query)](self.state, query, requester, self._now())
        if reply is None:
            self._block(requester)
        elif self._journal is None:
            self.reply(route, request_id, reply)
        else:
            self._uncommitted.append(Reply(requester, reply))

    def _is_stale(self, route: Route, client_id: int, request_id: int, query: Message) -> bool:
        """Whether ``query`` was applied before. Repeats the reply if so."""
        last = self._last.get(client_id)
        if last is None or request_id > last[0]:
            return False
        if request_id == last[0]:  # otherwise the client no longer waits for it
            self._carry_out([Reply(Requester(route, client_id, request_id, query), last[1])])
        return True

    def _change(self, route: Route, client_id: int, request_id: int, query: Message) -> None:
        """Handle a query that may change the store and never blocks. Applies it at most once."""
        last = self._last.get(client_id)
        if last is not None and request_id <= last[0] and self._is_stale(route, client_id, request_id, query):
            return
        others: list[Effect] = []
        reply = CHANGES[type(query)](self.state, query, others)
        # Also if nothing changed: a late repetition might change something by then.
        self._replies.remember(client_id, request_id, reply)
        if self._journal is None:
            if others:  # first, as they have waited longer
                self._deliver(others)
            self.reply(route, request_id, reply)
            return
        self._journal.remember(client_id, request_id, reply)
        self._uncommitted += [*others, Reply(Requester(route, client_id, request_id, query), reply)]

    def _pop(self, route: Route, client_id: int, request_id: int, query: StoreQueuePop) -> None:
        """As :meth:`_change`, but it may block, and completes when the item is acknowledged."""
        if self._is_stale(route, client_id, request_id, query):
            return
        requester = Requester(route, client_id, request_id, query)
        reply = self.state.execute(query, requester, self._now(), [])
        if reply is None:
            self._block(requester)
        else:
            self._carry_out([Reply(requester, reply)])

    def _deliver_item(self, requester: Requester, queue: str, item: Item) -> Message:
        """Deliver ``item`` to ``requester``, pending acknowledgement."""
        self._requesters.deliver(requester, queue, item, self._now())
        self._sweep_later()
        return StoreItem(item.id, item.value)

    def _acknowledge(self, route: Route, client_id: int, request_id: int, query: StoreQueueAck) -> None:
        """Handle the acknowledgement of an item."""
        if self._is_stale(route, client_id, request_id, query):
            return
        entry = self._open.get(client_id)
        reply = StoreNumber(0)
        if entry is not None and entry.item is not None and entry.item.id == query.item:
            self._requesters.release(client_id)
            self._contents.delivered(entry.item)
            reply = StoreNumber(1)
            self._replies.remember(client_id, request_id, reply)
            if self._journal is not None:
                self._journal.remember(client_id, request_id, reply)
        self._carry_out([Reply(Requester(route, client_id, request_id, query), reply)])

    def _block(self, requester: Requester) -> None:
        """Record the query of ``requester``, which the state machine has blocked."""
        if self._requesters.is_full():
            self.state.cancel(requester)
            text = f"{self._requesters.max_waiting} queries wait there already, which is its limit"
            self._carry_out([Reply(requester, StoreRefused(Refusal.LIMIT, text))])
            return
        self._requesters.block(requester, self._now())
        self._server.wake_by(self.state.next_deadline())
        self._sweep_later()

    def _handle_unknown(self, route: Route, client_id: int, request_id: int, query: Message) -> None:
        """Refuse a message that is not a query."""
        requester = Requester(route, client_id, request_id, query)
        self._carry_out(self.state.apply(query, requester, self._now()))

    # ---- watches ----------------------------------------------------------------------------------------

    def _describe_channel(
        self, route: Route, client_id: int, request_id: int, query: StoreWatchChannel
    ) -> None:
        """Reply with the address of the publisher of notifications."""
        if self.refuses_watches:
            return
        reply: Message
        try:
            publisher = self.open_publisher()
            reply = StoreChannel(publisher.port)
        except TransportError as e:
            reply = StoreRefused(Refusal.LIMIT, f"it cannot publish notifications: {e}")
        self.reply(route, request_id, reply)

    def open_publisher(self) -> Publisher:
        """The publisher of notifications, created at the first call.

        Raises:
            AddressInUseError, ConfigurationError, TransportError: if it cannot be bound.
        """
        if self._publisher is None:
            self._publisher = self._make_publisher(self._note_subscription)
        return self._publisher

    def _watch(
        self, route: Route, client_id: int, request_id: int, query: StoreWatchKey | StoreWatchPrefix
    ) -> None:
        """Begin a watch once the client's subscription is in place."""
        requester = Requester(route, client_id, request_id, query)
        if self._publisher is not None and self._publisher.has_seen(query.nonce):
            self._begin_watch(requester, query)
            return
        self._block(requester)
        if self._open.get(client_id) is requester:
            self._unsubscribed[query.nonce] = requester, self._now() + SUBSCRIBE_SECONDS

    def _note_subscription(self, nonce: str) -> None:
        """A client has subscribed to ``nonce``, and therefore, before it, to its watch target."""
        found = self._unsubscribed.pop(nonce, None)
        if found is None:
            return
        requester = found[0]
        if self._open.get(requester.client_id) is requester:
            self._requesters.release(requester.client_id)
            self._begin_watch(requester, requester.query)

    def _begin_watch(self, requester: Requester, query: Message) -> None:
        effects = self.state.apply(query, requester, self._now())
        if not any(type(e) is Reply and type(e.message) is StoreRefused for e in effects):
            assert isinstance(query, StoreWatchKey | StoreWatchPrefix)
            self._watches.add(_target_of(query), query.watcher, self._now())
            self._sweep_later()
        self._carry_out(effects)

    def _unwatch(
        self, route: Route, client_id: int, request_id: int, query: StoreUnwatchKey | StoreUnwatchPrefix
    ) -> None:
        target = _target_of(query)
        if self._watches.remove(target, query.watcher):
            self.state.unwatch(target)
        self.reply(route, request_id, DONE)

    def _renew(self, route: Route, client_id: int, request_id: int, query: StoreRenewWatches) -> None:
        targets: list[Target] = [*query.keys, *map(Prefix, query.prefixes)]
        now = self._now()
        revisions = tuple(
            self._contents.last_notification(target)
            if self._watches.renew(target, query.watcher, now)
            else UNKNOWN_WATCH
            for target in targets
        )
        requester = Requester(route, client_id, request_id, query)
        # Not before the changes that it reports.
        self._carry_out([Reply(requester, StoreRevisions(revisions))])

    # ---- out --------------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        if self._journal is None:
            self._deliver(effects)
        else:
            self._uncommitted += effects

    def _deliver(self, effects: list[Effect]) -> None:
        """Send replies and publish notifications."""
        for effect in effects:
            if type(effect) is Reply:
                requester: Requester = effect.requester
                sent = self.reply(requester.route, requester.request_id, effect.message)
                if self._open.get(requester.client_id) is not requester:
                    continue
                if requester.item is None:
                    self._requesters.replied(requester, effect.message, self._now())
                elif not sent:
                    self._give_up(requester)  # the item returns to its queue
            elif type(effect) is Notification and self._publisher is not None:
                self._publisher.publish(topic_of(effect.target), effect.message)

    def settle(self) -> None:
        """Commit all changes of this batch together, then send the replies."""
        if self._publisher is not None:
            self._publisher.read_if_unread()
        if self._journal is None or not self._uncommitted:
            return
        effects, self._uncommitted = self._uncommitted, []
        try:
            self._journal.commit()
        except OSError as e:
            text = f"it ends, as its journal {self._journal.path} cannot be written: {e.strerror}"
            refusal = StoreRefused(Refusal.CLOSING, text)
            self._deliver([Reply(effect.requester, refusal) for effect in effects if type(effect) is Reply])
            raise
        self._deliver(effects)

    # ---- time -------------------------------------------------------------------------------------------

    def do_due(self, now: float) -> float:
        """Refuse queries whose deadline has passed; drop expired clients."""
        self._carry_out(self.state.expire(now))
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
            if self._open.get(entry.client_id) is entry:  # else it was offered the item of one before
                self._give_up(entry)
        for target in self._watches.expire(now):
            self.state.unwatch(target)
        late = [nonce for nonce, (_, deadline) in self._unsubscribed.items() if deadline <= now]
        self._refuse_unsubscribed(late, Refusal.UNSUBSCRIBED, "the subscription has not arrived")

    def _refuse_unsubscribed(self, nonces: list[str], reason: Refusal, text: str) -> None:
        refusal = StoreRefused(reason, text)
        requesters = [self._unsubscribed.pop(nonce)[0] for nonce in nonces]
        self._carry_out([Reply(r, refusal) for r in requesters if self._open.get(r.client_id) is r])

    def stopping(self) -> None:
        """Refuse blocked queries. With a journal they are kept waiting for the restarted server instead."""
        if self._journal is None:
            self._carry_out(self.state.close())
            self._refuse_unsubscribed(list(self._unsubscribed), Refusal.CLOSING, "the store is closing")

    def stopped(self) -> None:
        """Called once serving has ended, for any reason."""
        if self._publisher is not None:
            self._publisher.close()


def _target_of(query: StoreWatchKey | StoreWatchPrefix | StoreUnwatchKey | StoreUnwatchPrefix) -> Target:
    """The watch target of ``query``."""
    return Prefix(query.prefix) if isinstance(query, StoreWatchPrefix | StoreUnwatchPrefix) else query.key


_HANDLERS: dict[type[Message], Callable[..., None]] = {
    **dict.fromkeys(READS, StoreService._read),
    **dict.fromkeys(CHANGES, StoreService._change),
    StoreQueuePop: StoreService._pop,
    StoreQueueAck: StoreService._acknowledge,
    StoreWatchChannel: StoreService._describe_channel,
    StoreWatchKey: StoreService._watch,
    StoreWatchPrefix: StoreService._watch,
    StoreUnwatchKey: StoreService._unwatch,
    StoreUnwatchPrefix: StoreService._unwatch,
    StoreRenewWatches: StoreService._renew,
}
"""Handlers by type of query."""
