"""Serialization of calls and values: Python objects to wire payloads and back.

Outgoing: :mod:`~zmqgrad.rpc.serialization.serializer`. Incoming:
:mod:`~zmqgrad.rpc.serialization.deserializer`. A payload has one of three formats: none, tensors only, or a
pickle beside which the tensors travel (:mod:`~zmqgrad.rpc.serialization.pickler`). Functions that can be
imported are sent by name (:mod:`~zmqgrad.rpc.serialization.naming`).
"""
