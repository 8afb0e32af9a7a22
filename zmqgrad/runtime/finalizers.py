"""Notes which objects have ended, by functions of C, and deals with them soon after in the service thread.

A finalizer of Python runs in the middle of long calls of C: a Ctrl-C that has come meanwhile is raised by its
first line, where the interpreter only prints it. See :meth:`~zmqgrad.runtime.polling.Wakeup.setter`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from zmqgrad.runtime.forks import in_forks
from zmqgrad.runtime.polling import READ, SPENT, Wakeup
from zmqgrad.runtime.service_thread import ServiceThread


class Notes(defaultdict[Any, object]):
    """The objects that were noted. Take one by ``popitem()``, which may raise KeyError in spite of a check.

    ``__missing__`` notes its argument: it is the callback of weak references that are to be noted. Two must
    keep such a reference: what outlives its object, as the collector calls no callback of a reference that is
    garbage itself; and its object, as a function of C does not keep its argument.
    """

    __slots__ = ("__weakref__",)


class Finalizers:
    """Calls a function after something was noted.

    Args:
        deal: the function, which empties the notes; in the service thread.
        seconds: how soon it is called, so that many objects that end together wake the thread once.
    """

    def __init__(self, deal: Callable[[], object], seconds: float) -> None:
        self._deal = deal
        self._seconds = seconds
        self._wakeup = Wakeup()
        self._all: weakref.WeakValueDictionary[int, Notes] = weakref.WeakValueDictionary()
        self._service: ServiceThread | None = None
        self._closed = False

    def notes(self) -> Notes:
        """Returns new notes."""
        notes = Notes(int if self._closed else self._wakeup.setter())
        self._all[id(notes)] = notes
        return notes

    def start(self, service: ServiceThread) -> None:
        """Calls the function in ``service`` from now on."""
        self._service = service
        in_forks(self, Finalizers._stop_waking)
        service.watch(self._wakeup.fd, READ, self._on_noted)

    def _on_noted(self, _: int) -> None:
        """In the service thread, which is woken no more before the function has run."""
        wakeup = self._wakeup  # not closed meanwhile
        if self._service is not None and not self._closed:
            self._service.rewatch(wakeup.fd, 0)
            self._service.call_later(self._seconds, self._run)

    def _run(self) -> None:
        wakeup = self._wakeup
        if self._service is not None and not self._closed:
            wakeup.clear()
            self._service.rewatch(wakeup.fd, READ)
            self._deal()

    def _stop_waking(self) -> None:
        """Write to the descriptor no more, at the end; also in a forked child, where it is the parent's."""
        self._closed = True
        self._wakeup = SPENT
        for notes in list(self._all.values()):
            notes.default_factory = int

    def close(self) -> None:
        """Calls the function no more. Objects can still be noted. Idempotent."""
        wakeup = self._wakeup
        self._stop_waking()
        if self._service is not None:
            self._service.unwatch(wakeup.fd)
