"""Sends and receives messages without interpreting them. The only layer that imports zmq.

    base.py          the contract, kept by mailbox.py, and in memory by zmqgrad.testing
    mailbox.py  ->   endpoint.py: messages and ends      |  sending.py, links.py: one link to each peer
                     local/: unix sockets of one host    |  session*.py, sealed/: over tcp, exactly once
                     data_plane.py: frames, by shared_memory/, flow_control.py and bulk.py (chunks)
                     heartbeat/: liveness                |  reader.py: the one reader
    query/           client and server of the store      |  sockets.py, security.py

While both workers live, a message arrives exactly once even if connections break, but messages may overtake
one another. The end of a peer is delivered last. A send blocks only for credit, with a deadline. Malformed
bytes cost a counter and a log line, never a thread (docs/guarantees.md, P5). ``close()`` requests the end and
``join()`` waits for it.

A mailbox has no thread of its own, but for a copier of large tensors and a reader of bulk, which begin when
they are needed, and libzmq's. Threads of the pool read messages, one at a time; the rest runs in the worker's
service thread.
"""
