"""Large messages between hosts, over a connection of their own; with a secret sealed with AES-256-GCM.

Messages with large frames use a *channel*: a second DEALER to a second ROUTER of the peer, both in an I/O
thread of their own. Each message becomes a record (:mod:`~zmqgrad.transport.sealed.records`). With a secret
records are sealed, and the channel has no CURVE, whose cipher reaches about 0.3 GB/s a core, AES-GCM several
GB/s. The channel's key, the port of that ROUTER and the acknowledgements travel over the main connection,
which has CURVE then. As every session, a channel resends what was not acknowledged when its connection
breaks, and delivers each record once and in order (:mod:`~zmqgrad.transport.session`). docs/security.md
states what that protects.

    sender                                          receiver
      | BULK_OPEN(channel, key)          over main     |
      |----------------------------------------------->|  binds its ROUTER, once
      | BULK_READY(channel, port, token) over main     |
      |<-----------------------------------------------|
      | records                     over the channel   |
      |===============================================>|  thread <name>-bulk opens them
      | BULK_ACK(channel, sequence)      over main     |
      |<-----------------------------------------------|

Small messages share neither the connection nor the reading thread with large ones, so they do not wait for
them. Until a channel is ready, everything uses the main connection.
"""
