"""The distributed engine: runs backward passes over several workers.

A pass is a set of requests, each handled once: the gradients for a send, or the notice that none will arrive.
A worker that has handled requests reports to the coordinator which requests that set off. So the
coordinator's termination detector knows when no request is outstanding. If groups on some worker still wait
then, they wait for gradients that will never arrive, and ``mode`` decides:

- *fast*: the pass fails; the error names the unused sends;
- *smart*: this does not happen. Before the start, the coordinator finds out which gradients will never arrive
  (:mod:`~zmqgrad.autograd.engine.discovery`) and notifies the workers to continue without them;
- *auto*: the pass starts like fast and continues like smart. It costs nothing if every send is used.

Modules: the :mod:`~zmqgrad.autograd.engine.coordinator` starts a pass and waits for its end; each worker is
a :mod:`~zmqgrad.autograd.engine.participant`, whose :mod:`~zmqgrad.autograd.engine.work_queue` holds what
arrives; a thread handles it step by step (:mod:`~zmqgrad.autograd.engine.step`); the
:mod:`~zmqgrad.autograd.engine.executor` runs the local graph.
"""
