"""Shared memory between the workers of one host and user: one copy in, none out (DESIGN section 6).

:mod:`~zmqgrad.transport.arena.exchange` is what a mailbox sees of it. It lends blocks
(:mod:`~zmqgrad.transport.arena.lender`) of segments (:mod:`~zmqgrad.transport.arena.segment`) and keeps what
peers have lent (:mod:`~zmqgrad.transport.arena.borrowings`). Guarantees: a block is not written again before
its reader has released it, or has unmapped it altogether; whatever cannot be done by shared memory is done by
frames; nothing stays behind, however a process ends.
"""
