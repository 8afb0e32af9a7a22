"""Sends and receives messages. The only layer that imports zmq; it does not interpret messages.

Start with :mod:`~zmqgrad.transport.base` (the contracts). Guarantees: while both workers live, a message
between them arrives exactly once, whatever happens to the connections
(:mod:`~zmqgrad.transport.session`), but messages may overtake one another; a send blocks only for credit,
with a deadline (:mod:`~zmqgrad.transport.flow_control`); malformed bytes cost a counter and a log line, never
a thread (P5); ``close()`` requests the end, ``join()`` waits for it.

Threads of a mailbox: one for heartbeats; one that helps to copy large tensors; the ZAP authenticator, if
there is a secret; and those of libzmq. Threads of the pool that it is given read messages, one at a time
(:mod:`~zmqgrad.transport.leader_poller`).
"""
