"""The choice of an interface, of the address, and of ports."""

from __future__ import annotations

import errno
import re
import socket

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad import environment
from zmqgrad.errors import AddressInUseError, ConfigurationError, TransportError
from zmqgrad.store import TCPStore
from zmqgrad.transport import bind_policy, host_address
from zmqgrad.transport.heartbeat.server import HeartbeatListener
from zmqgrad.transport.host_address import choose_address
from zmqgrad.transport.interfaces import InterfaceAddress, InterfaceFilter, interface_addresses, select
from zmqgrad.transport.mailbox import ZmqMailbox

HOST = [
    InterfaceAddress("lo", "127.0.0.1"),
    InterfaceAddress("eth0", "192.0.2.10"),
    InterfaceAddress("eth1", "192.0.2.11"),
    InterfaceAddress("eth10", "192.0.2.20"),
    InterfaceAddress("docker0", "172.17.0.1"),
    InterfaceAddress("ib0", "192.0.2.30"),
    InterfaceAddress("ib0", "2001:db8::30"),
]


@pytest.mark.parametrize(
    ("text", "facing", "chosen"),
    [
        ("eth", "192.0.2.30", "192.0.2.10"),
        ("eth1", "192.0.2.30", "192.0.2.11"),
        ("eth1", "192.0.2.20", "192.0.2.20"),  # a prefix; and eth10 is on the route
        ("=eth1", "192.0.2.20", "192.0.2.11"),
        ("ib,eth", "172.17.0.1", "192.0.2.30"),  # in the order of the list
        ("^docker,eth", "192.0.2.10", "192.0.2.30"),
        ("^docker0", "172.17.0.1", "192.0.2.10"),  # and loopback only by name
        ("^=eth1,eth0", "192.0.2.11", "192.0.2.20"),
        ("eth,^eth0", "192.0.2.10", "192.0.2.11"),
        ("lo", "192.0.2.10", "127.0.0.1"),
        ("ib", "2001:db8::1", "2001:db8::30"),
        ("eth", "2001:db8::1", None),
        ("wlan", "192.0.2.10", None),
    ],
)
def test_interfaces_are_selected_as_by_nccl(text: str, facing: str, chosen: str | None) -> None:
    found = select(HOST, InterfaceFilter(text), facing)
    assert (found and found.address) == chosen


@given(st.text("^=,abe01 ", max_size=12), st.sampled_from(HOST))
def test_what_excludes_selects_the_rest(text: str, each: InterfaceAddress) -> None:
    wanted = InterfaceFilter(text)
    excluding = InterfaceFilter("^" + text.lstrip("^= ,"))
    if not any(flag in text for flag in "^=") and text.strip(" ,"):
        assert (wanted.rank(each.interface) is None) == (excluding.rank(each.interface) is not None)
    assert wanted.rank(each.interface) in (None, *range(12))


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with several interfaces, of which eth0 is on the route to all others."""
    for name in (environment.SOCKET_IFNAME, "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_address, "interface_addresses", lambda: HOST)
    monkeypatch.setattr(host_address, "facing_address", lambda host, port: "192.0.2.10")


def test_the_variables_of_gloo_and_nccl_count_if_they_select_an_interface(
    several: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(choose_address("far", secured=True)) == "192.0.2.10 (faces far)"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    assert str(choose_address("far", secured=True)) == "192.0.2.30 (ib0, by NCCL_SOCKET_IFNAME=ib)"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert choose_address("far", secured=True).listen == "192.0.2.11"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wlan0")
    assert (
        choose_address("far", secured=True).reason == "faces far; no interface has GLOO_SOCKET_IFNAME=wlan0"
    )
    monkeypatch.setenv(environment.SOCKET_IFNAME, "wlan0")
    with pytest.raises(
        ConfigurationError, match=r"SOCKET_IFNAME=wlan0 selects no .* IPv4.*, ib0 192\.0\.2\.30"
    ):
        choose_address("far", secured=True)
    assert choose_address("localhost", secured=True).listen == "127.0.0.1", "a job of this host needs none"


def test_loopback_is_no_choice_for_a_job_of_several_hosts(
    several: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers would connect to their own loopback, and report that the process has ended."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    assert choose_address("far", secured=True).listen == "192.0.2.10"
    monkeypatch.setenv(environment.SOCKET_IFNAME, "lo")
    with pytest.raises(
        ConfigurationError, match=r"=lo selects 127\.0\.0\.1, .*meet at far: select another of eth0 192"
    ):
        choose_address("far", secured=True)
    assert choose_address("127.0.0.1", secured=True).listen == "127.0.0.1"
    assert choose_address(None, secured=True).listen == "127.0.0.1", "a file does not tell which hosts meet"
    monkeypatch.setenv(environment.ADVERTISE_ADDRESS, "198.51.100.9")  # of a proxy on this host
    assert tuple(choose_address("far", secured=True))[:2] == ("127.0.0.1", "198.51.100.9")


def test_an_address_that_may_not_be_listened_at(several: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQGRAD_ALLOW_INSECURE", raising=False)
    with pytest.raises(ConfigurationError, match=re.escape("will not listen on tcp://192.0.2.10:0")):
        choose_address("far", secured=False)


def test_an_own_name_that_resolves_to_loopback(several: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the hosts file of Debian: 127.0.1.1. Other hosts would find themselves there."""
    monkeypatch.delenv("ZMQGRAD_ALLOW_INSECURE", raising=False)
    monkeypatch.setattr(
        host_address, "facing_address", lambda host, port: "127.0.0.1" if host == "me" else "192.0.2.10"
    )
    assert str(choose_address("me", secured=True)) == "192.0.2.10 (default route, as me is this host)"
    assert choose_address("me", secured=False).listen == "127.0.0.1"


def test_an_own_name_that_resolves_to_loopback_without_a_default_route(
    several: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def facing(host: str, port: int) -> str:
        if host != "me":
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        return "127.0.0.1"

    monkeypatch.setattr(host_address, "facing_address", facing)
    chosen = "192.0.2.10 (eth0, without a default route, as me is this host)"
    assert str(choose_address("me", secured=True)) == chosen
    assert choose_address(None, secured=True).listen == "192.0.2.10"
    monkeypatch.setenv(environment.SOCKET_IFNAME, "ib")
    assert choose_address("me", secured=True).listen == "192.0.2.30"
    monkeypatch.setattr(host_address, "interface_addresses", lambda: HOST[:1])
    monkeypatch.delenv(environment.SOCKET_IFNAME)
    assert str(choose_address("me", secured=True)) == "127.0.0.1 (no network, as me is this host)"


def test_an_advertised_address(several: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.ADVERTISE_ADDRESS, "198.51.100.9")
    assert str(choose_address("far", secured=True)) == "192.0.2.10, reached at 198.51.100.9 (faces far)"
    monkeypatch.setenv(environment.ADVERTISE_ADDRESS, "no-such-host.invalid")
    with pytest.raises(
        ConfigurationError, match=r"ADVERTISE_ADDRESS=no-such-host\.invalid cannot be resolved"
    ):
        choose_address("far", secured=True)
    for unspecified in ("0.0.0.0", "[::]"):
        monkeypatch.setenv(environment.ADVERTISE_ADDRESS, unspecified)
        with pytest.raises(ConfigurationError, match="any address of a host"):
            choose_address("far", secured=True)
    for malformed in ("gate..example", "gate\udcff"):  # of which the resolver raises no OSError
        monkeypatch.setenv(environment.ADVERTISE_ADDRESS, malformed)
        with pytest.raises(ConfigurationError, match=f"ADVERTISE_ADDRESS is '{ascii(malformed)[1:5]}"):
            choose_address("far", secured=True)


def test_addresses_of_real_interfaces() -> None:
    assert InterfaceAddress("lo", "127.0.0.1") in interface_addresses()


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> range:
    """Three successive free ports, as the range of the environment."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            number: int = first.getsockname()[1]
            try:
                for port in range(number + 1, number + 3):
                    socket.create_server(("127.0.0.1", port)).close()
            except (OSError, OverflowError):
                continue
        monkeypatch.setenv(environment.PORT_RANGE, f"{number}-{number + 2}")
        return range(number, number + 3)


def test_sockets_listen_in_the_range_of_ports(ports: range) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, other = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    try:
        assert (
            bind_policy.bind_tcp(router, "tcp://127.0.0.1:*", secured=True) == f"tcp://127.0.0.1:{ports[0]}"
        )
        heartbeats = HeartbeatListener("ipc://@zmqgrad-test-range", "127.0.0.1", "198.51.100.9")
        try:
            assert heartbeats.endpoint is not None
            assert heartbeats.endpoint.startswith(f"heartbeat://198.51.100.9:{ports[1]}/")
            with TCPStore("127.0.0.1", 0, is_master=True) as store:
                assert store.port == ports[2]
                with pytest.raises(AddressInUseError, match=f"{ports[0]}-{ports[2]} are in use"):
                    bind_policy.bind_tcp(other, "tcp://127.0.0.1:*", secured=True)
        finally:
            heartbeats.close()
    finally:
        router.close()
        other.close()
        context.term()


def test_a_worker_without_a_port_for_its_heartbeats_is_told_so(ports: range) -> None:
    """It has one for its messages already, which it gives up."""
    with (
        socket.create_server(("127.0.0.1", ports[1])),
        socket.create_server(("127.0.0.1", ports[2])),
        pytest.raises(TransportError, match=r"cannot listen for heartbeats: all ports .* are in use"),
    ):
        ZmqMailbox("w0", 0)
    socket.create_server(("127.0.0.1", ports[0])).close()


def test_the_port_of_rank_0_is_left_to_its_store(ports: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent has chosen it for them, from the same range."""
    monkeypatch.setenv("MASTER_PORT", str(ports[0]))
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        assert store.port == ports[1]


@pytest.mark.parametrize("text", ["30000", "30009-30000", "0-9", "a-b", "30000-70000", "1-2-3"])
def test_a_malformed_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"PORT_RANGE is .*two ports"):
        environment.port_range({environment.PORT_RANGE: text})


def test_a_master_at_the_advertised_address_listens_at_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.ADVERTISE_ADDRESS, "198.51.100.9")
    monkeypatch.setenv("ZMQGRAD_ALLOW_INSECURE", "1")
    with TCPStore("198.51.100.9", 0, is_master=True, timeout=10) as store:
        store.set("key", "value")
        with TCPStore("127.0.0.1", store.port, timeout=10) as other:
            assert other.get("key") == b"value"
        with TCPStore("::1", store.port, timeout=10) as other:
            assert other.get("key") == b"value"
