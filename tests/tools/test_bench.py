"""The benchmarks: that they run, that they are fair, and that they tell what could not be measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.namespaces import Hosts, hosts, move_apart
from tools.bench import __main__ as command
from tools.bench import cores, memory, page, store_scale, trees
from tools.bench.limits import COPIES, ROUND_TRIP
from tools.bench.picture import save_picture
from tools.bench.plan import Piece, Row, limits, pieces
from tools.bench.processes import PieceFailed, Place, run_together
from tools.bench.profile import part_of, print_parts, read_samples
from tools.bench.report import duration, print_table
from tools.bench.results import LIMIT, Results
from tools.bench.sides import OURS, TORCH
from tools.bench.timing import Budget

__all__ = ["hosts"]

ROOT = Path(__file__).parents[2]
ROWS = [Row("a", "what a is", ROUND_TRIP), Row("b", "what b is")]


def results() -> Results:
    found = Results(ROWS)
    for ours, torchs, limit in ((1e-3, 4e-3, 1e-4), (2e-3, 5e-3, 2e-4), (9e-3, 8e-3, 9e-4)):
        found.add(OURS, [{"a": ours}, {"a": ours / 2, "b": 1.0}])
        found.add(TORCH, [{"a": torchs}])
        found.add(LIMIT, [{ROUND_TRIP: limit}])
    return found


def test_the_slowest_process_and_the_median_round_count() -> None:
    found = results()
    assert found.median(OURS, "a") == 2e-3
    assert found.ratio(ROWS[0]) == pytest.approx(0.4)
    assert found.times_limit(ROWS[0]) == pytest.approx(10)
    assert found.ratio(ROWS[1]) is None
    assert found.as_json()[0]["seconds"] == {OURS: [1e-3, 2e-3, 9e-3], TORCH: [4e-3, 5e-3, 8e-3]}


@pytest.mark.parametrize(
    ("terminal", "rich", "end"),
    [(False, True, " what a is"), (True, False, " what a is"), (True, True, " what a")],
)
def test_the_table(
    terminal: bool, rich: bool, end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no room, the explanations are cut, and no figure."""
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    print_table(results())
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1] == f"a 2 ms 5 ms 0.40 200 us 10.00{end}"
    assert lines[2] == f"b 1 s - - - -{end.replace(' a', ' b')}"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "-"), (1.5, "1.5 s"), (0.0123, "12.3 ms"), (9.994e-4, "999 us"), (3e-7, "0.3 us")],
)
def test_durations(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_each_name_is_there_once_and_each_limit_is_measured() -> None:
    made = pieces(lambda name: True, [2, 8], Budget())
    rows = [row for piece in made for row in piece.rows]
    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    bounds = limits(rows, Budget())
    assert bounds is not None
    assert {row.limit for row in rows} - {""} <= {row.name for row in bounds.rows} <= {ROUND_TRIP, *COPIES}
    assert limits(ROWS[1:], Budget()) is None


def test_failures_are_reported_and_sides_alternate() -> None:
    begun: list[tuple[str, str]] = []

    def run(title: str) -> Callable[[str, Callable[[str], None]], list[dict[str, float]]]:
        def run(side: str, hear: Callable[[str], None]) -> list[dict[str, float]]:
            begun.append((title, side))
            if side == TORCH and title == "two":
                raise PieceFailed("rank 1 died")
            return [{title: 1.0}]

        return run

    todo = [Piece(title, [Row(title, "")], run(title)) for title in ("one", "two")]
    found = Results([row for piece in todo for row in piece.rows])
    options = command._parser().parse_args(["-r", "2"])
    assert command.measure(options, todo, None, found) == 1
    order = [("one", OURS), ("one", TORCH), ("two", OURS), ("two", TORCH)]
    assert begun == order + order[::-1]
    assert [failure.partition(":")[0] for failure in found.failures] == [
        f"two, torch, round {n}" for n in (1, 2)
    ]
    assert found.median(TORCH, "one") == found.median(OURS, "two") == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("sides", [(), (OURS,), (OURS, TORCH, LIMIT)])
@pytest.mark.parametrize("sizes", [True, False])
def test_a_picture_of_whatever_there_is(sides: tuple[str, ...], sizes: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="is in the extra 'examples'")
    rows = [row for piece in pieces(lambda n: sizes or "send" not in n, [2], Budget()) for row in piece.rows]
    found = Results(rows)
    for side in sides:
        found.add(side, [{row.name: 0.001 for row in rows} | dict.fromkeys([ROUND_TRIP, *COPIES], 0.0001)])
    save_picture(found, "a machine", tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_names_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["-k", "no_such_row"]) == 2
    said = capsys.readouterr().err
    assert "no_such_row" in said
    assert "send_64MB" in said


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_it_measures_both_sides(tmp_path: Path) -> None:
    chosen = "call,send_64B,send_1MB,train_step,init_2,store_get,store_wake"
    arguments = ["--quick", "--seconds", "0.01", "--workers", "2", "-k", chosen, "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [row["name"] for row in saved["rows"]] == chosen.split(",")
    assert all(row["ratio"] > 0 for row in saved["rows"]), saved
    assert {row["name"]: row["times_limit"] is not None for row in saved["rows"]} == {
        name: name.startswith(("call", "send", "store_get")) for name in chosen.split(",")
    }
    assert saved["machine"]["processor"] in done.stdout
    assert (tmp_path / "benchmarks.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "round 1 of 1: calls, torch" in done.stderr


@pytest.mark.processes
@pytest.mark.slow
def test_two_trees_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trees.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no package zmqgrad" in capsys.readouterr().err
    (tmp_path / "zmqgrad").symlink_to(ROOT / "zmqgrad")
    assert trees.main([str(tmp_path), "-k", "store_get", "-r", "1", "--seconds", "0.01"]) == 0
    row, *_, ratio = capsys.readouterr().out.splitlines()[-1].split()
    assert row == "store_get"
    assert float(ratio) > 0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("hosts")
def test_two_hosts_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "hosts.json"
    arguments = ["--rounds", "1", "--scale", "0.05", "--sides", "open,zmq", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench.hosts", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seconds = json.loads(out.read_text())["seconds"]
    assert {"call_p99", "call_beside", "flood", "echo_16MB"} < set(seconds["open"])
    assert set(seconds["zmq"]) == {row for row in seconds["open"] if row.startswith("send_")}
    assert "x that of an idle line" in done.stdout


def namespaces(place: Place) -> dict[str, str]:
    """Runs in each of two processes: its namespaces, and what it sees of others."""
    move_apart(place.rank)
    seen = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "ipc", "uts", "mnt")}
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    place.together()  # the numbers of a namespace that has ended are given to the next one
    return {**seen, "processes": ",".join(processes)}


@pytest.mark.processes
@pytest.mark.slow
def test_two_hosts_share_no_kernel_object(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in hosts.environment().items():
        monkeypatch.setenv(name, value)
    a, b = run_together(namespaces, 2, 60.0, lambda text: None)
    assert a.pop("processes") == b.pop("processes") == "1"
    own = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in a}
    assert all(len({a[kind], b[kind], own[kind]}) == 3 for kind in a), (a, b, own)


def wait_for_ever(place: Place) -> None:
    place.say("begun")
    threading.Event().wait()


@pytest.mark.processes
@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them() -> None:
    """However it ends: they would be measured along with what comes next."""
    start = (
        "from tests.tools.test_bench import run_together, wait_for_ever\n"
        "run_together(wait_for_ever, 2, 60.0, lambda text: print(text, flush=True))"
    )
    command = [sys.executable, "-c", start]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert [starter.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        starter.kill()
        starter.communicate(timeout=20)  # the end of what they all write to


SAVED = {
    "results": {
        "rows": [{"name": f"send_{n}", "seconds": {OURS: [t], TORCH: [2 * t]}, "limit": {"copy": [t / 4]}}
                 for n, t in (("1MB", 1e-3), ("16MB", 8e-3))]
    },
    "hosts": {
        "seconds": {
            "torch": {"send_1MB": [2e-3], "call_beside": [0.5]},
            "open": {"send_1MB": [1e-3], "call_beside": [5e-3]},
        }
    },
    "programs": {
        "rows": [{"program": "rnn", "workers": 2, "ratios": {"wall": 0.9, "cpu": 0.8}}],
        "geometric means": {"wall": 0.9, "cpu": 0.8},
    },
    "cores": {"per second": {OURS: {row: {"1": [10.0], "2": [15.0]} for row in cores.ROWS}}},
    "memory": {"private MiB": {OURS: [dict.fromkeys(memory.COLUMNS, 90.4)] * 2}},
}  # fmt: skip


def test_the_tables_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="is in the extra 'examples'")
    parts = tmp_path / "a", tmp_path / "b"
    for part in parts:  # what is measured in parts counts together
        part.mkdir()
        for name, content in SAVED.items():
            (part / f"{name}.json").write_text(json.dumps(content))
    (parts[1] / "hosts.json").write_text(json.dumps({"seconds": {"open": {"send_1MB": [3e-3]}}}))
    picture = tmp_path / "new" / "picture.png"
    assert page.main([*map(str, parts), "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| `send_16MB` | 8 ms | 16 ms | 0.50 | 2 ms |" in lines
    assert "| `send_1MB` | 2 ms | 1.00 |" in lines  # 1 and 3 ms
    assert "| `call_beside` | 500 ms | 5 ms |" in lines
    assert "| geometric mean | | 0.90 | 0.80 |" in lines
    assert f"| {next(iter(cores.medians({})))}, {OURS} | 10 (1.00) | 15 (1.50) |" in lines
    assert "| zmqgrad, sender | 90 | 90 | 90 |" in lines
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_page_without_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main([str(tmp_path)]) == 1
    assert "no figures in" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.slow
def test_one_core_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cores.main(
            ["--cores", "1", "--rounds", "1", "--seconds", "0.05", "--no-torch", "--out", str(tmp_path)]
        )
        == 0
    )
    found = json.loads((tmp_path / "cores.json").read_text())["per second"]
    assert set(found) == {OURS}
    assert all(figures["1"][0] > 0 for figures in found[OURS].values())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:]] == [f"{row}:" for row in found[OURS]]
    assert all("(1.00)" in line for line in lines[2:])


def test_cores_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cores.main(["--cores", "0"])
    assert "may use 1 to" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.slow
def test_memory_after_a_large_message_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "memory.json"
    assert memory.main(["--mb", "4", "--wait", "0", "--sides", OURS, "--out", str(out)]) == 0
    sender, receiver = json.loads(out.read_text())["private MiB"][OURS]
    assert set(sender) == set(receiver) == set(memory.COLUMNS)
    assert min(sender["before"], receiver["later"]) > 1
    assert "| zmqgrad, receiver |" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_messages_of_grpc() -> None:
    grpc_rpc = pytest.importorskip("tools.bench.grpc_rpc", reason="grpcio is in the group 'bench'")
    tensor = torch.rand(1000)
    function, (same, other) = grpc_rpc._load(grpc_rpc._dump((torch.add, (tensor, torch.ones(3)))))
    assert function is torch.add
    assert torch.equal(same, tensor)
    assert torch.equal(other, torch.ones(3))


@pytest.mark.processes
@pytest.mark.slow
def test_many_clients_of_a_store_come_through_or_the_time_is_up() -> None:
    found = store_scale.measure("zmqgrad", 6, 2, 50.0)
    assert set(found) == {*store_scale.STEPS, "server", "a client"}
    assert store_scale.measure("zmqgrad", 6, 2, 0.0) == {"start": "0 through"}


PERF = """\
python  8951 62.1:
\t    7f01 mkl_blas_def_sgemm_kernel_0_zen+0x10 (/lib/libtorch_cpu.so)
\t    7f02 at::native::addmm+0x20 (/lib/libtorch_cpu.so)

python  8951 62.2:
\tffffffff81 finish_task_switch.isra.0+0x1 ([kernel.kallsyms])
\tffffffff82 __x64_sys_futex+0x9 ([kernel.kallsyms])
\t    7f03 take_gil+0x5 (/lib/libpython3.11.so.1.0)

python  8951 62.3:
\t    7f04 _PyEval_EvalFrameDefault+0x5 (/lib/libpython3.11.so.1.0)

python  8951 62.4:
\tffffffff83 clear_page_erms+0x1 ([kernel.kallsyms])
\tffffffff84 exc_page_fault+0x1 ([kernel.kallsyms])

python  8951 62.5:
\t    7f05 __memmove_avx_unaligned_erms+0x5 (/lib/x86_64-linux-gnu/libc.so.6)

python  8951 62.6:
\t    7f06 std::mutex::lock (anonymous)+0x5 (/lib/libtorch_python.so)
"""


def test_parts_of_a_profile() -> None:
    samples = list(read_samples(PERF.splitlines()))
    assert [len(sample) for sample in samples] == [2, 3, 1, 2, 1, 1]
    found = [part_of(sample) for sample in samples]
    assert found == ["arithmetic", "kernel: futex", "interpreter", "kernel: page faults", "copies", "torch"]


def test_a_printed_profile(capsys: pytest.CaptureFixture[str]) -> None:
    print_parts(
        "call", OURS, [(0.01, {"interpreter": 0.1, "torch": 0.05}), (0.0, {"torch": 0.2, "copies": 0.02})]
    )
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "call, zmqgrad: 10 ms each, of which ran",
        "on worker 0 on worker 1",
        "torch 500 us 2 ms",
        "interpreter 1 ms 0 us",
        "copies 0 us 200 us",
        "all 1.5 ms 2.2 ms",
    ]
