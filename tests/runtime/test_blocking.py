"""What each thread has of its own, and who may use it when."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from zmqgrad.runtime.blocking import thread_state


def test_a_finalizer_may_use_the_state_that_its_thread_is_just_making(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector runs wherever something is made, so also while the lock of the state is."""
    make, used = threading.RLock, list[int]()

    def collect_and_make() -> Any:
        with thread_state.nothing:
            used.append(threading.get_ident())
        return make()

    def touch() -> None:
        with thread_state.nothing:
            used.append(threading.get_ident())

    thread = threading.Thread(target=touch)
    monkeypatch.setattr(threading, "RLock", collect_and_make)
    thread.start()
    thread.join(20)
    assert [used.count(each) for each in used if each == thread.ident] == [2, 2]
