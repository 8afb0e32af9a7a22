"""Random programs over several workers have the gradients of one process (docs/guarantees.md, P7)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.autograd.contexts import wait_until_released
from tests.support.programs import _OPS as operations
from tests.support.programs import (
    Gradients,
    Program,
    assert_same,
    gradients_by_checkpoints,
    gradients_here,
    gradients_over_rpc,
    higher_here,
    higher_over_rpc,
    programs,
)
from zmqgrad.autograd.engine import differentiation, executor
from zmqgrad.autograd.engine.participant import MODES
from zmqgrad.autograd.graph import accumulate
from zmqgrad.errors import AutogradError
from zmqgrad.rpc import RpcBackendOptions
from zmqgrad.testing import Cluster, cluster
from zmqgrad.testing.faults import Fault
from zmqgrad.wire.messages import MessageType

pytestmark = [
    pytest.mark.slow,
    # A hundred programs with the ci profile, and twice that time to shrink one; thousands to soak.
    pytest.mark.timeout(240 * max(1, settings().max_examples // 100)),
    pytest.mark.open_outcomes,  # RRefs that are deleted while their fork request is on its way leave one
]
WORKERS = 3
OPTIONS = RpcBackendOptions(rpc_timeout=20.0)
"""What hangs shall say so before the test's own limit."""

AUTOGRAD = (
    MessageType.FORWARD_AUTOGRAD_REQ,
    MessageType.FORWARD_AUTOGRAD_RESP,
    MessageType.BACKWARD_AUTOGRAD_REQ,
    MessageType.BACKWARD_AUTOGRAD_RESP,
    MessageType.DISCOVER_AUTOGRAD_REQ,
    MessageType.DISCOVER_AUTOGRAD_RESP,
    MessageType.DROP_AUTOGRAD_REQ,
)
REPEATED = (
    MessageType.BACKWARD_AUTOGRAD_REQ,
    MessageType.BACKWARD_AUTOGRAD_RESP,
    MessageType.DISCOVER_AUTOGRAD_REQ,
    MessageType.DROP_AUTOGRAD_REQ,
)
ACROSS = 3
"""Messages that may overtake a delayed one; fewer than are sent meanwhile, or else it waits for the end."""


def check(
    c: Cluster,
    program: Program,
    mode: str,
    here: Callable[[Program], Gradients] = gradients_here,
    over_rpc: Callable[[Program, str], Gradients] = gradients_over_rpc,
) -> None:
    expected = here(program)
    with c.acting(program.driver):
        try:
            assert_same(over_rpc(program, mode), expected)
        except AutogradError as e:
            # fast mode may refuse a program, but must not hang or give other numbers
            if mode != "fast" or "in FAST mode" not in str(e):
                raise


def check_all_modes(c: Cluster, program: Program) -> None:
    for mode in MODES:
        check(c, program, mode)


def check_programs(
    kind: st.SearchStrategy[Program], share: int, check: Callable[[Cluster, Program], None]
) -> None:
    """``check`` drawn programs of a kind, one in ``share`` of those that the profile says."""
    with cluster(WORKERS, OPTIONS) as c:

        @settings(max_examples=settings().max_examples // share)
        @given(kind)
        def gradients_equal(program: Program) -> None:
            check(c, program)

        gradients_equal()
        wait_until_released(c)


def test_fast_mode_suffices_where_all_is_used() -> None:
    def check_fast(c: Cluster, program: Program) -> None:
        with c.acting(program.driver):
            assert_same(gradients_over_rpc(program, "fast"), gradients_here(program))

    check_programs(programs(WORKERS), 1, check_fast)


@pytest.mark.parametrize("hooks", [False, True])
def test_gradients_equal_those_of_one_process_in_every_mode(hooks: bool) -> None:
    """Hooks run once, on whole gradients."""
    check_programs(programs(WORKERS, all_used=False, hooks=hooks), 1, check_all_modes)


def test_gradients_of_group_calls_equal_those_of_one_process() -> None:
    """Those of an argument of all members are summed; of one of ``map``, each comes from its member."""
    check_programs(programs(WORKERS, all_used=False, hooks=True, groups=True), 1, check_all_modes)


def test_checkpointed_calls_give_the_same() -> None:
    """In one pass from all roots: constants that a checkpointed call gives require grad, too."""

    def check_checkpoints(c: Cluster, program: Program) -> None:
        for mode in MODES:
            check(c, replace(program, passes=None), mode, over_rpc=gradients_by_checkpoints)

    check_programs(programs(WORKERS, all_used=False, rich=True), 2, check_checkpoints)


@pytest.mark.parametrize("in_process_group", [False, True])
def test_several_passes_and_contexts_at_a_time(
    monkeypatch: pytest.MonkeyPatch, in_process_group: bool
) -> None:
    """Also: regions without grad, sparse gradients, hooks of leaves."""
    if in_process_group:
        for module in (accumulate, executor):
            monkeypatch.setattr(module, "may_have_replicas", lambda: True)
    check_programs(programs(WORKERS, all_used=False, hooks=True, rich=True), 2, check_all_modes)


def test_groups_run_node_by_node_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups with cut edges run node by node, as if a hook had been registered."""
    monkeypatch.setattr(executor, "hooks_registered", lambda *_: True)
    monkeypatch.setattr(differentiation, "has_tensor_hooks", lambda *_: True)
    check_programs(programs(WORKERS, all_used=False), 2, lambda c, program: check(c, program, "auto"))


def test_derivatives_of_any_order_equal_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    once = "one of two"  # its derivative cannot be differentiated
    monkeypatch.setitem(operations, once, lambda a, b: (a.sin() * 0.5,))

    def check_higher(c: Cluster, program: Program) -> None:
        for mode in MODES:
            check(c, program, mode, higher_here, higher_over_rpc)

    check_programs(programs(WORKERS, all_used=False, hooks=True), 2, check_higher)


class _Pushed:
    """Inside it, messages that a fault holds back go on whenever nothing else moves."""

    def __init__(self, c: Cluster, held: list[Fault]) -> None:
        self._network = c.network
        self._held = held
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pusher")

    def _run(self) -> None:
        while not self._over.wait(0.002):
            for fault in self._held:
                fault.release()  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


MISFORTUNES: st.SearchStrategy[list[tuple[str, int, int]]] = st.lists(
    st.one_of(
        st.tuples(st.just("delay"), st.sampled_from([int(k) for k in AUTOGRAD]), st.integers(1, ACROSS)),
        st.tuples(st.just("reorder"), st.integers(0, 1000), st.integers(2, 8)),
        st.tuples(st.just("duplicate"), st.sampled_from([int(k) for k in REPEATED]), st.just(2)),
    ),
    min_size=1,
    max_size=3,
)


@contextlib.contextmanager
def happening(c: Cluster, misfortunes: list[tuple[str, int, int]]) -> Iterator[None]:
    """Inside it, all ``misfortunes`` happen; none keeps a message for ever."""
    with contextlib.ExitStack() as stack:
        delays: list[Fault] = []
        for name, what, how in misfortunes:
            if name == "delay":
                delays.append(stack.enter_context(c.network.delay(MessageType(what), by=how)))
            elif name == "reorder":
                stack.enter_context(c.network.reorder(what, how))
            else:
                stack.enter_context(c.network.duplicate(MessageType(what)))
        stack.enter_context(_Pushed(c, delays))
        yield


def test_gradients_equal_whatever_happens_to_messages() -> None:
    with cluster(WORKERS, OPTIONS) as c:

        @given(programs(WORKERS, all_used=False), st.sampled_from(MODES), MISFORTUNES)
        def gradients_equal(program: Program, mode: str, misfortunes: list[tuple[str, int, int]]) -> None:
            with happening(c, misfortunes):
                check(c, program, mode)

        gradients_equal()
        wait_until_released(c)
