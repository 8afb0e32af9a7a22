"""The reference has an example with each name, and the examples of docstrings run as written.

Most run on worker 0 of a cluster in this process; those that join a group by themselves run outside of one.
What other hosts, Ray or etcd would be needed for has ``# doctest: +SKIP``, which the site does not show.
"""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import zmqgrad
from tools.docs import reference
from tools.ports import free_port
from zmqgrad import autograd, elastic, interop, nn, optim, rendezvous, rpc, store, testing, trace
from zmqgrad.testing import cluster, simulation

NAMES = reference.shown()
ALONE = (
    "init_rpc", "shutdown", "RpcBackendOptions", "cluster", "Cluster", "simulate", "install", "uninstall"
)  # fmt: skip
"""They join a group, or make a cluster of their own."""
DATA = {
    "elastic.Parameters", "elastic.RendezvousBackend", "elastic.RendezvousTimeout", "store.EtcdOptions",
    "testing.simulation.Failure", "testing.simulation.Faults", "testing.simulation.Run",
    "testing.simulation.SimulationFailed", "trace.Actor", "trace.Call", "trace.Message", "trace.Process",
    "trace.Stamped",
}  # fmt: skip
"""What programs get or implement, and the examples of functions use."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.fixture
def namespace(tmp_path: Path) -> dict[str, Any]:
    modules = (elastic, interop, nn, optim, rendezvous, store, testing, simulation)
    names = {
        name: getattr(each, name)
        for each in modules
        for name in [*dir(each), *getattr(each, "__all__", ())]
        if name[:1] != "_"
    }
    return {
        **names, "__name__": "__main__", "torch": torch, "zmqgrad": zmqgrad, "rpc": rpc, "trace": trace,
        "dist_autograd": autograd, "directory": tmp_path,
    }  # fmt: skip


def examples_of(name: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(NAMES[name]) or "", name)


@pytest.mark.parametrize("name", sorted(set(NAMES) - DATA))
def test_a_name_has_an_example(name: str) -> None:
    """Of a function, that uses it; of a class, perhaps one that has an object of it."""
    examples = examples_of(name)
    assert examples
    if not inspect.isclass(NAMES[name]):
        assert any(name.rpartition(".")[2] in each.source for each in examples)


@pytest.mark.parametrize("name", sorted(name for name in NAMES if examples_of(name)))
@pytest.mark.usefixtures("alone", "registries")
@pytest.mark.filterwarnings("ignore:imported from torch's RPC before")  # by other tests of this process
def test_examples_run_as_written(name: str, namespace: dict[str, Any]) -> None:
    if name.startswith("trace.prometheus"):
        pytest.importorskip("prometheus_client")
        from zmqgrad.trace import prometheus

        namespace["prometheus"] = prometheus
    elif name.startswith("trace.otel"):
        pytest.importorskip("opentelemetry.sdk")
        from zmqgrad.trace import otel

        namespace["otel"] = otel
    if name.rpartition(".")[2] in ALONE:
        run(name, namespace)
    else:
        with cluster(2):
            run(name, namespace)


def run(name: str, namespace: dict[str, Any]) -> None:
    test = doctest.DocTest(examples_of(name), namespace, name, None, 0, None)
    reported: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=reported.append)
    assert not reported, "".join(reported)
