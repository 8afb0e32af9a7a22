"""What a launch configuration accepts, and what it says of the rest."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.api import Std as TorchStd
from torch.distributed.elastic.multiprocessing.api import to_map

from zmqgrad.elastic.agent.job import describe_wait
from zmqgrad.elastic.launch_config import LaunchConfig, Std, Streams
from zmqgrad.errors import ConfigurationError


def test_what_joining_a_round_waits_for() -> None:
    meet = LaunchConfig(2, 4, rdzv_endpoint="h:1", rdzv_configs={"last_call_timeout": "7"}, run_id="job")
    waits = "joining a round at h:1: waiting for 2 nodes"
    assert describe_wait(meet) == f"{waits}, then up to 7 s for more, at most 4 (last_call_timeout)"
    assert describe_wait(dataclasses.replace(meet, max_nodes=2)) == waits


def test_the_default_is_one_worker_on_one_host() -> None:
    config = LaunchConfig()
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 1, 1)
    assert not config.redirects
    assert not config.tee
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_nodes = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_nodes": 0}, "min_nodes is 0; it must be an integer, at least 1"),
        ({"nproc_per_node": "gpu"}, "nproc_per_node is 'gpu'; it must be an integer, at least 1"),
        ({"nproc_per_node": True}, "nproc_per_node is True"),
        (
            {"min_nodes": 3, "max_nodes": 2, "rdzv_endpoint": "h"},
            "nnodes is 3:2; the minimum must not exceed",
        ),
        ({"max_nodes": 2}, "nnodes is 1:2, but the nodes have no place to meet: set rdzv_endpoint"),
        ({"node_rank": 1}, "node_rank is 1; it must be an integer, from 0 to 0"),
        ({"max_nodes": 2, "node_rank": 1, "master_addr": "h"}, "node_rank is 1, but nnodes is 1:2"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"master_port": 65536}, "master_port is 65536; it must be an integer, from 0 to 65535"),
        ({"monitor_interval": 0}, "monitor_interval is 0"),
        ({"monitor_interval": math.nan}, "monitor_interval is nan"),
        ({"start_method": "thread"}, "'thread'; it must be one of spawn, fork, forkserver"),
        ({"redirects": Streams(Std.OUT)}, "log_dir is not set: set it to a directory"),
        ({"redirects": Std.ALL, "log_dir": Path("logs")}, "it must be Streams: Streams(Std.ALL) for all"),
        ({"tee": "3"}, "tee is '3'; it must be Streams"),
        ({"log_dir": 3}, "log_dir is 3; it must be a path"),
        ({"master_addr": "node1..cluster"}, "master_addr is 'node1..cluster', which is not a host name"),
        ({"local_addr": "a" * 64}, "which is not a host name or address"),
    ],
)
def test_invalid_values_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LaunchConfig(**fields)
    assert words in str(caught.value)


def test_the_directory_of_logs_may_be_a_string() -> None:
    assert LaunchConfig(log_dir="logs").log_dir == Path("logs")  # type: ignore[arg-type]


def test_nodes_that_meet_somewhere_are_accepted() -> None:
    LaunchConfig(max_nodes=2, rdzv_endpoint="host:1")
    LaunchConfig(min_nodes=2, max_nodes=2, node_rank=1, master_addr="host")
    LaunchConfig(redirects=Streams.from_str("0:1"), log_dir=Path("logs"))


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 3), min_size=1) | st.integers(0, 3))
def test_streams_are_those_of_torchrun(wanted: dict[int, int] | int) -> None:
    pairs = wanted.items() if isinstance(wanted, dict) else ()
    text = ",".join(f"{rank}:{streams}" for rank, streams in pairs) or str(wanted)
    ours, theirs = Streams.from_str(text), to_map(TorchStd.from_str(text), 10)
    assert {rank: ours.of(rank) for rank in range(10)} == theirs
    assert bool(ours) == any(theirs.values())


def test_streams_of_workers_beyond_the_tenth() -> None:
    assert Streams.from_str("12:3").of(12) is Std.ALL


@pytest.mark.parametrize("text", ["", "4", "0:4", "0:1,", "a:1", "0:1 ,1:1", "\u0663", "3\n"])
def test_malformed_streams(text: str) -> None:
    with pytest.raises(ConfigurationError, match="as output streams: write 0"):
        Streams.from_str(text)
