"""Committed state: what a job goes on from after a worker, an agent or a host was lost.

A commit has *parts*: one that is replicated, which each host has once, and one for each rank that is sharded.
Parts are bytes in shared memory that a :class:`~zmqgrad.elastic.commits.holder.Holder` keeps: that of the
agent outlives the workers. :class:`~zmqgrad.elastic.commits.state.State` is what programs use, and reaches
the agent by :mod:`~zmqgrad.elastic.commits.connection`; :mod:`~zmqgrad.elastic.commits.agreement` decides
which commit all nodes of a round can have, and :mod:`~zmqgrad.elastic.commits.peers` copies sharded parts to
another host, and fetches parts from there.

Guarantees:

- All ranks restore the same commit, as each of them has made it.
- Memory: of each part the newest whole commit, and the one that is being made; after a restore of one that
  was not whole, that one, too. A commit is whole when all ranks have made it and each of its parts is on two
  hosts, if there are two.
- Nothing here unpickles: parts are bytes to all but the program.
"""
