"""Backward passes over workers: the root that starts one and waits, and the workers that carry it on.

A pass is a set of requests, each handled once: gradients for a send, or word that none will come. Those that
are there together travel, run and are told of together. Whoever handles some tells the root what that set
off, and the root's tally knows when nothing is under way. If groups wait somewhere at that point, they wait
for ever, unless the pass goes on as ``mode`` says:

- *fast*: it does not; the error names what was sent and never used;
- *smart*: the root has found out before the start (:mod:`~zmqgrad.autograd.passes.discovery`) what will never
  arrive, and told the workers to go on without it;
- *auto*: it begins as fast, and if groups wait at the end, it goes on as smart. Where everything is used
  this costs nothing.

:mod:`~zmqgrad.autograd.passes.root` starts and waits; :mod:`~zmqgrad.autograd.passes.part` is every worker's
part in it: what comes waits at a :mod:`~zmqgrad.autograd.passes.desk`, from which threads take and handle it
(:mod:`~zmqgrad.autograd.passes.request`), as steps of its :mod:`~zmqgrad.autograd.passes.local_pass`.
"""

from zmqgrad.autograd.passes.part import MODES, Passes

__all__ = ["MODES", "Passes"]
