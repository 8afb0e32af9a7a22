"""Python values to payloads and back.

The way out is :mod:`~zmqgrad.rpc.packing.packing`, the way in :mod:`~zmqgrad.rpc.packing.unpacking`. A value
goes in the simplest form that it fits: a function by its :mod:`~zmqgrad.rpc.packing.naming`, a
:mod:`~zmqgrad.rpc.packing.plain` value as it is, all else by :mod:`~zmqgrad.rpc.packing.pickling`, where
functions that cannot be named go by value and those of TorchScript by
:mod:`~zmqgrad.rpc.packing.scripts`.
"""
