"""Time and threads: clocks and deadlines, promises, the thread pool, the timer thread.

This package knows no message, socket or tensor. Guarantees: every wait has a deadline; a task that blocks in
one of our waits does not keep a thread from other tasks; callbacks run with none of our locks held.
"""
