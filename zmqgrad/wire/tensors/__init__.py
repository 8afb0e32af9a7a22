"""Encodes tensors as descriptors and blobs, and decodes them. The only part of wire that imports torch.

Preserved are any dtype, any shape (0-dim and empty included), strides of dense tensors, storages shared by
several tensors of one message, and sparse COO; other layouts (quantized, CSR, ...) are written by
``torch.save``. Of a view of a large storage, only the visible part is sent. Each blob is bounded by its
frame, and each tensor is checked against its blob before a byte is read (docs/guarantees.md, P5).
"""

from __future__ import annotations

from zmqgrad.wire.tensors.decoding import blob_bytes, decode_tensors
from zmqgrad.wire.tensors.devices import Devices
from zmqgrad.wire.tensors.encoding import encode_tensors

__all__ = ["Devices", "blob_bytes", "decode_tensors", "encode_tensors"]
