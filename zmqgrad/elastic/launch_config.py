"""How a job is launched: its nodes, workers, restarts and logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path


class Std(IntFlag):
    """Output streams of a worker. The values are those of torchelastic."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


Streams = Std | dict[int, Std]
"""Streams of all workers, or by local rank."""


@dataclass(frozen=True)
class LaunchConfig:
    """The configuration of a job, equal on all its nodes except for addresses. Options as of ``torchrun``."""

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    run_id: str = ""
    role: str = "default_role"
    rdzv_backend: str = "zmqgrad"
    rdzv_endpoint: str = ""
    rdzv_configs: dict[str, str] = field(default_factory=dict)
    node_rank: int | None = None
    max_restarts: int = 0
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_dir: Path | None = None
    redirects: Streams = Std.NONE
    tee: Streams = Std.NONE
    local_addr: str | None = None
    master_addr: str = ""
    master_port: int = 0
    env: dict[str, str] = field(default_factory=dict)
