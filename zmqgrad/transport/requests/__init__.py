"""Requests and their answers, on connections of their own: what a store and its clients speak by.

Unlike a mailbox, a client (:mod:`~zmqgrad.transport.requests.client`) waits for the answer to what it asks,
and a server (:mod:`~zmqgrad.transport.requests.server`) answers on the connection
(:mod:`~zmqgrad.transport.requests.connection`) on which it was asked. Guarantees: what has been asked is
answered, or its deadline passes; malformed bytes cost a counter and a line in the log (P5); nobody who does
not read, or say who they are, keeps others waiting.

On one host what is small takes a short way, by pipes (:mod:`~zmqgrad.transport.requests.short`); all else,
and everything where there are none, the general one.

Threads: a server's is the one that calls it; a client has none.
"""
