"""Named objects in a group that workers join late, and whose owners are killed."""

from __future__ import annotations

import os
import signal
from queue import SimpleQueue
from typing import Any

import pytest

from tests.processes.test_dynamic_processes import WAIT, join
from tests.processes.test_lifecycle import what_is_open
from tests.support.processes import free_port, run_processes
from zmqgrad import rpc
from zmqgrad.errors import DuplicateNameError
from zmqgrad.store import TCPStore

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Replay:
    """An object with a name."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_size(self) -> int:
        """What it was made with."""
        return self.size

    def get_pid(self) -> int:
        """Where it is."""
        return os.getpid()


def member(rank: int, signals: int) -> dict[str, Any]:
    """0 serves the store and watches; 1 is killed with its object; 2 joins late, and makes the next one."""
    with TCPStore("127.0.0.1", signals, is_master=rank == 0) as told:
        if rank == 2:
            told.wait(["named"], WAIT)
        join(("hub", "first", "second")[rank])
        if rank == 1:
            told.wait(["never"], 2 * WAIT)  # to be killed
        if rank == 2:
            return find_and_replace(told)
        heard: SimpleQueue[Any] = SimpleQueue()
        rpc.watch_ref("replay", heard.put)
        rpc.wait_for_workers(["first"])
        rpc.remote("first", Replay, args=(1,), name="replay")
        assert heard.get(timeout=WAIT).rpc_sync().get_size() == 1
        told.set("named", "")
        sizes = [heard.get(timeout=WAIT), heard.get(timeout=WAIT).rpc_sync().get_size()]
        assert rpc.get_ref("replay").owner_name() == "second"
        told.set("seen", "")
        rpc.shutdown()
    return {"heard": sizes, "left": what_is_open()[0]}


def find_and_replace(told: TCPStore) -> dict[str, Any]:
    """Find what was named before this worker joined, kill its owner, and take the name."""
    found = rpc.get_ref("replay")
    try:
        rpc.remote("second", Replay, args=(2,), name="replay")
    except DuplicateNameError as e:
        refused = str(e)
    os.kill(found.rpc_sync().get_pid(), signal.SIGKILL)
    while True:  # until the death is known here
        try:
            rpc.remote("second", Replay, args=(2,), name="replay")
            break
        except DuplicateNameError:
            continue
    told.wait(["seen"], WAIT)
    rpc.shutdown()
    return {"refused": refused, "left": what_is_open()[0]}


def test_a_late_joiner_finds_it_and_the_name_dies_with_a_killed_owner() -> None:
    hub, _, second = run_processes(member, 3, (free_port(),), timeout=60.0, may_die=(1,))
    assert hub == {"heard": [None, 2], "left": []}
    assert "first (worker" in second["refused"]
    assert second["left"] == []


def fixed(rank: int) -> list[str]:
    """A group of fixed size: all get one object, and leave nothing."""
    rpc.init_rpc(f"w{rank}")
    if rank == 1:
        rpc.remote("w2", Replay, args=(5,), name="replay")
    found = rpc.get_ref("replay")
    assert found.rpc_sync().get_size() == 5
    del found
    rpc.shutdown()
    return list(what_is_open()[0])


def test_a_group_of_fixed_size() -> None:
    assert run_processes(fixed, 3) == [[], [], []]
