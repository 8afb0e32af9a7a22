"""Queries and replies between many light clients and one server: the transport of the store.

    client.py      QueryClient: a pool of channels, one query at a time on each
    channel.py     sends a query and receives the reply, by a DEALER or the local fast path
    pending.py     pure: which message is the reply, and when to repeat the query
    dealer.py      a DEALER, and what its handshakes reveal about the server
    server.py      QueryServer: one reader of a ROUTER and a local listener
    admission.py   pure: which clients are connected, and the limit on their number
    publisher.py   notifications: the server's XPUB          subscriber.py   and the client's SUB
    sockets.py     options of all these sockets, and the context that clients share

Clients are responsible for reliability: they repeat a query until its reply arrives. So the server need not
notice that a client has ended, and nothing depends on a connection.
"""

from __future__ import annotations

from zmqgrad import environment
from zmqgrad.runtime.spinning import SpinBudget

"""The job named in the fast path's hello: clients of a store need not belong to one."""

SPIN_SECONDS = 1e-4
"""How long either side spins before it blocks: waking up an idle core takes as long."""

SPIN_RECENCY_SECONDS = 1e-3
"""A side that received nothing for this long blocks at once: its peer has stopped spinning, too."""


def spin_budget() -> SpinBudget:
    """Returns the spin budget of one side: SPIN_SECONDS, or less if ``ZMQGRAD_SPIN_US`` is lower.

    Raises:
        ConfigurationError: if that variable is malformed.
    """
    allowed = environment.spin_us()
    seconds = SPIN_SECONDS if allowed is None else min(SPIN_SECONDS, allowed * 1e-6)
    return SpinBudget(seconds, SPIN_RECENCY_SECONDS)
