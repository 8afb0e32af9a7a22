"""The wire format: messages to bytes and back. No state, clock or sockets.

Start with :mod:`~zmqgrad.wire.messages` (all messages on one page), then :mod:`~zmqgrad.wire.codec` (first
frames). Only :mod:`~zmqgrad.wire.tensors` imports torch, and this package does not import it, so that a store
server runs without torch.
"""
