"""Runs the tests that torch ships for its RPC against this library.

    python -m tools.conformance              # all of them
    python -m tools.conformance -k rref      # those whose names contain "rref"

The tests are those of ``torch.testing._internal.distributed``, unchanged, after ``zmqgrad.install()``. Each
runs in processes of its own with a time limit. :mod:`tools.conformance.exceptions` names the tests that do
not pass, each with its reason; the exit code is 0 if no other test fails.

Suites that need a GPU or torch's fault-injecting agent are left out.
"""
