"""Which workers are in the group: joining it, finding other members, and leaving it.

:mod:`~zmqgrad.rpc.membership.bootstrap` joins a group through a store. A worker itself knows only the
:mod:`~zmqgrad.rpc.membership.membership`: the workers of its group and their addresses.
"""
