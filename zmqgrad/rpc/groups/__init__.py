"""Calls to many workers at once.

:mod:`~zmqgrad.rpc.groups.group` has the groups of workers, :mod:`~zmqgrad.rpc.groups.future` the future of a
group call, :mod:`~zmqgrad.rpc.groups.rrefs` the references to what a group has made, and
:mod:`~zmqgrad.rpc.groups.sending` serializes a call once for all members and sends it.
"""
