"""Moving messages. The only floor that imports zmq; it never asks what a message means.

Start with :mod:`~zmqgrad.transport.base` (the contracts). Guarantees: messages between two workers arrive
once, while both live, but may overtake one another; a send waits for nothing but credit, for messages with
large parts, and says for how long at most (:mod:`~zmqgrad.transport.flow_control`); malformed bytes
cost a counter and a log line, never a thread (P5); ``close()`` tells, ``join()`` waits.

Threads of a mailbox: one that feels the pulse of peers; one that helps to copy, once a tensor is large; one
that checks who comes by tcp, if there is a secret; and libzmq's own. Messages are read by threads of the
engine pool that it is given, one at a time (:mod:`~zmqgrad.transport.leader_poller`).
"""
