"""Agents with real workers, one or several nodes on this host: who runs, who restarts, and how it ends."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.agent.nodes import FAST, Job, Node, exits, pause, run_command
from zmqgrad.__main__ import main
from zmqgrad.elastic.agent.addresses import usable_port
from zmqgrad.store import TCPStore
from zmqgrad.trace import Job as Trace

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes that are not its children"),
]

FINISH = "sys.exit()"


@pytest.fixture
def store() -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as served:
        yield served


@pytest.fixture
def job(store: TCPStore, tmp_path: Path) -> Iterator[Job]:
    """A job whose rendezvous is served by this process."""
    made = Job(f"127.0.0.1:{store.port}", tmp_path / "worker.py")
    yield made
    made.close()


@pytest.fixture
def served_by_a_node(tmp_path: Path) -> Iterator[Job]:
    """A job whose rendezvous is served by its first node."""
    made = Job(f"127.0.0.1:{usable_port('127.0.0.1', 0)}", tmp_path / "worker.py")
    yield made
    made.close()


def test_two_nodes_succeed_and_the_one_that_serves_the_store_leaves_last(served_by_a_node: Job) -> None:
    """The nodes finish at different times, so one waits for the other."""
    slow = "import time; time.sleep(2 * (os.environ['RANK'] in '01')); sys.exit()"
    nodes = [served_by_a_node.start(slow, "--nproc-per-node", 2, nodes="2") for _ in range(2)]
    workers = [node.find_workers(2, world_size=4) for node in nodes]
    assert sorted(rank for each in workers for rank in each) == [0, 1, 2, 3]
    assert [node.wait() for node in nodes] == [0, 0], "\n".join(node.text for node in nodes)
    assert all("zmqgrad run: round 0: node " in node.text for node in nodes)


def test_a_worker_that_fails_restarts_the_workers_of_all_nodes(job: Job) -> None:
    nodes = [job.start("", nodes="2", restarts=3) for _ in range(2)]
    first = [node.find_workers(1, world_size=2) for node in nodes]
    os.kill(first[0].get(1) or first[1][1], signal.SIGKILL)
    for node in nodes:
        node.find(r"^zmqgrad run: worker 1 of node 1 failed \(killed by SIGKILL\), restart 1 of 3$")
    again = [node.find_workers(1, world_size=2, restarts=1) for node in nodes]
    assert [list(each) for each in again] == [list(each) for each in first], "nodes keep their ranks"
    assert all(exits(pid) for each in first for pid in each.values())


def test_no_restart_left(job: Job) -> None:
    code = "if os.environ['RANK'] == '1': raise ValueError('the reason')"
    nodes = [job.start(code, nodes="2", restarts=1) for _ in range(2)]
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        assert node.text.count("failed (exit code 1), restart 1 of 1") == 1
        report = node.text[node.text.rindex("failed first: exit code 1") :]
        assert "ValueError: the reason\n" in report


def test_a_worker_that_is_killed_is_named(job: Job) -> None:
    node = job.start("", "--nproc-per-node", 2, nodes="1", restarts=1)
    os.kill(node.find_workers(2, world_size=2)[1], signal.SIGKILL)
    node.find(r"worker 1 of node 0 failed \(killed by SIGKILL\), restart 1 of 1$")
    os.kill(node.find_workers(2, world_size=2, restarts=1)[0], signal.SIGKILL)
    assert node.wait() == 137
    assert "worker 0 failed first: killed by SIGKILL" in node.text


def test_a_node_joins_and_is_killed(job: Job) -> None:
    first = job.start("")
    alone = first.find_workers(1, world_size=1)
    second = job.start("")
    first.find(r"^zmqgrad run: a node joined: restart as 2 nodes$")
    assert list(first.find_workers(1, world_size=2)) == [0], "who was there keeps its rank"
    assert exits(alone[0])
    orphan = second.find_workers(1, world_size=2)[1]
    second.process.kill()
    assert exits(orphan), "workers do not outlive their agent"
    first.find(r"^zmqgrad run: node 1 of 2 left or was lost: restart as 1 node$")
    first.find_workers(1, world_size=1)


LOSE = """
from zmqgrad.errors import PeerLostError, RpcTimeoutError
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
if size == "2" and rank == "0":
    def fail(*_):
        raise {first}
    signal.signal(signal.SIGUSR1, fail)
    print("ready", flush=True)
elif size == "2" and {both}:
    raise RpcTimeoutError("w1: shutdown gave up: the store no longer replies")
"""


@pytest.mark.parametrize("error", ["PeerLostError('w1 is gone')", "ValueError('connection closed')"])
def test_a_worker_that_fails_because_a_node_was_lost_costs_no_restart(job: Job, error: str) -> None:
    """It notices the loss before the agent does, whatever its error is."""
    code = LOSE.format(first=error, both=False)
    nodes = [job.start(code) for _ in range(2)]
    workers = [node.find_workers(1, world_size=2) for node in nodes]
    stays = 0 if 0 in workers[0] else 1
    nodes[stays].find("ready")
    nodes[1 - stays].process.kill()
    os.kill(workers[stays][0], signal.SIGUSR1)
    nodes[stays].find(r"left or was lost: restart as 1 node$")
    nodes[stays].find_workers(1, world_size=1)


def test_the_cause_is_reported_and_not_the_worker_that_lost_the_store(job: Job) -> None:
    """Rank 0 has failed first, but its process takes longer to end."""
    nodes = [job.start(LOSE.format(first="ValueError('the cause')", both=True), nodes="2") for _ in range(2)]
    workers = [node.find_workers(1, world_size=2) for node in nodes]
    serves = 0 if 0 in workers[0] else 1
    nodes[serves].find("ready")
    nodes[1 - serves].find("waiting for news")
    os.kill(workers[serves][0], signal.SIGUSR1)
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        report = node.text[node.text.rindex("failed first: exit code 1") - 30 :]
        assert "worker 0" in report
        assert "ValueError: the cause" in report
        fault = r"worker 0 of node 0 at 127\.0\.0\.1 \(exit code 1\)"
        assert re.search(
            rf"^zmqgrad run: at fault first: {fault}; tried: 0 of 0 restarts\n\Z", node.text, re.M
        )


def test_the_node_that_was_lost_is_named_if_the_others_are_too_few(job: Job) -> None:
    nodes = [job.start("", "--rdzv-conf", f"{FAST},join_timeout=4", nodes="2") for _ in range(2)]
    workers = [node.find_workers(1, world_size=2) for node in nodes]
    nodes[1].process.kill()
    assert nodes[0].wait() == 1
    lost = f"node {next(iter(workers[1]))} at 127.0.0.1, which left or was lost"
    tried = "to join the next round, after 0 of 0 restarts"
    assert nodes[0].text.endswith(f"\nzmqgrad run: at fault first: {lost}; tried: {tried}\n")


def test_spares_take_the_rank_of_a_lost_node_or_leave_with_success(job: Job, tmp_path: Path) -> None:
    """Though a dead node would only be noticed after three minutes: the kernel tells that it has ended."""
    done, slow = tmp_path / "done", ("--rdzv-conf", "keep_alive_interval=60")
    code = f"import time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.02)\nsys.exit()"
    nodes = [job.start(code, *slow, nodes="2") for _ in range(2)]
    workers = [node.find_workers(1, world_size=2) for node in nodes]
    spares = [job.start(code, *slow, nodes="2")]
    spares[0].find(r"^zmqgrad run: spare 1 of 1: the job has all of its nodes \(2\)")
    spares.append(job.start(code, *slow, nodes="2"))
    spares[1].find(r"^zmqgrad run: spare 2 of 2: ")
    nodes[1].process.kill()
    assert spares[0].find_workers(1, world_size=2).keys() == workers[1].keys(), "the rank of the lost node"
    assert nodes[0].find_workers(1, world_size=2).keys() == workers[0].keys()
    spares[1].find(r"^zmqgrad run: spare 1 of 1: ")
    done.touch()
    ended = [nodes[0], *spares]
    assert [node.wait() for node in ended] == [0, 0, 0], "\n".join(node.text for node in ended)
    assert "zmqgrad run: the job has ended, and did not need this node" in spares[1].text


@pytest.mark.parametrize("other", ["sys.exit()", "raise PeerLostError('w0 (worker 0) is gone')"])
def test_a_lost_peer_is_the_cause_once_all_workers_have_ended(job: Job, other: str) -> None:
    """The nodes do not wait until a dead one would have been noticed: that takes three minutes here."""
    code = f"from zmqgrad.errors import PeerLostError\nif os.environ['RANK'] == '1': {other}\n"
    code += "raise PeerLostError('w1 (worker 1) is gone')"
    slow = "keep_alive_interval=60,last_call_timeout=1"
    nodes = [job.start(code, "--rdzv-conf", slow, nodes="2") for _ in range(2)]
    assert [node.wait() for node in nodes] == [1, 1]
    first = {re.findall(r"worker (\d)(?: of node \d)? failed first", node.text)[-1] for node in nodes}
    assert len(first) == 1, "both name the same worker"


def test_a_node_that_is_interrupted_leaves_at_once(job: Job) -> None:
    nodes = [job.start("") for _ in range(2)]
    for node in nodes:
        node.find_workers(1, world_size=2)
    nodes[0].process.send_signal(signal.SIGINT)
    assert nodes[0].wait() == 130
    assert "zmqgrad run: stopped by SIGINT" in nodes[0].text
    nodes[1].find_workers(1, world_size=1)


def test_an_agent_that_was_frozen_kills_its_workers_and_joins_again(job: Job) -> None:
    nodes = [job.start("") for _ in range(2)]
    workers = [node.find_workers(1, world_size=2) for node in nodes]
    [old] = workers[1].values()
    pause(nodes[1], 4.0)
    nodes[0].find(r"left or was lost: restart as 1 node$")
    nodes[1].find(r"its workers are killed$")
    assert exits(old)
    for node in nodes:
        node.find_workers(1, world_size=2)


@pytest.mark.parametrize("manner", ["killed", "closed"])
def test_a_store_that_is_lost(served_by_a_node: Job, manner: str) -> None:
    """The host of the store dies: the other nodes end with an error, and their workers before."""
    host = served_by_a_node.start("")
    host.find_workers(1, world_size=1)
    other = served_by_a_node.start("")
    [worker] = other.find_workers(1, world_size=2).values()
    host.process.send_signal(signal.SIGKILL if manner == "killed" else signal.SIGTERM)
    assert exits(worker)
    assert other.wait() == 1
    assert "zmqgrad run: the store of the rendezvous cannot be used" in other.text


def test_an_agent_whose_output_nobody_reads_kills_its_workers_all_the_same(job: Job, store: TCPStore) -> None:
    """Its thread blocks in a write when it has lost its lease."""
    pid = job.script.with_name("pid")
    flood = f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\nwhile True: print('x' * 10000)"
    node = job.start(flood, read=False)
    node.wait_until_blocked()
    worker = int(pid.read_text())
    store.close()
    assert exits(worker)
    node.read()
    assert node.wait() == 1
    assert "the store of the rendezvous cannot be used" in node.text


def test_ctrl_c_while_a_node_waits_for_others(job: Job) -> None:
    node = job.start("", nodes="2")
    node.find("joining a round")
    node.process.send_signal(signal.SIGINT)
    assert node.wait() == 130
    other = job.start(FINISH, nodes="1")  # nobody waits any more: this one is alone
    assert other.wait() == 0, other.text


def test_an_endpoint_that_nobody_serves(tmp_path: Path) -> None:
    job = Job("192.0.2.1:29400", tmp_path / "worker.py")  # reserved for documentation (RFC 5737)
    try:
        node = job.start("", "--rdzv-conf", "read_timeout=1", nodes="2", ZMQGRAD_SECRET="s" * 16)
        assert node.wait() == 1
        assert "the rendezvous endpoint 192.0.2.1:29400 cannot be used" in node.text
    finally:
        job.close()


def test_hosts_that_meet_without_a_secret_are_told_how_to_make_one(tmp_path: Path) -> None:
    job = Job("192.0.2.1:29400", tmp_path / "worker.py")
    try:
        for fresh in ({}, {"ZMQGRAD_SECRET_FILE": str(tmp_path / "secret")}):
            node = job.start("", nodes="2", **fresh)
            assert node.wait() == 2
            assert re.search("zmqgrad secret --write|secret': No such file", node.text), node.text
    finally:
        job.close()


def test_error_files_of_record(tmp_path: Path) -> None:
    """torch's decorator writes the traceback; nothing else of it reaches the launcher."""
    script = tmp_path / "recorded.py"
    script.write_text(
        "import os, sys\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    sys.stderr = open(os.devnull, 'w')\n"
        "    os.dup2(sys.stderr.fileno(), 2)\n"
        "    raise ValueError('the reason')\n"
        "main()\n"
    )
    node = Node(run_command(script))
    try:
        assert node.wait() == 1
        assert "    ValueError: the reason" in node.text
        assert ", in main\n" in node.text
    finally:
        node.close()


DDP = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(5)
model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
print("gradient", model.module.weight.grad.tolist(), flush=True)
dist.destroy_process_group()
os._exit(0)
"""
"""It skips the interpreter's end, during which torch's gloo thread may free its last work, and abort."""


def test_a_program_of_torch_ddp(job: Job) -> None:
    nodes = [job.start(DDP, nodes="2", restarts=1) for _ in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], "\n".join(node.text for node in nodes)
    assert all("gradient [[1.5, 1.5]]" in node.text for node in nodes)


def test_output_in_files_and_a_trace_of_one_job(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the two workers of each node: the first one's stdout to a file only, the second one's to both."""
    code = "from zmqgrad.store import TCPStore; "
    code += "TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False).set('k', '1')"  # to be traced
    code += "; print('written by', os.environ['LOCAL_RANK']); sys.exit()"
    options = ("--nproc-per-node", 2, "-r", "0:1", "-t", "1:1", "--trace", tmp_path / "trace")
    nodes = [job.start(code, *options, "--log-dir", tmp_path / f"{i}", nodes="2") for i in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], "\n".join(node.text for node in nodes)
    for i, node in enumerate(nodes):
        assert re.findall("written by .", node.text) == ["written by 1"]
        logs = sorted((tmp_path / f"{i}").glob("*.stdout.log"))
        assert [re.findall("written by .", log.read_text())[0] for log in logs] == [
            "written by 0",
            "written by 1",
        ]
    traced = Trace(tmp_path / "trace").processes
    assert len(traced) == 6, "the agents, too"
    assert [process.jobs() for process in traced] == 6 * [{f"job@{job.endpoint}"}]
    assert main(["trace", "show", str(tmp_path / "trace"), "--round", "0"]) == 0
    diagram = capsys.readouterr().out
    assert diagram.count("ADD_TO_PARTICIPANTS") == 2, diagram
    assert "ADD_TO_PARTICIPANTS (2 participants, 0 waiting)" in diagram
    assert all(f"_{node.process.pid}_" in diagram for node in nodes), "each node has a lane"
    assert "STORE_COMPARE_SET" in diagram


def test_nodes_with_fixed_ranks(tmp_path: Path) -> None:
    """The first one that starts is not the first by rank; they meet at the port of the master."""
    port = usable_port("127.0.0.1", 0)
    job = Job("", tmp_path / "worker.py")
    code = "print('node', os.environ['GROUP_RANK'], 'port', os.environ['MASTER_PORT']); sys.exit()"
    try:
        nodes = [job.start(code, *fixed(rank, port), nodes="3") for rank in (1, 2, 0)]
        assert [node.wait() for node in nodes] == [0, 0, 0], "\n".join(node.text for node in nodes)
        assert [f"node {rank} port" in node.text for rank, node in zip((1, 2, 0), nodes, strict=True)] == [
            True
        ] * 3
        assert f"port {port}\n" not in nodes[0].text, "the agents' store has that port"
    finally:
        job.close()


def test_two_nodes_with_the_same_fixed_rank_are_refused(tmp_path: Path) -> None:
    job = Job("", tmp_path / "worker.py")
    port = usable_port("127.0.0.1", 0)
    try:
        nodes = [job.start("", *fixed(1, port), nodes="2") for _ in range(2)]
        assert [node.wait() for node in nodes] == [1, 1]
        for node in nodes:
            assert re.search(r"fixed ranks \S+: 1, \S+: 1\. Give each of the 2 nodes another", node.text), (
                node.text
            )
            assert "\nworker " not in node.text, "no worker has started"
    finally:
        job.close()


def fixed(rank: int, port: int) -> list[object]:
    """The options of a node with a fixed rank."""
    return ["--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port]
