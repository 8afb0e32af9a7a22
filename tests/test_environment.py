"""Launcher variables: what is read, and what is said of what cannot be."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad import environment
from zmqgrad.environment import LauncherInfo, Setting
from zmqgrad.errors import ConfigurationError, RendezvousError
from zmqgrad.rpc.options import RpcBackendOptions


def test_nothing_is_set() -> None:
    assert environment.read_launch({}) == LauncherInfo()
    assert not environment.agent_serves_store({})
    assert not environment.allows_insecure({})
    assert not environment.has_secret({})


def test_all_is_set() -> None:
    launch = environment.read_launch(
        {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "RANK": " 3 ", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    )
    assert launch == LauncherInfo("host", 29500, 3, 4, 1)
    assert environment.read_launch({"MASTER_ADDR": "[::1]"}).master_addr == "::1"
    assert environment.has_secret({"ZMQGRAD_SECRET": "s"})
    assert environment.has_secret({"ZMQGRAD_SECRET_FILE": "s"})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "one", "RANK (the rank of this worker, from 0 to WORLD_SIZE - 1) is 'one'"),
        ("RANK", "-1", "a number of at least 0"),
        ("RANK", "1.0", "'1.0'"),
        ("WORLD_SIZE", "0", "a number of at least 1"),
        ("MASTER_PORT", "65536", "a number from 0 to 65535"),
        ("LOCAL_RANK", "x", "LOCAL_RANK"),
    ],
)
def test_a_malformed_variable_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        environment.read_launch({name: value})
    assert words in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "means"),
    [("1", True), ("True", True), ("yes", True), ("0", False), ("False", False), ("", False), (" ", False)],
)
def test_switches(text: str, means: bool) -> None:
    assert environment.agent_serves_store({"TORCHELASTIC_USE_AGENT_STORE": text}) is means
    assert environment.allows_insecure({"ZMQGRAD_ALLOW_INSECURE": text}) is means


def test_a_switch_between_on_and_off() -> None:
    with pytest.raises(ConfigurationError, match="ZMQGRAD_ALLOW_INSECURE is 'Perhaps'; it must be 1 or 0"):
        environment.allows_insecure({"ZMQGRAD_ALLOW_INSECURE": "Perhaps"})


def test_the_error_for_a_missing_variable_names_where_it_was_searched() -> None:
    assert "not found in the environment; set MASTER_ADDR, or start" in str(
        environment.missing_variable("MASTER_ADDR")
    )
    said = str(environment.missing_variable("RANK", "the argument rank"))
    assert "in the environment and the argument rank, nor was OMPI_COMM_WORLD_RANK (Open MPI) or" in said
    assert "SLURM_PROCID (Slurm); set RANK, give it as the argument rank, or" in said


SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NODELIST": "gpu[03-04,09],login",
}

SBATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-123@1",
}


def test_slurm() -> None:
    launch = environment.read_launch(SRUN)
    assert (launch.rank, launch.world_size, launch.local_rank) == (3, 4, 1)
    assert launch.master_addr == "gpu03"
    assert launch.master_port is not None
    assert 20000 <= launch.master_port < 30000
    assert launch.master_port == environment.read_launch({**SRUN, "SLURM_PROCID": "0"}).master_port
    assert launch.master_port != environment.read_launch({**SRUN, "SLURM_STEP_ID": "1"}).master_port


def test_a_batch_script_of_slurm_is_no_worker() -> None:
    batch = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert environment.read_launch(batch) == LauncherInfo()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-4]", "n1"),
        ("n[007,9],m", "n007"),
        ("r[1-2]n[03-08]-ib,x", "r1n03-ib"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert environment.first_node(nodes) == first


names = st.text("abcnode", min_size=1, max_size=4)
spans = st.tuples(st.integers(0, 120), st.integers(0, 9), st.integers(1, 3))


@st.composite
def host_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A host list as Slurm prints it, and its hosts."""
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 3))):
        before, after = draw(names), draw(st.sampled_from(["", "-ib", ".cluster"]))
        ranges = draw(st.lists(spans, max_size=3))
        numbers = [f"{low + i:0{width}}" for low, size, width in ranges for i in range(size + 1)]
        hosts += [f"{before}{number}{after}" for number in numbers or [""]]
        inside = ",".join(
            f"{low:0{width}}" + (f"-{low + size:0{width}}" if size else "") for low, size, width in ranges
        )
        texts.append(f"{before}[{inside}]{after}" if ranges else f"{before}{after}")
    return ",".join(texts), hosts


@given(host_lists())
def test_the_first_host_of_any_list(drawn: tuple[str, list[str]]) -> None:
    text, hosts = drawn
    assert environment.first_node(text) == hosts[0]


def test_open_mpi_on_one_host() -> None:
    launch = environment.read_launch({**SRUN, **MPIRUN})
    assert (launch.rank, launch.world_size, launch.local_rank) == (1, 2, 1), "mpirun inside a Slurm job"
    assert launch.master_addr == "127.0.0.1"
    assert launch.master_port == environment.read_launch({**MPIRUN, "OMPI_COMM_WORLD_RANK": "0"}).master_port


def test_open_mpi_on_several_hosts_does_not_provide_master_addr() -> None:
    launch = environment.read_launch({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4"})
    assert (launch.master_addr, launch.master_port, launch.rank, launch.world_size) == (None, None, 1, 4)


def test_open_mpi_on_several_hosts_of_a_slurm_job() -> None:
    launch = environment.read_launch({**MPIRUN, **SBATCH, "OMPI_COMM_WORLD_SIZE": "4"})
    assert (launch.rank, launch.world_size, launch.master_addr) == (1, 4, "gpu03")
    other_daemon = {
        **MPIRUN,
        **SBATCH,
        "OMPI_COMM_WORLD_SIZE": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
    }
    assert environment.read_launch({**other_daemon, "SLURM_STEP_NODELIST": "gpu04"}) == launch


def test_slurm_with_pmi() -> None:
    assert environment.read_launch({**SRUN, "PMI_RANK": "0", "PMI_SIZE": "1"}) == environment.read_launch(
        SRUN
    )


def test_the_shell_of_an_interactive_allocation_is_no_worker() -> None:
    shell = {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert environment.read_launch(shell) == LauncherInfo()


# As Hydra of MPICH 4.0 sets them.
MPIEXEC = {
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
    "HYDI_CONTROL_FD": "7",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "vm",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}


def test_mpich() -> None:
    launch = environment.read_launch(MPIEXEC)
    assert (launch.rank, launch.world_size, launch.local_rank) == (1, 2, 1)
    assert (launch.master_addr, launch.master_port) == ("127.0.0.1", None), "it does not name the job"
    launch = environment.read_launch({**MPIEXEC, "PMI_SIZE": "4"})
    assert (launch.world_size, launch.master_addr, launch.master_port) == (4, None, None)
    in_slurm = environment.read_launch({**MPIEXEC, **SRUN, "PMI_SIZE": "4", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert (in_slurm.rank, in_slurm.world_size, in_slurm.master_addr) == (1, 4, "n1"), "Slurm starts proxies"
    assert in_slurm.master_port is not None


# A pod of an Indexed Job "digits", by the documentation of Kubernetes; the manifest sets the last two.
POD = {
    "HOSTNAME": "digits-2",
    "JOB_COMPLETION_INDEX": "2",
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "KUBERNETES_PORT_443_TCP": "tcp://10.96.0.1:443",
    "KUBERNETES_PORT_443_TCP_ADDR": "10.96.0.1",
    "KUBERNETES_PORT_443_TCP_PORT": "443",
    "KUBERNETES_PORT_443_TCP_PROTO": "tcp",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "KUBERNETES_SERVICE_PORT_HTTPS": "443",
    "MASTER_ADDR": "digits-0.digits",
    "WORLD_SIZE": "4",
}


def test_a_pod_of_an_indexed_job() -> None:
    launch = environment.read_launch(POD)
    assert launch == LauncherInfo("digits-0.digits", 29500, 2, 4, None, "JOB_COMPLETION_INDEX", "WORLD_SIZE")
    assert environment.read_launch({**POD, "MASTER_PORT": "1"}).master_port == 1


def test_a_pod_whose_manifest_does_not_pass_on_the_number_of_pods() -> None:
    pod = {name: value for name, value in POD.items() if name != "WORLD_SIZE"}
    assert environment.read_launch(pod).world_size is None
    assert environment.read_launch(pod).rank == 2
    said = str(environment.missing_variable("WORLD_SIZE"))
    assert "nor was OMPI_COMM_WORLD_SIZE (Open MPI) or PMI_SIZE (MPICH or Intel MPI) or SLURM_STEP" in said


def test_the_workers_of_an_agent_in_a_pod_or_a_step_are_numbered_by_the_agent() -> None:
    agent = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    for outer in (POD, SRUN, MPIRUN, MPIEXEC):
        assert environment.read_launch({**outer, **agent}) == LauncherInfo("host", 1, 5, 8, 1)


@pytest.mark.parametrize(
    ("recording", "rank", "world_size", "local_rank", "master"),
    [
        ("srun", 1, 2, 0, "gpu01"),
        ("sbatch", None, None, None, None),
        ("salloc", None, None, None, None),
        ("mpirun", 1, 2, 1, "127.0.0.1"),
        ("mpirun-in-slurm", 1, 2, 0, "gpu01"),
        ("mpiexec-in-slurm", 1, 2, 0, "gpu01"),
    ],
)
def test_recorded_environments(
    recording: str, rank: int | None, world_size: int | None, local_rank: int | None, master: str | None
) -> None:
    """Recorded with Slurm 22.05 (two nodes; srun with --mpi=pmi2), Open MPI 4.1 and MPICH 4.0."""
    path = Path(__file__).parent / "fixtures" / "launchers" / f"{recording}.env"
    environ = dict(line.split("=", 1) for line in path.read_text().splitlines())
    launch = environment.read_launch(environ)
    assert (launch.rank, launch.world_size, launch.local_rank) == (rank, world_size, local_rank)
    assert launch.master_addr == master
    assert (launch.master_port is None) == (master is None)


def test_variables_set_by_hand_take_precedence() -> None:
    by_hand = {"MASTER_ADDR": "host", "MASTER_PORT": "1"}
    launch = environment.read_launch({**SRUN, **by_hand})
    assert (launch.master_addr, launch.master_port, launch.rank) == ("host", 1, 3)
    launch = environment.read_launch({**SRUN, "RANK": "0"})
    assert (launch.rank, launch.world_size, launch.local_rank) == (0, None, None), "not some of each"


def test_a_malformed_variable_of_a_launcher_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"SLURM_PROCID \(the rank of this worker.* is 'x'"):
        environment.read_launch({**SRUN, "SLURM_PROCID": "x"})


@pytest.mark.parametrize(
    ("text", "means"),
    [("", None), (" ", None), ("0", 0), ("65536", 65536), ("64k", 65536), (" 2G ", 2 << 30)],
)
def test_sizes(text: str, means: int | None) -> None:
    assert environment.arena_limit({"ZMQGRAD_ARENA_LIMIT": text}) == means
    assert environment.arena_threshold({"ZMQGRAD_ARENA_THRESHOLD": text}) == means


@pytest.mark.parametrize("text", ["-1", "1.5G", "1KB", "K", "many", "1 G", "\u0663", "9" * 5000])
def test_a_malformed_size(text: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"ZMQGRAD_ARENA_LIMIT is {text!r}.* a number of bytes"):
        environment.arena_limit({"ZMQGRAD_ARENA_LIMIT": text})


@pytest.mark.parametrize(("text", "means"), [("", None), (" ", None), ("0", 0), (" 250 ", 250)])
def test_spin_us_is_parsed(text: str, means: int | None) -> None:
    assert environment.spin_us({"ZMQGRAD_SPIN_US": text}) == means


@pytest.mark.parametrize("text", ["-1", "1.5", "1K", "off", "\u0663", "9" * 5000])
def test_spin_us_must_be_a_number(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"ZMQGRAD_SPIN_US is .* a number of microseconds"):
        environment.spin_us({"ZMQGRAD_SPIN_US": text})


@pytest.mark.parametrize("text", ["-1", "nan", "-inf", "1 s"])
def test_a_malformed_time(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"ZMQGRAD_JOIN_TIMEOUT is .* a number of seconds"):
        environment.join_timeout({"ZMQGRAD_JOIN_TIMEOUT": text})


@pytest.mark.parametrize("digits", ["9" * 5000, "\u0663"])
def test_more_digits_than_a_number_has(digits: str) -> None:
    """``int`` raises ``ValueError`` for so many."""
    with pytest.raises(ConfigurationError, match="ZMQGRAD_PORT_RANGE is"):
        environment.port_range({"ZMQGRAD_PORT_RANGE": f"1-{digits}"})
    with pytest.raises(ConfigurationError, match="ZMQGRAD_COMMITS is"):
        environment.commits_address({"ZMQGRAD_COMMITS": f"{digits}:/x"})
    assert environment.read_launch({"SLURM_STEP_ID": digits}).rank is None


def test_the_page_of_settings_has_every_option_and_variable_by_its_name() -> None:
    page = Path(__file__).parents[1].joinpath("docs/settings.md").read_text()
    rows = [row.split(" | ")[:2] for row in page.splitlines() if row.startswith("| ")][1:]
    options = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    variables = {name for row in rows for name in re.findall(r"`(ZMQGRAD_\w+)`", row[1])}
    settings = {s.variable for s in vars(environment).values() if isinstance(s, Setting)}
    settings |= {environment.SECRET, environment.SECRET_FILE}
    assert options == {field.name for field in dataclasses.fields(RpcBackendOptions)}
    assert variables == {name for name in settings if name.startswith("ZMQGRAD_")}
    both = [re.findall(r"`(\w+)`", " ".join(row)) for row in rows if "-" not in (row[0].strip("| "), row[1])]
    assert {field: setting.variable for field, setting in environment.OPTIONS.items()} == dict(both)
    assert set(re.findall(r"ZMQGRAD_\w+", page)) <= variables
