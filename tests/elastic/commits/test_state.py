"""State without an agent: what is committed, restored, cut and saved."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.waiting import eventually
from zmqgrad.elastic import Sharded, State
from zmqgrad.elastic.agent.ranks import Placement
from zmqgrad.elastic.commits import files
from zmqgrad.elastic.commits import state as state_module
from zmqgrad.elastic.commits.connection import AgentCommits, Place
from zmqgrad.elastic.commits.holder import Holder
from zmqgrad.elastic.commits.server import CommitServer
from zmqgrad.errors import CommitError, ConfigurationError, PayloadError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ZMQGRAD_COMMITS"):
        monkeypatch.delenv(name, raising=False)


def place(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def make() -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 2))
    optimizer = torch.optim.Adam(model.parameters())
    return State(model=model, optimizer=optimizer, step=0, seen=torch.zeros(3), notes={"best": None})


def train(state: State) -> None:
    state.optimizer.zero_grad()
    loss = state.model(torch.randn(8, 40, generator=torch.Generator().manual_seed(state.step))).square().sum()
    loss.backward()
    state.optimizer.step()
    state.step += 1
    state.seen += 1
    state.notes["best"] = float(loss.detach())


def everything(state: State) -> Any:
    return (
        {key: t.clone() for key, t in state.model.state_dict().items()},
        {key: t.clone() for part in state.optimizer.state.values() for key, t in part.items()},
        state.step,
        state.seen.clone(),
        dict(state.notes),
    )


def same(a: Any, b: Any) -> bool:
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    return True


def test_a_commit_is_restored_and_training_goes_on_as_if_nothing_had_happened() -> None:
    state = make()
    assert not state.restore()
    for _ in range(3):
        train(state)
        state.commit()
    train(state)
    expected = everything(state)
    train(state)
    assert state.restore()
    assert (state.step, state.commits) == (3, 3)
    train(state)
    assert same(everything(state), expected)


def test_modules_and_tensors_are_filled_in_place() -> None:
    state = make()
    state.restore()
    model, weight, seen = state.model, state.model[0].weight, state.seen
    state.commit()
    train(state)
    state.restore()
    assert state.model is model
    assert state.model[0].weight is weight
    assert state.seen is seen
    assert seen.sum() == 0


def test_what_was_restored_does_not_change_with_later_commits() -> None:
    """The memory of a commit has another one soon."""
    state = State(table=torch.zeros(100_000), other=[torch.ones(50_000)])
    state.restore()
    state.commit()
    state.table = torch.zeros(1)  # of another shape: the restored tensor takes its place
    state.restore()
    table, other = state.table, state.other
    for _ in range(3):
        state.table, state.other = torch.full((100_000,), 7.0), [torch.full((50_000,), 7.0)]
        state.commit()
    assert table.sum() == 0
    assert other[0].sum() == 50_000


class Extra(nn.Module):
    """A module with a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.extra = torch.zeros(100_000)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


class Loading(nn.Module):
    """A module that keeps the tensors that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("extra", torch.zeros(100_000))

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.extra = state_dict["extra"]


class Plain:
    """An object that keeps the tensors that it loads."""

    def __init__(self) -> None:
        self.extra = torch.zeros(100_000)

    def parameters(self) -> list[torch.Tensor]:
        return [self.extra]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"extra": self.extra}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.extra = state["extra"]


@pytest.mark.parametrize("kind", [Extra, Loading, Plain])
def test_what_an_object_keeps_of_a_commit_does_not_change_with_later_ones(kind: Any) -> None:
    state = State(it=kind(), other=torch.zeros(1))
    state.restore()
    state.other = [torch.zeros(100_000)]
    state.commit()
    state.other = torch.zeros(1)
    state.restore()
    kept, other = state.it.extra, state.other[0]
    for _ in range(3):
        state.it.extra, state.other = torch.full((100_000,), 7.0), [torch.full((100_000,), 7.0)]
        state.commit()
    assert kept.sum() == 0
    assert other.sum() == 0


def test_restore_without_a_commit_changes_nothing() -> None:
    state = make()
    before = everything(state)
    assert not state.restore()
    assert same(everything(state), before)
    assert state.commits == 0


def test_it_says_that_commits_are_lost_with_the_process(caplog: pytest.LogCaptureFixture) -> None:
    state = State(step=0)
    state.restore()
    assert "they are lost with it, and not agreed upon with other ranks" in caplog.text
    assert not state.outlives_the_process


def test_saved_commits_are_restored_by_another_process(tmp_path: Path) -> None:
    state = make()
    state.restore(tmp_path)
    train(state)
    state.commit()
    state.save(tmp_path)
    train(state)
    expected = everything(state)
    again = make()
    assert again.restore(tmp_path)
    assert (again.step, again.commits) == (1, 1)
    train(again)
    assert same(everything(again), expected)


def test_older_files_are_removed_once_a_newer_commit_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for rank in (0, 1):
        place(monkeypatch, rank, 2)
        states.append(State(shard=Sharded(torch.tensor([float(rank)])), step=0))
        states[rank].restore(tmp_path)
    for _ in range(2):
        states[0].commit()
        states[0].save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4, "no commit is whole yet"
    states[1].commit()
    states[1].save(tmp_path)
    states[1].commit()
    states[1].save(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in names if "rank-1" in name] == ["commit-2.rank-1-of-2"]


def test_a_rank_that_is_slow_to_restore_finds_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all ranks have agreed on is not removed before all of them have made another commit."""
    place(monkeypatch, 0, 2)
    before, fast, slow = State(step=0), State(step=0), State(step=0)
    before.restore(tmp_path)
    before.step = 7
    before.commit()
    before.save(tmp_path)
    assert fast.restore(tmp_path)
    read = files.read

    def read_late(*of: Any) -> memoryview:
        fast.commit()
        fast.save(tmp_path)
        return read(*of)

    place(monkeypatch, 1, 2)
    with monkeypatch.context() as late:
        late.setattr(files, "read", read_late)
        assert slow.restore(tmp_path)
    assert slow.step == 7
    names = [f"commit-{number}.replicated-of-0" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names[:2]
    place(monkeypatch, 0, 2)
    last = State(step=0)
    last.restore(tmp_path)
    last.commit()
    last.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names[1:], "of each start, one may stay"
    last.commit()
    last.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["commit-4.replicated-of-0"]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (2, 2)])
def test_shards_are_cut_for_another_world_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    def make(rank: int, size: int, first: float) -> State:
        place(monkeypatch, rank, size)
        rows = torch.arange(12.0).view(6, 2) * first
        return State(
            table=Sharded(rows.tensor_split(size)[rank]),
            columns=Sharded(rows.T.tensor_split(size, 1)[rank].contiguous(), cut=1),
            ranks=Sharded([rank], cut=lambda parts, rank, size: [*chain(*parts)][rank::size]),
        )

    for rank in range(before):
        state = make(rank, before, 1.0)
        state.restore(tmp_path)
        state.commit()
        state.save(tmp_path)
    rows = torch.arange(12.0).view(6, 2)
    for rank in range(after):
        state = make(rank, after, 0.0)
        assert state.restore(tmp_path)
        assert torch.equal(state.table, rows.tensor_split(after)[rank])
        assert torch.equal(state.columns, rows.T.tensor_split(after, 1)[rank])
        assert state.ranks == list(range(before))[rank::after]


def test_an_optimizer_is_cut_along_the_last_dimension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counts of steps have no dimension, so they are the same on all ranks."""

    def make(rank: int, size: int) -> tuple[nn.Parameter, State]:
        place(monkeypatch, rank, size)
        weight = nn.Parameter(torch.ones(2, 4 // size))
        return weight, State(optimizer=Sharded(torch.optim.Adam([weight]), cut=-1))

    for rank in range(2):
        weight, state = make(rank, 2)
        (weight * (rank + 1)).sum().backward()
        state.optimizer.step()
        state.restore()
        state.commit()
        state.save(tmp_path)
    weight, state = make(0, 1)
    assert state.restore(tmp_path)
    found = state.optimizer.state[weight]
    assert found["step"] == 1
    assert torch.allclose(found["exp_avg"], torch.tensor([[0.1, 0.1, 0.2, 0.2]] * 2))


def test_parts_that_cannot_be_cut_are_an_error_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is no tensor is that of rank 0, also of lists of other lengths."""

    def make(rank: int, size: int) -> State:
        place(monkeypatch, rank, size)
        return State(
            losses=Sharded({"seen": [rank] * (rank + 1), "last": (rank,)}),
            parts=Sharded({rank: torch.ones(1)}),
        )

    for rank in range(2):
        state = make(rank, 2)
        state.restore()
        state.commit()
        state.save(tmp_path)
    state = make(0, 1)
    with pytest.raises(CommitError, match=r"'parts' cannot be joined along dimension 0, .*KeyError"):
        state.restore(tmp_path)
    assert state.losses == {"seen": [0], "last": (0,)}


def test_what_is_restored_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is not filled in place is a leaf, as it was: optimizers take nothing else."""
    for rank in range(2):
        place(monkeypatch, rank, 2)
        rows = torch.full((2, 3), float(rank), requires_grad=True)
        state = State(
            weight=nn.Parameter(torch.ones(3)),
            late=torch.ones(2, requires_grad=True),
            rows=Sharded({"rows": rows, "scale": torch.ones((), requires_grad=True)}),
        )
        state.restore()
        state.commit()
        state.save(tmp_path)
    place(monkeypatch, 0, 1)
    other = State(weight=nn.Parameter(torch.ones(5)), late=None, rows=Sharded(None))
    assert other.restore(tmp_path)
    rows, scale = other.rows["rows"], other.rows["scale"]
    optimizer = torch.optim.SGD([other.weight, other.late, rows, scale], lr=1.0)
    (other.weight.sum() + other.late.sum() + rows.sum() + scale).backward()
    optimizer.step()
    assert isinstance(other.weight, nn.Parameter)
    assert (other.weight.tolist(), other.late.tolist()) == ([0.0] * 3, [0.0] * 2)
    assert rows.tolist() == [[-1.0] * 3] * 2 + [[0.0] * 3] * 2
    assert scale.item() == 0.0


def test_a_tensor_that_cannot_be_filled_in_place() -> None:
    state = State(rows=torch.ones(1).expand(4))
    state.restore()
    state.commit()
    with pytest.raises(CommitError, match=r"'rows' cannot be restored: .*more than one element"):
        state.restore()


@pytest.mark.parametrize("name", ["commit", "restore", "save", "commits", "_values"])
def test_names_of_methods_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be the name of a value"):
        State(**{name: 1})


def test_values_that_were_not_declared() -> None:
    state = State(step=0)
    with pytest.raises(AttributeError, match="no value 'epoch': pass it to State"):
        state.epoch = 1
    with pytest.raises(AttributeError, match="it has step"):
        state.epoch  # noqa: B018


def test_commit_and_save_before_what_they_need(tmp_path: Path) -> None:
    state = State(step=0)
    with pytest.raises(CommitError, match=r"call restore\(\) before the first commit"):
        state.commit()
    state.restore()
    with pytest.raises(CommitError, match=r"call commit\(\) first"):
        state.save(tmp_path)
    with pytest.raises(CommitError, match=r"call commit\(\) first"):
        state.wait()
    state.commit()
    state.wait()


def test_a_value_that_cannot_be_serialized_leaves_the_commit_before() -> None:
    state = State(step=1, what=None)
    state.restore()
    state.commit()
    state.step, state.what = 2, (n for n in range(3))
    with pytest.raises(PayloadError, match="generator"):
        state.commit()
    state.restore()
    assert (state.step, state.what) == (1, None)


def test_a_commit_of_another_program(tmp_path: Path) -> None:
    state = State(step=1)
    state.restore()
    state.commit()
    state.save(tmp_path)
    with pytest.raises(CommitError, match="has no 'epoch'"):
        State(epoch=1).restore(tmp_path)
    state = State(step=nn.Linear(2, 2))
    with pytest.raises(CommitError, match="'step' cannot be restored"):
        state.restore(tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    state = State(step=1)
    state.restore()
    state.commit()
    (tmp_path / "file").touch()
    with pytest.raises(CommitError, match=r"cannot read .*Not a directory"):
        state.save(tmp_path / "file")
    (tmp_path / "link").symlink_to("none")
    with pytest.raises(CommitError, match=r"cannot write .*File exists"):
        state.save(tmp_path / "link")


def saved(path: Path, step: int = 1, commits: int = 1) -> State:
    """A state whose newest commit, of so many, is saved."""
    state = State(step=step, weight=torch.arange(100.0))
    state.restore()
    for _ in range(commits):
        state.commit()
    state.save(path)
    return state


def flipped(position: int) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[position] ^= 1
        return bytes(changed)

    return flip


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"x",
        *map(flipped, (3, 200, -1, -12, -30)),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    saved(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CommitError, match=r"commit-1\.replicated-of-0 is damaged"):
        State(step=0, weight=torch.zeros(100)).restore(tmp_path)


def test_a_directory_of_a_job_that_has_come_further_is_refused(tmp_path: Path) -> None:
    """Otherwise the new commit would be removed as an older one, and that of the other job restored."""
    saved(tmp_path, step=7, commits=5)
    with pytest.raises(CommitError, match=r"has commit 5, and commit 1 is to be saved there"):
        saved(tmp_path)
    state = State(step=0, weight=torch.zeros(100))
    state.restore(tmp_path)
    assert state.step == 7


def test_a_commit_that_fails_leaves_the_one_before_to_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saved(tmp_path)
    state.step = 2

    def fail(*args: object) -> None:
        raise CommitError("the round has ended")

    monkeypatch.setattr(Holder, "commit", fail)
    with pytest.raises(CommitError, match="the round has ended"):
        state.commit()
    state.save(tmp_path)
    again = State(step=0, weight=torch.zeros(100))
    again.restore(tmp_path)
    assert (again.step, again.commits) == (1, 1)


def test_a_process_that_is_killed_while_it_saves_leaves_no_file_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State(step=0)
    state.restore()
    state.commit()
    if not (child := os.fork()):
        monkeypatch.setattr(os, "fsync", lambda fd: os.kill(os.getpid(), signal.SIGKILL))
        state.save(tmp_path)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    assert not State(step=0).restore(tmp_path)
    state.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["commit-1.replicated-of-0"]


class Ranks:
    """Two ranks of an agent, each of which has a number; a thread for each."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server = CommitServer(directory)
        self._round = -1
        self._own = threading.local()
        monkeypatch.setattr(state_module, "connect", lambda: self._own.commits)

    def restored(self, path: Path | None) -> list[State]:
        """Begin a round, restore, and return the states."""
        self._round += 1
        self._server.begin_round(Placement(self._round, 0, 1, 0, 2, 2, 0, 2, "", 0, 0), None)
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda rank: self._restore(rank, path), range(2)))

    def _restore(self, rank: int, path: Path | None) -> State:
        self._own.commits = AgentCommits(Place(rank, 2, rank == 0), self._round, self._server.path)
        state = State(own=Sharded([0]))
        state.restore(path)
        return state

    def close(self) -> None:
        self._server.close()


def test_an_agent_without_descriptors_serves_workers_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    server = CommitServer(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    worker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.begin_round(Placement(0, 0, 1, 0, 1, 1, 0, 1, "", 0, 0), None)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        worker.connect(server.path)
        eventually(lambda: "Too many open files" in caplog.text)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert AgentCommits(Place(0, 1, True), 0, server.path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        worker.close()
        server.close()


def test_files_that_ranks_have_saved_at_different_times_are_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank saves commit 2, and is restored to commit 1; the other saves the commit 2 that follows."""

    def commit(state: State, value: int) -> None:
        state.own = [value]
        state.commit()

    path = tmp_path / "saved"
    ranks = Ranks(tmp_path, monkeypatch)
    try:
        states = ranks.restored(path)
        for state in states:
            commit(state, 1)
            state.save(path)
        commit(states[0], 2)
        states[0].save(path)
        states = ranks.restored(path)
        assert [state.own for state in states] == [[1], [1]]
        for state in states:
            commit(state, 3)
        states[1].save(path)
    finally:
        ranks.close()
    others = Ranks(tmp_path, monkeypatch)
    try:
        assert [(state.own, state.commits) for state in others.restored(path)] == [([1], 1)] * 2
    finally:
        others.close()


def test_another_commit_of_the_same_number_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nothing would be left on disk if the job ended before all ranks have saved."""
    path = tmp_path / "saved"
    for value in (1, 2):
        ranks = Ranks(tmp_path, monkeypatch)
        try:
            states = ranks.restored(None)
            for state in states:
                state.own = [value]
                state.commit()
            if value == 1:
                for state in (*states, *states):
                    state.save(path)
            else:
                with pytest.raises(CommitError, match=r"has commit 1, and commit 1 is to be saved there"):
                    states[0].save(path)
            assert [state.own for state in ranks.restored(path)] == [[value]] * 2  # from memory
        finally:
            ranks.close()
    others = Ranks(tmp_path, monkeypatch)
    try:
        assert [state.own for state in others.restored(path)] == [[1]] * 2
    finally:
        others.close()
