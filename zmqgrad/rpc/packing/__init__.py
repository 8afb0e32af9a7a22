"""What becomes of functions and values before they travel: by name, by hash, or plain, without a pickle.

Functions go by :mod:`~zmqgrad.rpc.packing.naming`, or as :mod:`~zmqgrad.rpc.packing.code`;
:mod:`~zmqgrad.rpc.packing.plain` values go as they are; for what cannot be sent the
:mod:`~zmqgrad.rpc.packing.culprit` is named. :mod:`zmqgrad.rpc.payload` decides which of it, and is the only
pickle.
"""
