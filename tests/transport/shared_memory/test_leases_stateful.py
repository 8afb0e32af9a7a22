"""A leased block is never rewritten: random programs of two transports keep, drop, fork, and lose each other.

After each step, all that was received and kept, here and in forks, is compared with what was sent.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.transport.shared_memory.test_transport import Side, uses_arena
from zmqgrad.transport.shared_memory import forks
from zmqgrad.transport.shared_memory.mapped_blocks import _PeerSegment
from zmqgrad.transport.shared_memory.packing import OWN_BUFFER_BYTES
from zmqgrad.transport.shared_memory.segment import supported
from zmqgrad.transport.shared_memory.settings import ArenaSettings

pytestmark = [
    pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

SETTINGS = ArenaSettings(256 << 10, threshold=1000)
"""Of few blocks, so that each is soon used again."""

MAX_FORKS = 2
SIZES = st.sampled_from([10, 1000, 4000, OWN_BUFFER_BYTES, 30_000, 100_000])
WHICH = st.integers(0, 1 << 16)


def check_equal(views: Iterable[Any], sent: Sequence[bytes]) -> None:
    """Without pytest's comparison of both, whose recursion overflows the stack where they are long."""
    differing = [
        n for n, (view, content) in enumerate(zip(views, sent, strict=True)) if bytes(view) != content
    ]
    assert not differing, "what was received is not what was sent"


class Fork:
    """A fork that compares what it had when it is told to end."""

    def __init__(self, kept: list[tuple[Any, bytes]]) -> None:
        self._go_on, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(write)
            os.read(self._go_on, 1)
            os._exit(0 if all(bytes(view) == sent for view, sent in kept) else 1)
        os.close(self._go_on)
        self._write = write

    def end(self) -> int:
        """Returns the exit code: 0 if nothing has changed."""
        os.write(self._write, b".")  # later forks hold this end, too, so closing it ends nothing
        os.close(self._write)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Leases(RuleBasedStateMachine):
    """Both sides send and receive; both have an arena, so both send segments and releases."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = Side(0, SETTINGS), Side(1, SETTINGS)
        self.a, self.b = self.sides
        self.a.other, self.b.other = self.b, self.a
        self.kept: list[tuple[Any, bytes]] = []
        self.forks: list[Fork] = []
        self.number = 0

    def content(self, size: int) -> bytes:
        self.number += 1
        return (b"%08d" % self.number * (size // 8 + 1))[:size]

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=3), keep=st.booleans(), back=st.booleans())
    def send(self, sizes: list[int], keep: bool, back: bool) -> None:
        """Also back, so that releases travel with messages."""
        frames = [self.content(size) for size in sizes]
        _, got = self.sides[back].transfer(frames)
        check_equal(got, frames)
        if keep:
            self.kept += zip(got, frames, strict=True)

    @rule(size=SIZES, copies=st.integers(1, 3), fails=st.booleans(), keep=st.booleans())
    def send_one_copy_several_times(self, size: int, copies: int, fails: bool, keep: bool) -> None:
        """To one peer; to several would be the same. What one reader writes, the others do not see."""
        content = self.content(size)
        frames = self.a.transport.share([content])
        if fails:
            self.a.transport.rollback(1, self.a.prepare(frames))
        got = [self.a.transfer(frames)[1][0] for _ in range(copies)]
        del frames
        check_equal(got, [content] * copies)
        if keep:
            self.kept += [(each, content) for each in got]

    @rule(size=SIZES)
    def fail_to_send(self, size: int) -> None:
        prepared = self.a.prepare([self.content(size)])
        self.a.transport.rollback(1, prepared)

    @precondition(lambda self: self.kept)
    @rule(which=WHICH)
    def drop(self, which: int) -> None:
        del self.kept[which % len(self.kept)]

    @precondition(lambda self: self.kept)
    @rule(which=WHICH, start=WHICH)
    def keep_a_part(self, which: int, start: int) -> None:
        view, sent = self.kept[which % len(self.kept)]
        start %= len(sent)
        self.kept[which % len(self.kept)] = view[start:], sent[start:]

    @precondition(lambda self: self.kept and not self.forks)  # a fork shares the memory
    @rule(which=WHICH)
    def write(self, which: int) -> None:
        """A received block belongs to its reader."""
        which %= len(self.kept)
        view, sent = self.kept[which]
        if isinstance(view, memoryview) and not view.readonly:
            view[:1] = b"!"
            self.kept[which] = view, b"!" + sent[1:]

    @rule()
    def run_timers(self) -> None:
        """Releases without a message, ends of forks, and memory that returns to the system."""
        forks.unpin_ended()  # for the service threads, which there are none of here
        for side in self.sides:
            side.run_jobs()

    @rule()
    def lose_the_peer(self) -> None:
        """What was received stays; another worker may come under the same number."""
        self.a.lose(1)
        self.b.lose(0)

    @precondition(lambda self: len(self.forks) < MAX_FORKS)
    @rule()
    def fork(self) -> None:
        self.forks.append(Fork(self.kept))

    @precondition(lambda self: self.forks)
    @rule(which=WHICH)
    def end_a_fork(self, which: int) -> None:
        assert self.forks.pop(which % len(self.forks)).end() == 0, "a block changed under a fork"

    @invariant()
    def nothing_has_changed(self) -> None:
        check_equal([view for view, _ in self.kept], [sent for _, sent in self.kept])

    def teardown(self) -> None:
        codes = [fork.end() for fork in self.forks]
        self.kept.clear()
        gc.collect()
        forks.unpin_ended()
        for side in (*self.sides, *self.sides):  # each sends its releases, then both find unmapped segments
            side.transport._release()
        left = [side.leased for side in self.sides]
        for side in self.sides:
            side.transport.close()
        assert not any(codes), "a block changed under a fork"
        assert left == [0, 0], "blocks that nobody reads are leased"


STEPS = settings(max_examples=max(10, settings.default.max_examples // 5), stateful_step_count=40)


@pytest.mark.slow
def test_a_leased_block_is_never_rewritten() -> None:
    run_state_machine_as_test(Leases, settings=STEPS)


@pytest.fixture
def early_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect: blocks are released as soon as they are opened."""
    whole = _PeerSegment.open

    def opened(self: _PeerSegment, buffer: Any) -> memoryview:
        view = whole(self, buffer)
        self._released.append(buffer.block)
        return view

    monkeypatch.setattr(_PeerSegment, "open", opened)


def test_a_block_that_is_released_too_early_is_noticed(early_release: None) -> None:
    with pytest.raises(BaseException, match=r"assert|changed under a fork|distinct failures"):
        run_state_machine_as_test(
            Leases, settings=settings(STEPS, max_examples=1000, phases=[Phase.generate])
        )


def test_the_programs_use_shared_memory() -> None:
    machine = Leases()
    prepared, got = machine.a.transfer([bytes(4000)])
    assert uses_arena(prepared)
    del got
    machine.teardown()
