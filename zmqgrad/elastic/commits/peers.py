"""The other agents of a round: agrees with them by the store of the round, and moves parts by a mailbox.

Keys in that store: ``commits/job``: the random name of the job of the mailboxes;
``commits/have/<restores>/<node>``: the inventory of each node; ``commits/made/<restores>/<number>``: how many
nodes have made a commit; ``commits/whole``: the newest that all have made.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from functools import partial

import msgspec

from zmqgrad import environment
from zmqgrad.elastic.commits.agreement import Inventory
from zmqgrad.elastic.commits.holder import Holder
from zmqgrad.errors import CommitError, StoreError, StoreTimeoutError, TransportError, ZmqgradError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.thread_pool import Task, ThreadPool
from zmqgrad.store import Store
from zmqgrad.transport import local
from zmqgrad.transport.base import Buffer, Inbound, PeerAddress, PeerEnd
from zmqgrad.transport.host_address import choose_address
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.security import job_keys, keys_for_worker, load_keys
from zmqgrad.wire.messages import (
    CommitCopy,
    CommitFetch,
    CommitFetched,
    CommitId,
    CommitKept,
    Message,
    PartId,
)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How long one wait for the store takes: the round may end meanwhile."""

COPY_SECONDS = 600.0
"""How long a part may take to reach another host. If that is lost, the round ends sooner."""

CLOSE_SECONDS = 5.0

THREADS = 4

_WHOLE = "commits/whole"


class OtherAgents:
    """What :class:`~zmqgrad.elastic.commits.holder.Peers` says, with several nodes.

    Args:
        holder: of this node.
        store: of the round.
        node_rank, num_nodes: of this node in the round.
    """

    def __init__(self, holder: Holder, store: Store, node_rank: int, num_nodes: int) -> None:
        self._holder = holder
        self._store = store
        self._rank = node_rank
        self._num_nodes = num_nodes
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards the opening and the closing of the mailbox
        self._mailbox: ZmqMailbox | None = None
        self._pool: ThreadPool | None = None
        self._addresses: list[PeerAddress] = []
        self._buddy = (node_rank + 1) % num_nodes
        self._known = threading.Event()  # set once the addresses are, or this is closed
        self._ids = itertools.count(1)
        self._replies: dict[
            int, tuple[int, Promise[memoryview | None]]
        ] = {}  # by message id: the peer, and what it sends

    # ---- the store --------------------------------------------------------------------------------------

    def exchange(self, restores: int, own: Inventory, deadline: Deadline) -> Sequence[Inventory]:
        try:
            return self._exchange(restores, own, deadline)
        except StoreError as e:
            raise CommitError(f"the store of the round does not reply: {e}") from e

    def _exchange(self, restores: int, own: Inventory, deadline: Deadline) -> Sequence[Inventory]:
        mailbox = self._open()
        own = msgspec.structs.replace(
            own, endpoints=mailbox.endpoints, incarnation=mailbox.incarnation, host=socket.gethostname()
        )
        keys = [f"commits/have/{restores}/{node}" for node in range(self._num_nodes)]
        self._store.set(keys[self._rank], msgspec.json.encode(own))
        while True:
            try:
                self._store.wait(keys, min(LOOK_SECONDS, deadline.left()))
                break
            except StoreTimeoutError:
                if self._closed.is_set():
                    raise CommitError("the round has ended") from None
                if deadline.passed():
                    missing = [node for node, key in enumerate(keys) if not self._store.check([key])]
                    raise CommitError(
                        f"the ranks of node {missing} have not called restore(): all ranks must do so "
                        "equally often"
                    ) from None
        found = [msgspec.json.decode(data, type=Inventory) for data in self._store.multi_get(keys)]
        self._addresses = [PeerAddress(each.endpoints, each.incarnation) for each in found]
        following = [(self._rank + step) % self._num_nodes for step in range(1, self._num_nodes)]
        elsewhere = [node for node in following if found[node].host != own.host]
        self._buddy = (elsewhere or following)[0]
        self._known.set()
        return found

    def report(self, commit: CommitId) -> None:
        made = f"commits/made/{commit.restores}/"
        try:
            if self._store.add(f"{made}{commit.number}", 1) == self._num_nodes:
                self._store.set(_WHOLE, msgspec.json.encode(commit))
                self._store.delete_key(f"{made}{commit.number - 1}")
        except StoreError as e:
            raise CommitError(f"the store of the round does not reply: {e}") from e

    def _on_whole(self, old: bytes | None, new: bytes | None) -> None:
        if new is not None:
            self._holder.on_whole(msgspec.json.decode(new, type=CommitId))

    # ---- the mailbox ------------------------------------------------------------------------------------

    def _open(self) -> ZmqMailbox:
        with self._lock:
            if self._closed.is_set():
                raise CommitError("the round has ended")
            if self._mailbox is None:
                self._store.watch_key(_WHOLE, self._on_whole)
                self._pool = ThreadPool("zmqgrad-agent-commits", THREADS)
                self._mailbox = self._new_mailbox()
                self._mailbox.start(self._on_message, self._resolve, self._pool, self._on_end)
            return self._mailbox

    def _new_mailbox(self) -> ZmqMailbox:
        job = self._store.compare_set("commits/job", "", secrets.token_hex(32))
        beneath = getattr(self._store, "underlying_store", self._store)
        keys = keys_for_worker(job)
        address = choose_address(
            getattr(beneath, "host", None) or "localhost",
            getattr(beneath, "port", 0),
            secured=load_keys() is not None,
        )
        listens = True
        if keys is None and not environment.allows_insecure():
            # All agents are on this host, and other users of it have no business at a port.
            keys, listens = job_keys(job), not local.supported()
        return ZmqMailbox(
            f"zmqgrad-agent-{self._rank}",
            self._rank,
            tcp_host=address.listen if listens else None,
            advertised=address.advertise,
            keys=keys,
            job=job,
        )

    def _resolve(self, peer: int) -> PeerAddress:
        # A node that has learned all addresses may ask before this one has.
        if not self._known.wait(COPY_SECONDS) or self._closed.is_set():
            raise TransportError(f"the address of node {peer} is not known")
        return self._addresses[peer]

    def copy(self, part: PartId, data: memoryview) -> None:
        self._request(self._buddy, CommitCopy(part), [data])

    def fetch(self, node: int, part: PartId) -> memoryview:
        data = self._request(node, CommitFetch(part), [])
        assert data is not None
        return data

    def _request(self, peer: int, message: Message, frames: list[memoryview]) -> memoryview | None:
        reply: Promise[memoryview | None] = Promise()
        number = next(self._ids)
        self._replies[number] = peer, reply
        try:
            self._open().send(peer, message, number, frames, timeout=COPY_SECONDS)
            return reply.wait(COPY_SECONDS)
        except CommitError:
            raise
        except (ZmqgradError, TimeoutError) as e:
            raise CommitError(f"node {peer} does not reply: {e}") from e
        finally:
            self._replies.pop(number, None)

    def _on_message(self, inbound: Inbound) -> Task | None:
        message, source = inbound.message, inbound.envelope.source
        number, frames, error = inbound.envelope.message_id, list[Buffer](), ""
        try:
            frames = list(inbound.frames)
        except MemoryError as e:  # there was none for them: who waits is to be told
            error = str(e)
        if isinstance(message, (CommitKept, CommitFetched)):
            self._settle(source, number, memoryview(frames[0]) if frames else None, message.error or error)
        elif isinstance(message, CommitCopy) and error:
            return partial(self._reply, source, CommitKept(error), number)
        elif isinstance(message, CommitCopy) and len(frames) == 1:
            self._holder.keep(message.part, memoryview(frames[0]))
            return partial(self._reply, source, CommitKept(), number)
        elif isinstance(message, CommitFetch):
            return partial(self._send_part, source, message.part, number)
        return None

    def _settle(self, source: int, number: int, data: memoryview | None, error: str) -> None:
        peer, reply = self._replies.get(number, (-1, None))
        if reply is None or peer != source:
            return
        if error:
            reply.set_exception(CommitError(f"node {source}: {error}"))
        else:
            reply.set_result(data)

    def _send_part(self, peer: int, part: PartId, number: int) -> None:
        with self._holder.reading(part) as data:
            if data is None:
                self._reply(peer, CommitFetched(f"rank {part.rank} of {part.commit} is not here"), number)
            else:
                self._reply(peer, CommitFetched(), number, [data])

    def _reply(self, peer: int, message: Message, number: int, frames: Sequence[memoryview] = ()) -> None:
        mailbox = self._mailbox
        try:
            if mailbox is not None:
                mailbox.send(peer, message, number, frames, timeout=COPY_SECONDS)
        except ZmqgradError as e:
            logger.info("node %d gets no reply: %s", peer, e)

    def _on_end(self, end: PeerEnd) -> None:
        for peer, reply in list(self._replies.values()):
            if peer == end.peer:
                reply.set_exception(CommitError(f"node {peer} is lost: {end.reason}"))

    def close(self) -> None:
        self._closed.set()
        self._known.set()
        with self._lock:
            mailbox, self._mailbox = self._mailbox, None
        for _, reply in list(self._replies.values()):
            reply.set_exception(CommitError("the round has ended"))
        if mailbox is None or self._pool is None:
            return
        with contextlib.suppress(StoreError):  # it may be gone
            self._store.unwatch_key(_WHOLE, self._on_whole)
        mailbox.close()  # without a last message, which would wait for hosts that are lost
        self._pool.close()
        deadline = Deadline.after(CLOSE_SECONDS)
        left = mailbox.join(deadline) + self._pool.join(deadline)
        if left:
            logger.warning("threads are left behind: %s", ", ".join(left))
