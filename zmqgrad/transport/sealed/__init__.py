"""Large messages between hosts, sealed with AES-256-GCM, over a connection of their own.

CURVE's cipher reaches about 0.3 GB/s a core, AES-GCM several GB/s. So a worker with a secret sends messages
with large frames over a *channel*: a second DEALER, without CURVE, to a second ROUTER of the peer. Each
message becomes a sealed record (:mod:`~zmqgrad.transport.sealed.records`). The channel's key, the port of
that ROUTER and the acknowledgements travel over the CURVE connection. As every session, a channel
resends what was not acknowledged when its connection breaks, and delivers each record once and in order
(:mod:`~zmqgrad.transport.session`). docs/security.md states what that protects.

    sender                                          receiver
      | BULK_OPEN(channel, key)          over CURVE    |
      |----------------------------------------------->|  binds its ROUTER, once
      | BULK_READY(channel, port, token) over CURVE    |
      |<-----------------------------------------------|
      | sealed records                    over plain   |
      |===============================================>|  thread <name>-bulk opens them
      | BULK_ACK(channel, sequence)      over CURVE    |
      |<-----------------------------------------------|

Small messages share neither the connection nor the reading thread with large ones, so they do not wait for
them. Until a channel is ready, everything goes through CURVE.
"""
