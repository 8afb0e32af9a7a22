"""The one reader: polls everything by which something may arrive, and hands it to its owner, in one thread.

Mailboxes (:mod:`~zmqgrad.transport.endpoint`), the store's server and its subscribers each have one. With a
thread pool, threads of the pool take turns in reading, by leader/followers
(:mod:`~zmqgrad.transport.leader_poller`, :meth:`~zmqgrad.runtime.thread_pool.ThreadPool.serve_from`); without
one, the reader has a thread of its own, or reads in that of its owner.

The reading thread handles what other threads have posted, what it polls, messages of the ROUTER, of which
only so many in a row, and, before it polls again, what is due. All of that must be quick, and must not wait.
What takes longer is a task: its thread gives up the lead before.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import zmq

from zmqgrad.runtime.clock import MONOTONIC, Clock
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.polling import MAX_SECONDS, READ, SPENT, Wakeup
from zmqgrad.runtime.spinning import SpinBudget
from zmqgrad.runtime.thread_pool import Source, Task
from zmqgrad.transport.base import OnIdle
from zmqgrad.transport.leader_poller import make_leader_poller
from zmqgrad.transport.local import LocalConnection, LocalListener
from zmqgrad.transport.sockets import get_int

if TYPE_CHECKING:
    from zmqgrad.runtime.clock import Deadline
    from zmqgrad.transport.local.listener import Arrival, Registry

logger = logging.getLogger(__name__)

ROUTER_BURST = 64
"""Messages read from the ROUTER in a row before everything else has its turn."""

BURST = 32
"""Events of one source, such as connections of strangers, handled in a row before everything else has its
turn: they may come faster than they are handled, if threads of the program keep the interpreter busy."""

TAKEN_AT_ONCE = 16
"""Messages taken from the ROUTER for each one that is handled, while something waits until it is empty."""

MAX_SENDERS = 1000
"""How many senders of malformed messages are remembered, so that each is logged once."""

_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
"""Plain integers: combining pyzmq's enumerations takes as long as a call into libzmq."""

Work = Callable[[], object]


class Reader:
    """Reads in one thread at a time: a :class:`~zmqgrad.runtime.thread_pool.Source` of tasks.

    Args:
        name: of its thread.
        on_closed: called once when it has ended: closes sockets.
        budget: how long a thread spins before it blocks; None: not at all.
    """

    def __init__(
        self,
        name: str,
        on_closed: Callable[[], object],
        budget: SpinBudget | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.on_idle: OnIdle = lambda: None
        """Called when all that has arrived was handled, and before the thread goes off to run a task. May
        return a task."""
        self.on_failed: Callable[[Exception], object] = logger.debug
        """Called with an error that ends the reader, before it closes: nothing is received any more."""
        self.at_router = False
        """Whether the ROUTER may have messages. To be set after it was used otherwise than to read: its
        descriptor does not report again what it has reported."""
        self.tasks: deque[Task] = deque()
        """Tasks that what was handled resulted in. Reading thread only."""
        self.malformed = 0
        """How many malformed messages have arrived."""
        self._name = name
        self.at_end: list[Callable[[], object]] = [on_closed]
        """Called when it has ended, the last first."""
        self._now = clock.now
        self._poller = make_leader_poller(budget)
        self.wait_for_lead, self.try_lead = self._poller.wait_for_lead, self._poller.try_lead
        """As :class:`~zmqgrad.runtime.thread_pool.Source`."""
        self._watched: dict[int, Callable[[], object]] = {}
        self._posted: deque[Work] = deque()
        self._due: list[tuple[float, int, Work]] = []  # a heap
        self._order = itertools.count()
        self._again: dict[Work, None] = {}
        self._wakeup = Wakeup()
        self.watch(self._wakeup.fd, self._wakeup.clear)
        self._local: LocalListener | None = None
        self._read_local: Callable[[int], Sequence[Arrival]] = lambda fd: ()  # its events are outdated
        self._on_packet: Callable[[bytes, LocalConnection], Task | None]
        self._router: zmq.Socket[bytes]
        self._receive: Callable[[], Task | None]
        self._in_a_row = 0  # messages read from the ROUTER
        self._take: Callable[[], Callable[[], Task | None]] | None = None
        self._taken: deque[Callable[[], Task | None]] = deque()  # handles what was taken from the ROUTER
        self._when_empty: list[Work] = []
        self._offenders: set[object] = set()
        self._thread = 0  # id of the reading thread; 0: none
        self._own_thread: threading.Thread | None = None
        self._started = False
        self._stopped = False
        self._ended: Promise[None] = Promise()

    def listen(
        self,
        make: Callable[[Registry], LocalListener],
        on_packet: Callable[[bytes, LocalConnection], Task | None],
    ) -> LocalListener:
        """Reads from the connections of the listener that ``make`` returns, and ends with it.

        Args:
            on_packet: called with each packet; an empty one is the end of its connection.
        """
        self._on_packet = on_packet
        self._local = made = make(self._poller)
        self._read_local = made.read
        return made

    def read_router(
        self,
        router: zmq.Socket[bytes],
        receive: Callable[[], Task | None],
        take: Callable[[], Callable[[], Task | None]] | None = None,
    ) -> None:
        """Calls ``receive`` for each message of ``router``, which it takes and handles.

        Args:
            take: takes a message, and returns what handles it. With it, :meth:`call_when_empty` ends also if
                messages always arrive before the last one was handled.
        """
        self._router, self._receive, self._take = router, receive, take
        self.watch(get_int(router, zmq.FD), self._look_at_router)
        self._look_at_router()

    def _look_at_router(self) -> None:
        self.at_router = True

    def call_when_empty(self, work: Work) -> None:
        """Calls ``work`` when everything that is at the ROUTER now was handled. Reading thread only."""
        self._when_empty.append(work)
        self.at_router = True

    def post(self, work: Work) -> None:
        """Makes the reading thread call ``work`` soon. From any thread."""
        self._posted.append(work)
        self._wakeup.set()

    def call_at(self, moment: float, work: Work) -> None:
        """Calls ``work`` at that time. Reading thread only."""
        heapq.heappush(self._due, (moment, next(self._order), work))

    def call_later(self, seconds: float, work: Work) -> None:
        """Calls ``work`` in ``seconds``. Reading thread only."""
        self.call_at(self._now() + seconds, work)

    def call_again(self, work: Work) -> None:
        """Calls ``work`` once everything else has had its turn, however often this asks for it. Reading
        thread only."""
        if work not in self._again:
            self._again[work] = None
            self.call_later(0.0, partial(self._do_again, work))

    def _do_again(self, work: Work) -> None:
        del self._again[work]
        work()

    def watch(self, fd: int, readable: Callable[[], object]) -> None:
        """Makes the reading thread call ``readable`` when that descriptor is readable. From any thread."""
        self._watched[fd] = readable
        self._poller.register(fd, READ)

    def unwatch(self, fd: int) -> None:
        """Undoes :meth:`watch`. Must be called before the descriptor is closed."""
        del self._watched[fd]
        self._poller.unregister(fd)

    def count_malformed(self, sender: object, text: str) -> None:
        """Counts a malformed message that is dropped. Logs it if it is the first of that sender."""
        if sender not in self._offenders and len(self._offenders) < MAX_SENDERS:
            self._offenders.add(sender)
            logger.warning("%s: dropped a malformed %s", self._name, text)
        self.malformed += 1  # last: who sees it finds the line

    # ---- reading ----------------------------------------------------------------------------------------

    def start(self, serve_from: Callable[[Source], None] | None = None) -> None:
        """Starts to read in a pool (``ThreadPool.serve_from``); None: in a thread of its own."""
        self._started = True
        try:
            if serve_from is not None:
                serve_from(self)
            else:
                self._own_thread = threading.Thread(target=self.run, name=self._name, daemon=True)
                self._own_thread.start()
        except RuntimeError:  # no thread can be started, so none will end it
            self._started = False
            raise

    def run(self) -> None:
        """Reads in the calling thread until :meth:`close`, and runs the tasks."""
        self._started = True
        while (task := self.read()) is not None:
            self._thread = threading.get_ident()  # no thread reads meanwhile
            task()

    def reads_here(self) -> bool:
        """Returns whether the calling thread is the reading thread, so must not wait for messages."""
        return self._thread == threading.get_ident()

    def promote(self) -> None:
        """As ``Source``. A follower is woken at once if there is something to handle, now or at its time."""
        if self.at_router and not (self._when_empty or self._taken):
            self.at_router = self._has_message()
        self._poller.promote(self._posted or self.tasks or self.at_router or self._due)

    def read(self) -> Task | None:
        """Reads until something results in a task. Returns None at the end."""
        self._thread = threading.get_ident()
        task: Task | None = None
        try:
            while not self._stopped:
                if self._posted:
                    self._call(self._posted.popleft())
                elif self.tasks:
                    task = self.tasks.popleft()
                elif self.at_router and self._in_a_row < ROUTER_BURST:
                    task = self._read_router()
                elif (idle := self.on_idle()) is not None:
                    self._thread = 0
                    return idle
                else:
                    self._poll()
                if task is not None:
                    # The task may wait for what was handled together with it.
                    if (idle := self.on_idle()) is not None:
                        self.tasks.append(idle)
                    self._thread = 0
                    return task
        except zmq.ContextTerminated:
            logger.debug("%s: the context has ended", self._name)
        except Exception as e:  # no other thread would read: who waits for messages is to be told
            logger.exception("%s: reading has failed, so nothing is received any more", self._name)
            self._call(partial(self.on_failed, e))
        self._thread = 0
        self.shut()
        return None

    def _has_message(self) -> bool:
        return bool(get_int(self._router, _EVENTS) & _POLLIN)

    def _read_router(self) -> Task | None:
        if self._when_empty and self._take is not None:
            for _ in range(TAKEN_AT_ONCE):
                if not self._has_message():
                    self._taken.extend(partial(self._call, work) for work in self._when_empty)
                    self._when_empty = []
                    break
                self._taken.append(self._take())
        if self._taken:
            self._in_a_row += 1
            return self._taken.popleft()()
        if self._has_message():
            self._in_a_row += 1
            return self._receive()
        self.at_router = False
        works, self._when_empty = self._when_empty, []
        for work in works:
            self._call(work)
        return None

    def _do_due(self) -> float:
        """Does what is due first. Returns how long to wait for other events than messages of the ROUTER."""
        self._in_a_row = 0
        seconds = self._due[0][0] - self._now() if self._due else math.inf
        if seconds <= 0:
            self._call(heapq.heappop(self._due)[2])
        return 0.0 if seconds <= 0 or self.at_router else min(seconds, MAX_SECONDS)

    def _poll(self) -> None:
        """Waits for events, and handles them."""
        for fd, _ in self._poller.poll(self._do_due() if self._due or self.at_router else None):
            readable = self._watched.get(fd)
            if readable is not None:
                self._call(readable)
                continue
            for packet, connection in self._read_local(fd):  # else it is that of the listener
                task = self._on_packet(packet, connection)
                if task is not None:
                    self.tasks.append(task)

    def _call(self, work: Work) -> None:
        try:
            work()
        except Exception:
            logger.exception("%s: handling an event failed", self._name)

    # ---- closing ----------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._stopped = True

    def shut(self) -> None:
        """Ends at once. In the reading thread, or when there is none. Idempotent."""
        if self._ended.done():
            return
        if self._local is not None:
            self._local.close()
        while self.at_end:
            self.at_end.pop()()
        self._poller.close()
        del self._watched[self._wakeup.fd]
        self._wakeup = SPENT
        self._ended.set_result(None)

    def close(self) -> None:
        """Stops reading. From any thread. Idempotent."""
        if self._started:
            self.post(self._stop)
        else:
            self.shut()

    def join(self, deadline: Deadline) -> list[str]:
        """Waits until no thread reads. Returns a name if that has not happened by ``deadline``."""
        if self._started and not self._ended.wait_done(deadline.timeout()):
            return [self._name]
        if self._own_thread is not None and self._started:
            self._own_thread.join(deadline.timeout())  # it has yet to return
            return [self._name] if self._own_thread.is_alive() else []
        return []
