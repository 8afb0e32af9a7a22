"""Large memory is copied by two threads, and is all there when the copy returns, whatever happens."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

import pytest

from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.shared_memory import copier as module
from zmqgrad.transport.shared_memory.copier import Copier

SMALL = 1 << 12


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copier]:
    monkeypatch.setattr(module, "MIN_SPLIT_BYTES", SMALL)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    made = Copier("test")
    yield made
    made.close()
    made.close()
    assert made.join(Deadline.after(20)) == []


def copied(copier: Copier, data: bytes | bytearray) -> bytes:
    room = bytearray(len(data))
    to = (ctypes.c_char * len(room)).from_buffer(room)
    source = data if isinstance(data, bytes) else (ctypes.c_char * len(data)).from_buffer(data)
    copier.copy(ctypes.addressof(to), source, len(data))
    return bytes(room)


@pytest.mark.parametrize("size", [1, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL + 63, 1 << 20])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_every_byte_arrives(copier: Copier, size: int, kind: type) -> None:
    data = kind(random.Random(size).randbytes(size))
    assert copied(copier, data) == data
    assert copier.split_copies == (size >= SMALL and kind is bytearray)


def test_many_threads_copy_at_once(copier: Copier) -> None:
    faults: list[int] = []

    def work(seed: int) -> None:
        data = bytearray(random.Random(seed).randbytes(SMALL + 64 * seed))
        faults.extend(seed for _ in range(50) if copied(copier, data) != data)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert faults == []


def test_a_copy_that_is_interrupted_returns_only_when_both_halves_are_done(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    memmove = ctypes.memmove

    def interrupted(to: int, source: int, size: int) -> None:
        if threading.current_thread() is threading.main_thread():
            go_on.set()
            raise KeyboardInterrupt
        assert go_on.wait(20)
        memmove(to, source, size)

    monkeypatch.setattr(module.ctypes, "memmove", interrupted)
    data, room = bytearray(b"x" * 2 * SMALL), bytearray(2 * SMALL)
    source, to = ((ctypes.c_char * len(buffer)).from_buffer(buffer) for buffer in (data, room))
    with pytest.raises(KeyboardInterrupt):
        copier.copy(ctypes.addressof(to), source, len(data))
    assert room[SMALL:] == data[SMALL:]


def test_after_the_end_and_with_one_core_it_copies_alone(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier.close()
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    data = bytearray(range(256)) * 64
    for alone in (copier, Copier("single")):
        assert copied(alone, data) == data
        assert alone.split_copies == 0
        assert alone.join(Deadline.after(20)) == []


def test_an_interrupt_as_the_other_half_ends_is_raised() -> None:
    """A handler runs when the lock has just been acquired: nobody releases it a second time."""
    ended: list[bool] = []

    class Interrupted:
        def acquire(self) -> None:
            assert not ended, "it would wait for ever"
            ended.append(True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module._wait(Interrupted(), ended)  # type: ignore[arg-type]
