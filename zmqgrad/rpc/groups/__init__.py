"""Who takes part: how workers form a group, know each other in it, meet, and part.

From a store at which they meet to a group, :mod:`~zmqgrad.rpc.groups.forming` leads: to one of a fixed size
(:mod:`~zmqgrad.rpc.groups.group`), or to one that workers join and leave as they like
(:mod:`~zmqgrad.rpc.groups.dynamic`). A worker itself knows only the
:mod:`~zmqgrad.rpc.groups.membership`: which workers there are, and where.
"""
