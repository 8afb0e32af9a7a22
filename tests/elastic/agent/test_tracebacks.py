"""Each traceback of a job is shown once; nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.elastic.agent.tracebacks import Shown, Tracebacks

HEAD = b"Traceback (most recent call last):"
OWN = [HEAD, b'  File "a.py", line 1, in <module>', b"    f()", b"ValueError: no"]
SHORT = b"ValueError: no (traceback: above, worker 1)"
STORE = b"zmqgrad.errors.RpcTimeoutError: w2: shutdown gave up: the store no longer replies"
GLOO = b"RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"
LOST = b"zmqgrad.errors.PeerLostError: w1 (worker 1) is lost"


def two() -> tuple[Shown, Tracebacks, Tracebacks]:
    shown = Shown()
    return shown, Tracebacks(shown, 1), Tracebacks(shown, 2)


def test_what_another_worker_wrote_is_shown_once() -> None:
    _, one, other = two()
    assert one.feed([b"a", *OWN, b"b"]) == [b"a", *OWN, b"b"]
    assert other.feed([b"On w1:", *OWN, b""]) == [b"On w1:", SHORT, b""]
    assert not other.shortened, "all of it is above"
    assert one.feed(OWN) == OWN, "its own again"


def test_a_traceback_that_differs_is_shown() -> None:
    _, one, other = two()
    one.feed(OWN)
    mine = [*OWN[:2], b"    g()", b"ValueError: no"]
    assert other.feed(mine) == mine
    assert other.feed([*OWN[:-1], b"ValueError: yes"]) == [*OWN[:-1], b"ValueError: yes"]


@pytest.mark.parametrize(
    "error", [LOST, b"RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"]
)
def test_the_loss_of_a_worker_that_wrote_why_it_fails_takes_a_line(error: bytes) -> None:
    _, one, other = two()
    one.feed(OWN)
    assert other.feed([*OWN[:2], error]) == [error + b" (follows from the failure of another worker)"]
    assert other.shortened


def test_a_loss_is_shown_whole_if_nothing_explains_it() -> None:
    shown, one, other = two()
    lost = [*OWN[:2], STORE]  # of worker 0
    one.feed(OWN)
    assert other.feed(lost) == lost
    shown.failed.add(1)
    assert Tracebacks(shown, 3).feed([HEAD, b"  other", STORE])[0].startswith(STORE + b" (follows")


def test_a_traceback_that_has_no_end_is_shown_at_the_end() -> None:
    shown, one, other = two()
    shown.failed.add(1)
    other.feed(OWN[:2])
    assert other.finish() == [HEAD + b" ... (cut off when the worker was ended)"]
    assert other.shortened
    assert one.feed(OWN[:2]) == []
    assert one.finish() == OWN[:2]
    assert one.feed_live(b"\n".join(OWN[:2])) == b""
    assert one.finish_live() == b"\n".join(OWN[:2])


def test_a_line_that_is_being_drawn_is_passed_on_at_once() -> None:
    _, one, other = two()
    one.feed(OWN)
    assert other.feed_live(b"\r10%") == b"\r10%"
    assert other.feed_live(b"\r20%") == b"\r20%"
    assert other.feed_live(b"\nTrace") == b"\n"
    assert other.feed_live(b"d\n") == b"Traced\n"
    assert other.feed_live(b"x" + HEAD + b"\n") == b"x" + HEAD + b"\n", "not at the start of a line"
    assert other.feed_live(b"\x1b[1m" + b"\n".join(OWN) + b"\n>") == SHORT + b"\n>"


PIECES = st.lists(
    st.sampled_from([*OWN, b"text", b"", b"\r50%", LOST, b"Traceback", b"  indented"]), max_size=12
)


@given(PIECES, st.integers(1, 9))
def test_live_output_is_shown_as_lines_are(lines: list[bytes], size: int) -> None:
    _, one, other = two()
    one.feed(OWN)
    data = b"".join(line + b"\n" for line in lines)
    live = b"".join(other.feed_live(data[i : i + size]) for i in range(0, len(data), size))
    live += other.finish_live()
    _, one, again = two()
    one.feed(OWN)
    assert live == b"".join(line + b"\n" for line in [*again.feed(lines), *again.finish()])


@given(PIECES)
def test_alone_nothing_changes(lines: list[bytes]) -> None:
    only = Tracebacks(Shown(), 0)
    assert [*only.feed(lines), *only.finish()] == lines
