"""The command line: ``zmqgrad run`` and others. Arguments in, text and exit codes out.

Imports nothing that imports torch, so that a command answers at once and a launcher stays small. Start
reading at :mod:`zmqgrad.cli.run`; what is decided, and when, is in :mod:`zmqgrad.cli.supervision`.
"""
