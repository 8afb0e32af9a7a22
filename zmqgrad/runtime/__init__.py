"""Time and threads: clocks and deadlines, one-shot outcomes, the engine pool, the timekeeper.

Knows no message, socket or tensor. Guarantees: every wait has a deadline; a task that blocks on one of
our waits does not take a thread from the others; a callback runs with no lock of ours held.
"""
