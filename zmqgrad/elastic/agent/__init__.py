"""The agent: the process of a node that starts the workers there, watches them, and restarts or ends them.

Two pure modules decide: :mod:`~zmqgrad.elastic.agent.lifecycle` about the rounds of a job, and
:mod:`~zmqgrad.elastic.agent.supervision` about the workers of one round.
:mod:`~zmqgrad.elastic.agent.agent` and :mod:`~zmqgrad.elastic.agent.group` carry out their decisions, in one
thread that never waits for another node: :mod:`~zmqgrad.elastic.agent.rendezvoused` does that. A single node
needs no store, so its workers start fast.
"""
