"""The future of a group call: of the results of all members, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from zmqgrad.errors import GroupError, RpcTimeoutError
from zmqgrad.rpc.calls import PendingCall
from zmqgrad.rpc.futures import Endings, PythonFuture, RpcFuture
from zmqgrad.rpc.groups.sending import GroupCall
from zmqgrad.rpc.membership.worker_info import WorkerInfo
from zmqgrad.rpc.torch_internals import CppFuture
from zmqgrad.runtime.clock import Deadline

T = TypeVar("T")


class GroupFuture(PythonFuture[list[T]]):
    """A future of the results of all members, which is done when all have replied or failed.

    ``wait`` returns the results in the order of the members, or raises one ``GroupError``, as the group call
    was made with ``errors``. It is a ``torch.futures.Future``, with ``then`` and ``await``.

    Attributes:
        members: of the group, as they were when the call was made.
        futures: of the result of each member.

    Example:
        >>> future = rpc.group("worker*").call_async(pow, args=(2, 3))
        >>> sorted((worker.name, result.wait()) for worker, result in future.as_completed())
        [('worker0', 8), ('worker1', 8)]
        >>> future.wait()
        [8, 8]
    """

    def __init__(self, call: GroupCall) -> None:
        """Sends the requests of ``call``."""
        super().__init__()
        replies = call.worker.replies
        self.members: tuple[WorkerInfo, ...] = tuple(call.members)
        self.futures: tuple[RpcFuture[T], ...] = tuple(
            [
                replies.future(each) if isinstance(each, PendingCall) else replies.failed_future(each)
                for each in call.send()
            ]
        )
        self._unfinished: list[GroupCall] = []
        ended = torch.futures.collect_all(list(self.futures))
        CppFuture.add_done_callback(ended, self._finish)
        # Only now: of a callback that is called at once, C++ only prints what a signal handler raises in it.
        self._unfinished.append(call)
        if ended.done():
            self._finish()

    def as_completed(self) -> Iterator[tuple[WorkerInfo, RpcFuture[T]]]:
        """Iterate over the members with their futures, in the order in which these are done."""
        for index in in_order(self.futures):  # every call has a deadline, or its caller wanted none
            yield self.members[index], self.futures[index]

    def _finish(self, _: object = None) -> None:
        try:
            call = self._unfinished.pop()
        except IndexError:
            return
        try:
            results = call.conclude([partial(CppFuture.wait, future) for future in self.futures])
        except GroupError as e:
            self._settle(self.set_exception, e)
        else:
            self._settle(self.set_result, results)


def in_order(futures: Sequence[Any], seconds: float = 0.0) -> Iterator[int]:
    """Yields the indices of ``futures`` in the order in which these are done, for ``seconds`` (0: no limit).

    Raises:
        RpcTimeoutError: if they are not done in time.
    """
    endings, deadline = Endings(futures), Deadline.after(seconds or None)
    for count in range(len(futures)):
        index = endings.wait(deadline.timeout())
        if index is None:
            raise RpcTimeoutError(f"{count} of {len(futures)} calls are done after {seconds} s")
        yield index
