"""Ctrl-C at each moment of a call at which Python lets it in: after a call of C, and at a beginning."""

from __future__ import annotations

import dis
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any, TypeAlias

import pytest
import torch

from tests.support.leaks import Watcher
from tests.support.waiting import eventually
from tests.support.workers import WAIT, two_workers
from tools.ports import free_port
from zmqgrad import rpc
from zmqgrad.autograd import backward, context, grad
from zmqgrad.autograd.context import Context, own_context, pass_context
from zmqgrad.autograd.forwarding import autograd_of
from zmqgrad.autograd.torch_internals import saved_tensor_hooks
from zmqgrad.autograd.versions import ParameterVersions
from zmqgrad.elastic import RendezvousHandler, RendezvousSettings, State, StoreBackend
from zmqgrad.errors import ClosedError, GroupError, NotInitializedError, UnknownWorkerError
from zmqgrad.optim import DistributedOptimizer
from zmqgrad.rpc.current import reset_current_worker, set_current_worker
from zmqgrad.rpc.debug import debug_info
from zmqgrad.rpc.futures import PythonFuture
from zmqgrad.rpc.membership.fixed import FixedGroup
from zmqgrad.rpc.membership.group import make_worker
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.blocking import blocking_section, holding
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.finalizers import Notes
from zmqgrad.store import HashStore, PrefixStore, TCPStore
from zmqgrad.transport.local.listener import LocalListener
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.shared_memory.arena import Arena, Lease
from zmqgrad.transport.shared_memory.free_list import FreeList
from zmqgrad.transport.shared_memory.mapped_blocks import MappedBlocks
from zmqgrad.transport.shared_memory.segment import Segment, supported
from zmqgrad.transport.shared_memory.settings import ArenaSettings
from zmqgrad.transport.shared_memory.transport import SharedMemoryTransport
from zmqgrad.wire.messages import ArenaOffer

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 does not tell which handler guards an instruction"
)


@pytest.fixture
def pair() -> Iterator[list[Worker]]:
    """Two workers of one host; the test acts for the first."""
    with two_workers(ZmqMailbox) as workers:
        yield workers


@cache
def moments(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions of ``code`` before which Python may run a signal handler.

    Not those that another handler of exceptions guards than the instruction before: what a signal handler
    raises belongs to that one, and what a trace function raises, to this one.
    """
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def guard(offset: int) -> object:
        return [entry.target for entry in table if entry.start <= offset < entry.end]

    found, before, last = set(), "", 0
    for instruction in dis.get_instructions(code):
        if before in ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX") and guard(last) == guard(
            instruction.offset
        ):
            found.add(instruction.offset)
        before, last = instruction.opname, instruction.offset
    return frozenset(found)


def interrupted(
    number: int,
    modules: tuple[str, ...],
    call: Callable[[], Any],
    kind: type[BaseException] = KeyboardInterrupt,
) -> bool:
    """Run ``call``, and raise an error of ``kind`` at moment ``number`` in ``modules``, if there are so many.

    Returns:
        Whether it was raised.
    """
    left = number

    def reach(code: CodeType, offset: int) -> None:
        nonlocal left
        if left >= 0 and offset in moments(code):
            left -= 1
            if left < 0:
                raise kind

    stop = (monitor if sys.version_info >= (3, 12) else trace)(modules, reach)
    try:
        call()
    except kind:
        return True
    finally:
        stop()
    return left < 0  # in a finalizer, where it is only printed


Reach: TypeAlias = Callable[[CodeType, int], None]


def trace(modules: tuple[str, ...], reach: Reach) -> Callable[[], object]:
    """Call ``reach`` before each instruction of ``modules`` that this thread executes. What ends that."""

    def on_event(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_globals.get("__name__") not in modules:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            reach(frame.f_code, frame.f_lasti)
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    return lambda: sys.settrace(before)


def monitor(modules: tuple[str, ...], reach: Reach) -> Callable[[], object]:
    """As :func:`trace`, from Python 3.12 on, where that misses the first time that a function runs."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    tool, me = monitoring.DEBUGGER_ID, threading.get_ident()
    files = {importlib.import_module(name).__file__ for name in modules}

    def on_instruction(code: CodeType, offset: int) -> object:
        if code.co_filename not in files:
            return monitoring.DISABLE
        if threading.get_ident() == me:
            reach(code, offset)
        return None

    monitoring.use_tool_id(tool, __name__)
    monitoring.register_callback(tool, monitoring.events.INSTRUCTION, on_instruction)
    monitoring.restart_events()
    monitoring.set_events(tool, monitoring.events.INSTRUCTION)

    def stop() -> None:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)

    return stop


KINDS = pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
"""What a signal handler raises: that of Ctrl-C, and many that programs have for SIGALRM. The latter is an
error of the operating system, too."""

MODULES = ("zmqgrad.rpc.reply_port", "zmqgrad.transport.local.channels")


@KINDS
@pytest.mark.open_outcomes  # of calls that were interrupted before anything knew of them
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_loses_no_reply_channel(
    kind: type[BaseException], pair: list[Worker]
) -> None:
    def call() -> Any:
        return rpc.rpc_sync(1, len, args=("abc",), timeout=WAIT)

    assert call() == 3
    number = 0
    while interrupted(number, (*MODULES, "zmqgrad.transport.local.connection"), call, kind):
        number += 1
        assert call() == 3
    assert number > 30
    for worker in pair:
        worker.close("the test is over")
        assert worker.join(Deadline.after(WAIT)) == []


@pytest.mark.open_outcomes  # of calls that were interrupted before anything knew of them
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_alarm_at_any_moment_of_making_a_reply_channel_reaches_its_caller(pair: list[Worker]) -> None:
    """It was taken for an error of the system: the call went on without a channel, or was a KeyError."""
    reached = hits = 0

    def call() -> None:
        nonlocal reached
        try:
            rpc.rpc_sync(1, len, args=("abc",), timeout=WAIT)
        except TimeoutError:
            reached += 1
            raise

    for number in range(120):  # each is left with the channel that it interrupts
        hits += interrupted(number, (*MODULES, LocalListener.__module__), call, TimeoutError)
    assert hits > 30
    assert reached > 0.8 * hits  # some are raised in finalizers


def test_a_call_of_a_signal_handler_that_fails_does_not_end_the_call_that_it_interrupts(
    pair: list[Worker],
) -> None:
    failed = 0

    def handle() -> None:
        nonlocal failed
        with pytest.raises(UnknownWorkerError):
            rpc.rpc_sync("nobody", len, args=("abc",))
        failed += 1

    send = pair[0].mailbox.send

    def interrupted_send(*args: Any, **kwargs: Any) -> None:
        send(*args, **kwargs)
        if not failed:
            handle()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair[0].mailbox, "send", interrupted_send)
        assert rpc.rpc_sync(1, len, args=("abc",), timeout=WAIT) == 3
    assert failed == 1


MAKING = ("zmqgrad.store.client", "zmqgrad.store.server", "zmqgrad.transport.query.server")


@KINDS
@pytest.mark.open_outcomes  # of readers that nothing knows of
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")  # one that no name refers to yet
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_a_store_is_made_leaves_no_server(kind: type[BaseException]) -> None:
    """Nor a context: in a cycle, the collector ended that before its sockets, and waited for ever."""
    made: list[TCPStore] = []
    kept: list[BaseException] = []  # with the variables that they refer to
    port = free_port()

    def make() -> None:
        try:
            made.append(TCPStore("127.0.0.1", port, is_master=True, timeout=WAIT))
        except BaseException as e:
            kept.append(e)
            raise

    watcher, number = Watcher(), 0
    modules = MAKING[:1] if kind is TimeoutError else MAKING  # which sockets take for one of the system
    while interrupted(number, modules, make, kind):
        number += 1
        while made:
            made.pop().close()
        assert [left for left in watcher.what_is_left() if left.startswith("zmq")] == []
        kept.clear()
        make()  # fails if the port is in use
        made.pop().close()
    made.pop().close()
    assert number > 10


CLOSING = ("zmqgrad.store.client", "zmqgrad.store.finalizer", "zmqgrad.store.server")


@pytest.mark.parametrize("shared", [False, True])
def test_an_interrupt_while_a_store_closes_leaves_what_the_next_close_ends(shared: bool) -> None:
    """It had forgotten its server before that was closed, or had counted itself out of its users."""
    port, number = free_port(), 0

    def make() -> TCPStore:
        return TCPStore("127.0.0.1", port, is_master=True, timeout=WAIT, multi_tenant=shared)

    store, other = make(), make() if shared else None
    while interrupted(number, (*CLOSING, "zmqgrad.transport.query.server"), store.close):
        number += 1
        store.close()
        if other is not None:
            other.set("key", str(number))
            other, store = make(), other
        else:
            store = make()  # fails if the port is in use
    assert number > 10
    if other is not None:
        other.close()
    make().close()


@pytest.mark.open_outcomes
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_a_worker_joins_leaves_no_worker() -> None:
    """One that came just after it had joined left all of it, and nothing could shut it down."""
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", num_worker_threads=1)
    join = partial(rpc.init_rpc, "alone", rank=0, world_size=1, rpc_backend_options=options)
    number = 0
    while interrupted(number, ("zmqgrad.rpc.membership.bootstrap",), join):
        number += 1
        assert not [t.name for t in threading.enumerate() if t.name.startswith("alone")]
    rpc.shutdown()
    assert number > 10


CONNECTING = ("zmqgrad.transport.query.client", "zmqgrad.transport.query.sockets")


@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")  # one that no name refers to yet
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_a_client_connects_leaves_no_context() -> None:
    """As long as a name of the address is looked up: the client counted as a user of the context for ever."""
    made: list[TCPStore] = []
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=WAIT) as master:
        connect = partial(TCPStore, "127.0.0.1", master.port, timeout=WAIT, fast_path=False)
        watcher, number = Watcher(), 0
        while interrupted(number, CONNECTING, lambda: made.append(connect())):
            number += 1
            while made:
                made.pop().close()
            assert watcher.what_is_left() == []
        made.pop().close()
        assert number > 10


LEAVING = ("zmqgrad.rpc.api", "zmqgrad.rpc.membership.group", "zmqgrad.runtime.clock")


@pytest.mark.open_outcomes
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("graceful", [True, False])
def test_an_interrupt_of_shutdown_leaves_a_worker_that_has_left_or_can_be_shut_down(graceful: bool) -> None:
    """The group was forgotten, though nothing had closed it: its threads, sockets and port stayed."""
    options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", num_worker_threads=1)
    join = partial(rpc.init_rpc, "alone", rank=0, world_size=1, rpc_backend_options=options)
    number = 0
    join()
    while interrupted(number, LEAVING, lambda: rpc.shutdown(graceful)):
        number += 1
        with suppress(NotInitializedError):
            rpc.shutdown(graceful=False)
        assert not [t.name for t in threading.enumerate() if t.name.startswith("alone")]
        join()
    assert number > 10


used: list[int] = []


def use(rref: rpc.RRef[int]) -> None:
    """Fails if the owner has dropped the value."""
    used.append(rref.to_here(WAIT))


SENDING = (
    "zmqgrad.rpc.client",
    "zmqgrad.transport.mailbox",
    "zmqgrad.transport.sending",
    "zmqgrad.transport.links",
    "zmqgrad.transport.local.connection",
)


@KINDS
@pytest.mark.open_outcomes  # of calls that were interrupted before anything knew of them
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_of_sending_drops_no_argument_and_delays_no_shutdown(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """The message had left, but was not counted, and the values that its RRefs refer to were dropped."""
    store, options = HashStore(), rpc.RpcBackendOptions(rpc_timeout=WAIT, num_worker_threads=2)
    workers = [make_worker(f"worker{n}", n, 2, ZmqMailbox(f"worker{n}", n), options) for n in range(2)]
    groups = [FixedGroup(worker, PrefixStore("g", store)) for worker in workers]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda group: group.join(Deadline.after(WAIT)), groups))
        for worker in workers:
            worker.server.serve()
        token = set_current_worker(workers[0])
        try:
            number = 0
            while interrupted(
                number, SENDING, lambda: rpc.rpc_sync(1, use, args=(rpc.RRef(7),), timeout=WAIT), kind
            ):
                number += 1
                rpc.rpc_sync(1, len, args=("abc",), timeout=WAIT)  # behind it: what was sent has arrived
            assert number > 30
            served = workers[1].counts()[1]
        finally:
            reset_current_worker(token)
        list(threads.map(lambda group: group.leave(True, Deadline.after(WAIT)), groups))
    assert served > number
    assert "shutdown goes on" not in caplog.text
    assert "failed" not in caplog.text
    assert set(used) == {7}


@KINDS
@pytest.mark.skipif(not supported(), reason="this system has no shared memory of this kind")
def test_an_interrupt_at_any_moment_of_leasing_leaves_the_rest_to_others(kind: type[BaseException]) -> None:
    """The free range that a block is cut from, or merged with, was lost: as a rule, all of the memory."""
    arena = Arena(1 << 20)

    def use() -> None:
        leases = arena.lease(1, [100, 70_000, 100])
        for lease in (leases[1], leases[0], leases[2]):
            assert isinstance(lease, Lease)
            arena.release(1, [lease.number])

    use()
    number = 0
    while interrupted(number, (Arena.__module__, FreeList.__module__), use, kind):
        number += 1
        arena.forget(1)  # who was to read what was leased
        whole = arena.lease(2, [1 << 20])
        assert not isinstance(whole, str), number
        arena.release(2, [lease.number for lease in whole])
    assert number > 50
    arena.close()


@pytest.mark.skipif(not supported(), reason="this system has no shared memory of this kind")
def test_an_interrupt_of_preparing_a_message_leaves_no_block_to_a_peer_that_never_hears_of_it() -> None:
    transport = SharedMemoryTransport("worker0", ArenaSettings(64 << 20), lambda peer, message: None)
    frames = [bytes(100_000), bytes(200_000)]

    moments = 0
    while interrupted(
        moments, (SharedMemoryTransport.__module__,), lambda: transport.prepare(1, True, frames)
    ):
        moments += 1
    assert moments > 20
    # The last was not interrupted. At three moments a function returns the leases, which nobody knows then.
    assert transport.statistics()["blocks_leased"] <= (1 + 3) * len(frames)
    transport.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_alarm_at_any_moment_of_mapping_does_not_end_the_link() -> None:
    """It was taken for an error of the system: the segment could not be mapped, so its owner was lost."""
    segment = Segment(1 << 20)
    offer, number = ArenaOffer(segment.id, segment.size), 0

    def map_segment() -> None:
        blocks = MappedBlocks(lambda: Notes(int))
        try:
            blocks.map(1, offer, fd)
        finally:
            blocks.close()

    fd = segment.open_for_reader(1)
    while interrupted(number, (MappedBlocks.__module__, Segment.__module__), map_segment, TimeoutError):
        number += 1
        gc.collect()  # what was made in part
        with suppress(OSError):  # as a rule it is closed; unless nothing owned it yet
            os.close(fd)
        fd = segment.open_for_reader(1)
    assert number > 10
    segment.close()


def in_another_thread(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns in a thread, which must not have to wait for this one."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(WAIT)
    assert found, "another thread waits for a lock of this one"
    return found[0]


def test_an_interrupt_at_any_moment_leaves_a_watch_to_other_threads() -> None:
    """It held the lock of the watch for ever if it came while a condition was entered."""
    with HashStore(timeout=WAIT) as store:
        number = 0
        changes = store.watch("key", present=True)
        store.set("key", "first")
        while interrupted(number, ("threading", "zmqgrad.store.watch_iterator"), lambda: changes.next(WAIT)):
            number += 1
            store.set("key", str(number))
            in_another_thread(partial(changes.next, WAIT))
            store.set("key", "next")
        assert number > 5


@pytest.mark.parametrize("timeout", [-1.0, 0.01])
def test_an_interrupt_at_any_moment_leaves_a_lock_to_other_threads(timeout: float) -> None:
    """Whether it was free, or is still held elsewhere as the time ends."""
    lock, number = threading.Lock(), 0
    is_free = timeout < 0

    def hold() -> None:
        with holding(lock, timeout) as held:
            assert held == is_free

    if not is_free:
        assert lock.acquire(timeout=WAIT)
    while interrupted(number, ("contextlib", "zmqgrad.runtime.blocking"), hold):
        number += 1
        assert lock.locked() != is_free
    assert number > 5
    assert lock.locked() != is_free


@pytest.mark.open_outcomes
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_leaves_publishing_to_other_threads(pair: list[Worker]) -> None:
    modules = "threading", "contextlib", "zmqgrad.rpc.publishing", "zmqgrad.rpc.relaying"
    publish = partial(rpc.publish, "weights", {"w": torch.ones(2)}, timeout=WAIT)

    def publish_there() -> int:
        token = set_current_worker(pair[0])
        try:
            return publish()
        finally:
            reset_current_worker(token)

    with HashStore(timeout=WAIT) as store:
        pair[0].directory.store = store
        number, last = 0, publish()
        while interrupted(number, modules, publish):
            number += 1
            version = in_another_thread(publish_there)
            assert version > last
            last = version
        assert number > 50


closing, may_go_on = threading.Event(), threading.Event()
kept: list[Any] = []


def keep(value: Any) -> None:
    kept.append(value)  # as an argument, kept.append itself would be that of a copy


class Slow:
    """Takes its time to be freed, as its owner closes."""

    def __del__(self) -> None:
        closing.set()
        may_go_on.wait(WAIT)


def test_a_thread_that_cannot_wait_ends_nothing_that_closing_needs(pair: list[Worker]) -> None:
    """It ended the timer, which closes sockets: they, the context and two threads were left."""
    rpc.rpc_sync(1, keep, args=(rpc.RRef(Slow()),))
    thread = threading.Thread(target=pair[0].close)
    thread.start()
    assert closing.wait(WAIT)
    pair[0].close()
    assert pair[0].join(Deadline.after(0.2)) != []
    may_go_on.set()
    thread.join(WAIT)
    kept.clear()
    assert pair[0].join(Deadline.after(WAIT)) == []


def test_a_call_that_is_sent_while_its_worker_closes_says_so(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is made afterwards: the state of the transport is nothing that the program knows."""

    def closes_meanwhile(*_: object) -> None:
        during.setattr(pair[0], "closed", True)
        raise ClosedError("the mailbox of worker0 is closed")

    with monkeypatch.context() as during:
        during.setattr(pair[0].mailbox, "send", closes_meanwhile)
        with pytest.raises(NotInitializedError):
            rpc.rpc_sync(1, len, args=("abc",))


@KINDS
def test_an_interrupt_at_any_moment_of_a_context_lets_the_thread_enter_another(
    kind: type[BaseException], pair: list[Worker]
) -> None:
    """It stayed the context of the thread for ever: contexts do not nest."""

    def use() -> None:
        with context():
            pass

    number = 0
    while interrupted(number, ("zmqgrad.autograd.api", "zmqgrad.autograd.context"), use, kind):
        number += 1
        use()
    assert number > 20
    assert debug_info(pair[0])["autograd"]["num_autograd_contexts"] < number / 5, (
        "only some moments of a release"
    )


@pytest.mark.parametrize("create_graph", [False, True])
def test_an_interrupt_at_any_moment_of_a_step_leaves_the_modes_of_the_thread(
    create_graph: bool, pair: list[Worker]
) -> None:
    """The thread stayed in the context of the pass, whose graph it kept for ever, or without grad."""
    x = torch.ones(3, requires_grad=True)

    def run_pass() -> None:
        backward(context_id, [x.square().sum()], create_graph=create_graph)

    def modes() -> object:
        return torch.is_grad_enabled(), own_context(), pass_context.get()

    number = 0
    with context() as context_id:
        before = modes()
        while interrupted(
            number, ("zmqgrad.autograd.engine.step", "zmqgrad.autograd.context"), run_pass, KeyboardInterrupt
        ):
            number += 1
            assert modes() == before
    assert number > 20


@KINDS
def test_an_interrupt_at_any_moment_of_grad_leaves_the_modes_of_the_thread(
    kind: type[BaseException], pair: list[Worker]
) -> None:
    """The thread stayed without grad: what it computed from then on had no gradients, in silence."""
    x = torch.ones(3, requires_grad=True)
    modules = ("zmqgrad.autograd.grads", "zmqgrad.autograd.context")
    number = 0
    with context() as context_id:
        while interrupted(number, modules, lambda: grad(context_id, x.square().sum(), [x]), kind):
            number += 1
            assert torch.is_grad_enabled()
    assert number > 20


class Alarm(TimeoutError):
    """What the handler of SIGALRM raises."""


@KINDS
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_an_interrupt_at_any_moment_leaves_shared_parameters_to_others(
    reads: bool, held: bool, kind: type[BaseException]
) -> None:
    """Of a step, in place or in new memory, and of reading: others read, and their steps are published."""

    def is_interrupted(number: int) -> bool:
        versions, param = ParameterVersions(), torch.nn.Parameter(torch.zeros(1))
        shared = versions.share(param)
        alias = param.detach() if held else None

        def step(by: float) -> None:
            with versions.stepping(Context(1), [shared]) as (memory,):
                memory.add_(by)

        def read_and_step() -> None:
            with versions.reading(fresh=True) if reads else nullcontext():
                with blocking_section():
                    pass
                step(1.0)

        def others() -> None:
            with versions.reading(fresh=True):
                pass
            step(2.0)

        modules = ("zmqgrad.autograd.versions",)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(interrupted, number, modules, read_and_step, kind).result()
            thread = threading.Thread(target=others, daemon=True)
            thread.start()
            thread.join(20)
            assert param.item() in ((2.0, 3.0) if found else (3.0,)), number
            if reads:
                pool.submit(read_and_step).result()
            assert pool.submit(saved_tensor_hooks, True).result() is None, number
        assert alias is None or alias.item() == 0.0
        return found

    number = 0
    while is_interrupted(number):
        number += 1
    assert number > 20


def test_an_interrupt_at_any_moment_of_a_step_lets_no_later_one_take_its_gradients(
    pair: list[Worker],
) -> None:
    """A parameter without a gradient was stepped again with its last one."""
    for versions in (False, True):
        number, interrupts = 0, True
        while interrupts:
            first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
            params = [rpc.RRef(first), rpc.RRef(second)]
            optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=1.0, versions=versions)
            with context() as ctx:
                backward(ctx, [(first + second).sum()])
                interrupts = interrupted(number, ("zmqgrad.optim.local",), partial(optimizer.step, ctx))
            before = first.item(), second.item()
            with context() as ctx:
                backward(ctx, [first.sum()])
                optimizer.step(ctx)
            assert (first.item(), second.item()) == (before[0] - 1.0, before[1]), number
            number += 1
        assert number > 10


def test_an_interrupt_at_any_moment_of_a_commit_lets_the_program_commit_again() -> None:
    """A commit that was made, but not known to be whole, let all later ones wait until their timeout."""
    state = State(step=0, weight=torch.zeros(1))
    state.restore()

    def commit() -> None:
        state.step += 1
        state.weight += 1
        state.commit(timeout=1)

    commit()
    commit()  # from now on, the memory is there
    number = 0
    while interrupted(number, ("zmqgrad.elastic.commits.holder",), commit):
        commit()
        commit()
        expected = state.step
        state.step, state.weight = 0, torch.zeros(1)
        assert state.restore(timeout=1)
        assert (state.step, state.weight.item()) == (expected, expected), number
        number += 1
    assert number > 20


def test_an_interrupt_at_any_moment_of_leaving_a_rendezvous_leaves_no_heartbeats() -> None:
    """A thread renewed the heartbeat of a node that had left, or did so beside the next one."""
    for end in (RendezvousHandler.leave, RendezvousHandler.close):
        number, interrupts = 0, True
        while interrupts:
            with HashStore() as store:
                settings = RendezvousSettings("job", 1, 1)
                handler = RendezvousHandler(settings, StoreBackend(store, "job"), store)
                handler.next_rendezvous()
                interrupts = interrupted(number, ("zmqgrad.elastic.handler",), partial(end, handler))
                handler.close()
                assert not [each for each in threading.enumerate() if str(handler.node) in each.name], number
                number += 1
        assert number > 10


def test_an_alarm_at_any_moment_of_received_gradients_ends_the_pass_at_once(pair: list[Worker]) -> None:
    """Nobody heard of it if it came before the step knew what it handles: the pass waited for its timeout."""
    x = torch.ones(3, requires_grad=True)
    y = torch.ones(3, requires_grad=True)
    hits = 0
    with context() as context_id:
        loss = (rpc.rpc_sync(1, torch.neg, args=(x,)) * rpc.rpc_sync(1, torch.neg, args=(y,))).sum()
        run_pass = partial(backward, context_id, [loss], retain_graph=True)
        run_pass()
        modules = "zmqgrad.autograd.engine.step", "zmqgrad.autograd.engine.work_queue"
        for number in range(150):
            hits += interrupted(number, modules, run_pass, Alarm)  # an RpcTimeoutError is none
    assert hits > 50


class Quiet:
    """Follows a key that never changes."""

    closed = False

    def __init__(self, key: str, step: Callable[[bytes], None], on_close: Callable[[], None]) -> None:
        self.close = on_close


def test_an_interrupt_at_any_moment_of_waiting_for_a_name_ends_that(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What told of changes stayed locked, and to close the watch was to tell."""
    directory, number = pair[0].directory, 0
    monkeypatch.setattr(directory, "follow", Quiet)

    def look() -> None:
        assert directory.wait_for("key", lambda: None, Deadline.after(0.001)) is None

    while interrupted(number, ("threading", "zmqgrad.rpc.directory", "zmqgrad.runtime.blocking"), look):
        number += 1
    assert number > 5


GATHERING = (
    "zmqgrad.rpc.futures",
    "zmqgrad.rpc.gathering",
    "zmqgrad.rpc.groups.future",
    "zmqgrad.runtime.future",
)


@pytest.mark.parametrize("wait", [rpc.wait_all, lambda futures: list(rpc.as_completed(futures))])
def test_an_interrupt_at_any_moment_of_waiting_for_many_reaches_its_caller(
    wait: Callable[[list[Any]], Any],
) -> None:
    """C++ printed what was raised in a callback of a future that was done already, and nobody counted it."""
    futures = [torch.futures.Future[int]() for _ in range(3)]
    for future in futures:
        future.set_result(1)
    hits = 0

    def call() -> None:
        nonlocal hits
        try:
            wait(futures)
        except KeyboardInterrupt:
            hits += 1
            raise

    number = 0
    while interrupted(number, GATHERING, call):
        number += 1
    assert hits == number > 5


@pytest.mark.open_outcomes
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_alarm_at_any_moment_of_a_group_call_does_not_let_it_wait_for_ever(pair: list[Worker]) -> None:
    """It was taken for the error of a callback of a reply, which was not counted."""
    modules = ("zmqgrad.rpc.groups.sending", "zmqgrad.runtime.future")
    hits: list[bool] = []

    def run() -> None:
        set_current_worker(pair[0])
        group = rpc.group([0, 1])
        for number in range(150):
            with suppress(GroupError):
                hits.append(interrupted(number, modules, partial(group.call, len, ("abc",)), Alarm))

    calling = threading.Thread(target=run, daemon=True)
    calling.start()
    calling.join(WAIT)
    assert not calling.is_alive()
    assert sum(hits) > 50


def test_an_interrupt_at_any_moment_of_then_leaves_no_future_without_an_end() -> None:
    """C++ printed what was raised before the callback of a future that was done, and nobody set the next."""
    future: PythonFuture[int] = PythonFuture()
    future.set_result(1)
    chained: list[PythonFuture[int]] = []
    number = 0
    while interrupted(
        number, ("zmqgrad.rpc.futures",), lambda: chained.append(future.then(lambda done: done.value() + 1))
    ):
        assert all(each.done() for each in chained)
        number += 1
    assert number > 10
    assert chained.pop().value() == 2


def use_reference() -> Callable[[], None]:
    """Refer to a value of worker 1. Returns what releases it."""
    kept = [rpc.remote(1, len, args=("abc",))]
    kept[0].to_here(WAIT)
    return kept.clear


def use_context() -> Callable[[], None]:
    """Enter a context that worker 1 takes part in."""
    entered = context()
    entered.__enter__()
    rpc.rpc_sync(1, torch.neg, args=(torch.ones(2, requires_grad=True),), timeout=WAIT)
    return lambda: entered.__exit__(None, None, None)


RELEASING = (
    "zmqgrad.rpc.rref.handle",
    "zmqgrad.rpc.rref.table",
    "zmqgrad.autograd.releases",
    "zmqgrad.runtime.service_thread",
)


@pytest.mark.open_outcomes
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("use", "count"),
    [
        (use_reference, lambda worker: worker.references.statistics()["owner_rrefs"]),
        (use_context, lambda worker: debug_info(worker)["autograd"]["num_autograd_contexts"]),
    ],
    ids=["reference", "context"],
)
def test_an_interrupt_at_any_moment_of_a_release_stops_no_later_release(
    pair: list[Worker], use: Callable[[], Callable[[], None]], count: Callable[[Worker], int]
) -> None:
    """Releases were marked as scheduled, and were not: worker 1 kept all that was dropped after that."""
    hits = 0
    for number in range(30):
        before = count(pair[1])
        release = use()
        rpc.rpc_sync(1, len, args=("abc",), timeout=WAIT)  # no other thread holds the last message any more
        hits += interrupted(number, RELEASING, release)
        use()()
        eventually(partial(count, pair[1]), lambda left: left <= before + 1)  # noqa: B023
    assert hits > 5


@KINDS
def test_an_interrupt_at_any_moment_of_leaving_a_context_leaves_nothing_after_the_next_one(
    kind: type[BaseException], pair: list[Worker]
) -> None:
    """Neither here nor on worker 1, which was never told that the context had ended."""
    contexts = [autograd_of(worker).contexts for worker in pair]
    hits = 0
    modules = ("zmqgrad.autograd.api", "zmqgrad.autograd.context", *RELEASING)
    for number in range(80):
        leave = use_context()
        hits += interrupted(number, modules, leave, kind)
        del leave  # one that was not left at all ends with this
    use_context()()
    assert hits > 40
    eventually(lambda: [len(each.live()) for each in contexts], lambda left: left == [0, 0])


@pytest.mark.open_outcomes
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@KINDS
def test_an_interrupt_at_any_moment_of_preparing_a_call_keeps_no_value_that_it_refers_to(
    kind: type[BaseException], pair: list[Worker]
) -> None:
    """The owner waited for a message of the reference that was never sent."""
    modules = ("zmqgrad.rpc.reply_port", "zmqgrad.rpc.calls")
    hits = 0
    for number in range(8):
        kept = [rpc.remote(1, len, args=("abc",))]
        kept[0].to_here(WAIT)
        hits += interrupted(number, modules, lambda kept=kept: rpc.rpc_sync(1, str, (kept[0],)), kind)  # type: ignore[misc]
        kept.clear()
    assert hits == 8

    def owned() -> int:
        gc.collect()  # an error refers to the frames that it left
        return int(pair[1].references.statistics()["owner_rrefs"])

    eventually(owned, lambda left: left == 0)
