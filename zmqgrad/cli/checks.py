"""The checks of ``zmqgrad doctor``. Each checks one thing and reports its result."""

from __future__ import annotations

import enum
import importlib.metadata
import json
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from zmqgrad import __version__, environment
from zmqgrad.elastic.agent.addresses import LOOPBACK, usable_port
from zmqgrad.elastic.agent.ranks import NodeInfo, place
from zmqgrad.elastic.agent.variables import common_variables, worker_variables
from zmqgrad.elastic.launch_config import LaunchConfig
from zmqgrad.errors import ConfigurationError
from zmqgrad.transport import capabilities
from zmqgrad.transport.host_address import choose_address
from zmqgrad.transport.interfaces import interface_addresses
from zmqgrad.transport.security import load_keys

SELF_TEST_SECONDS = 120.0
"""Time limit of the two workers of the self-test, including importing torch."""

MIN_OPEN_FILES = 1024
"""Below this limit on open files, a group of a few dozen workers may fail."""


class Status(enum.Enum):
    """Status of a check. A NOTE is informational; BAD means that workers cannot run."""

    OK = enum.auto()
    NOTE = enum.auto()
    WARNING = enum.auto()
    BAD = enum.auto()


class Check(NamedTuple):
    """Result of a check: its subject, status, findings, and the remedy."""

    name: str
    status: Status
    found: str
    advice: str = ""
    data: Mapping[str, object] | None = None
    """Measured values, for JSON."""


def all_checks(self_test: bool = True) -> list[Check]:
    """All checks, in the order of the report."""
    checks = [check() for check in _CHECKS]
    if self_test:
        checks.append(_self_test())
    return checks


def _versions() -> Check:
    found = [f"zmqgrad {__version__}", f"Python {platform.python_version()}", platform.platform(terse=True)]
    return Check("versions", Status.OK, ", ".join(found))


def _packages() -> Check:
    found, absent = [f"libzmq {capabilities.libzmq_version()}"], []
    for name in ("torch", "pyzmq", "msgspec", "cloudpickle"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    if absent:
        return Check(
            "packages", Status.BAD, f"missing: {', '.join(absent)}", f"pip install {' '.join(absent)}"
        )
    return Check("packages", Status.OK, ", ".join(found))


def _encryption() -> Check:
    if capabilities.has_curve():
        return Check("libsodium", Status.OK, "libzmq can encrypt (CURVE)")
    return Check(
        "libsodium",
        Status.WARNING,
        "libzmq was built without CURVE: nothing can be encrypted",
        "install pyzmq from a wheel, which brings libsodium",
    )


def _ipc() -> Check:
    problem = capabilities.ipc_problem()
    if problem:
        return Check("ipc", Status.WARNING, f"not usable ({problem}): workers of this host will use tcp")
    return Check("ipc", Status.OK, "chosen between workers of this host")


def _shared_memory() -> Check:
    problem = capabilities.arena_problem()
    if problem:
        return Check(
            "memfd", Status.WARNING, f"{problem}: large tensors go through sockets, many times slower"
        )
    return Check("memfd", Status.OK, "chosen for large tensors between workers of this host and user")


def _interfaces() -> Check:
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name, address in interface_addresses():
        found.setdefault(name, []).append(address)
    shown = "; ".join(" ".join([name, *addresses]) for name, addresses in found.items())
    return Check("interfaces", Status.OK, shown or "none")


def _launch() -> environment.LauncherInfo:
    """The launcher's variables; if one is malformed, which :func:`_launcher` reports, as if none were set."""
    try:
        return environment.read_launch()
    except ConfigurationError:
        return environment.LauncherInfo()


def _launcher() -> Check:
    """The worker that the launcher has made of this process, and the variables that say so."""
    try:
        launch = environment.read_launch()
    except ConfigurationError as e:
        return Check("launcher", Status.BAD, str(e))
    rank, world_size = launch.rank, launch.world_size
    if rank is None and world_size is None:
        return Check("launcher", Status.NOTE, "RANK and WORLD_SIZE are not set: zmqgrad run sets them")
    variables = {launch.rank_from: rank, launch.world_size_from: world_size}
    found = ", ".join(f"{name} {'is not set' if v is None else v}" for name, v in variables.items())
    if rank is not None and world_size is not None and rank >= world_size:
        return Check("launcher", Status.BAD, found, "give the workers the ranks from 0 to WORLD_SIZE - 1")
    return Check("launcher", Status.OK, found)


def _address() -> Check:
    """The address at which workers on other hosts would reach this one."""
    launch = _launch()
    try:
        secured = load_keys() is not None
        address = choose_address(launch.master_addr or LOOPBACK, launch.master_port or 0, secured=secured)
    except (OSError, UnicodeError) as e:  # UnicodeError: no name that can be looked up, as a..b
        return Check("address", Status.BAD, f"no route to MASTER_ADDR {launch.master_addr}: {e}")
    except ConfigurationError as e:
        return Check("address", Status.BAD, "no worker could listen", str(e))
    unset = "" if launch.master_addr else ": MASTER_ADDR is not set, so workers are on this host only"
    return Check("address", Status.OK, f"{address}{unset}")


def _port() -> Check:
    launch = _launch()
    if launch.master_port is None:
        return Check("port", Status.NOTE, "MASTER_PORT is not set: zmqgrad run picks a free one")
    try:
        usable_port("127.0.0.1", launch.master_port)
    except ConfigurationError as e:
        return Check("port", Status.WARNING, f"MASTER_PORT {launch.master_port} is in use: {e}")
    return Check("port", Status.OK, f"MASTER_PORT {launch.master_port} is free here")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files allowed"
    if soft < MIN_OPEN_FILES:
        return Check("limits", Status.WARNING, found, f"ulimit -n {hard if hard > 0 else 65536}")
    return Check("limits", Status.OK, found)


def _secret() -> Check:
    try:
        if load_keys() is not None:
            name = environment.SECRET if environment.secret() else environment.SECRET_FILE
            return Check("secret", Status.OK, f"{name} is set: traffic between hosts is encrypted")
    except ConfigurationError as e:
        return Check("secret", Status.BAD, "the secret cannot be used", str(e))
    return Check("secret", Status.NOTE, f"{environment.SECRET} is not set: workers listen on loopback only")


_CHECKS: tuple[Callable[[], Check], ...] = (
    _versions,
    _packages,
    _encryption,
    _ipc,
    _shared_memory,
    _interfaces,
    _launcher,
    _address,
    _port,
    _open_files,
    _secret,
)


def _self_test() -> Check:
    """Start two workers on this host and let one call the other."""
    common = common_variables(environment.inherited(), LaunchConfig(nproc_per_node=2))
    node = NodeInfo("self-test", "default_role", 2, 0, LOOPBACK, usable_port(LOOPBACK, 0))
    environments = [worker_variables(common, place([node], 0, 0), rank) for rank in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "zmqgrad.rpc.selftest", f"doctor{rank}"],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, environ in enumerate(environments)
    ]
    try:
        outputs = [worker.communicate(timeout=SELF_TEST_SECONDS) for worker in workers]
    except subprocess.TimeoutExpired:
        return Check("self-test", Status.BAD, f"two workers did not finish within {SELF_TEST_SECONDS:.0f} s")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for rank, worker in enumerate(workers):
        if worker.returncode:
            last = outputs[rank][1].decode(errors="replace").strip().splitlines()[-1:]
            return Check("self-test", Status.BAD, f"worker {rank} failed: {''.join(last)}")
    # A sitecustomize may print as well.
    reports = [line for line in outputs[0][0].splitlines() if line.startswith(b"{")]
    if not reports:
        return Check("self-test", Status.BAD, "worker 0 ended without a result")
    return _self_test_result(json.loads(reports[-1]))


def _self_test_result(report: dict[str, float | str | bool]) -> Check:
    path = {"arena": "shared memory", "frames": "sockets"}.get(str(report["path"]), str(report["path"]))
    found = (
        f"two workers: {report['call_us']:.0f} us per empty call, {report['tensor_ms']:.1f} ms per "
        f"round trip of 64 MB by {path}"
    )
    if not report["tensor_right"]:
        return Check("self-test", Status.BAD, f"{found}; the returned tensor differs from the sent one")
    return Check("self-test", Status.OK, found)
