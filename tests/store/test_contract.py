"""What every store does (:class:`zmqgrad.store.Store`): one suite over all of them."""

from __future__ import annotations

import _thread
import copy
import inspect
import pickle
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.waiting import eventually
from zmqgrad.errors import ConfigurationError, QueueEmptyError, StoreError, StoreTimeoutError
from zmqgrad.runtime.future import Promise
from zmqgrad.store import EtcdStore, FileStore, HashStore, PrefixStore, Store, TCPStore, arguments, connection
from zmqgrad.wire.messages import MAX_KEY

PATIENCE = 20.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, a timeout is told of by the store itself, in words about the key."""
    monkeypatch.setattr(connection, "LATE_SECONDS", PATIENCE)


KINDS = [
    "tcp",
    "keyed tcp",
    "tcp, no fast path",
    "keyed tcp, no fast path",
    "hash",
    "file",
    "prefix of tcp",
    "prefix of file",
    "prefix of prefix",
    pytest.param("etcd", marks=[pytest.mark.processes, needs_etcd]),
]


@pytest.fixture(scope="module", autouse=True)
def etcd(request: pytest.FixtureRequest) -> Iterator[EtcdCluster | None]:
    """A cluster for all tests of this module, if any of those that are selected needs it."""
    if not any("etcd" in item.name for item in request.session.items if item.path == request.path):
        yield None
        return
    with EtcdCluster(3) as cluster:
        yield cluster


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, etcd: EtcdCluster | None) -> Iterator[Store]:
    beneath: Store
    if "tcp" in request.param:
        secret = "the secret of this job" if "keyed" in request.param else None
        beneath = TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            timeout=PATIENCE,
            secret=secret,
            fast_path="no fast path" not in request.param,
        )
    elif "etcd" in request.param:
        assert etcd is not None
        beneath = EtcdStore(etcd.endpoint, secrets.token_hex(8), PATIENCE)
    elif "file" in request.param:
        beneath = FileStore(str(tmp_path / "store"), 1, PATIENCE)
    else:
        beneath = HashStore(PATIENCE)
    with beneath:
        seen = beneath
        for n in range(request.param.count("prefix")):
            seen = PrefixStore(f"p{n}", seen)
        yield seen


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Promise[Any]]]:
    """Runs something in a thread; the threads are waited for."""
    threads = []

    def run(call: Callable[..., Any], *args: Any) -> Promise[Any]:
        outcome: Promise[Any] = Promise()

        def work() -> None:
            try:
                outcome.set_result(call(*args))
            except BaseException as e:
                outcome.set_exception(e)

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return outcome

    yield run
    for thread in threads:
        thread.join(PATIENCE)


def until_parked(store: Store, count: int) -> None:
    """Return once ``count`` queries wait in ``store``."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, (TCPStore, FileStore, HashStore, EtcdStore))
    eventually(lambda: store.statistics()["parked"], lambda parked: parked == count, PATIENCE)


# ---- values -----------------------------------------------------------------------------------------------


def test_values_come_back_as_bytes(store: Store) -> None:
    store.set("k", "tëxt")
    assert store.get("k") == "tëxt".encode()
    store.set("k", b"\xff\0")
    assert store.get("k") == b"\xff\0"
    store.set(b"k", bytearray(b"other"))  # type: ignore[arg-type]
    assert store.get("k") == b"other"
    assert store.get(b"k") == b"other"  # type: ignore[arg-type]


class Text(str):
    """As NumPy's ``str_``, which its arrays of names consist of."""

    __slots__ = ()


class Data(bytes):
    """As NumPy's ``bytes_``."""


def test_keys_and_values_of_subclasses(store: Store) -> None:
    store.set(Text("a"), Data(b"1"))
    store.multi_set([Text("b"), "c"], [Text("2"), Data(b"3")])
    store.queue_push(Text("q"), Data(b"4"))
    got = [*store.multi_get(["a", Text("b"), "c"]), store.queue_pop(Text("q"))]
    assert [(type(value), value) for value in got] == [(bytes, b"%d" % n) for n in (1, 2, 3, 4)]
    assert store.check([Text("a")])
    assert {*map(type, store.list_keys(Text("")))} == {str}
    assert store.add(Text("a"), 1) == 2


def test_large_values(store: Store) -> None:
    large = bytes(range(256)) * 4096 * 5
    store.set("k", large)
    assert store.get("k") == large
    assert store.multi_get(["k", "k"]) == [large, large]


def test_add(store: Store) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "40")
    assert store.add("n", 2) == 42
    assert type(store.add("n", True)) is int


def test_add_to_a_value_that_is_not_a_number(store: Store) -> None:
    store.set("k", "text")
    with pytest.raises(StoreError, match="no 64-bit number but b'text'"):
        store.add("k", 1)
    assert store.get("k") == b"text"


def test_compare_set(store: Store) -> None:
    assert store.compare_set("k", "not", "x") == b"not", "missing, and something was expected"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "1") == b"1", "missing, as expected"
    assert store.compare_set("k", "0", "2") == b"1"
    assert store.compare_set("k", b"1", b"2") == b"2"
    assert store.compare_set("k", "", "3") == b"2"
    assert store.get("k") == b"2"


def test_check_delete_and_count(store: Store) -> None:
    assert store.check([])
    assert not store.check(["a"])
    store.set("a", "")
    store.set("b", "")
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert store.num_keys() == 2
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False
    assert store.num_keys() == 1


def test_append(store: Store) -> None:
    assert store.has_extended_api()
    store.append("k", "ab")
    store.append("k", b"c")
    assert store.get("k") == b"abc"


def test_multi_set_and_multi_get(store: Store) -> None:
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]
    assert store.multi_get([]) == []
    with pytest.raises(ConfigurationError, match="2 keys, but 1 values"):
        store.multi_set(["a", "b"], ["1"])


def test_queues(store: Store) -> None:
    for value in ("1", b"2"):
        store.queue_push("q", value)
    assert store.queue_len("q") == 2
    assert store.queue_pop("q") == b"1"
    assert store.queue_pop("q", False) == b"2"
    assert store.queue_len("q") == 0
    with pytest.raises(QueueEmptyError, match=r"queue is empty: '(.*/)?q'"):
        store.queue_pop("q", block=False)


def test_a_queue_is_no_value_to_be_cached(store: Store, in_thread: Callable[..., Promise[Any]]) -> None:
    store.queue_push("q", "item")
    store.set_timeout(0.2)
    outcome = in_thread(store.get_cached, "q")
    assert outcome.wait_done(3 * PATIENCE)
    with pytest.raises(StoreTimeoutError):
        outcome.result()


def test_a_wait_that_fails_names_what_is_missing(store: Store) -> None:
    store.queue_push("q", "item")
    with pytest.raises(StoreTimeoutError) as failed:
        store.wait(["q", "gone"], 0.1)
    missing = str(failed.value).partition("missing: ")[2]
    assert "gone'" in missing
    assert "q'" not in missing


def test_a_queue_exists_for_check_and_wait_while_it_holds_something(
    store: Store, in_thread: Callable[..., Promise[Any]]
) -> None:
    assert not store.check(["q"])
    wait = in_thread(store.wait, ["q", "k"])
    until_parked(store, 1)
    store.set("k", "")
    store.queue_push("q", "1")
    wait.wait(PATIENCE)
    assert store.check(["q"])
    assert store.num_keys() == 1
    assert store.delete_key("q") is False
    store.set("q", "a key beside it")
    assert (store.queue_pop("q"), store.get("q")) == (b"1", b"a key beside it")
    store.delete_key("q")
    assert not store.check(["q"])


def test_a_barrier_blocks_until_the_last_has_arrived(
    store: Store, in_thread: Callable[..., Promise[Any]]
) -> None:
    for _ in range(3):
        waits = [in_thread(store.barrier, "b", 3) for _ in range(2)]
        until_parked(store, 2)
        assert not any(wait.done() for wait in waits)
        store.barrier("b", 3)
        for wait in waits:
            wait.wait(PATIENCE)
    store.barrier("alone", 1, timedelta(0))


def test_a_barrier_that_times_out_counts_the_arrived(store: Store) -> None:
    with pytest.raises(
        StoreTimeoutError, match=r"barrier timeout after 0\.01 s, key 'b': 1 of 2 have arrived"
    ):
        store.barrier("b", 2, 0.01)
    for size in (0, -1, "2"):
        with pytest.raises(ConfigurationError, match="world size"):
            store.barrier("b", size)  # type: ignore[arg-type]


def test_a_clone_shares_the_keys_and_lives_by_itself(store: Store) -> None:
    store.set_timeout(0.5 * PATIENCE)
    clone = store.clone()
    assert type(clone) is type(store)
    assert clone.timeout == store.timeout
    store.set("k", "1")
    assert clone.get("k") == b"1"
    clone.set_timeout(0.01)
    clone.close()
    assert store.timeout == timedelta(seconds=0.5 * PATIENCE)
    assert store.get("k") == b"1"
    with pytest.raises(StoreError, match="closed"):
        clone.get("k")


def test_list_keys(store: Store) -> None:
    for key in ("b", "a1", "a2"):
        store.set(key, "")
    assert store.list_keys() == ["a1", "a2", "b"]
    assert store.list_keys("a") == ["a1", "a2"]


def test_the_empty_key_is_a_key(store: Store) -> None:
    store.set("a", "")
    count = store.num_keys()
    store.set("", "1")
    assert (store.get(""), store.num_keys()) == (b"1", count + 1)
    assert store.list_keys() == ["", "a"]
    assert store.list_keys("a") == ["a"]
    assert store.delete_key("")
    assert store.list_keys() == ["a"]


COMMANDS = st.lists(
    st.tuples(
        st.sampled_from(["set", "add", "append", "delete_key", "compare_set"]),
        st.sampled_from(["a", "b", "ü"]),
        st.integers(-9, 9),
    ),
    max_size=30,
)


@pytest.fixture(scope="module")
def shared() -> dict[str, Store]:
    return {"hash": HashStore(PATIENCE)}


@given(commands=COMMANDS)
def test_all_stores_behave_the_same(shared: dict[str, Store], commands: list[tuple[str, str, int]]) -> None:
    """What one answers the other answers: a view of a HashStore, and a dict."""
    plain: dict[str, bytes] = {}
    view = PrefixStore("p", shared["hash"])
    for key in view.list_keys():
        view.delete_key(key)
    for name, key, n in commands:
        if name == "set":
            view.set(key, str(n))
            plain[key] = b"%d" % n
        elif name == "delete_key":
            assert view.delete_key(key) == (plain.pop(key, None) is not None)
        elif name == "compare_set":
            expected = view.compare_set(key, str(n), "7")
            if plain.get(key) == b"%d" % n:
                plain[key] = b"7"
            assert expected == plain.get(key, b"%d" % n)
        elif name == "append":
            view.append(key, "1")
            plain[key] = plain.get(key, b"") + b"1"
        else:
            assert view.add(key, n) == int(plain.get(key, b"0")) + n
            plain[key] = b"%d" % (int(plain.get(key, b"0")) + n)
    assert {key: view.get(key) for key in view.list_keys()} == plain


# ---- waiting ----------------------------------------------------------------------------------------------


def test_waits_end_when_the_keys_are_there(store: Store, in_thread: Callable[..., Promise[Any]]) -> None:
    store.set("a", "1")
    waits = [
        in_thread(store.wait, ["a", "b"]),
        in_thread(store.get, "b"),
        in_thread(store.multi_get, ["b", "a"]),
        in_thread(store.queue_pop, "q"),
    ]
    until_parked(store, 4)
    assert not any(wait.done() for wait in waits)
    store.set("b", "2")
    store.queue_push("q", "3")
    assert [wait.wait(PATIENCE) for wait in waits] == [None, b"2", [b"2", b"1"], b"3"]


def test_a_wait_in_one_thread_does_not_block_others(
    store: Store, in_thread: Callable[..., Promise[Any]]
) -> None:
    wait = in_thread(store.wait, ["never"])
    until_parked(store, 1)
    for n in range(100):
        assert store.add("n", 1) == n + 1
    store.set("never", "now")
    wait.wait(PATIENCE)


def test_a_timeout_names_the_key_and_the_time(store: Store) -> None:
    store.set("there", "")
    with pytest.raises(StoreTimeoutError, match=r"0\.02 s.*missing.*nope'") as caught:
        store.wait(["there", "nope"], timedelta(milliseconds=20))
    assert "'there'" not in str(caught.value).rpartition("missing")[2]
    with pytest.raises(StoreTimeoutError, match=r"0\.01 s"):
        store.wait(["nope"], 0.01)
    with pytest.raises(StoreTimeoutError, match=r"0\.01 s.*missing.*nope'"):
        store.multi_get(["there", "nope"], 0.01)
    store.set_timeout(timedelta(milliseconds=10))
    for call in (
        lambda: store.get("nope"),
        lambda: store.multi_get(["nope"]),
        lambda: store.queue_pop("nope"),
    ):
        with pytest.raises(TimeoutError, match=r"0\.01 s.*nope"):
            call()
    assert store.timeout == timedelta(milliseconds=10)
    assert store.get("there") == b""


def test_a_timeout_shows_the_beginning_of_long_keys(store: Store) -> None:
    """Of several of them, each character of which is shown as four, the whole text would fit no message."""
    keys = [f"long{n}" + "\x01" * 60_000 for n in range(5)]
    store.set_timeout(0.01)
    for call in (lambda: store.wait(keys), lambda: store.get(keys[0]), lambda: store.queue_pop(keys[0])):
        with pytest.raises(StoreTimeoutError, match="long0") as caught:
            call()
        assert len(str(caught.value)) < 10_000


def test_timeout_zero_checks_once(store: Store) -> None:
    store.set("k", "1")
    store.wait(["k"], 0)
    with pytest.raises(StoreTimeoutError):
        store.wait(["nope"], 0)


def test_adds_of_many_threads_add_up(store: Store, in_thread: Callable[..., Promise[Any]]) -> None:
    # In etcd, all but one of those that add at a time must try again.
    threads, times = (3, 20) if isinstance(store, EtcdStore) else (8, 50)

    def add_many() -> list[int]:
        return [store.add("n", 1) for _ in range(times)]

    outcomes = [in_thread(add_many) for _ in range(threads)]
    sums = [n for outcome in outcomes for n in outcome.wait(PATIENCE)]
    assert sorted(sums) == list(range(1, threads * times + 1))


# ---- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda s: s.set("k", 3), TypeError, "a value must be bytes or str, not int"),
        (lambda s: s.set(3, "v"), TypeError, "a key must be a str, not int"),
        (lambda s: s.get(None), TypeError, "not NoneType"),
        (lambda s: s.add("n", 1.5), TypeError, "amount must be an int, not float"),
        (lambda s: s.add("n", 1 << 63), ConfigurationError, "does not fit 64 bits"),
        (lambda s: s.wait("key"), TypeError, "a list of keys, not the str 'key'"),
        (lambda s: s.multi_set(["k"], "1"), TypeError, "a list of values, not the str"),
        (lambda s: s.check("key"), TypeError, "a list of keys"),
        (lambda s: s.multi_get(["k", 1]), TypeError, "a key must be a str"),
        (lambda s: s.wait(["k"], -1), ConfigurationError, "cannot be negative"),
        (lambda s: s.wait(["k"], timedelta(seconds=-1)), ConfigurationError, "cannot be negative"),
        (lambda s: s.wait(["k"], float("nan")), ConfigurationError, "no number"),
        (lambda s: s.wait(["k"], "1"), TypeError, "timedelta or seconds, not str"),
        (lambda s: s.set_timeout(None), TypeError, "not NoneType"),
        (lambda s: s.set("k" * (MAX_KEY + 1), ""), ConfigurationError, f"at most {MAX_KEY}"),
        (lambda s: s.set("\ud800", ""), ConfigurationError, "unpaired surrogate"),
        (lambda s: s.set("k", "\ud800"), ConfigurationError, "no Unicode text"),
    ],
)
def test_wrong_arguments_are_named(
    store: Store, call: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(store)
    store.set("k", "still works")
    assert store.get("k") == b"still works"


def test_a_value_over_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "MAX_VALUE", 9)  # the real one is 256 MB
    with HashStore() as store, pytest.raises(ConfigurationError, match=r"of 10 bytes \(at most 9"):
        store.set("k", bytes(10))


def test_a_closed_store_raises(store: Store, in_thread: Callable[..., Promise[Any]]) -> None:
    beneath = store
    while isinstance(beneath, PrefixStore):
        beneath = beneath.underlying_store
    waits = [in_thread(store.wait, ["never"]), in_thread(store.queue_pop, "never")]
    until_parked(store, 2)
    beneath.close()
    beneath.close()
    for wait in waits:
        with pytest.raises(StoreError, match="clos"):
            wait.wait(PATIENCE)
    with pytest.raises(StoreError, match="closed"):
        store.set("k", "v")


# ---- views ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_store_is_not_copied(store: Store, refused: Callable[[Store], object]) -> None:
    store.set("k", "1")  # so that it has its descriptors
    with pytest.raises(TypeError, match=r"cannot pickle or copy .* clone"):
        refused(store)
    assert store.get("k") == b"1"


def test_a_watch_with_a_wrong_timeout_is_none(store: Store) -> None:
    with pytest.raises(ConfigurationError, match="negative"):
        store.watch("k", timeout=-1)
    assert not store._registry.live_targets()


def test_prefixed_views_share_only_the_underlying_store() -> None:
    with HashStore() as store:
        one, two = PrefixStore("one", store), PrefixStore("two", store)
        one.set("k", "1")
        two.set("k", "2")
        one.queue_push("q", "x")
        assert (one.get("k"), two.get("k"), two.queue_len("q")) == (b"1", b"2", 0)
        assert store.list_keys() == ["one/k", "two/k"]
        assert PrefixStore("k", PrefixStore("one", store)).list_keys() == []
        assert one.num_keys() == 2, "as torch's: of the store beneath"
        assert one.underlying_store is store


def _close(store: HashStore) -> None:
    store.close()


def _interrupt(store: HashStore) -> None:
    _thread.interrupt_main()


@pytest.mark.parametrize("end", [_close, _interrupt])
def test_a_pop_that_ends_without_an_item_takes_none_later(end: Callable[[HashStore], None]) -> None:
    with HashStore(PATIENCE) as store, store.clone() as clone:

        def end_the_pop() -> None:
            until_parked(store, 1)
            end(clone)

        thread = threading.Thread(target=end_the_pop)
        thread.start()
        with pytest.raises((StoreError, KeyboardInterrupt)):
            clone.queue_pop("q")
        thread.join(PATIENCE)
        until_parked(store, 0)
        store.queue_push("q", "item")
        assert store.queue_pop("q", block=False) == b"item"


def test_a_signal_handler_that_calls_a_local_store_waits_for_no_call_that_it_interrupts() -> None:
    """Whichever step it interrupts: both calls are made, or the handler's cannot be, and says so."""
    left, refused, done = 0, list[str](), SimpleQueue[int]()

    def handle(frame: FrameType, event: str, argument: object) -> None:
        """As a signal handler, which runs between any two steps of its thread."""
        nonlocal left
        if left and event == "return":
            left -= 1
            if not left:
                try:
                    store.add("n", 1)
                except StoreError as e:
                    refused.append(str(e))

    def call() -> None:
        nonlocal left
        steps = 0
        while not left:
            steps += 1
            left = steps
            sys.setprofile(handle)
            store.add("n", 1)
            sys.setprofile(None)
        done.put(steps)

    with HashStore(PATIENCE) as store:
        threading.Thread(target=call, daemon=True).start()
        steps = done.get(timeout=PATIENCE)
        assert 0 < len(refused) < steps
        assert all("signal handler" in each for each in refused)
        assert store.add("n", 0) == 2 * steps - 1 - len(refused)


def test_a_prefix_store_closes_only_an_owned_store() -> None:
    store = HashStore()
    PrefixStore("p", store).close()
    store.set("k", "")
    PrefixStore("p", store, owned=True).close()
    with pytest.raises(StoreError):
        store.set("k", "")


def test_keys_of_any_bytes(store: Store) -> None:
    """As torch, whose list_keys fails then; ours gives what can be given back."""
    names: list[Any] = [b"\0", b"\0\1", b"\xff", b"\xfe", b"a\x80b", "\udcff\udcfe", "ÿ", b"\xc3\xbf\xff"]
    with store.watch(prefix="", timeout=PATIENCE) as watch:
        for n, name in enumerate(names):
            store.set(name, str(n))
            assert watch.next(PATIENCE).new == str(n).encode()
    assert [store.get(name) for name in names] == [b"%d" % n for n in range(len(names))]
    listed = store.list_keys()
    assert sorted(store.multi_get(listed)) == [b"%d" % n for n in range(len(names))]
    assert (len(store.list_keys("\0")), store.num_keys()) == (2, len(names))
    assert store.check(names)
    assert not store.check([b"\xfd"])
    assert all(store.delete_key(name) for name in names)


def test_a_view_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="not dict"):
        PrefixStore("p", {})  # type: ignore[arg-type]


def test_every_call_of_the_contract_is_public_everywhere() -> None:
    """No store adds arguments to the contract, so that one can take the place of another."""
    names = [name for name in vars(Store) if not name.startswith("_")]
    for cls in (TCPStore, FileStore, HashStore, EtcdStore, PrefixStore):
        for name in names:
            if callable(getattr(Store, name)):
                ours, theirs = (inspect.signature(getattr(c, name)) for c in (cls, Store))
                assert list(ours.parameters) == list(theirs.parameters), (cls, name)
