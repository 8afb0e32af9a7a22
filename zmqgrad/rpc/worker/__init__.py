"""One worker, by what it does.

The :mod:`~zmqgrad.rpc.worker.worker` is put together, started and ended in one module. It asks others by
:mod:`~zmqgrad.rpc.worker.calling`, on :mod:`~zmqgrad.rpc.worker.terms` found out for each, and opens their
:mod:`~zmqgrad.rpc.worker.answers`. What others ask comes in by :mod:`~zmqgrad.rpc.worker.receiving`, is run
by the :mod:`~zmqgrad.rpc.callee`, and goes out by :mod:`~zmqgrad.rpc.worker.replying`. Who is gone is given
up by :mod:`~zmqgrad.rpc.worker.losing`. The parts know the worker, not each other.
"""

from __future__ import annotations

from zmqgrad.rpc.worker.worker import Worker

__all__ = ["Worker"]
