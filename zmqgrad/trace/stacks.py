"""The Python stacks of all threads of a process, and how another process asks for them.

A request is a file in the trace directory, which only its user may write to: the recorder looks at its time
of change at each flush. Compared with a signal, this needs no main thread that runs Python code, takes no
signal from the program, and reaches all processes of a job at once, also those of other hosts that share the
directory. A thread that keeps the GIL keeps the recorder from its turn; then the process does not reply.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from zmqgrad.errors import TraceError

REQUEST_NAME = "stacks.request"
MAX_FRAMES = 40
MAX_THREADS = 200
_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)\n((?:    .*)?)', re.MULTILINE)
_WAITS = re.compile(r"\bwith\b|acquire|wait|\.get\(|join|recv|select|poll|lock", re.IGNORECASE)
_PYTHON = ("/threading.py", "/queue.py", "<frozen runpy>")
LIBRARY = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The directory of this package."""


def request_stacks(directory: Path | str) -> None:
    """Asks all processes that record into ``directory`` for the stacks of their threads.

    Raises:
        TraceError: if the directory cannot be written to.
    """
    path = Path(directory) / REQUEST_NAME
    try:
        path.touch(mode=0o600)
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # a coarse clock may repeat itself
    except OSError as e:
        raise TraceError(f"cannot ask for stacks in {path.parent}: {e.strerror or e}") from e


class Requests:
    """Notices requests that come after its creation."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / REQUEST_NAME
        self._seen = self._time()

    def is_new(self) -> bool:
        """Whether stacks were asked for since the last call."""
        before, self._seen = self._seen, self._time()
        return self._seen not in (before, 0)

    def _time(self) -> int:
        try:
            return os.stat(self._path).st_mtime_ns
        except OSError:
            return 0  # nobody has asked yet


def dump(exclude: str = "") -> Iterator[tuple[int, str, str]]:
    """Yields the native id, the name and the stack of each Python thread, but that of this name."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    for ident, frame in list(sys._current_frames().items())[:MAX_THREADS]:
        thread = threads.get(ident)
        name = thread.name if thread is not None else f"thread {ident}"
        if name != exclude:
            native_id = thread.native_id or 0 if thread is not None else 0
            yield native_id, name, _show(frame)


def show_stack(ident: int) -> str:
    """The stack of a thread of this process; empty if it has ended."""
    frame = sys._current_frames().get(ident)
    return _show(frame) if frame is not None else ""


def _show(frame: FrameType) -> str:
    return "".join(traceback.format_list(traceback.extract_stack(frame, limit=MAX_FRAMES)))


def is_blocked(stack: str) -> bool:
    """Whether the innermost line looks as if it waits, for a lock say: Python does not tell."""
    innermost_frame = stack.rstrip().rpartition("  File ")[2]
    return bool(_WAITS.search(innermost_frame.partition("\n")[2]))


def innermost(stack: str, count: int = 3, library: str = "") -> list[str]:
    """The innermost frames of a stack as ``file:line in function: code``, the innermost first.

    Frames of the program tell more than how this library or the interpreter waits, which are left out.

    Args:
        library: the directory of this package where the stack was recorded; empty: as here.
    """
    own = library or LIBRARY
    here = _prefix_of_paths()
    frames = [
        (m[1], f"{m[1].removeprefix(here)}:{m[2]} in {m[3]}: {m[4].strip()}") for m in _FRAME.finditer(stack)
    ]
    program = [text for file, text in frames if not file.startswith(own) and not file.endswith(_PYTHON)]
    return (program or [text for _, text in frames])[: -count - 1 : -1]


def _prefix_of_paths() -> str:
    """What the paths of files in the current directory begin with; empty if that was removed."""
    try:
        return os.getcwd() + os.sep
    except OSError:
        return ""
