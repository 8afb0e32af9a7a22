"""Torch as the oracle: the same scenarios on torch's RPC and on this one, in real processes.

A family is a module of small functions (:func:`~tests.oracles.scenario.scenario`). For each implementation,
one group of workers runs all scenarios of a family, one after another; the test process compares the results.
``differences.py`` lists the scenarios whose result differs on purpose, with both results and the reason.
"""
