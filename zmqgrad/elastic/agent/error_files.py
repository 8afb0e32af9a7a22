"""Error files of workers, in torchelastic's format: JSON with the message and the traceback of an exception.

torch's ``@record`` writes them; our own function workers do, too.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path

from zmqgrad.runtime.clock import unix_time


def write_error(path: Path, error: BaseException) -> None:
    """Write ``error`` with its traceback to ``path``."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    extra = {"py_callstack": text, "timestamp": str(int(unix_time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    path.write_text(json.dumps({"message": message}))


def read_error(path: Path) -> list[str]:
    """The lines of the traceback in an error file. Empty if the worker has written none, or not all of it."""
    try:
        message = json.loads(path.read_text())["message"]
        text = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return []  # a worker that was killed wrote nothing, or a part; its exit code is reported anyway
    return str(text).splitlines()
