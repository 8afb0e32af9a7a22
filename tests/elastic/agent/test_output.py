"""Lines, labels, and a terminal that several programs share."""

from __future__ import annotations

import itertools
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.elastic.agent.listening import Listener
from zmqgrad.elastic.agent.output import LineSplitter, Screen, without_escapes
from zmqgrad.elastic.agent.streams import Stream
from zmqgrad.elastic.agent.workers import ScriptWorker, Worker

LABEL = b"[worker 0] "
OTHER = b"[worker 1] "


class Terminal:
    """As much of a terminal as these tests need: rows, a cursor, ``\\r``, erase line, show cursor."""

    def __init__(self) -> None:
        self.rows = [""]
        self.column = 0
        self.cursor_hidden = False

    def write(self, fd: int, data: bytes) -> None:
        for token in re.findall(r"\x1b\[[0-9?;]*[a-zA-Z]|[^\x1b]", data.decode()):
            self._take(token)

    def _take(self, token: str) -> None:
        match token:
            case "\n":
                self.rows.append("")
                self.column = 0
            case "\r":
                self.column = 0
            case "\x1b[2K":
                self.rows[-1] = ""
            case "\x1b[?25l" | "\x1b[?25h":
                self.cursor_hidden = token.endswith("l")
            case _ if token.startswith("\x1b"):
                pass
            case _:
                row = self.rows[-1].ljust(self.column)
                self.rows[-1] = row[: self.column] + token + row[self.column + 1 :]
                self.column += 1


@pytest.fixture
def terminal() -> Terminal:
    """An empty terminal."""
    return Terminal()


@pytest.fixture
def screen(terminal: Terminal) -> Screen:
    """A screen of which both descriptors are ``terminal``."""
    return Screen(terminal.write, {1, 2})


def split(*chunks: bytes) -> list[bytes]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


@given(text=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60)))
def test_chunks_do_not_matter(text: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert split(*(text[a:b] for a, b in itertools.pairwise(bounds))) == split(text)


@given(lines=st.lists(st.binary(min_size=1).map(lambda line: line.translate(None, b"\r\n")).filter(bool)))
def test_lines_come_out_as_they_went_in(lines: list[bytes]) -> None:
    assert split(b"".join(line + b"\n" for line in lines)) == lines
    assert split(b"\r\n".join(lines)) == lines


def test_the_last_state_of_a_redrawn_line_is_kept() -> None:
    assert split(b"\r 10%", b"\r 50%\r", b"100%\n", b"done") == [b"100%", b"done"]


def test_a_line_without_end_is_cut_and_a_bar_without_end_is_not_kept() -> None:
    splitter = LineSplitter()
    assert [len(line) for line in splitter.feed(b"x" * 100_000)] == [100_000]
    assert splitter.feed(b"\r10%" * 100_000) == []
    assert splitter.finish() == [b"10%"]


def test_without_escapes() -> None:
    assert without_escapes(b"\x1b[1;31mValueError\x1b[0m: \x1b[2Kno") == b"ValueError: no"


def test_lines_are_labelled(screen: Screen, terminal: Terminal) -> None:
    screen.lines(1, LABEL, [b"one", b"", b"two"])
    screen.lines(2, OTHER, [b"three"])
    assert terminal.rows == ["[worker 0] one", "[worker 0] ", "[worker 0] two", "[worker 1] three", ""]


@pytest.mark.parametrize(
    "start",
    [b"\r", b"\r\x1b[2K", b"\x1b[?25l\r\x1b[2K"],
    ids=["carriage return", "erase", "hide and erase"],
)
def test_a_progress_bar_keeps_its_row_and_its_label(screen: Screen, terminal: Terminal, start: bytes) -> None:
    for percent in range(0, 101, 25):
        screen.live(1, LABEL, start + b"\x1b[32mstep\x1b[0m %3d%%" % percent)
        assert terminal.rows == [f"[worker 0] step {percent:3}%"]
    screen.live(1, LABEL, b"\ndone\n")
    assert terminal.rows == ["[worker 0] step 100%", "[worker 0] done", ""]


def test_a_line_of_another_worker_is_printed_above_the_bar(screen: Screen, terminal: Terminal) -> None:
    screen.live(1, LABEL, b"\rstep 1")
    screen.lines(2, OTHER, [b"hello", b"world"])
    assert terminal.rows == ["[worker 1] hello", "[worker 1] world", "[worker 0] step 1"]
    screen.live(1, LABEL, b"\rstep 2")
    assert terminal.rows[-1] == "[worker 0] step 2"


def test_a_line_for_a_file_does_not_touch_the_bar(terminal: Terminal) -> None:
    written: list[tuple[int, bytes]] = []
    screen = Screen(lambda fd, data: written.append((fd, data)), {1})
    screen.live(1, LABEL, b"\rstep 1")
    screen.lines(2, OTHER, [b"to a file"])
    assert written[1:] == [(2, OTHER + b"to a file\n")]


def test_an_escape_sequence_cut_in_two(screen: Screen, terminal: Terminal) -> None:
    for byte in b"\r\x1b[2K\x1b[1;32mstep\x1b[0m 1":
        screen.live(1, LABEL, bytes([byte]))
    assert terminal.rows == ["[worker 0] step 1"]


def test_a_message_of_the_agent_begins_a_row(screen: Screen, terminal: Terminal) -> None:
    screen.live(1, LABEL, b"\rstep 1")
    screen.end_line()
    terminal.write(2, b"a message\n")
    screen.live(1, LABEL, b"\rstep 2")
    assert terminal.rows == ["[worker 0] step 1", "a message", "[worker 0] step 2"]


def test_close_leaves_the_terminal_usable(screen: Screen, terminal: Terminal) -> None:
    screen.live(1, LABEL, b"\x1b[?25l\rstep 1")
    hidden = [terminal.cursor_hidden]
    screen.close()
    assert [*hidden, terminal.cursor_hidden] == [True, False]
    assert terminal.rows == ["[worker 0] step 1", ""]


def test_close_writes_nothing_to_an_unused_screen(screen: Screen, terminal: Terminal) -> None:
    screen.close()
    assert terminal.rows == [""]


@pytest.mark.processes
def test_output_of_a_worker_that_was_removed_meanwhile_is_not_read() -> None:
    """Its lease ran out after the wait: the worker is gone before its output is shown."""
    listener = Listener(Screen(lambda fd, data: None))
    worker = ScriptWorker(0, ["true"], {}, [Stream(fd, b"", None, None) for fd in (1, 2)])
    listener.add(worker)
    ready = listener.ready(20)
    assert ready
    listener.remove(worker)
    worker.close()
    listener.show(ready)
    listener.close()


class Written(ScriptWorker):
    """A worker without a process, whose output the test writes."""

    def __init__(self, rank: int, stream: Stream | None = None) -> None:
        Worker.__init__(self, rank, [stream or Stream(2, b"", None, None)])

    def write(self, text: str) -> None:
        os.write(self.streams[0].child_end(), text.encode())

    def close(self) -> None:
        for stream in self.streams:
            os.close(stream.child_end())
            stream.close()


def test_a_loss_is_shown_behind_its_cause_though_it_was_read_before() -> None:
    """Worker 1 writes that it has lost worker 0 behind what worker 0 has written, which is not read yet."""
    shown = bytearray()
    listener = Listener(Screen(lambda fd, data: shown.extend(data)))
    workers = [Written(0), Written(1)]
    for worker in workers:
        listener.add(worker)
    head = "Traceback (most recent call last):\n"
    workers[1].write("before\n")
    ready = listener.ready(20)
    workers[0].write(f"{head}  in the program\nValueError: the reason\n")
    lost = "zmqgrad.errors.PeerLostError: w0 (worker 0) is gone"
    workers[1].write(f"{head}  in a call\n{lost}\nbehind\n")
    listener.show(ready)
    assert shown.decode().splitlines() == [
        *head.splitlines(),
        "  in the program",
        "ValueError: the reason",
        "before",
        f"{lost} (follows from the failure of another worker)",
        "behind",
    ]
    listener.close()
    for worker in workers:
        worker.close()


class Endless(Stream):
    """A process that has left the session of its worker writes to it faster than it is read."""

    def read(self) -> bytes:
        self.reads = getattr(self, "reads", 0) + 1
        assert self.reads < 10_000, "read without end"
        return b"zmqgrad.errors.PeerLostError: w0 (worker 0) is gone\n" * 1000


@pytest.mark.parametrize("call", ["show", "remove"])
def test_output_without_end_does_not_keep_the_agent(call: str) -> None:
    shown = bytearray()
    listener = Listener(Screen(lambda fd, data: shown.extend(data)))
    worker = Written(0, Endless(2, b"", None, None))
    listener.add(worker)
    worker.write("x")
    if call == "show":
        listener.show(listener.ready(20))
    else:
        listener.remove(worker)
    assert b"PeerLostError" in shown
    listener.close()
    worker.close()
