"""Sends and receives messages without interpreting them. The only layer that imports zmq.

    base.py          the contract, kept by mailbox.py (ZeroMQ) and memory/ (in memory, with fault injection)
    mailbox.py  ->   receiver.py, leader_poller.py: in   |  connections.py: out  |  heartbeat/: liveness
                     local/: fast path of one host       |  session*.py: exactly once, over tcp
                     data_plane.py: frames, by shared_memory/, flow_control.py and bulk.py (chunks)
    query/           client and server of the store      |  sockets.py, polling.py, security.py

While both workers live, a message arrives exactly once even if connections break, but messages may overtake
one another. A send blocks only for credit, with a deadline. Malformed bytes cost a counter and a log line,
never a thread (docs/guarantees.md, P5). ``close()`` requests the end and ``join()`` waits for it.

Threads of a mailbox: heartbeats, a copier of large tensors, the ZAP authenticator if there is a secret, and
libzmq's. Threads of the pool read messages, one at a time.
"""
