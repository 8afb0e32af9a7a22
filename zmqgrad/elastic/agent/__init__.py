"""The agent: the process of a host that starts the workers there, watches them, and ends them together.

Nothing here needs a store or a socket at import, so that workers of one host start fast.
:mod:`~zmqgrad.elastic.agent.supervision` holds the decisions about one group of workers and is pure;
:mod:`~zmqgrad.elastic.agent.group` carries them out.
"""
