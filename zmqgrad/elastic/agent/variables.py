"""The environment variables of a worker: those of torchrun, by the same names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import quote, urlencode

from zmqgrad import environment
from zmqgrad.elastic.agent.ranks import Placement
from zmqgrad.elastic.launch_config import LaunchConfig

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

ROUND = "ZMQGRAD_ROUND"
"""Number of the round, for programs that write where workers of an earlier round may still write."""

ROUND_HERE = "{round}"
"""In the URL of the store of a job: the number of the round, as each has a store of its own."""


def common_variables(inherited: Mapping[str, str], config: LaunchConfig) -> dict[str, str]:
    """The variables that all workers have in all rounds: ``inherited``, ``config.env`` and defaults."""
    common = dict(inherited) | config.env
    if config.nproc_per_node > 1:
        # Otherwise each worker would start a thread per core, and the threads would compete for the cores.
        common.setdefault("OMP_NUM_THREADS", "1")
    common.setdefault("PYTHONUNBUFFERED", "1")
    common.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if not environment.has_secret(common) and config.max_nodes == 1:
        common[environment.SECRET] = os.urandom(32).hex()  # keeps other users of this host out
    if config.rdzv_backend == "etcd":  # a cluster that keeps the rendezvous can keep the store as well
        common.setdefault(environment.STORE, _store_url(config))
    return common | {
        "TORCHELASTIC_RUN_ID": config.run_id or "none",
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        # Worker rank 0 serves the store at MASTER_ADDR:MASTER_PORT, be it one of torch's or ours.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "ROLE_NAME": config.role,
    }


def _store_url(config: LaunchConfig) -> str:
    from zmqgrad.store.etcd.cluster import SETTINGS  # loads the store, which a single node does not need

    settings = {name: value for name, value in config.rdzv_configs.items() if name in SETTINGS}
    query = f"?{urlencode(settings)}" if settings else ""
    return f"etcd://{config.rdzv_endpoint}/{quote(config.run_id or 'none', safe='')}/{ROUND_HERE}{query}"


def _store_of_round(url: str, round: int) -> str:
    """The URL of the store of a round: the first one has what the user has set, as it is."""
    if round and ROUND_HERE not in url:
        path, mark, query = url.partition("?")
        url = f"{path.rstrip('/')}/{ROUND_HERE}{mark}{query}"
    return url.replace(ROUND_HERE, str(round))


def worker_variables(common: Mapping[str, str], place: Placement, local_rank: int) -> dict[str, str]:
    """The environment of one worker in one round."""
    numbers = {
        "RANK": place.first_rank + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.num_nodes,
        "ROLE_RANK": place.first_role_rank + local_rank,
        "ROLE_WORLD_SIZE": place.role_world_size,
        "MASTER_PORT": place.master_port,
        "TORCHELASTIC_RESTART_COUNT": place.restarts,
        ROUND: place.round,
    }
    if environment.STORE in common:
        common = {**common, environment.STORE: _store_of_round(common[environment.STORE], place.round)}
    return {**common, "MASTER_ADDR": place.master_addr} | {
        name: str(number) for name, number in numbers.items()
    }
