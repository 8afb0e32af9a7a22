"""Memory of devices (GPUs) between the workers of one host and user: what never has to come to main memory.

:mod:`~zmqgrad.transport.devices.exchange` is what a mailbox sees of it. As with the arena, a worker lends
blocks of segments (:mod:`~zmqgrad.transport.devices.segment`), here of memory on a device, and keeps what
peers have lent (:mod:`~zmqgrad.transport.devices.borrowings`). What is done on devices is done by others
(:mod:`~zmqgrad.transport.devices.port`): here is who owns what, and until when.

Note [Two copies]: a tensor is copied into a block by its sender, on the sender's current stream, and out of
it by its reader, on the reader's. One copy would do if the tensor's own memory were shared; but then

- a sender that changes its tensor after the call would change what the reader sees, at any moment,
- a reader would keep memory of the sender's in use for as long as it likes, and a dead one for ever,
- each call would wrap the storage of the tensor once more (``_share_cuda_`` counts readers so), with an event
  of which CUDA has few, and open and close a mapping in the reader, which takes longer than the copy.

A copy on a device runs at the speed of its memory, tens of times that of the way through main memory. So the
reader gets what the tensor was when the call was made, in the order of the sender's streams; what it gets is
its own; and a block is free again when the copy is done, however long the tensor lives.

Guarantees: a block is not written again before its reader has copied it, dropped it unread, or ended, and
before what was queued to write it has been written; whatever cannot be done so goes through main memory, and
a counter says why.
"""
