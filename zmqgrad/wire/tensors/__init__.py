"""Tensors beside a message: to descriptors and blobs, and back. The only part of the wire that knows torch.

What survives: any dtype, any shape (0-dim and empty included), strides of dense tensors, storages that
several tensors of one message share, sparse COO; the rest (quantized, CSR, ...) as ``torch.save`` writes it.
A view of a large storage sends only what it shows. Each blob is bounded by the frame that it came in,
and each tensor is checked against its blob before a byte is read (P5).
"""

from __future__ import annotations

from zmqgrad.wire.tensors.decoding import blob_bytes, decode_tensors
from zmqgrad.wire.tensors.devices import Devices
from zmqgrad.wire.tensors.encoding import encode_tensors

__all__ = ["Devices", "blob_bytes", "decode_tensors", "encode_tensors"]
