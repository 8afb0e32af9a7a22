"""Two transports side by side: which path frames take, and what malicious peers can do."""

from __future__ import annotations

import fcntl
import gc
import itertools
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.messages import messages_of
from tests.support.signals import called_within, ends, interrupted_in_c
from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.service_thread import TimerHandle
from zmqgrad.transport.base import Inbound
from zmqgrad.transport.shared_memory import forks
from zmqgrad.transport.shared_memory.arena import LOST, OWN
from zmqgrad.transport.shared_memory.packing import OWN_BUFFER_BYTES, PreparedFrames
from zmqgrad.transport.shared_memory.segment import Segment, supported
from zmqgrad.transport.shared_memory.settings import OFF, ArenaSettings
from zmqgrad.transport.shared_memory.transport import SharedMemoryTransport
from zmqgrad.wire.codec import decode
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.lazy_frame import LazyFrame
from zmqgrad.wire.messages import ArenaOffer, FrameBuffer, FrameSlice, Manifest, Message, Release

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory")

MB = 1 << 20
SETTINGS = ArenaSettings(16 * MB, threshold=1000)


class Side:
    """A transport whose messages reach the other side at once; ``jobs`` wait until they are run."""

    def __init__(self, worker_id: int, settings: ArenaSettings = SETTINGS) -> None:
        self.id = worker_id
        self.other: Side | None = None
        self.said: list[Message] = []
        self.jobs: list[TimerHandle] = []
        self.masks: dict[int, int] = {}  # of the descriptors that are watched
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.offered: set[int] = set()
        """The segments that the other side has, as a connection to it knows."""
        self.transport = SharedMemoryTransport(f"worker{worker_id}", settings, self.notify)
        self.transport.sender = (worker_id, 10 + worker_id)
        self.transport.start(self)  # type: ignore[arg-type]

    def call_later(self, seconds: float, job: Callable[[], None]) -> TimerHandle:
        self.jobs.append(TimerHandle(job))
        return self.jobs[-1]

    def call_soon(self, job: Callable[[], None]) -> None:
        job()

    def watch(self, fd: int, mask: int, handler: Callable[[int], None]) -> None:
        self.masks[fd], self.handlers[fd] = mask, handler

    def rewatch(self, fd: int, mask: int) -> None:
        self.masks[fd] = mask

    def unwatch(self, fd: int) -> None:
        self.masks.pop(fd, None)

    def scheduled(self) -> list[TimerHandle]:
        """The jobs, once the descriptors that are watched were handled."""
        while ready := select.select([fd for fd, mask in self.masks.items() if mask], [], [], 0)[0]:
            self.handlers[ready[0]](self.masks[ready[0]])
        return self.jobs

    def run_jobs(self) -> None:
        handles, self.jobs = self.scheduled(), []
        for handle in handles:
            job, handle.job = handle.job, None
            assert job is not None
            job()

    def notify(self, peer: int, message: Message) -> None:
        """As a mailbox does it."""
        if self.other is None:
            return
        self.said.append(message)
        prepared = self.transport.prepare(peer, True, [])
        if prepared.manifest is not None:
            self.other.transport.open(self.id, through_bytes(prepared.manifest), [])

    def send_offers(self, prepared: PreparedFrames) -> None:
        """Send the segments that the other side does not have, as a connection does."""
        assert self.other is not None
        for offer in prepared.offers:
            if offer.segment not in self.offered:
                self.offered.add(offer.segment)
                described, fd = offer.make()
                envelope, message = decode(described)
                assert (envelope.source, envelope.incarnation) == (self.id, 10 + self.id)
                assert isinstance(message, ArenaOffer)
                self.said.append(message)
                self.other.transport.on_offer(self.id, message, fd)

    def prepare(self, frames: Sequence[Any]) -> PreparedFrames:
        """Prepare ``frames``, for which the other side has the segments."""
        assert self.other is not None
        prepared = self.transport.prepare(self.other.id, True, frames)
        self.send_offers(prepared)
        return prepared

    def transfer(self, frames: Sequence[Any], local: bool = True) -> tuple[PreparedFrames, Sequence[Any]]:
        """Send ``frames``; how they went, and what the other side sees."""
        assert self.other is not None
        prepared = self.transport.prepare(self.other.id, local, frames)
        self.send_offers(prepared)
        if prepared.manifest is None:
            return prepared, prepared.frames
        got = self.other.transport.open(self.id, through_bytes(prepared.manifest), copies(prepared.frames))
        return prepared, got

    def lose(self, peer: int) -> None:
        """The link to ``peer`` has ended."""
        self.transport.forget(peer)
        self.offered.clear()

    @property
    def leased(self) -> int:
        found: int = self.transport.statistics()["blocks_leased"]
        return found


def through_bytes(manifest: Manifest) -> Manifest:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)


def copies(frames: Sequence[Any]) -> list[bytearray]:
    return [bytearray(f) for f in frames]


def uses_arena(prepared: PreparedFrames) -> bool:
    return prepared.manifest is not None and any(p.segment for p in prepared.manifest.buffers)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    yield from pair()


def pair(settings: ArenaSettings = SETTINGS) -> Iterator[tuple[Side, Side]]:
    a, b = Side(0, settings), Side(1, settings)
    a.other, b.other = b, a
    try:
        yield a, b
    finally:
        a.transport.close()
        b.transport.close()


# ---- through the arena ----------------------------------------------------------------------------------


def test_the_first_message_uses_the_arena_and_brings_its_segment(sides: tuple[Side, Side]) -> None:
    a, b = sides
    frame = os.urandom(2000)
    for _ in range(3):
        prepared, got = a.transfer([frame])
        assert uses_arena(prepared)
        assert prepared.frames == ()
        assert list(map(bytes, got)) == [frame]
    assert [type(m) for m in a.said] == [ArenaOffer]
    assert b.transport.statistics()["segments_mapped"] == 1
    assert a.transport.statistics()["fallbacks"] == {}


def test_a_segment_that_arrives_by_several_connections_is_mapped_once(sides: tuple[Side, Side]) -> None:
    a, b = sides
    _, (kept,) = a.transfer([b"x" * 2000])
    before = sorted(os.listdir("/proc/self/fd"))
    a.offered.clear()
    _, (more,) = a.transfer([b"y" * 2000])
    assert b.transport.statistics()["segments_mapped"] == 1
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert (bytes(kept), bytes(more)) == (b"x" * 2000, b"y" * 2000)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_signal_handler_may_read_a_reply_while_its_thread_maps_a_segment() -> None:
    """By another connection, which brings the same segment. What it has opened is pinned for forks, too."""

    def at_every_moment() -> None:
        for number in itertools.count(1):
            for a, b in pair():
                got: list[Any] = []
                prepared = [a.transport.prepare(1, True, [bytes(2000)]) for _ in range(2)]

                def receive() -> None:
                    message = prepared.pop()  # noqa: B023
                    a.offered.clear()  # noqa: B023
                    a.send_offers(message)  # noqa: B023
                    assert message.manifest is not None
                    got.extend(b.transport.open(0, message.manifest, []))  # noqa: B023

                called = called_within(receive, receive, number)
                assert len(got) == 1 + called
                child = os.fork()
                if child == 0:
                    os.kill(os.getpid(), signal.SIGSTOP)
                assert b.transport.statistics()["blocks_pinned"] == len(got)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                forks.unpin_ended()
            if not called:
                return

    assert ends(at_every_moment)


def test_frames_for_several_peers_are_copied_once(sides: tuple[Side, Side]) -> None:
    a, b = sides
    frame = bytearray(os.urandom(5000))
    sent = [bytes(frame), b"small", b"x" * OWN_BUFFER_BYTES]
    shared = a.transport.share([frame, *sent[1:]])
    frame[:] = bytes(5000)  # a second copy would have this
    (one, first), (_, second), (other, far) = (
        a.transfer(shared),
        a.transfer(shared),
        a.transfer(shared, local=False),
    )
    assert uses_arena(one)
    assert not uses_arena(other)
    assert list(map(bytes, far)) == list(map(bytes, second)) == sent
    assert a.leased == 2  # small frames have one block
    del shared, far, other, one
    first[0][:4] = b"mine"
    assert list(map(bytes, second)) == sent
    assert bytes(first[0]) == b"mine" + sent[0][4:]
    del first
    b.run_jobs()
    a.run_jobs()
    assert a.leased == 2
    assert list(map(bytes, second)) == sent
    del second
    b.run_jobs()
    assert a.leased == 0


def test_frames_for_several_peers_of_which_nothing_is_copied(sides: tuple[Side, Side]) -> None:
    """The arena has no room, or a frame cannot be read: nothing stays leased, and releases are not lost."""
    a, b = sides
    too_large, small = [bytes(100_000), bytes(2 * SETTINGS.limit)], [b"small"]
    assert a.transport.share(too_large) is too_large
    assert a.transport.share(small) is small
    assert not any(uses_arena(a.transfer(too_large)[0]) for _ in range(2))
    _, kept = b.transfer([bytes(5000)])
    del kept

    class Broken(LazyFrame):
        def __len__(self) -> int:
            return 5000

        def write_to(self, buffer: memoryview) -> None:
            raise KeyboardInterrupt

        def materialize(self) -> bytes:
            raise AssertionError

    with pytest.raises(KeyboardInterrupt):
        a.transport.share([Broken()])
    with pytest.raises(KeyboardInterrupt):
        a.transfer([Broken()])
    a.run_jobs()
    assert a.leased == 0
    a.transfer([bytes(5000)])
    assert b.leased == 0


class NoMemory(LazyFrame):
    """Cannot be packed."""

    def __len__(self) -> int:
        return 500

    def write_to(self, buffer: memoryview) -> None:
        raise MemoryError

    def materialize(self) -> bytes:
        raise MemoryError


def test_a_message_that_cannot_be_packed_loses_no_releases(sides: tuple[Side, Side]) -> None:
    """1. A block is to be released with the next message. 2. There is no memory for it. 3. It is not lost."""
    a, b = sides
    shared = a.transport.share([bytes(5000)])
    for frames in ([NoMemory()], [NoMemory(), *shared], [*shared, NoMemory()], [*shared, None]):
        _, kept = b.transfer([bytes(5000)])
        del kept
        assert b.leased == 1
        with pytest.raises((MemoryError, TypeError)):
            a.transfer(frames)
        a.transfer([])
        assert b.leased == 0
    del shared, frames
    a.run_jobs()
    assert a.leased == 0


@given(
    frames=st.lists(
        st.integers(0, 300)
        | st.sampled_from([OWN_BUFFER_BYTES - 1, OWN_BUFFER_BYTES, OWN_BUFFER_BYTES + 1, 70_000]),
        max_size=12,
    )
)
def test_frames_of_any_size_arrive_whole(frames: list[int]) -> None:
    sent = [os.urandom(size) for size in frames]
    for a, b in pair():
        for local in (True, False):
            prepared, got = a.transfer(sent, local)
            assert list(map(bytes, got)) == sent
            assert uses_arena(prepared) == (local and sum(frames) >= SETTINGS.threshold)
        del got
        assert b.transport.statistics()["blocks_in_use"] == 0


def test_a_received_frame_belongs_to_the_reader(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    _, (one,) = a.transfer([b"a" * 2000])
    one[:5] = b"mine!"
    _, (two,) = a.transfer([b"b" * 2000])
    assert bytes(one) == b"mine!" + b"a" * 1995
    assert bytes(two) == b"b" * 2000


def test_a_block_is_released_with_the_next_message(sides: tuple[Side, Side]) -> None:
    a, b = sides
    _, got = a.transfer([bytes(2000), bytes(OWN_BUFFER_BYTES)])
    assert a.leased == 2
    assert not b.transport.has_releases(0)
    one = got[0][5:10]
    del got
    gc.collect()
    assert b.transport.has_releases(0)
    b.transfer([])
    assert a.leased == 1  # of the other, something is left
    del one
    b.transfer([bytes(2000)])
    assert a.leased == 0


@pytest.mark.parametrize("sizes", [[2000], [2000, 3000], [OWN_BUFFER_BYTES, 100]])
def test_blocks_of_a_dropped_message_are_released_with_the_reply(
    sizes: list[int], sides: tuple[Side, Side]
) -> None:
    a, b = sides
    _, frames = a.transfer([bytes(size) for size in sizes])
    assert not b.transport.has_releases(0)
    Inbound(Envelope(0, 0, 0, 0), Release(), frames, 0).release_frames()
    assert b.transport.has_releases(0)
    b.transfer([])
    assert a.leased == 0


def test_a_block_is_released_in_time_without_other_messages(sides: tuple[Side, Side]) -> None:
    a, b = sides
    for _ in range(3):
        a.transfer([bytes(2000)])
    assert a.leased == 3
    assert len(b.scheduled()) == 1  # one timer, however many
    b.run_jobs()
    assert [m for m in b.said if isinstance(m, Release)] == [Release()]
    assert a.leased == 0
    a.transfer([bytes(2000)])
    assert len(b.scheduled()) == 1  # and it is set anew


@pytest.mark.parametrize("whose", ["received", "own"])
def test_a_signal_is_not_lost_where_a_block_is_dropped(whose: str, sides: tuple[Side, Side]) -> None:
    """And the block is released: it stayed for ever."""
    a, _ = sides
    kept: list[Any] = [
        a.transfer([bytes(2000)]) if whose == "received" else a.transport.allocate(2000, Deadline.after(0))
    ]
    interrupted_in_c(kept.clear)
    assert not kept
    for side in sides:
        side.run_jobs()
    assert a.leased == 0


def test_rollback_frees_the_blocks_of_an_unsent_message(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.transfer([bytes(2000)])
    prepared = b.transport.prepare(0, True, [bytes(2000)])
    assert prepared.manifest is not None
    assert len(prepared.manifest.released) == 1
    b.transport.rollback(0, prepared)
    assert b.leased == 0
    assert b.transport.has_releases(0)
    b.transport.rollback(0, PreparedFrames(None, ()))


# ---- through frames -------------------------------------------------------------------------------------


def test_off_and_other_hosts_and_small_messages_use_frames() -> None:
    for a, b in pair(OFF):
        prepared, _ = a.transfer([bytes(MB)])
        assert prepared == PreparedFrames(None, [bytes(MB)])
        assert (a.said, b.said) == ([], [])
        assert a.transport.statistics()["fallbacks"] == {"off": 1}
    for a, _ in pair():
        a.transfer([bytes(MB)], local=False)
        a.transfer([bytes(999)])
        assert a.said == []
        assert a.transport.statistics()["fallbacks"] == {"other host": 1}


def test_statistics_have_the_same_names_where_the_arena_is_off() -> None:
    on, off = Side(0), Side(1, OFF)
    assert on.transport.statistics().keys() == off.transport.statistics().keys()
    assert (off.transport.statistics()["limit"], off.leased) == (0, 0)
    for side in (on, off):
        side.transport.close()


def test_a_disabled_arena_still_maps_blocks_of_peers() -> None:
    a, b = Side(0), Side(1, OFF)
    a.other, b.other = b, a
    prepared, got = a.transfer([b"x" * 2000])
    assert uses_arena(prepared)
    assert bytes(got[0]) == b"x" * 2000
    del got
    b.run_jobs()
    assert a.leased == 0
    a.transport.close()
    b.transport.close()


def test_a_full_arena_falls_back_and_recovers(sides: tuple[Side, Side]) -> None:
    a, b = sides
    _, kept = a.transfer([bytes(10 * MB)])
    prepared, got = a.transfer([b"x" * (10 * MB)])
    assert not uses_arena(prepared)
    assert bytes(got[0]) == b"x" * (10 * MB)
    assert a.transport.fallbacks["full"] == 1
    assert a.leased == 1
    del kept
    b.run_jobs()
    assert uses_arena(a.transfer([bytes(10 * MB)])[0])


def test_a_message_beyond_the_limit_uses_frames(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    for _ in range(3):
        assert not uses_arena(a.transfer([bytes(17 * MB)])[0])
    assert a.transport.fallbacks["full"] == 3
    assert a.said == []


def test_a_system_without_memory_falls_back(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    a, _ = sides
    monkeypatch.setattr(os, "memfd_create", refuse)
    for _ in range(2):
        assert not uses_arena(a.transfer([bytes(2000)])[0])
    assert a.transport.fallbacks == {"no memory": 2}


def test_blocks_of_a_segment_that_cannot_be_mapped_are_copied(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = sides
    frames = [os.urandom(2000), os.urandom(OWN_BUFFER_BYTES)]
    manifest = offer_unmapped(a, frames, monkeypatch)
    got = b.transport.open(0, manifest, [])
    assert list(map(bytes, got)) == frames
    del got
    b.run_jobs()
    assert a.leased == 0


def test_blocks_for_which_there_is_no_memory_are_released(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are the others of the message."""
    a, b = sides
    sizes = OWN_BUFFER_BYTES, 2 * OWN_BUFFER_BYTES, 3 * OWN_BUFFER_BYTES
    manifest = offer_unmapped(a, [bytes(size) for size in sizes], monkeypatch)
    read = os.preadv

    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        if len(buffers[0]) == sizes[1]:
            raise MemoryError
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(MemoryError, match=f"no memory for {sizes[1]} bytes that worker 0 has sent"):
        b.transport.open(0, manifest, [])
    gc.collect()
    b.run_jobs()
    assert a.leased == 0


def offer_unmapped(a: Side, frames: list[bytes], monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """Prepares ``frames``, whose segment the other side cannot map."""
    prepared = a.transport.prepare(1, True, frames)
    assert prepared.manifest is not None
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", Refused)
        a.send_offers(prepared)
    return through_bytes(prepared.manifest)


def test_a_segment_of_another_size_is_an_error(sides: tuple[Side, Side]) -> None:
    """What follows cannot be read; the link ends."""
    a, b = sides
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError, match="cannot be mapped"):
        b.transport.on_offer(0, ArenaOffer(1, 2 * MB), sealed_memory(MB))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert uses_arena(a.transfer([bytes(2000)])[0])


class Refused:
    """In the place of mappings."""

    def __init__(self, *_: object) -> None:
        raise OSError(12, "Cannot allocate memory")


def sealed_memory(size: int) -> int:
    """A descriptor of memory that may be mapped."""
    fd = os.memfd_create("zmqgrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def test_an_unreachable_peer_keeps_nothing_leased() -> None:
    a = Side(0)
    prepared = a.transport.prepare(1, True, [bytes(2000)])
    assert uses_arena(prepared)
    a.transport.rollback(1, prepared)
    assert a.leased == 0
    a.transport.close()


# ---- ends -----------------------------------------------------------------------------------------------


def test_blocks_of_a_lost_peer_are_freed(sides: tuple[Side, Side]) -> None:
    a, b = sides
    _, got = a.transfer([bytes(2000)])
    b.lose(0)  # its process is gone, and with it
    del got
    assert a.leased == 1
    a.lose(1)
    assert a.leased == 0


def test_a_peer_that_left_and_keeps_a_tensor_keeps_its_block(sides: tuple[Side, Side]) -> None:
    a, b = sides
    _, got = a.transfer([b"x" * 2000])
    b.transport.close()
    a.transport.forget(1)
    assert a.leased == 1
    assert bytes(got[0]) == b"x" * 2000
    del got
    a.transport._release()
    assert a.leased == 0


def test_a_repeated_loss_of_a_peer_frees_no_block_that_is_mapped() -> None:
    """As when a number were used again: what the new owner of the number maps stays as it is."""
    a, former, new = Side(0), Side(1), Side(1)
    a.other, former.other, new.other = former, a, a
    _, old_blocks = a.transfer([b"o" * 2000])
    a.lose(1)
    a.other = new
    _, (mine,) = a.transfer([b"n" * 2000])
    a.lose(1)  # late
    del old_blocks
    former.transport.close()
    a.transport._release()
    assert a.leased == 1  # the new one's alone
    for _ in range(20):
        a.transfer([b"x" * 2000])
    assert bytes(mine) == b"n" * 2000
    for side in (a, new):
        side.transport.close()


def test_a_received_frame_outlives_both_transports(sides: tuple[Side, Side]) -> None:
    a, b = sides
    _, (kept,) = a.transfer([b"x" * 2000])
    a.transport.close()
    b.transport.close()
    kept[0:1] = b"y"
    assert bytes(kept) == b"y" + b"x" * 1999
    b.jobs.clear()
    del kept
    assert not b.scheduled()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_sees_what_it_had(sides: tuple[Side, Side]) -> None:
    """1. A process with a block forks. 2. The parent lets go of it. 3. The child does not see it change."""
    a, b = sides
    _, got = a.transfer([b"x" * 2000])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0 if bytes(got[0]) == b"x" * 2000 else 1)
    del got
    b.run_jobs()
    assert a.leased == 1
    a.transfer([b"y" * 2000])
    os.write(write, b".")
    assert b.transport.statistics()["blocks_pinned"] == 1
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    b.run_jobs()  # the end of the child is enough: no other block comes or goes
    assert (b.transport.statistics()["blocks_pinned"], a.leased) == (0, 0)
    os.close(read)
    os.close(write)


class OtherThread:
    """Does something, as another thread would, each time the blocks in use are being pinned for a fork."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = list(steps)
        forks.watch(self)

    def pin(self, fork: forks.Fork) -> bool:
        if self.steps:
            self.steps.pop(0)()
        return False

    def unpin(self, fork: forks.Fork) -> None: ...


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("is_first", [True, False])
def test_a_fork_sees_what_another_thread_had_just_opened(is_first: bool, sides: tuple[Side, Side]) -> None:
    """Also if that has dropped it before the thread that forks goes on."""
    a, b = sides
    got: list[Any] = []
    threads = [OtherThread(lambda: None, got.clear)]
    if not is_first:
        a.transfer([bytes(2000)])
    threads.append(OtherThread(lambda: got.extend(a.transfer([b"x" * 2000])[1])))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0 if bytes(got[0]) == b"x" * 2000 else 1)
    assert not got
    b.run_jobs()
    more = [a.transfer([b"y" * 2000]) for _ in range(2)]
    os.write(write, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    more.clear()
    b.run_jobs()
    b.run_jobs()
    assert (b.transport.statistics()["blocks_pinned"], a.leased) == (0, 0)
    os.close(read)
    os.close(write)


def test_blocks_are_counted_while_another_thread_forks(sides: tuple[Side, Side]) -> None:
    """At any line."""
    a, b = sides
    _, got = a.transfer([bytes(2000)])
    made: list[forks.Fork] = []

    def fork(*_: object) -> Any:
        if len(made) < 200:
            made.append(forks.Fork())
            made[-1].pin()
        return fork

    fork()
    before = sys.gettrace()
    sys.settrace(fork)
    try:
        counts = b.transport.statistics()
    finally:
        sys.settrace(before)
    assert (counts["blocks_pinned"], len(got)) == (1, 1)
    for each in made:
        each.close(1)
        each.unpin()


def fork_within_a_fork() -> None:
    """A signal handler forks in the thread that is about to fork."""

    def fork() -> None:
        if os.fork() == 0:
            os._exit(0)
        os.wait()

    for a, b in pair():
        _, got = a.transfer([bytes(2000)])
        handler = OtherThread(fork)
        fork()
        assert not handler.steps
        del got
        for _ in range(2):
            _, more = a.transfer([bytes(2000)])
            del more
            b.run_jobs()
        assert (b.transport.statistics()["blocks_pinned"], a.leased) == (0, 0)


FORK_WITHIN_A_FORK = """
import concurrent.futures.thread  # first: each fork holds a lock of it, not reentrant, from its hook on
from tests.transport.shared_memory.test_transport import fork_within_a_fork
fork_within_a_fork()
"""


def test_a_fork_within_a_fork_keeps_no_block_for_ever() -> None:
    subprocess.run([sys.executable, "-c", FORK_WITHIN_A_FORK], check=True, timeout=120)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_keeps_nothing_mapped_for_a_closed_transport(sides: tuple[Side, Side]) -> None:
    """Nothing can be released any more, so the parent needs no copy of what the child sees."""
    a, b = sides
    _, got = a.transfer([bytes(2000)])
    read, write = os.pipe()
    children = []
    for close in (b.transport.close, lambda: None):  # pinned before, and never
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        children.append(child)
        close()
    array = weakref.ref(got[0].obj)
    del got
    gc.collect()
    assert array() is None
    os.close(write)
    for child in children:
        os.waitpid(child, 0)
    os.close(read)
    forks.unpin_ended()
    assert forks._living == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_block_seen_by_several_forks_is_released_after_the_last(sides: tuple[Side, Side]) -> None:
    """One block that two forks and a fork of a fork look at, and one that the second alone sees."""
    a, b = sides
    a.transfer([bytes(2000)])
    b.run_jobs()
    before = sorted(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    read_second, write_second = os.pipe()

    def fork(again: bool) -> int:
        child = os.fork()
        if child == 0:
            if not again:
                os.read(read_second, 1)
            elif os.fork() == 0:
                os.read(read, 1)
            os._exit(0)
        return child

    _, got = a.transfer([b"x" * 2000])
    first = fork(True)
    _, more = a.transfer([b"y" * 2000])
    second = fork(False)
    del got, more
    b.run_jobs()
    assert a.leased == 2
    os.write(write_second, b".")
    os.waitpid(second, 0)
    b.run_jobs()
    assert a.leased == 1
    os.waitpid(first, 0)
    b.run_jobs()
    assert a.leased == 1  # its own fork lives
    os.write(write, b".")
    (living,) = forks._living
    assert living._pipe is not None
    eof = select.poll()
    eof.register(living._pipe[0], select.POLLHUP)
    assert eof.poll(20_000)
    b.run_jobs()
    assert (b.transport.statistics()["blocks_pinned"], a.leased) == (0, 0)
    for fd in (read, write, read_second, write_second):
        os.close(fd)
    assert sorted(os.listdir("/proc/self/fd")) == before


# ---- malicious peers ------------------------------------------------------------------------------------


BIG = 2**62


def buffer(change: dict[str, int]) -> Callable[[Manifest], Manifest]:
    def corrupt(m: Manifest) -> Manifest:
        changed = msgspec.structs.replace(m.buffers[0], **change)
        return msgspec.structs.replace(m, buffers=(changed, *m.buffers[1:]))

    return corrupt


def frame(change: dict[str, int]) -> Callable[[Manifest], Manifest]:
    def corrupt(m: Manifest) -> Manifest:
        changed = msgspec.structs.replace(m.slices[0], **change)
        return msgspec.structs.replace(m, slices=(changed, *m.slices[1:]))

    return corrupt


@pytest.mark.parametrize(
    ("corrupt", "says"),
    [
        (buffer({"segment": 0}), "more frames than the message has"),
        (buffer({"segment": 1}), "was never sent by"),
        (buffer({"segment": 2**64 - 1}), "was never sent by"),
        (buffer({"offset": 16 * MB}), "is not within its segment"),
        (buffer({"offset": 16 * MB - 64}), "is not within its segment"),
        (buffer({"offset": 65}), "is not within its segment"),
        (buffer({"offset": BIG}), "is not within its segment"),
        (buffer({"size": 0}), "is not within its segment"),
        (buffer({"size": 16 * MB + 1}), "is not within its segment"),
        (buffer({"size": BIG}), "is not within its segment"),
        (buffer({"size": 5}), "exceeds its buffer of 5"),
        (frame({"buffer": 2}), "buffer 2 of 1"),
        (frame({"buffer": BIG}), "of 1"),
        (frame({"offset": 1}), "exceeds its buffer of"),
        (frame({"offset": BIG}), "exceeds its buffer of"),
        (frame({"size": 2001}), "exceeds its buffer of"),
        (frame({"size": BIG}), "exceeds its buffer of"),
        (lambda m: msgspec.structs.replace(m, buffers=()), "buffer 0 of 0"),
        (lambda m: msgspec.structs.replace(m, buffers=m.buffers * 2), "was received twice"),
        (
            lambda m: msgspec.structs.replace(m, buffers=(*m.buffers, FrameBuffer())),
            "more frames than the message has",
        ),
    ],
)
def test_a_corrupt_descriptor_is_refused(
    sides: tuple[Side, Side], corrupt: Callable[[Manifest], Manifest], says: str
) -> None:
    a, b = sides
    prepared = a.prepare([bytes(2000)])
    assert prepared.manifest is not None
    with pytest.raises(ProtocolError, match=says):
        b.transport.open(0, corrupt(prepared.manifest), [])
    assert b.transport.statistics()["blocks_in_use"] == 0
    got = b.transport.open(0, prepared.manifest, [])  # the good one still does
    assert bytes(got[0]) == bytes(2000)


def test_frames_that_no_manifest_refers_to_are_refused(sides: tuple[Side, Side]) -> None:
    a, b = sides
    prepared = a.prepare([bytes(2000)])
    assert prepared.manifest is not None
    with pytest.raises(ProtocolError, match="fewer than the 1 frames"):
        b.transport.open(0, prepared.manifest, [b"more"])


def test_a_block_in_use_cannot_be_received_again(sides: tuple[Side, Side]) -> None:
    a, b = sides
    prepared, got = a.transfer([bytes(2000)])
    assert prepared.manifest is not None
    with pytest.raises(ProtocolError, match="was received twice"):
        b.transport.open(0, prepared.manifest, [])
    assert bytes(got[0]) == bytes(2000)


@given(st.data())
def test_no_manifest_does_harm(data: st.DataObject) -> None:
    for a, b in pair():
        prepared = a.prepare([b"x" * 2000])
        assert prepared.manifest is not None
        segment = prepared.manifest.buffers[0].segment
        drawn = data.draw(messages_of(Manifest))
        pieces = tuple(
            msgspec.structs.replace(p, segment=data.draw(st.sampled_from([p.segment, segment, 0])))
            for p in drawn.buffers
        )
        frames = [bytearray(n) for n in data.draw(st.lists(st.integers(0, 50), max_size=3))]
        try:
            got = b.transport.open(0, Manifest(pieces, drawn.slices, drawn.released), frames)
        except ProtocolError:
            continue
        for one in got:
            bytes(one)  # readable to its end


def test_unknown_releases_are_counted_and_free_nothing(sides: tuple[Side, Side]) -> None:
    a, b = sides
    prepared, got = a.transfer([bytes(2000)])
    assert prepared.manifest is not None
    number = prepared.manifest.buffers[0].block
    a.transport.open(2, Manifest(released=(number,)), [])  # of somebody who has nothing
    a.transport.open(1, Manifest(released=(number + 5, 2**63)), [])
    assert a.leased == 1
    assert a.transport.statistics()["unknown_releases"] == 2
    del got
    assert b.scheduled()


def test_slices_may_refer_to_frames_and_to_blocks(sides: tuple[Side, Side]) -> None:
    a, b = sides
    prepared = a.prepare([b"b" * 2000])
    assert prepared.manifest is not None
    mixed = Manifest(
        (*prepared.manifest.buffers, FrameBuffer()), (FrameSlice(1, 2, 3), *prepared.manifest.slices)
    )
    got = b.transport.open(0, mixed, [b"abcdefgh"])
    assert list(map(bytes, got)) == [b"cde", b"b" * 2000]


def test_a_block_that_is_being_written_is_not_given_to_another_peer(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer may be lost while a thread copies: what it then writes would be read by the other one."""
    a, _ = sides
    write, kept = Segment.write, list[Any]()
    theirs, ours = bytes(2000), os.urandom(2000)

    def write_late(self: Segment, offset: int, data: Any, *args: Any) -> None:
        if data is theirs:
            a.lose(2)
            kept.extend(a.transfer([ours])[1])
        write(self, offset, data, *args)

    monkeypatch.setattr(Segment, "write", write_late)
    a.transport.prepare(2, True, [theirs])
    assert list(map(bytes, kept)) == [ours]
    assert a.leased == 2
    kept.extend(a.transfer([ours])[1])
    assert a.leased == 2  # that of the lost peer was freed


# ---- shared blocks --------------------------------------------------------------------------------------


def shared(a: Side, size: int = MB, fill: int = 7) -> Any:
    """A block of ``a`` that many peers may read."""
    array = a.transport.allocate(size, Deadline.after(0.0))
    assert not isinstance(array, str), array
    a.transport.write(array, 0, bytes([fill]) * size)
    return array


def test_a_shared_block_is_leased_without_a_copy_and_mapped_privately(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    array = shared(a)
    before = a.transport.statistics()["bytes_leased"]
    (one,), (other,) = a.transfer([memoryview(array)])[1], a.transfer([memoryview(array)])[1]
    assert a.transport.statistics()["bytes_leased"] == before
    one[:3] = b"abc"
    assert bytes(one[:5]) == b"abc\7\7"
    assert bytes(other[:5]) == bytes(memoryview(array).cast("B")[:5]) == b"\7" * 5
    assert a.transport.holders(array.lease) == [OWN, 1]


def test_a_shared_block_is_freed_with_its_array_and_the_last_lease(sides: tuple[Side, Side]) -> None:
    a, b = sides
    array = shared(a)
    lease = array.lease
    one, other = a.transfer([memoryview(array)])[1], a.transfer([memoryview(array)])[1]
    del array
    a.run_jobs()
    assert (a.leased, a.transport.holders(lease)) == (1, [1])
    del one
    b.run_jobs()
    assert a.leased == 1
    del other
    b.run_jobs()
    assert (a.leased, a.transport.holders(lease)) == (0, [])


def test_a_shared_block_that_was_not_sent_is_not_leased(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    array = shared(a)
    a.transport.rollback(1, a.transport.prepare(1, True, [memoryview(array)]))
    assert a.transport.holders(array.lease) == [OWN]
    del array
    a.run_jobs()
    assert a.leased == 0


def test_shared_blocks_and_other_frames_go_in_one_message(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    array = shared(a)
    got = a.transfer([b"x" * 5000, memoryview(array), bytearray(b"y" * 9)])[1]
    assert [bytes(frame) for frame in got] == [b"x" * 5000, b"\7" * MB, b"y" * 9]


def test_parts_of_a_shared_block_are_leased_with_it(sides: tuple[Side, Side]) -> None:
    a, b = sides
    array = shared(a)
    a.transport.write(array, 100, b"abc")
    view = memoryview(array).cast("B")
    got = a.transfer([view[100:200], view[:0], view[MB // 2 :], view[:103]])[1]
    assert list(map(len, got)) == [100, 0, MB // 2, 103]
    assert [bytes(got[0][:4]), bytes(got[3][99:])] == [b"abc\7", b"\7abc"]
    assert a.transport.holders(array.lease) == [OWN, 1]
    assert a.leased == 1
    del got
    b.run_jobs()
    assert a.transport.holders(array.lease) == [OWN]


def test_a_lost_reader_holds_a_shared_block_as_long_as_it_is_mapped(sides: tuple[Side, Side]) -> None:
    a, b = sides
    array = shared(a)
    lease = array.lease
    got = a.transfer([memoryview(array)])[1]
    del array
    a.lose(1)
    b.transport.close()
    a.run_jobs()
    assert a.transport.holders(lease) == [LOST]
    assert bytes(got[0][:3]) == b"\7\7\7"
    del got
    a.run_jobs()
    a.transport.allocate(100, Deadline.after(0.0))
    assert a.transport.holders(lease) == []


def test_memory_is_waited_for_until_readers_release_it(sides: tuple[Side, Side]) -> None:
    a, b = sides
    array = shared(a, 12 * MB)
    got = a.transfer([memoryview(array)])[1]
    del array
    assert a.transport.allocate(12 * MB, Deadline.after(0.0)) == "full"
    for never in (99 * MB, 16 * MB + 1):
        assert a.transport.allocate(never, Deadline.after(60.0)) == "full"  # it will never fit

    def release() -> None:
        got.clear()  # type: ignore[attr-defined]
        b.run_jobs()

    reader = threading.Thread(target=release)
    reader.start()
    assert not isinstance(a.transport.allocate(12 * MB, Deadline.after(20.0)), str)
    reader.join()


def test_without_an_arena_nothing_is_shared() -> None:
    for a, _ in pair(OFF):
        assert a.transport.allocate(100, Deadline.after(0.0)) == "off"


def test_memory_of_shared_blocks_returns_to_the_system(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    array = shared(a, 8 * MB)
    before = a.transport.statistics()["memory"]
    del array
    for _ in range(4):  # the release, and the trims of an arena that is used, and is not any more
        a.run_jobs()
    assert a.transport.statistics()["memory"] <= before - 8 * MB
