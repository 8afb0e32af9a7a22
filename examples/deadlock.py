"""A program that hangs: two workers hold a lock while they call each other. The tracer finds out why.

    zmqgrad run --nproc-per-node 3 --trace /tmp/hang examples/deadlock.py    # hangs
    zmqgrad trace /tmp/hang                                                  # in another terminal
    zmqgrad run --nproc-per-node 3 examples/deadlock.py --fixed              # does not hang

Each of the first two workers has an account, and a lock that guards it. ``transfer`` locks the own account
and then calls ``deposit`` on the other worker, which locks that account. If both do it at the same time, each
waits for a lock that the other one holds. The third worker is not at fault, but waits as well. After 60 s,
the default timeout of a call, the program ends with an ``RpcTimeoutError``.
"""

from __future__ import annotations

import os
import sys
import threading

from zmqgrad import rpc

lock = threading.Lock()
balance = 100


def deposit(amount: int) -> int:
    """Add ``amount`` to the account of this worker. Returns the balance."""
    global balance
    with lock:
        balance += amount
        return balance


def transfer(to: str, amount: int) -> int:
    """Move ``amount`` to worker ``to``. Returns its balance."""
    global balance
    with lock:
        balance -= amount
        rpc.barrier(["worker0", "worker1"])  # so that it happens each time: both hold their locks
        return rpc.rpc_sync(to, deposit, args=(amount,))


def transfer_without_deadlock(to: str, amount: int) -> int:
    """Move ``amount`` to worker ``to``, without a lock during the call."""
    global balance
    with lock:
        balance -= amount
    rpc.barrier(["worker0", "worker1"])
    return rpc.rpc_sync(to, deposit, args=(amount,))


def main() -> None:
    """Transfer in both directions at the same time."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    move = transfer_without_deadlock if "--fixed" in sys.argv else transfer
    try:
        if rank < 2:
            print("balance of the other worker:", move(f"worker{1 - rank}", 10))
        else:
            print("balance of worker0:", rpc.rpc_sync("worker0", deposit, args=(0,)))
        rpc.shutdown()
    except BaseException:
        rpc.shutdown(graceful=False)  # the others are about to end, too
        raise


if __name__ == "__main__":
    main()
