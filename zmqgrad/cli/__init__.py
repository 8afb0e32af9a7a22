"""What is typed at a prompt: ``zmqgrad run``. Arguments in, text and exit codes out.

Imports nothing that imports torch, so that a command answers at once and a launcher stays small. Start
reading at :mod:`zmqgrad.cli.run`; what is decided, and when, is in :mod:`zmqgrad.cli.supervision`.
"""
