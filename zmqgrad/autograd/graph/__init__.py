"""The graph that one worker holds: what of it may run when, and how torch is brought to run just that.

The :mod:`~zmqgrad.autograd.graph.plan` and its :mod:`~zmqgrad.autograd.graph.border` are pure. The others
know torch's engine: what it does around a :mod:`~zmqgrad.autograd.graph.single` node, its
:mod:`~zmqgrad.autograd.graph.hooks`, and how gradients come to :mod:`~zmqgrad.autograd.graph.leaves`. What
puts them together is :mod:`zmqgrad.autograd.passes.engine`.
"""
