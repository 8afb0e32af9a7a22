"""The checks of ``zmqgrad doctor --peer HOST:PORT``: can this host and that one work together?

The peer is a listener of ``zmqgrad doctor --listen``, or a store or worker that runs. Only a listener
connects back, as workers do, to the address that a worker of this host would choose.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from zmqgrad import environment
from zmqgrad.cli.checks import Check, Status
from zmqgrad.cli.peer_connection import (
    LARGE_BYTES,
    SILENCE_SECONDS,
    Attempt,
    Outcome,
    Peer,
    connect,
    kernel_round_trip,
    open_peer,
    outcome_of,
    passes,
    path_mtu,
    read_greeting,
)
from zmqgrad.cli.peer_listener import MALFORMED, MAX_BYTES, plain
from zmqgrad.errors import ConfigurationError, StoreTimeoutError, ZmqgradError
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.store import Store, TCPStore
from zmqgrad.transport.bind_policy import bind_in_range, tcp_address
from zmqgrad.transport.host_address import HostAddress, choose_address
from zmqgrad.transport.interfaces import interface_addresses
from zmqgrad.transport.security import Keys, load_keys

PINGS = 50
_FIRST_BYTES = 1 << 20
_BANDWIDTH_SECONDS = 0.5
_STORE_BYTES = 8 << 20
_STORE_SECONDS = 3.0
_SEGMENT_SECONDS = 1.5
_SEGMENTS = {1460: "1500", 1410: "1450", 1360: "1400", 1240: "1280", 536: "576"}
"""Sizes of TCP segments to try, and the MTU that each needs over IPv4."""

_ADVICE = {
    Outcome.REFUSED: "the host is up, but nothing listens at port {port} there, or its firewall rejects: "
    "start `zmqgrad doctor --listen {port}` (or the job) there. If `ss -ltn` there shows it at 127.0.0.1 "
    "only, give the job a secret; otherwise let its firewall accept tcp port {port}",
    Outcome.TIMED_OUT: "a firewall drops the packets, or the host is down: on that host, and in security "
    "groups of the network, accept tcp port {port}; `ping {host}` tells whether it is up",
    Outcome.RESET: "a firewall, proxy or port mapping on the way accepts connections and resets them: "
    "compare with `ss -ltn` on that host, and exempt tcp port {port}",
    Outcome.UNREACHABLE: "a router or firewall reports that it does not deliver, or no host has the address: "
    "`ip neigh` shows FAILED if none has it; firewalld rejects like this: open tcp port {port} there",
    Outcome.NO_ROUTE: "this host has no route there (`ip route get {host}`): connect both to one network, or "
    "use another address of that host",
    Outcome.FAILED: "see the error",
}

_MTU_ADVICE = (
    "an MTU on the way is smaller than those of the interfaces, and a firewall drops the ICMP messages that "
    "would tell. Set `ip link set dev INTERFACE mtu {mtu}` on both hosts, or let ICMP pass (IPv4: "
    "fragmentation-needed; IPv6: packet-too-big)"
)


_BACK_UNTESTED = Check(
    "back",
    Status.NOTE,
    "not tested: this server does not connect to this host, as workers will",
    "run `zmqgrad doctor --listen` there, at another port while this one is in use",
)


def peer_checks(host: str, port: int) -> list[Check]:
    """All checks against ``host``, in the order of the report.

    Raises:
        ConfigurationError: if the secret of this host cannot be used.
    """
    keys = load_keys()
    found = _resolve(host, port)
    if not isinstance(found, list):
        return [found]
    checks = (
        [] if found == [host.strip("[]")] else [Check("name", Status.OK, f"{host} is {', '.join(found)}")]
    )
    attempts = [(address, connect(address, port)) for address in found]
    with ExitStack() as streams:
        for _, attempt in attempts:
            if attempt.stream is not None:
                streams.callback(attempt.stream.close)
        reached = any(attempt.stream for _, attempt in attempts)
        checks += [_attempt(address, port, attempt, reached) for address, attempt in attempts]
        for address, attempt in attempts:
            if attempt.stream is not None:
                own, interface = _interface(address, port)
                return [*checks, interface, *_examine(host, address, port, attempt.stream, keys, own)]
    return checks


def checked_back(checks: Sequence[Check]) -> bool:
    """Whether the peer was found to reach this host."""
    return any(check.name == "back" and check.status is Status.OK for check in checks)


def _resolve(host: str, port: int) -> list[str] | Check:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as e:
        advice = f"use its numeric address, or add `ADDRESS {host}` to /etc/hosts here"
        return Check("name", Status.BAD, f"{host} cannot be resolved here: {e.strerror or e}", advice)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _attempt(address: str, port: int, attempt: Attempt, reached: bool) -> Check:
    """The report of one attempt. One that fails is bad only if all do."""
    where = f"{f'[{address}]' if ':' in address else address}:{port}"
    milliseconds = attempt.seconds * 1000
    data: dict[str, Any] = {"address": address, "port": port, "outcome": attempt.outcome.value}
    if attempt.stream is None:
        status = Status.WARNING if reached else Status.BAD
        found = f"{where}: {attempt.outcome.value} after {milliseconds:.0f} ms ({attempt.error})"
        return Check("connect", status, found, _ADVICE[attempt.outcome].format(host=address, port=port), data)
    own = attempt.stream.getsockname()[0]
    interface = next((name for name, each in interface_addresses() if each == own), "?")
    mtu = path_mtu(attempt.stream)
    shown = f"{where}: connected in {milliseconds:.1f} ms from {own} ({interface}"
    data |= {"from": own, "interface": interface, "connect_ms": round(milliseconds, 3), "mtu": mtu}
    return Check("connect", Status.OK, f"{shown}{f', MTU {mtu}' if mtu else ''})", "", data)


def _interface(address: str, port: int) -> tuple[HostAddress | None, Check]:
    """The address that a worker of this host would choose, if those meet at ``address``."""
    try:
        own = choose_address(address, port, secured=True)  # the check of the secret tells if there is none
    except (ConfigurationError, OSError) as e:
        return None, Check("interface", Status.BAD, "a worker of this host finds no address", str(e))
    return own, Check("interface", Status.OK, f"a worker of this host listens at {own}")


def _examine(
    host: str, address: str, port: int, stream: socket.socket, keys: Keys | None, own: HostAddress | None
) -> list[Check]:
    try:
        greeting = read_greeting(stream)
        if greeting.kind == "listener":
            with Peer(stream, greeting.hello, keys) as peer:
                return _listener(peer, address, port, keys, own)
    except (OSError, *MALFORMED) as e:
        outcome = outcome_of(e) if isinstance(e, OSError) else Outcome.FAILED
        advice = _ADVICE[Outcome.RESET if outcome is Outcome.FAILED else outcome].format(host=host, port=port)
        return [Check("server", Status.BAD, f"accepts connections, and then: {e}", advice)]
    if greeting.kind == "zeromq":
        return [*_zeromq(host, port, stream, greeting.mechanism, keys), _BACK_UNTESTED]
    what = f"sent nothing in {SILENCE_SECONDS:.0f} s" if greeting.kind == "silent" else "is not of zmqgrad"
    advice = (
        f"rank 0 of a job is silent, and so is a port mapping without a server behind it; to test the "
        f"network, start `zmqgrad doctor --listen` there, at another port than {port} while that is in use"
    )
    return [Check("server", Status.NOTE, f"the server {what}", advice)]


# ---- a listener ------------------------------------------------------------------------------------------


def _listener(peer: Peer, address: str, port: int, keys: Keys | None, own: HostAddress | None) -> list[Check]:
    hello = peer.hello
    checks = [Check("server", Status.OK, f"zmqgrad doctor --listen on {hello['host']}")]
    checks.append(_same_secret(peer, keys))
    if not peer.accepted:
        return checks
    checks.append(_translation(hello, address))
    times = [peer.exchange(1, 1) for _ in range(PINGS)]
    median = statistics.median(times) * 1e6
    checks.append(Check("round trip", Status.OK, f"{median:.0f} us", "", {"round_trip_us": round(median, 1)}))
    if own is not None:
        checks.append(_back(peer, own, secured=keys is not None))
    packets = _packets(address, port, keys)
    checks.append(packets)
    if packets.status is Status.OK:
        checks.append(_bandwidth(peer))
    return checks


def _same_secret(peer: Peer, keys: Keys | None) -> Check:
    secured = bool(peer.hello["secured"])
    if secured and keys is not None:
        if peer.accepted:
            return Check("secret", Status.OK, "the same on both hosts")
        return Check("secret", Status.BAD, "another one than on the peer", "give both hosts the same")
    if not secured and keys is None:
        return Check("secret", Status.WARNING, "none on either host", "zmqgrad secret --write FILE")
    lacks = "this host" if secured else "the peer"
    advice = f"set {environment.SECRET_FILE} (or {environment.SECRET}) on {lacks} as well"
    return Check("secret", Status.BAD, f"{lacks} has none", advice)


def _translation(hello: dict[str, Any], address: str) -> Check:
    """Are addresses translated on the way, in either direction?"""
    name, found, advice = environment.ADVERTISE_ADDRESS, [], []
    own = [each for _, each in interface_addresses()]
    if own and hello["client"] not in own:
        found.append(f"the peer sees this host as {hello['client']}")
        advice.append(f"set {name}={hello['client']} here")
    if hello["at"] != plain(address).partition("%")[0]:
        found.append(f"the peer is {hello['at']}, not {address}")
        advice.append(f"set {name}={address} there")
    if not found:
        return Check("NAT", Status.OK, "none between the hosts")
    advice.append("where others must connect: forward the ports of ZMQGRAD_PORT_RANGE to the same ports")
    return Check("NAT", Status.NOTE, "; ".join(found), ", ".join(advice))


def _back(peer: Peer, own: HostAddress, secured: bool) -> Check:
    """Let the peer connect to this host, as its workers will. Without a secret, it chooses the address."""
    host = own.advertise if secured else str(peer.hello["client"])
    family = socket.AF_INET6 if ":" in own.listen else socket.AF_INET
    at = own.listen if secured else ""
    with bind_in_range(lambda port: socket.create_server((at, port), family=family)) as listening:
        port = int(listening.getsockname()[1])
        problem = peer.connect_back(host, port)
    where = tcp_address(host, port).removeprefix("tcp://")
    if not problem:
        return Check("back", Status.OK, f"the peer connects to {where}", "", {"outcome": "connected"})
    advice = (
        f"workers connect in both directions: on this host, accept tcp from the peer at the ports of "
        f"{environment.PORT_RANGE} (30000-30031, say; unset: at all); behind a NAT, forward them"
    )
    return Check(
        "back", Status.BAD, f"the peer cannot connect to {where}: {problem}", advice, {"outcome": problem}
    )


def _packets(address: str, port: int, keys: Keys | None) -> Check:
    """Do full packets pass, in both directions?"""
    lost = [
        name
        for name, (send, receive) in {"there": (LARGE_BYTES, 1), "back": (1, LARGE_BYTES)}.items()
        if not _passes(address, port, keys, send, receive)
    ]
    if not lost:
        return Check("packets", Status.OK, f"{LARGE_BYTES >> 10} KB pass in both directions")
    passing = [
        mtu
        for segment, mtu in _SEGMENTS.items()
        if _passes(address, port, keys, LARGE_BYTES, LARGE_BYTES, segment, _SEGMENT_SECONDS)
    ][:1]
    found = f"small messages pass, {LARGE_BYTES >> 10} KB do not ({' and '.join(lost)})"
    if passing:
        found += f"; with packets of at most {passing[0]} bytes they do"
    advice = _MTU_ADVICE.format(mtu=passing[0] if passing else "1280")
    return Check(
        "packets", Status.BAD, found, advice, {"lost": lost, "passing_mtu": passing[0] if passing else None}
    )


def _passes(
    address: str,
    port: int,
    keys: Keys | None,
    send: int,
    receive: int,
    segment: int = 0,
    seconds: float = SILENCE_SECONDS,
) -> bool:
    try:
        with open_peer(address, port, keys, segment) as peer:
            peer.exchange(send, receive, seconds)
    except OSError:
        return False
    return True


def _bandwidth(peer: Peer) -> Check:
    there = _rate(lambda size: peer.exchange(size, 1))
    back = _rate(lambda size: peer.exchange(1, size))
    found = f"{there / 1e6:.0f} MB/s there, {back / 1e6:.0f} MB/s back (one TCP connection, not encrypted)"
    data = {"there_bytes_per_second": round(there), "back_bytes_per_second": round(back)}
    return Check("bandwidth", Status.OK, found, "", data)


def _rate(transfer: Any) -> float:
    """Bytes per second, of a transfer that takes about half a second."""
    size = int(_FIRST_BYTES / transfer(_FIRST_BYTES) * _BANDWIDTH_SECONDS)
    size = max(_FIRST_BYTES, min(size, MAX_BYTES))
    return float(size / transfer(size))


# ---- a store or a worker ---------------------------------------------------------------------------------


def _zeromq(host: str, port: int, stream: socket.socket, mechanism: str, keys: Keys | None) -> list[Check]:
    round_trip = kernel_round_trip(stream)
    secured = mechanism == "CURVE"
    alike = secured == (keys is not None)
    store = _store(host, port) if mechanism != "PLAIN" else None
    if isinstance(store, Check):
        if alike:
            return [store]
        store = None
    what = "a store of zmqgrad" if store else "a store, a worker, or another program with ZeroMQ"
    checks = [
        Check("server", Status.OK, f"{what}, {'with' if secured else 'without'} encryption ({mechanism})")
    ]
    if mechanism in ("NULL", "CURVE") and not alike and not store:
        lacks, has = ("this host", "the peer") if secured else ("the peer", "this host")
        advice = f"give all processes of the job the same {environment.SECRET_FILE}"
        checks.append(Check("secret", Status.BAD, f"{has} has one, {lacks} has none", advice))
    if store is None and round_trip is not None:
        data = {"round_trip_us": round(round_trip * 1e6, 1)}
        checks.append(Check("round trip", Status.OK, f"{round_trip * 1e6:.0f} us (of the kernel)", "", data))
    whole = passes(stream, mechanism)
    if whole is False:
        return [*checks, Check("packets", Status.BAD, "full packets vanish", _MTU_ADVICE.format(mtu=1280))]
    if whole:
        checks.append(Check("packets", Status.OK, f"{LARGE_BYTES >> 10} KB pass to the peer"))
    if store:
        return checks + store
    advice = f"`zmqgrad doctor --listen` on {host} shows that, and whether it can connect to this host"
    return [*checks, Check("bandwidth", Status.NOTE, "not measured against this server", advice)]


def _store(host: str, port: int) -> list[Check] | Check | None:
    """Round trip and bandwidth of a store; None if the server is none; its error if it refuses this host."""
    key = "zmqgrad-doctor"
    try:
        with TCPStore(host, port, timeout=_STORE_SECONDS, wait_for_workers=False, fast_path=False) as store:
            return _measure_store(store, f"{key}/{id(store)}")
    except StoreTimeoutError:  # a worker does not reply to clients of stores
        return None
    except ZmqgradError as e:
        return Check("secret" if load_keys() else "server", Status.BAD, str(e))


def _measure_store(store: Store, key: str) -> list[Check]:
    def timed(call: Any) -> float:
        began = MONOTONIC.now()
        call()
        return MONOTONIC.now() - began

    median = statistics.median(timed(lambda: store.check([key])) for _ in range(PINGS)) * 1e6
    try:
        there = _STORE_BYTES / timed(lambda: store.set(key, bytes(_STORE_BYTES)))
        back = _STORE_BYTES / timed(lambda: store.get(key))
    finally:
        store.delete_key(key)
    found = f"{there / 1e6:.0f} MB/s there, {back / 1e6:.0f} MB/s back (a value of 8 MB)"
    data = {"there_bytes_per_second": round(there), "back_bytes_per_second": round(back)}
    return [
        Check("round trip", Status.OK, f"{median:.0f} us", "", {"round_trip_us": round(median, 1)}),
        Check("bandwidth", Status.OK, found, "", data),
    ]
