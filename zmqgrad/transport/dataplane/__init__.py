"""The data plane: how what is large travels, and how much of it at once (DESIGN section 6).

A mailbox asks the :mod:`~zmqgrad.transport.dataplane.plane`. By shared memory goes what can
(:mod:`zmqgrad.transport.arena`); what goes by the socket waits for
:mod:`~zmqgrad.transport.dataplane.credit`, and is cut into :mod:`~zmqgrad.transport.dataplane.chunks`.
"""
