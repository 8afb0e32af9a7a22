"""The local graph of one worker.

:mod:`~zmqgrad.autograd.graph.plan` decides which nodes may run when, and is pure. The other modules deal with
torch's engine: the :mod:`~zmqgrad.autograd.graph.walk` over the graph, single nodes
(:mod:`~zmqgrad.autograd.graph.node`), :mod:`~zmqgrad.autograd.graph.hooks`, undefined gradients
(:mod:`~zmqgrad.autograd.graph.undefined`), and how leaves :mod:`~zmqgrad.autograd.graph.accumulate`.
:mod:`zmqgrad.autograd.engine.executor` uses them all.
"""
