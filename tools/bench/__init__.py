"""Benchmarks: the same work through zmqgrad and through torch, and what the machine itself can do.

``python -m tools.bench`` (or ``make bench``) runs them; docs/benchmarks.md says how to read what it prints.
"""
