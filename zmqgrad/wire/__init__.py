"""The language: values to bytes and back. No state, no clock, no sockets.

Start with :mod:`~zmqgrad.wire.messages` (everything that can be said, on one page), then
:mod:`~zmqgrad.wire.codec` (how it becomes frames). Only :mod:`~zmqgrad.wire.tensors` knows torch, and
this package does not import it, so that a store server can speak without loading torch.
"""
