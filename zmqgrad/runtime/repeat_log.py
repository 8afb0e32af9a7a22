"""Log lines that repeat per message: the first in full, then how often, at growing intervals.

Ten thousand calls that fail in the same way would otherwise write ten thousand equal tracebacks.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

MAX_TEXTS = 256
"""How many texts are remembered; one that was not used for long is forgotten, and logged in full again."""

GROWTH = 10
"""A repeated text is counted in the log at this many times the count before."""


class _Repeats:
    __slots__ = ("count", "logged")

    def __init__(self) -> None:
        self.count = self.logged = 1


class RepeatLog:
    """Writes warnings to ``logger``, each text once and then its count. Thread-safe.

    Args:
        logger: where to write.
        name: the worker or socket that counts.
    """

    def __init__(self, logger: logging.Logger, name: str) -> None:
        self._logger = logger
        self._name = name
        self._lock = threading.Lock()
        self._repeats: OrderedDict[str, _Repeats] = OrderedDict()

    def warning(self, text: str) -> None:
        """Log ``text``, unless it has been logged before and it is not yet time to log its count."""
        forgotten: tuple[str, _Repeats] | None = None
        with self._lock:
            found = self._repeats.get(text)
            if found is None:
                self._repeats[text] = _Repeats()
                if len(self._repeats) > MAX_TEXTS:
                    forgotten = self._repeats.popitem(last=False)
            else:
                self._repeats.move_to_end(text)
                found.count += 1
                if found.count < found.logged * GROWTH:
                    return
                found.logged = found.count
        if forgotten is not None:
            self._log_total(*forgotten)
        if found is None:
            self._logger.warning("%s", text)
        else:
            self._log_count(text, found.logged, "so far")

    def close(self) -> None:
        """Log the totals of all texts that were repeated since their last count. Idempotent."""
        with self._lock:
            repeats, self._repeats = self._repeats, OrderedDict()
        for text, found in repeats.items():
            self._log_total(text, found)

    def _log_total(self, text: str, found: _Repeats) -> None:
        if found.count > found.logged:
            self._log_count(text, found.count, "in total")

    def _log_count(self, text: str, count: int, when: str) -> None:
        *_, last = text.rstrip().splitlines() or [""]
        self._logger.warning("%s: logged once, happened %d times %s: %s", self._name, count, when, last)
