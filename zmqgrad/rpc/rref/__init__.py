"""Remote references from the inside: who holds which, how they travel, and how long values stay.

What is difficult is decided by the :mod:`~zmqgrad.rpc.rref.protocol`, which is pure. The
:mod:`~zmqgrad.rpc.rref.table` carries it out for one worker. What users see is
:class:`zmqgrad.rpc.rref.api.RRef`.
"""
