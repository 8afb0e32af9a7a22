"""The gate lets in one thread at a time, when there is something to read, and all when it is over."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from zmqgrad.transport.gate import EpollGate, Gate, PlainGate, make_gate
from zmqgrad.transport.looking import Eyes

WAIT = 20.0

on_linux = pytest.mark.skipif(not hasattr(select, "epoll"), reason="needs epoll")


def looking_gate() -> Gate:
    return EpollGate(Eyes())


@pytest.fixture(
    params=[pytest.param(EpollGate, marks=on_linux), pytest.param(looking_gate, marks=on_linux), PlainGate]
)
def gate(request: pytest.FixtureRequest) -> Iterator[Gate]:
    gate: Gate = request.param()
    yield gate
    gate.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def numbers(gate: Gate, seconds: float | None = None) -> list[int]:
    """What is ready to be read."""
    return [number for number, _ in gate.poll(seconds)]


class Readers:
    """Threads that wait at a gate; each takes one byte when it is let in, and opens the gate or not."""

    def __init__(self, gate: Gate, reader: int, count: int, opens: Callable[[], bool]) -> None:
        self.gate, self.reader, self.opens = gate, reader, opens
        self.inside = threading.Lock()
        self.taken: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self.faults: list[str] = []
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def _run(self, index: int) -> None:
        while self.gate.wait():
            if not self.inside.acquire(blocking=False):
                self.faults.append("two are in")
                return
            byte = b""
            while not byte:
                if self.reader in numbers(self.gate):
                    byte = os.read(self.reader, 1)
            over = byte == b"."
            self.inside.release()
            self.taken.put((index, byte))
            if over:
                self.gate.close()
            elif self.opens():
                self.gate.open(at_once=False)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        assert self.faults == []


def test_each_message_is_read_once_and_all_leave_in_the_end(gate: Gate, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    gate.register(reader, select.POLLIN)
    readers = Readers(gate, reader, 4, lambda: True)
    gate.open(at_once=False)
    sent = bytes(range(65, 91)) * 20 + b"."
    for byte in sent:
        os.write(writer, bytes([byte]))
    taken = b"".join(readers.taken.get(timeout=WAIT)[1] for _ in sent)
    assert taken == sent
    readers.join()
    assert not gate.wait()


def test_nobody_is_let_in_before_the_gate_is_opened_again(gate: Gate, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    gate.register(reader, select.POLLIN)
    readers = Readers(gate, reader, 2, lambda: False)
    gate.open(at_once=False)
    os.write(writer, b"ab")
    assert readers.taken.get(timeout=WAIT)[1] == b"a"
    assert not readers.inside.locked()
    assert readers.taken.empty()
    gate.open(at_once=False)
    assert readers.taken.get(timeout=WAIT)[1] == b"b"
    gate.open(at_once=False)
    os.write(writer, b".")
    readers.join()


def test_with_something_read_already_one_is_let_in_at_once(gate: Gate, pipe: tuple[int, int]) -> None:
    gate.register(pipe[0], select.POLLIN)
    came = threading.Event()
    thread = threading.Thread(target=lambda: gate.wait() and came.set())
    thread.start()
    gate.open(at_once=True)
    assert came.wait(WAIT)
    thread.join(WAIT)
    if isinstance(gate, EpollGate):
        assert gate.poll(0.0) == []  # the bell that let it in is nobody's message


def test_who_takes_the_gate_is_in_and_nobody_else(gate: Gate, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    gate.register(reader, select.POLLIN)
    assert not gate.take()  # shut at first: whoever opens it is in
    gate.open(at_once=False)
    assert gate.take()
    assert not gate.take()
    readers = Readers(gate, reader, 2, lambda: False)
    os.write(writer, b"ab")
    assert numbers(gate, 0.0) == [reader]
    assert os.read(reader, 1) == b"a"
    assert readers.taken.empty()
    gate.open(at_once=False)
    assert readers.taken.get(timeout=WAIT)[1] == b"b"
    assert not gate.take()  # whoever was let in has not opened it again
    gate.open(at_once=False)
    os.write(writer, b".")
    readers.join()
    assert not gate.take()


def test_taking_and_waiting_by_turns_loses_nothing(gate: Gate, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    gate.register(reader, select.POLLIN)
    inside = threading.Lock()
    taken: SimpleQueue[bytes] = SimpleQueue()

    def run() -> None:
        while gate.take() or gate.wait():
            assert inside.acquire(blocking=False)
            byte = b""
            while not byte:
                if reader in numbers(gate):
                    byte = os.read(reader, 1)
            inside.release()
            taken.put(byte)
            gate.close() if byte == b"." else gate.open(at_once=False)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.open(at_once=False)
    sent = bytes(range(65, 91)) * 40 + b"."
    for byte in sent:
        os.write(writer, bytes([byte]))
    assert b"".join(taken.get(timeout=WAIT) for _ in sent) == sent
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


def test_what_is_unregistered_lets_nobody_in(gate: Gate, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    gate.register(reader, select.POLLIN)
    os.write(writer, b"x")
    assert numbers(gate, 0.0) == [reader]
    gate.unregister(reader)
    assert gate.poll(0.0) == []


@on_linux
def test_closing_leaves_no_descriptor_whoever_waits() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for count in (0, 3):
        gate = EpollGate()
        threads = [threading.Thread(target=gate.wait) for _ in range(count)]
        for thread in threads:
            thread.start()
        gate.close()
        gate.close()
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) == before


@on_linux
def test_epoll_is_used_where_there_is_one() -> None:
    gate = make_gate()
    assert isinstance(gate, EpollGate)
    gate.close()
