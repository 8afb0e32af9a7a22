"""The distributed engine: runs backward passes over several workers.

A pass is a set of requests, each handled once: the gradients for a send, or the notice that none will arrive.
Workers report handled requests, with those they set off, to the coordinator, whose termination detector so
knows when none is outstanding. If groups on a worker still wait then, for gradients that will never arrive,
``mode`` decides: *fast* fails and names the unused sends; *smart* found these gradients before the start
(:mod:`~zmqgrad.autograd.engine.discovery`); *auto* finds them now, and continues without them.

The :mod:`~zmqgrad.autograd.engine.coordinator` starts a pass. Each worker is a
:mod:`~zmqgrad.autograd.engine.participant`: its :mod:`~zmqgrad.autograd.engine.work_queue` holds what
arrived, threads handle it in a :mod:`~zmqgrad.autograd.engine.step` each, and the
:mod:`~zmqgrad.autograd.engine.executor` runs the local graph.
"""
