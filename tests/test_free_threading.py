"""Python without the interpreter lock: nothing turns it on, and what many threads do at once adds up."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.support.workers import WAIT, two_workers
from zmqgrad import rpc
from zmqgrad.autograd.engine.work_queue import WorkQueue
from zmqgrad.rpc.current import set_current_worker
from zmqgrad.rpc.worker import Worker

THREADS = 8

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys, zmqgrad
for module in pkgutil.walk_packages(zmqgrad.__path__, "zmqgrad."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as e:  # of an extra that is not installed here
            assert not (e.name or "zmqgrad").startswith("zmqgrad.") or "pip install" in str(e), e
        assert not sys._is_gil_enabled(), module.name
print("off")
"""


def at_once(*tasks: Callable[[], object]) -> None:
    """Run each of ``tasks`` in a thread of its own, all from the same moment on."""
    start, failures = threading.Barrier(len(tasks)), list[BaseException]()

    def run(task: Callable[[], object]) -> None:
        start.wait(WAIT)
        try:
            task()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert failures == []


@pytest.mark.slow
@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has the lock")
def test_no_module_turns_the_lock_on() -> None:
    environ = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", IMPORT_EVERYTHING]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "off\n"


def test_each_request_is_counted_once() -> None:
    """A shutdown waits until as many requests were served as were sent."""

    def call(worker: Worker) -> None:
        set_current_worker(worker)
        for i in range(50):
            assert rpc.rpc_sync(1 - worker.id, abs, args=(-i,), timeout=WAIT) == i

    with two_workers() as workers:
        at_once(*[partial(call, worker) for worker in workers for _ in range(THREADS // 2)])
        for mine, other in (workers, workers[::-1]):
            assert mine.client.sent >= THREADS // 2 * 50
            assert mine.client.sent == other.server.served
            sent, received = mine.mailbox.statistics(), other.mailbox.statistics()
            assert sent["messages_sent"] == received["messages_received"]
            assert sent["sent_by_path"]["inline"] == received["received_by_path"]["inline"]


def test_futures_that_are_done_at_once_are_each_reported() -> None:
    futures = [torch.futures.Future[int]() for _ in range(THREADS * 50)]

    def finish(first: int) -> None:
        for i in range(first, len(futures), THREADS):
            futures[i].set_result(i)

    found = rpc.as_completed(futures, timeout=WAIT)
    reported: list[int] = []
    at_once(
        *[partial(finish, first) for first in range(THREADS)],
        lambda: reported.extend(future.wait() for future in found),
    )
    assert sorted(reported) == list(range(len(futures)))


def test_a_queue_may_be_abandoned_while_threads_take_from_it() -> None:
    def consume(queue: WorkQueue) -> None:
        while queue.take(2):
            pass

    for _ in range(30):
        queue = WorkQueue()
        queue.add([(send, []) for send in range(1, 500)])
        at_once(*[partial(consume, queue)] * 3, queue.abandon)
        assert queue.take(1) == []


def test_hooks_that_are_registered_at_once_all_run() -> None:
    tensor, ran = torch.ones(2, requires_grad=True), list[int]()

    def register(first: int) -> None:
        for i in range(first, first + 50):
            tensor.register_hook(lambda _, i=i: ran.append(i))

    tensor.register_hook(lambda _: None)  # of two first ones at once, torch loses one
    at_once(*[partial(register, 50 * n) for n in range(THREADS)])
    tensor.sum().backward()
    assert sorted(ran) == list(range(50 * THREADS))
