"""RRefs: owners and users, values, proxies, errors, identity, lifetimes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
from typing import Any

import torch

from tests.oracles.calls import TIMED_OUT, Counter, block, combine, raise_it, same
from tests.oracles.implementation import rpc
from tests.oracles.outcome import attempt
from tests.oracles.scenario import scenario
from tests.support.waiting import eventually

WRONG_PICKLER = "Can not pickle rref in python pickler"


# ---- on the callee ----------------------------------------------------------------------------------------


def look_at(rref: Any) -> Any:
    """Describe a reference that arrived."""
    return rref.is_owner(), rref.owner().name, rref.owner_name(), rref.to_here()


def local_value_there(rref: Any) -> Any:
    """Return the value of a reference to this worker."""
    return rref.local_value()


def pass_on(rref: Any, names: list[str]) -> Any:
    """Send a reference along, and return what the last worker sees."""
    if not names:
        return look_at(rref)
    return rpc.rpc_sync(names[0], pass_on, args=(rref, names[1:]))


def return_it(rref: Any) -> Any:
    """Return a reference."""
    return rref


def make_there(value: Any) -> Any:
    """Return a reference that this worker owns."""
    return rpc.RRef(value)


def refer_to(name: str, value: Any) -> Any:
    """Return a reference that a third worker owns."""
    return rpc.remote(name, same, args=(value,))


_kept: list[Any] = []


def keep(rref: Any) -> None:
    """Keep a reference after the call."""
    _kept.append(rref)


def kept_value() -> Any:
    """Return the value of the kept reference, and drop it."""
    return _kept.pop().to_here()


def counter_of(rref: Any) -> int:
    """Return the count on the owner."""
    return int(rref.local_value().n)


# ---- owners and users -------------------------------------------------------------------------------------


@scenario()
def a_value_on_another_worker() -> Any:
    rref = rpc.remote("worker1", combine, args=(1,))
    return [
        rref.to_here(),
        rref.is_owner(),
        rref.owner().name,
        rref.owner().id,
        rref.owner_name(),
        eventually(rref.confirmed_by_owner),  # torch confirms at its own time, maybe after the value has come
        type(rref).__name__ in ("RRef", "PyRRef"),
        isinstance(rref, rpc.PyRRef),
        attempt(
            rref.local_value,
            "can't call localValue() on user",
            "WorkerInfo(id=0, name=worker0)",
            "Call it on owner",
        ),
    ]


@scenario()
def a_value_here() -> Any:
    value = Counter(3)
    rref = rpc.RRef(value)
    return [
        rref.is_owner(),
        rref.owner_name(),
        rref.local_value() is value,
        rref.to_here() is value,
        rref.confirmed_by_owner(),
        isinstance(rref, rpc.RRef),
        rref.to_here(timeout=0.1) is value,
    ]


@scenario()
def a_list_here() -> Any:
    value = [1, 2]
    return rpc.RRef(value).local_value() is value


@scenario()
def a_value_made_here_by_remote() -> Any:
    rref = rpc.remote("worker0", combine, args=(1,))
    return [rref.is_owner(), rref.to_here(), rref.local_value(), rref.confirmed_by_owner()]


@scenario()
def values_of_all_kinds() -> Any:
    values = [None, 5, "text", [1], torch.ones(2), {"a": torch.zeros(1)}, torch.Size([1]), int]
    return [rpc.remote("worker1", same, args=(value,)).to_here() for value in values]


@scenario()
def each_to_here_is_a_copy() -> Any:
    rref = rpc.remote("worker1", same, args=([1],))
    rref.to_here().append(2)
    return rref.to_here()


@scenario()
def references_are_sent() -> Any:
    other, own = rpc.remote("worker1", combine, args=(1,)), rpc.RRef(7)
    return [
        rpc.rpc_sync("worker1", look_at, args=(other,)),
        rpc.rpc_sync("worker2", look_at, args=(other,)),
        rpc.rpc_sync("worker1", look_at, args=(own,)),
        rpc.rpc_sync("worker0", look_at, args=(own,)),
        rpc.rpc_sync("worker0", look_at, args=(other,)),
        rpc.rpc_sync("worker1", pass_on, args=(other, ["worker2", "worker0", "worker2"])),
        rpc.rpc_sync("worker1", pass_on, args=(own, ["worker2", "worker0", "worker1"])),
        rpc.rpc_async("worker2", look_at, args=(other,)).wait(),
        rpc.remote("worker2", look_at, args=(other,)).to_here(),
    ]


@scenario()
def references_are_returned() -> Any:
    other, own = rpc.remote("worker1", combine, args=(1,)), rpc.RRef(7)
    results = [
        rpc.rpc_sync("worker1", return_it, args=(other,)),
        rpc.rpc_sync("worker2", return_it, args=(other,)),
        rpc.rpc_sync("worker1", return_it, args=(own,)),
        rpc.rpc_sync("worker1", make_there, args=(8,)),
        rpc.rpc_sync("worker1", refer_to, args=("worker2", 9)),
        rpc.rpc_sync("worker1", refer_to, args=("worker0", 10)),
        rpc.remote("worker1", make_there, args=(11,)).to_here(),
    ]
    return [look_at(rref) for rref in results]


@scenario()
def references_in_containers() -> Any:
    rrefs = {"a": [rpc.remote("worker1", combine, args=(n,)) for n in range(3)], "b": (rpc.RRef(1),)}
    back = rpc.rpc_sync("worker2", same, args=(rrefs,))
    return [rref.to_here() for rref in (*back["a"], *back["b"])]


@scenario()
def a_user_keeps_the_value() -> Any:
    rref = rpc.remote("worker1", combine, args=(1,))
    rpc.rpc_sync("worker2", keep, args=(rref,))
    del rref
    gc.collect()
    return rpc.rpc_sync("worker2", kept_value)


@scenario()
def a_user_keeps_a_value_of_this_worker() -> Any:
    rpc.rpc_sync("worker2", keep, args=(rpc.RRef([1, 2]),))
    gc.collect()
    return rpc.rpc_sync("worker2", kept_value)


@scenario()
def an_argument_of_remote() -> Any:
    rref = rpc.remote("worker1", combine, args=(1,))
    return rpc.remote("worker2", look_at, args=(rref,)).to_here()


@scenario()
def local_value_of_a_reference_that_went_home() -> Any:
    rref = rpc.remote("worker1", combine, args=(1,))
    return [
        rpc.rpc_sync("worker1", local_value_there, args=(rref,)),
        attempt(
            lambda: rpc.rpc_sync("worker2", local_value_there, args=(rref,)),
            "can't call localValue() on user",
        ),
    ]


@scenario()
def the_future_of_a_creation() -> Any:
    rref = rpc.remote("worker1", combine, args=(1,))
    failed = rpc.remote("worker1", raise_it, args=(ValueError, "the text"))
    return [rref._get_future().wait(), attempt(lambda: failed._get_future().wait())]


@scenario()
def the_type_of_a_value() -> Any:
    return [
        rpc.remote("worker1", Counter)._get_type(),
        rpc.RRef(5)._get_type(),
        rpc.remote("worker1", combine, args=(1,))._get_type(blocking=False).wait(),
    ]


# ---- identity ---------------------------------------------------------------------------------------------


@scenario()
def equality_and_hash() -> Any:
    rref = rpc.remote("worker1", combine, args=(1,))
    back = rpc.rpc_sync("worker1", return_it, args=(rref,))
    own = rpc.RRef(1)
    own_back = rpc.rpc_sync("worker1", return_it, args=(own,))
    return [
        rref == rref,
        rref == back,
        own == own_back,
        rref == own,
        rref == 1,
        rref != back,
        len({rref, back, own}),
    ]


@scenario()
def texts() -> Any:
    def shown(rref: Any) -> str:
        return re.sub(r"\d+", "N", str(rref))

    return [shown(rpc.RRef(1)), shown(rpc.remote("worker1", combine, args=(1,)))]


@scenario()
def pickling_outside_of_calls() -> Any:
    rref = rpc.remote("worker1", combine, args=(1,))
    return [
        attempt(lambda: pickle.dumps(rref), WRONG_PICKLER),
        attempt(lambda: pickle.dumps(rpc.RRef(1)), WRONG_PICKLER),
        attempt(lambda: torch.save(rref, io.BytesIO()), WRONG_PICKLER),
        attempt(lambda: copy.copy(rref), WRONG_PICKLER),
        attempt(lambda: copy.deepcopy(rref), WRONG_PICKLER),
    ]


@scenario()
def arguments_of_the_constructor() -> Any:
    return [
        rpc.RRef(value=1).local_value(),
        attempt(lambda: rpc.RRef()),
        attempt(lambda: rpc.RRef(1).nonsense, "has no attribute 'nonsense'"),
    ]


@scenario()
def a_type_hint() -> Any:
    return attempt(lambda: rpc.RRef(1, type_hint=int).local_value())


# ---- proxies ----------------------------------------------------------------------------------------------


@scenario()
def proxies() -> Any:
    for_name = {}
    for name in ("worker0", "worker1"):
        counter = rpc.remote(name, Counter, args=(5,))
        tensor = rpc.remote(name, torch.add, args=(torch.ones(2, 2), 1))
        for_name[name] = [
            counter.rpc_sync().add(1),
            counter.rpc_async().add(2).wait(),
            counter.remote().add(3).to_here(),
            counter.rpc_sync().static(1),
            counter.rpc_sync().of_class(1),
            counter.rpc_sync(timeout=5).add(1),
            counter.rpc_sync().__call__(2),
            tensor.rpc_sync().size(),
            tensor.rpc_async().view(1, 4).wait(),
            tensor.remote().view(-1).to_here(),
            rpc.rpc_sync(name, counter_of, args=(counter,)),
        ]
    return for_name


@scenario()
def proxies_of_own_values() -> Any:
    counter = rpc.RRef(Counter(5))
    return [counter.rpc_sync().add(1), counter.rpc_async().add(1).wait(), counter.remote().add(1).to_here()]


@scenario()
def proxies_sent_to_others() -> Any:
    counter = rpc.remote("worker1", Counter, args=(5,))
    return rpc.rpc_sync("worker2", add_by_proxy, args=(counter,)), counter.rpc_sync().add(0)


def add_by_proxy(counter: Any) -> Any:
    """Call methods of a value of another worker."""
    return counter.rpc_sync().add(1), counter.rpc_async().add(1).wait(), counter.remote().add(1).to_here()


@scenario()
def attributes_that_do_not_exist() -> Any:
    counter = rpc.remote("worker1", Counter)
    return [
        attempt(lambda: counter.remote().subtract(1), "has no attribute 'subtract'"),
        attempt(lambda: rpc.RRef(5).remote().subtract(1), "has no attribute 'subtract'"),
    ]


@scenario()
def attributes_that_do_not_exist_in_calls() -> Any:
    counter = rpc.remote("worker1", Counter)
    return [
        attempt(lambda: counter.rpc_sync().subtract(1), "has no attribute 'subtract'"),
        attempt(lambda: counter.rpc_async().subtract(1).wait(), "has no attribute 'subtract'"),
    ]


@scenario()
def methods_that_fail() -> Any:
    counter = rpc.remote("worker1", Counter)
    return [
        attempt(lambda: rpc.remote("worker1", Checked).rpc_sync().check(), "checked"),
        attempt(lambda: rpc.remote("worker1", Checked).rpc_async().check().wait(), "checked"),
        attempt(lambda: rpc.remote("worker1", Checked).remote().check().to_here(), "checked"),
        attempt(lambda: rpc.remote("worker1", Checked).rpc_sync().slow(0.4), "checked"),
        counter.rpc_sync().add(1),
    ]


@scenario()
def data_by_proxy() -> Any:
    return attempt(lambda: rpc.remote("worker1", Counter, args=(5,)).rpc_sync().n())


class Checked:
    """Its methods fail."""

    def check(self) -> None:
        """Fail."""
        raise ValueError("checked")

    def slow(self, seconds: float) -> None:
        """Fail later."""
        block(seconds)
        raise ValueError("checked")

    def sleep(self, seconds: float) -> float:
        """Take ``seconds``."""
        return block(seconds)


@scenario()
def timeouts_of_proxies() -> Any:
    slow = rpc.remote("worker1", Checked)
    slow.to_here()
    return [
        attempt(lambda: slow.rpc_sync(timeout=0.1).sleep(0.4), TIMED_OUT),
        attempt(lambda: slow.rpc_async(timeout=0.1).sleep(0.4).wait(), TIMED_OUT),
        slow.rpc_sync(timeout=0).sleep(0.2),
        slow.rpc_sync().sleep(0.0),
    ]


@scenario()
def a_timeout_of_a_remote_proxy() -> Any:
    slow = rpc.remote("worker1", Checked)
    slow.to_here()
    return attempt(lambda: slow.remote(timeout=0.1).sleep(0.4).to_here(timeout=2.0), "RRef creation")


@scenario()
def timeouts_of_creations() -> Any:
    late = rpc.remote("worker1", block, args=(0.4,))
    return [
        attempt(lambda: late.to_here(timeout=0.1), TIMED_OUT),
        late.to_here(timeout=2),
        attempt(lambda: late.to_here(timeout="1")),
    ]


@scenario()
def a_creation_that_failed() -> Any:
    rref = rpc.remote("worker1", raise_it, args=(ValueError, "not made"))
    return [
        attempt(rref.to_here, "not made"),
        attempt(rref.to_here, "not made"),
    ]


@scenario()
def a_creation_that_failed_is_used() -> Any:
    rref = rpc.remote("worker1", raise_it, args=(ValueError, "not made"))
    attempt(rref.to_here)
    return [
        attempt(lambda: rref.rpc_sync().bit_length(), "not made"),
        attempt(lambda: rpc.rpc_sync("worker1", local_value_there, args=(rref,)), "not made"),
        attempt(lambda: rpc.rpc_sync("worker2", look_at, args=(rref,)), "not made"),
    ]


@scenario()
def a_creation_that_failed_here() -> Any:
    rref = rpc.remote("worker0", raise_it, args=(ValueError, "not made"))
    return attempt(rref.to_here, "not made"), attempt(rref.local_value, "not made")


@scenario()
def backward_from_a_value() -> Any:
    x = torch.ones(2, requires_grad=True)
    own = rpc.RRef((x * 3).sum())
    own.backward()
    return [
        x.grad,
        attempt(lambda: rpc.RRef(5).backward(), "RRef should contain a tensor for .backward()"),
        attempt(
            lambda: rpc.remote("worker1", combine, args=(1,)).backward(),
            "User RRefs require 'dist_autograd_ctx_id'",
        ),
        attempt(
            lambda: rpc.RRef(torch.ones(2, requires_grad=True) * 2).backward(),
            "grad can be implicitly created",
        ),
    ]
