"""Calls by gRPC, under the names of an RPC module: what people build who need no more than calls.

A call is one message: the pickle of the function and its arguments, and the bytes of tensors, without further
copies: what arrives is the memory of the tensor. Of two workers, the second serves.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import torch

LIMIT_SECONDS = 60.0
SERVING_THREADS = 4
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

_close: Callable[[], object]
_call: Any
_ended = threading.Event()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return (torch.from_numpy, (obj.numpy(),)) if isinstance(obj, torch.Tensor) else NotImplemented


def _dump(value: object) -> bytes:
    """The sizes of its arrays, its pickle without them, and they."""
    arrays: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=arrays.append).dump(value)
    views = [array.raw() for array in arrays]
    return b"".join([pickle.dumps([len(view) for view in views]), file.getbuffer(), *views])


def _load(data: bytes) -> Any:
    file, view = io.BytesIO(data), memoryview(data)
    sizes = pickle.load(file)
    starts = itertools.accumulate(sizes, initial=len(data) - sum(sizes))
    return pickle.load(
        file, buffers=[view[start : start + n] for start, n in zip(starts, sizes, strict=False)]
    )


def _end() -> None:
    _ended.set()


def init_rpc(name: str, rank: int, world_size: int) -> None:
    """Serves, or connects to the other one at ``BENCH_SERVER``."""
    global _call, _close
    address = os.environ["BENCH_SERVER"]
    if rank:
        server = grpc.server(ThreadPoolExecutor(SERVING_THREADS), options=UNLIMITED)

        def run(call: tuple[Callable[..., object], tuple[Any, ...]], _: object) -> object:
            return (call[0](*call[1]),)  # gRPC takes None for a failure

        handler = grpc.unary_unary_rpc_method_handler(run, _load, _dump)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("rpc", {"call": handler})])
        server.add_insecure_port(address)
        server.start()
        _close = lambda: (_ended.wait(), server.stop(LIMIT_SECONDS).wait())  # noqa: E731
        return
    channel = grpc.insecure_channel(address, UNLIMITED)
    grpc.channel_ready_future(channel).result(LIMIT_SECONDS)
    _call = channel.unary_unary("/rpc/call", _dump, _load)
    _close = lambda: (rpc_sync("", _end), channel.close())  # noqa: E731


def rpc_sync(to: str, function: Callable[..., object], args: tuple[Any, ...] = ()) -> Any:
    """Calls ``function`` there."""
    return _call((function, args), LIMIT_SECONDS)[0]


def rpc_async(to: str, function: Callable[..., object], args: tuple[Any, ...] = ()) -> Any:
    """As :func:`rpc_sync`; ``wait`` of what it returns waits for that."""
    future = _call.future((function, args), LIMIT_SECONDS)
    future.wait = future.result
    return future


def shutdown() -> None:
    """Ends both."""
    _close()
