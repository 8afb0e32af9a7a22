"""The ``zmqgrad`` command: arguments in, text and exit codes out.

``run`` starts the workers of one host; ``store`` serves a store or accesses one; ``doctor`` checks this host;
``secret`` makes a secret for a job; ``examples`` copies the example programs; ``trace`` shows what a job
recorded; ``completion`` completes words in a shell. Nothing here imports torch, so commands start fast and
the launcher stays small. Start with :mod:`zmqgrad.cli.run`; :mod:`zmqgrad.elastic.agent` runs the workers.
"""
