"""The options of ``zmqgrad run``: those of torchrun, in its spellings, and a few of our own.

:func:`add_arguments` declares them, :func:`to_config` turns parsed ones into a
:class:`~zmqgrad.elastic.launch_config.LaunchConfig`, :func:`to_command` into the command of a worker. As with
torchrun, the environment variable ``PET_<OPTION>`` sets the default of an option (``PET_NNODES=1:4``).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

from zmqgrad import environment
from zmqgrad.cli.devices import count_workers
from zmqgrad.cli.option_values import (
    add_flag,
    add_option,
    backend_name,
    integer,
    name_value_pairs,
    node_range,
    worker_count,
)
from zmqgrad.cli.unsupported_options import check_unsupported, declare_unsupported
from zmqgrad.elastic.launch_config import START_METHODS, STATIC_PORT, LaunchConfig, Streams
from zmqgrad.errors import ConfigurationError

logger = logging.getLogger(__name__)

_BACKENDS = {None: "zmqgrad", "c10d": "zmqgrad", "static": "zmqgrad"}
"""Ours for those of torchrun. None: not given; ``static``: the nodes have fixed ranks."""

_EXAMPLES = """\
examples:
  one host, 4 workers:
    zmqgrad run --nproc-per-node 4 train.py --lr 0.1
  a worker per GPU, restarted up to 3 times after a failure:
    zmqgrad run --nproc-per-node gpu --max-restarts 3 -m package.train
  1 to 4 hosts, which join and leave while the job runs (the same command on each; host0 is one of them):
    zmqgrad run --nnodes 1:4 --nproc-per-node 2 --rdzv-endpoint host0:29400 --rdzv-id job7 train.py
  2 hosts with fixed ranks (on the other: --node-rank 1):
    zmqgrad run --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500 train.py

torchrun's options can also be set by variables: PET_NNODES=1:4 is --nnodes 1:4.
The job's secret is never an argument: see `zmqgrad secret --help`.

exit codes:
  0        every worker succeeded
  N        exit code of the first worker that failed; 128 + S if signal S killed it
  2        an invalid option or setting; nothing was started
  126      a worker could not be started
  128 + S  signal S ended the launcher (130: Ctrl-C)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad run``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    _add_size(parser.add_argument_group("workers"))
    _add_rendezvous(parser.add_argument_group("several hosts"))
    _add_restarts(parser.add_argument_group("restarts"))
    _add_output(parser.add_argument_group("output"))
    _add_program(parser.add_argument_group("program"))
    declare_unsupported(parser)


def to_config(arguments: argparse.Namespace) -> LaunchConfig:
    """The launch that the parsed ``arguments`` describe.

    Counts devices if asked for (``--nproc-per-node gpu``); otherwise nothing is started or imported.

    Raises:
        ConfigurationError: if options contradict each other or are refused, or devices cannot be counted.
    """
    check_unsupported(arguments)
    min_nodes, max_nodes = arguments.nnodes
    return LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=count_workers(arguments.nproc_per_node),
        role=arguments.role,
        rdzv_configs=arguments.rdzv_conf,
        max_restarts=arguments.max_restarts,
        monitor_interval=arguments.monitor_interval,
        start_method=arguments.start_method,
        log_dir=arguments.log_dir,
        redirects=arguments.redirects,
        tee=arguments.tee,
        local_addr=arguments.local_addr,
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
        **(_standalone(max_nodes) if arguments.standalone else _meeting(arguments, max_nodes)),
    )


def to_command(arguments: argparse.Namespace) -> list[str]:
    """The command that each worker runs.

    Raises:
        ConfigurationError: if the script does not exist, or options contradict each other.
    """
    script, plain = arguments.script, arguments.run_path  # torchrun: --run-path overrides the other two
    if arguments.no_python and arguments.module and not plain:
        raise ConfigurationError(
            "--no-python runs SCRIPT as a program, --module as a Python module: leave one out"
        )
    if arguments.module and not plain:
        return [sys.executable, "-m", script, *arguments.args]
    if arguments.no_python and not plain:
        return [script, *arguments.args]
    try:
        os.stat(script)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"there is no file {script!r} in {Path.cwd()} (for a module, say -m; for a program, --no-python)"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"cannot find {script!r}: {error.strerror}") from error
    return [sys.executable, script, *arguments.args]


def _standalone(max_nodes: int) -> dict[str, Any]:
    if max_nodes > 1:
        raise ConfigurationError("--standalone is for one host: leave it out, or leave --nnodes out")
    return {"run_id": os.urandom(16).hex()}


def _meeting(arguments: argparse.Namespace, max_nodes: int) -> dict[str, Any]:
    """Where the nodes meet, and by which ranks."""
    backend, endpoint, rank = arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.node_rank
    by_master = rank is not None or (arguments.master_addr and not endpoint)
    if backend == "static" or (backend is None and by_master):
        rank = rank or 0
        if max_nodes > 1 and not endpoint:
            endpoint = f"{arguments.master_addr or '127.0.0.1'}:{arguments.master_port or STATIC_PORT}"
    elif rank is not None:
        logger.warning("--node-rank is ignored: --rdzv-backend %s assigns the ranks", backend)
        rank = None
    return {
        "run_id": arguments.rdzv_id,
        "rdzv_backend": _BACKENDS.get(backend, backend),
        "rdzv_endpoint": endpoint,
        "node_rank": rank,
    }


def _add_size(group: argparse._ArgumentGroup) -> None:
    text = "number of hosts, or the least and the greatest number (default: 1)"
    add_option(group, "nnodes", node_range, "1", text, metavar="N|MIN:MAX")
    text = (
        "number of workers on this host; gpu, xpu, cpu: one for each; auto: one for each device, or for each"
        " processor if there is none (default: 1)"
    )
    add_option(group, "nproc_per_node", worker_count, "1", text, metavar="N|gpu|cpu|auto")
    text = "how workers that run a function start (default: spawn); scripts always start anew"
    add_option(group, "start_method", str, "spawn", text, choices=START_METHODS)
    add_option(group, "role", str, "default", "a name for the workers, in their ROLE_NAME (default: default)")


def _add_rendezvous(group: argparse._ArgumentGroup) -> None:
    text = "where the hosts meet: one of them, which serves the rendezvous (port 29400), or an etcd server"
    add_option(group, "rdzv_endpoint", str, "", text, metavar="HOST[:PORT]")
    text = "identifies the job, the same on all hosts (default: none)"
    add_option(group, "rdzv_id", str, "none", text, metavar="ID")
    text = "zmqgrad (default; c10d means the same), etcd, or static: fixed ranks by --node-rank"
    add_option(group, "rdzv_backend", backend_name, None, text, metavar="NAME")
    text = "options of the rendezvous: join_timeout=600,last_call_timeout=30"
    add_option(group, "rdzv_conf", name_value_pairs, "", text, metavar="K=V,...")
    add_flag(group, "standalone", "one host, which meets no other")
    text = "fixed rank of this host, from 0; the hosts meet at --master-addr"
    add_option(group, "node_rank", integer(0), None, text, metavar="N")
    text = "address of the host of rank 0 (default: 127.0.0.1 for one host, otherwise found)"
    add_option(group, "master_addr", str, "", text, metavar="HOST")
    text = (
        "port at which worker 0 listens (default: any free one); several hosts with --node-rank: at which the"
        " hosts meet (default: 29500)"
    )
    add_option(group, "master_port", integer(0, environment.MAX_PORT), "0", text, metavar="PORT")
    add_option(group, "local_addr", str, None, "address of this host for the others", metavar="HOST")


def _add_restarts(group: argparse._ArgumentGroup) -> None:
    text = "how often the workers are restarted after a failure before the job fails (default: 0)"
    add_option(group, "max_restarts", integer(0), "0", text, metavar="N")
    text = "accepted as torchrun's; the exit of a worker is noticed at once"
    add_option(group, "monitor_interval", float, "0.1", text, metavar="SECONDS")


def _add_output(group: argparse._ArgumentGroup) -> None:
    text = "also write each worker's output to DIR/worker-RANK.stdout.log and .stderr.log"
    add_option(group, "log_dir", Path, None, text, metavar="DIR")
    text = "streams that go to files in --log-dir only: 1 stdout, 2 stderr, 3 both; 0:1,1:2 by local rank"
    add_option(group, "redirects", Streams.from_str, "0", text, ["-r"], metavar="STREAMS")
    text = "streams that go to files in --log-dir and are displayed"
    add_option(group, "tee", Streams.from_str, "0", text, ["-t"], metavar="STREAMS")
    text = "print the address, the number of workers and changed variables"
    group.add_argument(
        "--trace", type=Path, metavar="DIR", help="record all messages in DIR (docs/tracing.md)"
    )
    group.add_argument("-v", "--verbose", action="store_true", help=text)


def _add_program(group: argparse._ArgumentGroup) -> None:
    text = (
        "use this library for torch.distributed.rpc in the workers and the Python processes that they start"
        f" (also {environment.REPLACE_TORCH_RPC}=1)"
    )
    group.add_argument("--replace-torch-rpc", action="store_true", help=text)
    add_flag(group, "module", "SCRIPT is a module, as in python -m", ["-m"])
    add_flag(group, "no_python", "SCRIPT is a program, which is executed as it is")
    add_flag(group, "run_path", "SCRIPT is a Python file, also with --no-python or -m")
    group.add_argument("script", metavar="SCRIPT", help="a Python file")
    group.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")
