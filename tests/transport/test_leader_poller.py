"""The poller lets in one thread at a time, when there is something to read, and all when it is over."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from zmqgrad.runtime.spinning import SpinBudget
from zmqgrad.transport.leader_poller import (
    EpollLeaderPoller,
    LeaderPoller,
    PollLeaderPoller,
    make_leader_poller,
)

WAIT = 20.0

on_linux = pytest.mark.skipif(not hasattr(select, "epoll"), reason="needs epoll")


def spinning_poller() -> LeaderPoller:
    return EpollLeaderPoller(SpinBudget())


@pytest.fixture(
    params=[
        pytest.param(EpollLeaderPoller, marks=on_linux),
        pytest.param(spinning_poller, marks=on_linux),
        PollLeaderPoller,
    ]
)
def poller(request: pytest.FixtureRequest) -> Iterator[LeaderPoller]:
    poller: LeaderPoller = request.param()
    yield poller
    poller.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def numbers(poller: LeaderPoller, seconds: float | None = None) -> list[int]:
    """What is ready to be read."""
    return [number for number, _ in poller.poll(seconds)]


class Readers:
    """Threads that wait at a poller; each takes one byte when it is let in, and opens the poller or not."""

    def __init__(self, poller: LeaderPoller, reader: int, count: int, opens: Callable[[], bool]) -> None:
        self.poller, self.reader, self.opens = poller, reader, opens
        self.inside = threading.Lock()
        self.taken: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self.faults: list[str] = []
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def _run(self, index: int) -> None:
        while self.poller.wait_for_lead():
            if not self.inside.acquire(blocking=False):
                self.faults.append("two are in")
                return
            byte = b""
            while not byte:
                if self.reader in numbers(self.poller):
                    byte = os.read(self.reader, 1)
            over = byte == b"."
            self.inside.release()
            self.taken.put((index, byte))
            if over:
                self.poller.close()
            elif self.opens():
                self.poller.promote(at_once=False)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        assert self.faults == []


def test_each_message_is_read_once_and_all_leave_in_the_end(
    poller: LeaderPoller, pipe: tuple[int, int]
) -> None:
    reader, writer = pipe
    poller.register(reader, select.POLLIN)
    readers = Readers(poller, reader, 4, lambda: True)
    poller.promote(at_once=False)
    sent = bytes(range(65, 91)) * 20 + b"."
    for byte in sent:
        os.write(writer, bytes([byte]))
    taken = b"".join(readers.taken.get(timeout=WAIT)[1] for _ in sent)
    assert taken == sent
    readers.join()
    assert not poller.wait_for_lead()


def test_no_follower_is_woken_before_the_leader_promotes(poller: LeaderPoller, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    poller.register(reader, select.POLLIN)
    readers = Readers(poller, reader, 2, lambda: False)
    poller.promote(at_once=False)
    os.write(writer, b"ab")
    assert readers.taken.get(timeout=WAIT)[1] == b"a"
    assert not readers.inside.locked()
    assert readers.taken.empty()
    poller.promote(at_once=False)
    assert readers.taken.get(timeout=WAIT)[1] == b"b"
    poller.promote(at_once=False)
    os.write(writer, b".")
    readers.join()


def test_with_something_read_already_one_is_let_in_at_once(
    poller: LeaderPoller, pipe: tuple[int, int]
) -> None:
    poller.register(pipe[0], select.POLLIN)
    came = threading.Event()
    thread = threading.Thread(target=lambda: poller.wait_for_lead() and came.set())
    thread.start()
    poller.promote(at_once=True)
    assert came.wait(WAIT)
    thread.join(WAIT)
    if isinstance(poller, EpollLeaderPoller):
        assert poller.poll(0.0) == []  # the bell that let it in is nobody's message


def test_try_lead_makes_one_thread_the_leader(poller: LeaderPoller, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    poller.register(reader, select.POLLIN)
    assert not poller.try_lead()  # shut at first: whoever opens it is in
    poller.promote(at_once=False)
    assert poller.try_lead()
    assert not poller.try_lead()
    readers = Readers(poller, reader, 2, lambda: False)
    os.write(writer, b"ab")
    assert numbers(poller, 0.0) == [reader]
    assert os.read(reader, 1) == b"a"
    assert readers.taken.empty()
    poller.promote(at_once=False)
    assert readers.taken.get(timeout=WAIT)[1] == b"b"
    assert not poller.try_lead()  # whoever was let in has not opened it again
    poller.promote(at_once=False)
    os.write(writer, b".")
    readers.join()
    assert not poller.try_lead()


def test_taking_and_waiting_by_turns_loses_nothing(poller: LeaderPoller, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    poller.register(reader, select.POLLIN)
    inside = threading.Lock()
    taken: SimpleQueue[bytes] = SimpleQueue()

    def run() -> None:
        while poller.try_lead() or poller.wait_for_lead():
            assert inside.acquire(blocking=False)
            byte = b""
            while not byte:
                if reader in numbers(poller):
                    byte = os.read(reader, 1)
            inside.release()
            taken.put(byte)
            poller.close() if byte == b"." else poller.promote(at_once=False)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    poller.promote(at_once=False)
    sent = bytes(range(65, 91)) * 40 + b"."
    for byte in sent:
        os.write(writer, bytes([byte]))
    assert b"".join(taken.get(timeout=WAIT) for _ in sent) == sent
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


def test_an_unregistered_descriptor_wakes_no_follower(poller: LeaderPoller, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    poller.register(reader, select.POLLIN)
    os.write(writer, b"x")
    assert numbers(poller, 0.0) == [reader]
    poller.unregister(reader)
    assert poller.poll(0.0) == []


@on_linux
def test_closing_wakes_all_followers_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for count in (0, 3):
        poller = EpollLeaderPoller()
        threads = [threading.Thread(target=poller.wait_for_lead) for _ in range(count)]
        for thread in threads:
            thread.start()
        poller.close()
        poller.close()
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Makes Python switch between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_followers_that_come_after_the_end_return(poller: LeaderPoller, switching_often: None) -> None:
    """Several at once: each finds that others are about to return, and must not wake them."""
    poller.close()
    returned: SimpleQueue[bool] = SimpleQueue()
    threads = [
        threading.Thread(target=lambda: [returned.put(poller.wait_for_lead()) for _ in range(5000)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert [returned.get_nowait() for _ in range(returned.qsize())] == [False] * 40_000


@on_linux
def test_epoll_is_used_where_there_is_one() -> None:
    poller = make_leader_poller()
    assert isinstance(poller, EpollLeaderPoller)
    poller.close()
