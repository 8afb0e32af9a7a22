"""Polls file descriptors for the threads of a pool, by leader/followers (Schmidt et al., POSA2).

One thread, the leader, reads. Before it runs a task, it releases the lead. The followers already block in the
kernel, so that wakes none of them; the next message makes one of them the leader: the one that blocked last,
whose caches are the warmest. A thread that returns from its task leads again if no follower was woken
meanwhile, and then spins before it blocks.
"""

from __future__ import annotations

import os
import select
import threading

from zmqgrad.runtime.polling import READ, SPENT, Wakeup
from zmqgrad.runtime.spinning import UNSOLICITED_SPIN_SECONDS, SpinBudget, Spinner

MAX_EVENTS = 256
"""How many events one poll returns at most."""

_ONCE = getattr(select, "EPOLLONESHOT", 0)  # where there is epoll


class EpollLeaderPoller:
    """Polls descriptors in one thread at a time, the leader: at first the one that starts it.

    Two nested epolls: followers wait at the outer one, which contains the inner one.

    The outer epoll is armed for one event (``EPOLLONESHOT``), so the kernel wakes one follower, and no other
    one before it is armed again.
    """

    def __init__(self, budget: SpinBudget | None = None) -> None:
        self._spin_budget = budget or SpinBudget(0)
        self._spin = Spinner(self._spin_budget, at_most=UNSOLICITED_SPIN_SECONDS).spin
        self._inner = select.epoll()
        self._poll = self._inner.poll
        self._outer = select.epoll()
        self._wakeup = Wakeup()
        self._lock = threading.RLock()  # guards _waiting, _closed and _has_leader
        self._waiting = 0
        self._closed = False
        self._has_leader = True
        self._has_followers = False
        self._woken = False
        self._inner_fd = self._inner.fileno()
        self._inner.register(self._wakeup.fd, select.EPOLLIN)

    def register(self, fd: int, mask: int) -> None:
        """Polls file descriptor ``fd`` for ``mask`` (``select.POLLIN``). From any thread; no effect after
        :meth:`close`."""
        with self._lock:
            if not self._inner.closed:
                self._inner.register(fd, mask)

    def unregister(self, fd: int) -> None:
        """Stops polling ``fd``, which must still be open."""
        with self._lock:
            if not self._inner.closed:
                self._inner.unregister(fd)

    def poll(self, seconds: float | None) -> list[tuple[int, int]]:
        """Waits up to ``seconds`` (None: no limit); returns events as ``select.poll`` does. Leader only."""
        # Threads that wait for replies at their own channels need the processor next.
        spins = seconds != 0 and not self._spin_budget.waits
        ready = (spins and self._spin(self._poll)) or self._poll(seconds, MAX_EVENTS)
        return self._clear_wakeup(ready) if self._woken else ready

    def _clear_wakeup(self, ready: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Clears the wake-up, which carries no message."""
        self._woken = False
        self._wakeup.clear()
        return [entry for entry in ready if entry[0] != self._wakeup.fd]

    def wait_for_lead(self) -> bool:
        """Blocks until the calling thread is the leader. Returns False if the poller was closed."""
        with self._lock:
            self._waiting += 1
        while True:
            if not self._closed:
                self._outer.poll(None, 1)
            with self._lock:
                if self._closed:
                    self._waiting -= 1
                    self._dismiss()
                    return False
                if not self._has_leader:
                    self._waiting -= 1
                    self._has_leader = True
                    return True

    def try_lead(self) -> bool:
        """Makes the calling thread the leader if there is none. Returns whether it leads. Never blocks."""
        with self._lock:
            if self._has_leader or self._closed:
                return False
            self._has_leader = True
            self._outer.modify(self._inner_fd, _ONCE)  # else the next message would wake a follower
            return True

    def promote(self, at_once: object) -> None:
        """Gives up the lead: the next event makes one follower the leader; if ``at_once``, a truth value, one
        is woken now.

        Called by the leader, or before there is one.
        """
        with self._lock:  # else another thread could lead, and close, before it is armed
            self._arm(at_once)

    def _arm(self, at_once: object) -> None:
        """Lets the next event wake a follower. Called with the lock held."""
        if at_once:
            self._woken = True
            self._wakeup.set()
        self._has_leader = False
        if self._has_followers:
            self._outer.modify(self._inner_fd, READ | _ONCE)
        else:
            self._has_followers = True  # each event of the inner epoll costs more from here on
            self._outer.register(self._inner_fd, READ | _ONCE)

    def close(self) -> None:
        """Makes all followers return. Called by the leader, or before there is one. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._dismiss()

    def _dismiss(self) -> None:
        """Wakes the next follower, so that it returns; the last one closes the epolls. Called with the lock
        held."""
        if self._outer.closed:
            return  # followers that come later do not block
        if self._waiting:
            self._arm(at_once=True)
        else:
            self._outer.close()
            self._inner.close()
            self._wakeup = SPENT


class PollLeaderPoller:
    """As :class:`EpollLeaderPoller`, without epoll: a follower becomes leader at once, and polls."""

    def __init__(self) -> None:
        self._inner = select.poll()
        self._turns = threading.Semaphore(0)
        self._closed = False
        self._wakeup = Wakeup()
        self._inner.register(self._wakeup.fd, select.POLLIN)

    def register(self, fd: int, mask: int) -> None:
        """As :meth:`EpollLeaderPoller.register`."""
        self._inner.register(fd, mask)
        self._wakeup.set()  # a poll under way does not see a new descriptor

    def unregister(self, fd: int) -> None:
        """As :meth:`EpollLeaderPoller.unregister`."""
        self._inner.unregister(fd)

    def poll(self, seconds: float | None) -> list[tuple[int, int]]:
        """As :meth:`EpollLeaderPoller.poll`."""
        ready = self._inner.poll(None if seconds is None else int(seconds * 1000))
        if (self._wakeup.fd, select.POLLIN) in ready:
            self._wakeup.clear()
            ready.remove((self._wakeup.fd, select.POLLIN))
        return ready

    def wait_for_lead(self) -> bool:
        """As :meth:`EpollLeaderPoller.wait_for_lead`."""
        return self._take_turn(blocking=True)

    def try_lead(self) -> bool:
        """As :meth:`EpollLeaderPoller.try_lead`."""
        return self._take_turn(blocking=False)

    def _take_turn(self, blocking: bool) -> bool:
        taken = self._turns.acquire(blocking)
        if taken and self._closed:
            self._turns.release()
        return taken and not self._closed

    def promote(self, at_once: object) -> None:
        """As :meth:`EpollLeaderPoller.promote`."""
        self._turns.release()

    def close(self) -> None:
        """As :meth:`EpollLeaderPoller.close`."""
        if not self._closed:
            self._closed = True
            self._turns.release()


LeaderPoller = EpollLeaderPoller | PollLeaderPoller


def make_leader_poller(budget: SpinBudget | None = None) -> LeaderPoller:
    """Returns the best poller for this system. Its leader spins with ``budget`` before it blocks."""
    return (
        EpollLeaderPoller(budget)
        if hasattr(select, "epoll") and hasattr(os, "eventfd")
        else PollLeaderPoller()
    )
