"""At which address a worker listens and is reached: several interfaces, IPv6, names, a NAT."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch

from tests.support.networks import Networks, enter_namespace, networks
from tests.support.processes import run_processes
from tools.ports import free_port
from zmqgrad import rpc
from zmqgrad.transport.host_address import choose_address
from zmqgrad.transport.interfaces import interface_addresses

pytestmark = [pytest.mark.processes, pytest.mark.slow]

__all__ = ["networks"]

SECRET = "the secret of this job, of 33 bytes"


def call_each_other(rank: int, hosts: list[str], environs: list[dict[str, str]]) -> Any:
    """Call, and send a large tensor, both ways; returns the endpoint and the log of the choice."""
    enter_namespace(hosts[rank])
    os.environ.update(environs[rank])
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zmqgrad.rpc.membership.bootstrap")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    sent = torch.ones(1 << 20)
    assert rpc.rpc_sync(f"w{1 - rank}", torch.neg, args=(sent,)).equal(-sent)
    rpc.shutdown()
    return lines


def two_hosts(networks: Networks) -> list[str]:
    a, b = networks.add("a"), networks.add("b")
    networks.link(a, "eth0", b, "eth0", "10.213.8.", "fd00:213:8::")
    networks.link(a, "ib0", b, "ib0", "10.213.9.", "fd00:213:9::")
    return [a, b]


def logged(networks: Networks, environ: dict[str, str]) -> list[list[str]]:
    common = {"MASTER_PORT": str(free_port()), "ZMQGRAD_SECRET": SECRET, **environ}
    result: list[list[str]] = run_processes(
        call_each_other, 2, (two_hosts(networks), [common, common]), timeout=60
    )
    return result


def test_the_interface_is_chosen_by_name(networks: Networks) -> None:
    """Over IPv6, and not the one on the route to the store."""
    chosen = "ZMQGRAD_SOCKET_IFNAME"
    first, second = logged(networks, {"MASTER_ADDR": "fd00:213:8::1", chosen: "^lo,eth"})
    assert first == [f"worker w0 listens at fd00:213:9::1 (ib0, by {chosen}=^lo,eth)"]
    assert second == [f"worker w1 listens at fd00:213:9::2 (ib0, by {chosen}=^lo,eth)"]


def test_a_worker_and_its_store_behind_a_nat(networks: Networks) -> None:
    """Only the router's address, and ten ports of it, lead to the first host."""
    a, r, b = networks.add("a"), networks.add("r"), networks.add("b")
    networks.link(a, "eth0", r, "in0", "10.213.20.")
    networks.link(r, "out0", b, "eth0", "10.213.21.")
    networks.run(r, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    networks.run(a, "ip", "route", "add", "default", "via", "10.213.20.2")
    networks.iptables(
        r,
        "-t nat -A PREROUTING -i out0 -p tcp --dport 30000:30009 -j DNAT --to-destination 10.213.20.1",
    )
    networks.iptables(r, "-t nat -A POSTROUTING -o out0 -j MASQUERADE")
    common = {"MASTER_ADDR": "10.213.21.1", "MASTER_PORT": "30000", "ZMQGRAD_SECRET": SECRET}
    hidden = {**common, "ZMQGRAD_ADVERTISE_ADDRESS": "10.213.21.1", "ZMQGRAD_PORT_RANGE": "30001-30009"}
    first, second = run_processes(call_each_other, 2, ([a, b], [hidden, common]), timeout=60)
    assert first == ["worker w0 listens at 10.213.20.1, reached at 10.213.21.1 (faces 10.213.21.1)"]
    assert second == ["worker w1 listens at 10.213.21.2 (faces 10.213.21.1)"]


def test_a_host_whose_loopback_interface_is_down(networks: Networks) -> None:
    """As in a sandbox that sets up no more than it needs. It cannot connect to an address of its own."""
    hosts = two_hosts(networks)
    networks.run(hosts[0], "ip", "link", "set", "lo", "down")
    common = {"MASTER_ADDR": "10.213.8.1", "MASTER_PORT": str(free_port()), "ZMQGRAD_SECRET": SECRET}
    first, second = run_processes(call_each_other, 2, (hosts, [common, common]), timeout=60)
    assert first == ["worker w0 listens at 10.213.8.1 (faces 10.213.8.1)"]
    assert second == ["worker w1 listens at 10.213.8.2 (faces 10.213.8.1)"]


def addresses_of(rank: int, host: str) -> Any:
    enter_namespace(host)
    return interface_addresses(), choose_address("10.213.8.2", 1, secured=True)


def test_the_addresses_of_this_host(networks: Networks) -> None:
    host, _ = two_hosts(networks)
    networks.run(host, "ip", "addr", "add", "10.213.8.77/24", "dev", "eth0")
    ((found, chosen),) = run_processes(addresses_of, 1, (host,), timeout=60)
    assert [tuple(each) for each in found] == [
        ("lo", "127.0.0.1"),
        ("eth0", "10.213.8.1"),
        ("eth0", "10.213.8.77"),
        ("ib0", "10.213.9.1"),
        ("lo", "::1"),
        ("eth0", "fd00:213:8::1"),
        ("ib0", "fd00:213:9::1"),
    ]
    assert tuple(chosen) == ("10.213.8.1", "10.213.8.1", "faces 10.213.8.2")
