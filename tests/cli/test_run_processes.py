"""``zmqgrad run`` with real workers: what is seen, what is left, and how it ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from tools.ports import free_port

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes that are not its children"),
]

LAUNCHER = [sys.executable, "-m", "zmqgrad", "run"]
ENDS_WITHIN = 15.0
"""Seconds: two periods of grace, and plenty for the machine; what is not ended stays for ever."""

TELL = """
import json, os, sys
names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
print(json.dumps([sys.argv[1:], {name: os.environ[name] for name in names}]))
print("to stderr", file=sys.stderr)
print("no end", end="")
"""

# Says which processes there are, and waits for a signal; with "stubborn" it does not heed any.
WAIT = """
import os, signal, subprocess, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pids = [os.getpid()]
if "family" in sys.argv:
    child = "import signal; print('up', flush=True); signal.pause()"
    pids.append((p := subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)).pid)
    p.stdout.readline()
try:
    print("pids", *pids)
    if "leave" in sys.argv:
        os._exit(0)
    signal.pause()
    signal.pause()
except KeyboardInterrupt:
    print("interrupted")
"""

FAIL = """
import os, signal, sys
if os.environ["RANK"] == "1":
    def inner():
        raise ValueError("the reason")
    if sys.argv[1] == "raise":
        inner()
    if sys.argv[1] == "exit":
        sys.exit(7)
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""

# Worker 0 fails beside RPC, and takes its time to end; worker 1 fails because of that.
FAIL_BESIDE_RPC = """
import os, sys, threading
import zmqgrad.rpc as rpc
import zmqgrad.rpc.membership.group as group
group.EXIT_GRACE_SECONDS = 30.0
begun = threading.Event()
def begin():
    begun.set()
    threading.Event().wait(60)  # longer than the process lives
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
if rank == 0:
    begun.wait()
    raise ValueError("the reason")
if sys.argv[1] == "call":
    rpc.rpc_sync("worker0", begin)
rpc.rpc_async("worker0", begin)
rpc.shutdown()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where a test may put its script."""
    return tmp_path / "script.py"


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCHER, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=cwd)


class Launched:
    """A launcher at work, and the processes that its workers have said there are."""

    def __init__(self, *arguments: object, processes: int) -> None:
        self.launcher = subprocess.Popen(
            [*LAUNCHER, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # or a line read here would take the next ones along, out of communicate()'s reach
        )
        assert self.launcher.stdout is not None
        self.pidfds: list[int] = []
        told = 0
        while told < processes:
            line = self.launcher.stdout.readline().decode()
            assert line, f"the launcher ended early: {self.rest()[1]}"
            for pid in line.partition("pids")[2].split():
                told += 1
                try:
                    self.pidfds.append(os.pidfd_open(int(pid)))
                except ProcessLookupError:
                    pass  # gone already

    def stop(self, signum: int) -> tuple[str, str]:
        """Signal the launcher; what it printed after that."""
        self.launcher.send_signal(signum)
        return self.rest()

    def rest(self) -> tuple[str, str]:
        """Wait for the launcher's end; what it printed that was not read yet, to stdout and stderr."""
        stdout, stderr = self.launcher.communicate(timeout=60)
        return stdout.decode(), stderr.decode()

    def all_gone(self, seconds: float) -> bool:
        """Have all processes ended, at the latest in ``seconds``?"""
        limit = time.monotonic() + seconds
        waiting = list(self.pidfds)
        while waiting and (left := limit - time.monotonic()) > 0:
            for fd in select.select(waiting, [], [], left)[0]:
                waiting.remove(fd)
        return not waiting

    def close(self) -> None:
        """End what is left."""
        self.launcher.kill()
        self.launcher.communicate()
        for fd in self.pidfds:
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.close(fd)


@pytest.fixture
def launch(script: Path) -> Iterator[type[Launched]]:
    """Makes launchers that end with the test."""
    launched: list[Launched] = []

    class Kept(Launched):
        def __init__(self, *arguments: object, processes: int) -> None:
            launched.append(self)
            super().__init__(*arguments, processes=processes)

    yield Kept
    for one in launched:
        one.close()


def test_an_unknown_option_of_the_rendezvous(script: Path) -> None:
    script.write_text("")
    meet = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    done = run(*meet, "--rdzv-conf", "last_cal_timeout=3", script)
    assert done.returncode == 2
    assert "has no setting 'last_cal_timeout'; it has close_timeout" in done.stderr


def test_each_worker_has_its_place_and_its_prefix(script: Path) -> None:
    script.write_text(TELL)
    done = run("--nproc-per-node", 3, script, "--lr", "0.1", "--nproc-per-node", "5")
    assert (done.returncode, done.stderr.count("to stderr")) == (0, 3)
    assert sorted(done.stderr.splitlines()) == [f"[worker {rank}] to stderr" for rank in range(3)]
    told = {}
    for rank, line in re.findall(r"^\[worker (\d)\] (\[\[.*)$", done.stdout, re.MULTILINE):
        arguments, told[rank] = json.loads(line)
        assert arguments == ["--lr", "0.1", "--nproc-per-node", "5"]
    assert {rank: (env["RANK"], env["LOCAL_RANK"]) for rank, env in told.items()} == {
        rank: (rank, rank) for rank in "012"
    }
    assert {env["WORLD_SIZE"] + env["LOCAL_WORLD_SIZE"] for env in told.values()} == {"33"}
    assert len({env["MASTER_PORT"] for env in told.values()}) == 1
    assert {env["MASTER_ADDR"] for env in told.values()} == {"127.0.0.1"}
    assert sorted(re.findall(r"^\[worker \d\] no end$", done.stdout, re.MULTILINE)) == [
        f"[worker {rank}] no end" for rank in range(3)
    ]


def test_a_module_and_verbose(script: Path) -> None:
    script.write_text(TELL)
    done = run("-v", "--nproc-per-node", 2, "-m", "script", "-v", cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('[["-v"], {') == 2
    assert re.search(r"^zmqgrad run: 2 workers meet at 127\.0\.0\.1:\d+$", done.stderr, re.MULTILINE)
    assert ("OMP_NUM_THREADS=1" in done.stderr) == ("OMP_NUM_THREADS" not in os.environ)


def test_logs(script: Path, tmp_path: Path) -> None:
    script.write_text(TELL)
    logs = tmp_path / "new" / "logs"
    assert run("--nproc-per-node", 2, "--log-dir", logs, script).returncode == 0
    assert sorted(path.name for path in logs.iterdir()) == [
        f"worker-{rank}.{stream}.log" for rank in range(2) for stream in ("stderr", "stdout")
    ]
    assert (logs / "worker-1.stderr.log").read_text() == "to stderr\n"
    assert (logs / "worker-1.stdout.log").read_text().endswith("\nno end")


@pytest.mark.parametrize("redirected", [True, False], ids=["redirected", "displayed"])
def test_a_log_that_takes_no_more_ends_no_worker(script: Path, tmp_path: Path, redirected: bool) -> None:
    script.write_text("for n in range(1000): print(f'{n:090}')\n")
    redirects = ["--redirects", 3] if redirected else []
    limited = ["bash", "-c", 'ulimit -f 16; exec "$0" "$@"', *LAUNCHER]
    command = [*limited, "--log-dir", tmp_path, *redirects, script]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    log = tmp_path / "worker-0.stdout.log"
    assert done.stderr.count(f"cannot write the log {log}: File too large") == 1
    lines = done.stdout.splitlines()
    assert lines[-1] == f"[worker 0] {999:090}"
    logged = log.read_text().splitlines()
    assert len(logged) < 1000 <= len(logged) + len(lines)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="stands for a full disk")
def test_an_output_that_takes_no_more_ends_no_worker(script: Path, tmp_path: Path) -> None:
    script.write_text(
        f"print('1', flush=True)\nprint('2', flush=True)\nopen({str(tmp_path / 'done')!r}, 'w')"
    )
    with open("/dev/full", "w") as full:
        command = [*LAUNCHER, str(script)]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot write the output of the workers: No space left on device") == 1
    assert (tmp_path / "done").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="stands for a full disk")
@pytest.mark.parametrize("restarts", [0, 1])
def test_messages_that_nobody_gets_change_nothing(script: Path, restarts: int) -> None:
    script.write_text("import os; os._exit(7 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))")
    with open("/dev/full", "w") as full:
        command = [*LAUNCHER, "--max-restarts", str(restarts), str(script)]
        assert subprocess.call(command, stderr=full, timeout=60) == (0 if restarts else 7)


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_change_nothing(script: Path, closed: str) -> None:
    """What the launcher opens must not take their numbers, to which it writes."""
    script.write_text("print('some output', flush=True); import os; os._exit(7)")
    assert subprocess.call(["sh", "-c", f'exec "$@" {closed}', "sh", *LAUNCHER, script], timeout=60) == 7


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("raise", 1, "exit code 1"), ("exit", 7, "exit code 7"), ("kill", 137, "killed by SIGKILL")],
)
def test_the_first_failure_ends_all_and_is_reported(script: Path, how: str, code: int, said: str) -> None:
    script.write_text(FAIL)
    done = run("--nproc-per-node", 3, script, how)
    assert done.returncode == code
    report = done.stderr[done.stderr.index("zmqgrad run:") :]
    assert report.startswith(f"zmqgrad run: worker 1 failed first: {said}")
    assert report.endswith("zmqgrad run: workers 0 and 2 were ended by the launcher\n")
    if how == "raise":
        assert report.startswith("zmqgrad run: worker 1 failed first: exit code 1: ValueError: the reason\n")
        assert done.stderr.count("Traceback (most recent call last):") == 1
        assert "[worker 1] ValueError: the reason\n" in done.stderr


LOSES_A_PEER = """
import os, shutil, signal, time
def fail(error, code):
    os.write(2, f"Traceback (most recent call last):\\n{error}\\n".encode())
    os._exit(code)
signal.signal(signal.SIGTERM, lambda *_: fail("zmqgrad.errors.PeerLostError: w1 (worker 1) is gone", 1))
up = os.path.join(os.environ["TMPDIR"], "up")
if os.environ["RANK"] == "0":
    open(up, "w").close()
    signal.pause()
while not os.path.exists(up):
    time.sleep(0.01)
shutil.rmtree(os.environ["TMPDIR"])
fail("ValueError: the reason", 7)
"""


def test_a_failure_is_reported_though_there_is_no_place_for_logs(script: Path, tmp_path: Path) -> None:
    script.write_text(LOSES_A_PEER)
    (tmp_path / "tmp").mkdir()
    command = [*LAUNCHER, "--nproc-per-node", "2", script]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "worker 1 failed first: exit code 7" in done.stderr) == (7, True), done.stderr


CALL_FAILS = """
import os
import zmqgrad.rpc as rpc
def divide(a, b):
    return a / b
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
if rank == 0:
    rpc.rpc_sync("worker1", divide, args=(1, 0))
rpc.shutdown()
"""


@pytest.mark.slow
def test_a_failure_is_printed_once_with_where_to_look(script: Path, tmp_path: Path) -> None:
    script.write_text(CALL_FAILS)
    logs, trace = tmp_path / "logs", tmp_path / "trace"
    done = run("--nproc-per-node", 3, "--log-dir", logs, "--trace", trace, script)
    report = done.stderr[done.stderr.index("zmqgrad run:") :].splitlines()
    assert report[:3] == [
        "zmqgrad run: worker 0 failed first: exit code 1: ZeroDivisionError: division by zero, on worker1",
        f"    logs: {logs}",
        f"    trace: zmqgrad trace {trace}",
    ]
    assert done.stderr.count("return a / b") == 1, "the log of the callee and the error of the caller"
    assert "Traceback" in (logs / "worker-1.stderr.log").read_text()
    assert (logs / "worker-0.stderr.log").read_text().count("return a / b") == 1
    # The others lose worker 0, which is no second failure: it takes a line, also where it was cut off.
    heads = [line for line in done.stderr.splitlines() if line.endswith("Traceback (most recent call last):")]
    assert len(heads) == 2


def test_a_traced_job_says_what_to_type_next(script: Path, tmp_path: Path) -> None:
    script.write_text("")
    done = run("--nproc-per-node", 1, "--trace", tmp_path / "my trace", script)
    assert done.stderr.endswith(f"zmqgrad run: trace: zmqgrad trace '{tmp_path}/my trace'\n")


CATCH = """
import os
import torch
import zmqgrad.autograd as autograd
import zmqgrad.rpc as rpc
class Own(Exception):
    def __init__(self, text, *, code):
        super().__init__(text)
        self.code = code
def fail():
    raise Own("the reason", code=3)
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        raise Own("backward", code=4)
rpc.init_rpc("worker" + os.environ["RANK"])
if os.environ["RANK"] == "0":
    try:
        rpc.rpc_sync("worker1", fail)
    except Own as e:
        print("caught", e.code)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", Fails.apply, args=(torch.ones(1, requires_grad=True),))
        try:
            autograd.backward(context_id, [y.sum()])
        except Own as e:
            print("caught", e.code)
rpc.shutdown()
"""


@pytest.mark.slow
def test_an_exception_of_the_program_itself_is_caught_by_its_class(script: Path) -> None:
    script.write_text(CATCH)
    said = run("--nproc-per-node", 2, script).stdout
    assert "caught 3" in said
    assert "caught 4" in said


@pytest.mark.slow
@pytest.mark.parametrize("others", ["call", "shutdown"])
def test_the_first_failure_determines_the_report(script: Path, others: str) -> None:
    script.write_text(FAIL_BESIDE_RPC)
    done = run("--nproc-per-node", 2, script, others)
    report = done.stderr[done.stderr.index("zmqgrad run:") :]
    assert report.startswith("zmqgrad run: worker 0 failed first: exit code 1: ValueError: the reason\n")
    assert report.endswith(("worker 1 was ended by the launcher\n", "worker 1 failed later: exit code 1\n"))


@pytest.mark.parametrize(
    ("signum", "manner"),
    [
        (signal.SIGINT, ""),
        (signal.SIGTERM, ""),
        (signal.SIGHUP, ""),
        (signal.SIGQUIT, ""),
        (signal.SIGINT, "stubborn"),
        (signal.SIGTERM, "stubborn"),
    ],
)
def test_a_signal_ends_everything_in_time(
    script: Path, launch: type[Launched], signum: int, manner: str
) -> None:
    script.write_text(WAIT)
    launched = launch("--nproc-per-node", 2, script, "family", manner, processes=4)
    began = time.monotonic()
    stdout, stderr = launched.stop(signum)
    assert time.monotonic() - began < ENDS_WITHIN
    assert launched.all_gone(ENDS_WITHIN)
    assert launched.launcher.returncode == 128 + signum
    assert f"zmqgrad run: stopped by {signal.Signals(signum).name}\n" in stderr
    assert stdout.count("interrupted") == (2 if signum == signal.SIGINT and not manner else 0)


def test_a_signal_to_a_launcher_that_begins_leaves_nothing(script: Path, tmp_path: Path) -> None:
    """As soon as it has a directory, and long before it has workers: it connects to the other nodes first."""
    script.write_text("")
    there = tmp_path / "there"
    there.mkdir()
    endpoint = f"127.0.0.1:{free_port()}"
    launcher = subprocess.Popen(
        [*LAUNCHER, "--nnodes", "2", "--rdzv-endpoint", endpoint, script],
        env={**os.environ, "TMPDIR": str(there)},
        stderr=subprocess.PIPE,
    )
    try:
        eventually(lambda: any(there.iterdir()))
        launcher.terminate()
        _, stderr = launcher.communicate(timeout=ENDS_WITHIN)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signal.SIGTERM
    assert b"stopped by SIGTERM" in stderr
    assert not list(there.iterdir())


def test_workers_do_not_outlive_a_launcher_that_is_killed(
    script: Path, launch: type[Launched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # it cannot remove the error files of its workers
    script.write_text(WAIT)
    launched = launch("--nproc-per-node", 3, script, "stubborn", processes=3)
    launched.launcher.kill()
    assert launched.all_gone(ENDS_WITHIN)


def test_programs_of_a_shell_script_do_not_outlive_a_launcher_that_is_killed(
    script: Path, launch: type[Launched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends the shells with the launcher, and not what they have started."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script.write_text(WAIT)
    shell = tmp_path / "script.sh"
    shell.write_text(f"#!/bin/sh\n{sys.executable} {script} $1\ntrue\n")
    shell.chmod(0o700)
    launched = launch("--no-python", "--nproc-per-node", 2, shell, "stubborn", processes=2)
    launched.launcher.kill()
    assert launched.all_gone(ENDS_WITHIN)


def test_orphan_processes_end_with_the_job(script: Path, launch: type[Launched]) -> None:
    script.write_text(WAIT)
    launched = launch("--nproc-per-node", 2, script, "family", "leave", processes=4)
    launched.rest()
    assert launched.launcher.returncode == 0
    assert launched.all_gone(ENDS_WITHIN)


def test_orphan_processes_may_clean_up(script: Path, tmp_path: Path) -> None:
    """As Python's own resource tracker does, which frees shared memory after the worker has gone."""
    child = (
        "import pathlib, signal, sys\n"
        "def tidy(*_):\n"
        "    pathlib.Path(sys.argv[1]).write_text('tidy')\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, tidy)\n"
        "print('up', flush=True)\n"
        "signal.pause()\n"
    )
    script.write_text(
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-c', {child!r}, sys.argv[1]]\n"
        "subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline()\n"
        "os._exit(0)\n"
    )
    assert run(script, tmp_path / "note").returncode == 0
    assert (tmp_path / "note").read_text() == "tidy"


def test_output_before_the_exit_is_shown_though_the_stream_stays_open(
    script: Path, launch: type[Launched]
) -> None:
    """Something that a worker has started in a session of its own still holds the worker's stdout."""
    script.write_text(
        "import subprocess, sys\n"
        "command = [sys.executable, '-c', 'import signal; signal.pause()']\n"
        "print('pids', subprocess.Popen(command, start_new_session=True).pid)\n"
        "print('last words', end='')\n"
    )
    launched = launch(script, processes=1)
    assert launched.rest()[0] == "[worker 0] last words\n"
    assert launched.launcher.returncode == 0


def test_closing_the_launchers_output_ends_the_job(script: Path, launch: type[Launched]) -> None:
    script.write_text("import os\nprint('pids', os.getpid())\nwhile True: print('on and on')")
    launched = launch("--nproc-per-node", 2, script, processes=2)
    assert launched.launcher.stdout is not None
    launched.launcher.stdout.close()
    assert launched.launcher.wait(30) == 128 + signal.SIGPIPE
    assert launched.all_gone(ENDS_WITHIN)


@pytest.mark.parametrize("streams", [(1,), (1, 2)], ids=["stdout", "both"])
def test_a_signal_stops_a_job_whose_output_nobody_reads(script: Path, streams: tuple[int, ...]) -> None:
    script.write_text("while True: print('on and on')")
    reader, writer = os.pipe()
    outputs = {"stdout": writer, "stderr": writer if 2 in streams else subprocess.DEVNULL}
    launcher = subprocess.Popen([*LAUNCHER, script], **outputs)
    full = select.poll()
    full.register(writer, select.POLLOUT)
    eventually(lambda: full.poll(0), lambda ready: not ready)
    launcher.terminate()
    assert launcher.wait(60) == 128 + signal.SIGTERM
    os.close(reader)
    os.close(writer)


def test_closing_the_terminal_lets_the_workers_end_in_order(script: Path, tmp_path: Path) -> None:
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        f"    pathlib.Path({str(tmp_path / 'ended')!r}).touch()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "while True:\n"
        "    print('line', flush=True)\n"
        "    time.sleep(0.01)\n"
    )
    ours, theirs = pty.openpty()
    launcher = subprocess.Popen([*LAUNCHER, script], stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    assert os.read(ours, 1)
    os.close(ours)
    assert launcher.wait(60) == 128 + signal.SIGPIPE
    assert (tmp_path / "ended").exists()


def run_in_terminal(*command: object, **environ: str) -> str:
    """What a terminal of 100 columns gets to see."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    env = {
        "TERM": "xterm",
        **{k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")},
        **environ,
    }
    process = subprocess.Popen(
        [*LAUNCHER, *map(str, command)], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:  # EIO: everybody has let go of it
        pass
    os.close(ours)
    assert process.wait(30) == 0, seen.decode()
    return seen.decode()


def test_on_a_terminal_the_driver_may_draw(script: Path) -> None:
    script.write_text(
        "import os, sys\n"
        "print(os.environ['RANK'], sys.stdout.isatty(), sys.stderr.isatty(), end=' ')\n"
        "print(os.get_terminal_size(1).columns if sys.stdout.isatty() else '')\n"
        "for step in range(3): print(end=f'\\rstep {step}')\n"
        "print()\n"
    )
    seen = run_in_terminal("--nproc-per-node", 2, script)
    first, second = "\x1b[36m[worker 0]\x1b[0m ", "\x1b[33m[worker 1]\x1b[0m "
    assert f"{first}0 True True {100 - len('[worker 0] ')}\r\n" in seen
    assert f"{second}1 False False" in seen
    assert [f"\r{first}step {step}" in seen for step in range(3)] == [True] * 3
    assert f"{second}step 2\r\n" in seen


def test_no_color(script: Path) -> None:
    script.write_text("print('plain')")
    seen = run_in_terminal("--nproc-per-node", 2, script, NO_COLOR="1")
    assert "[worker 0] plain\r\n" in seen
    assert "m[worker" not in seen
