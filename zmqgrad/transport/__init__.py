"""Moving messages. The only floor that imports zmq; it never asks what a message means.

Start with :mod:`~zmqgrad.transport.base` (the contracts). Guarantees: messages between two workers
arrive once, while both live, but may overtake one another; a send never blocks on the network; malformed
bytes cost a counter and a log line, never a thread (P5); ``close()`` tells, ``join()`` waits.
"""
