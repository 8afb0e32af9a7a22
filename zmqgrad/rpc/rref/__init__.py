"""Remote references: their ownership, their serialization, and the lifetime of their values.

:mod:`~zmqgrad.rpc.rref.protocol` is the RRef protocol as pure bookkeeping; :mod:`~zmqgrad.rpc.rref.values`
has the values of the owner; :mod:`~zmqgrad.rpc.rref.table` sends the messages for one worker. Programs use
:class:`zmqgrad.rpc.rref.api.RRef`.
"""
