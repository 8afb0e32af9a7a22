"""How values are serialized for each peer: RRefs and code by reference, autograd history, device maps."""

from __future__ import annotations

from zmqgrad.rpc.devices import for_calls, for_gradients, for_replies
from zmqgrad.rpc.hooks import Hooks
from zmqgrad.rpc.membership.membership import Membership, WorkerRecord
from zmqgrad.rpc.rref.table import ReferenceTable
from zmqgrad.rpc.serialization.context import SerializationContext
from zmqgrad.wire.tensors import Devices


class PeerContexts:
    """Caches the serialization context of each peer; every message needs it."""

    def __init__(self, membership: Membership, references: ReferenceTable, hooks: Hooks) -> None:
        self._membership = membership
        self._references = references
        self._hooks = hooks
        # By peer, and whether with autograd history.
        self._calls: dict[tuple[int, bool], SerializationContext] = {}
        self._replies: dict[tuple[int, bool], SerializationContext] = {}
        self._gradients: dict[tuple[int, bool], Devices] = {}  # by peer, and whether for tensors of a reply
        self._maps_devices: dict[int, bool] = {}

    def for_calls(self, peer: WorkerRecord) -> SerializationContext:
        """The context for calls to ``peer``."""
        key = peer.id, self._hooks.with_history()
        context = self._calls.get(key)
        if context is None:
            same_program = peer.program == self._membership.own.program
            devices = for_calls(self._membership.own, peer)
            context = self._calls[key] = SerializationContext(
                self._references.of(peer.id), same_program, key[1], devices
            )
        return context

    def for_replies(self, peer: WorkerRecord) -> SerializationContext:
        """The context for replies to ``peer``: tensors return to the devices that they were sent from."""
        key = peer.id, self._hooks.with_history()
        context = self._replies.get(key)
        if context is None:
            devices = for_replies(self._membership.own, peer)
            context = self._replies[key] = self.for_calls(peer)._replace(devices=devices)
        return context

    def for_gradients(self, peer: int, in_reply: bool) -> Devices:
        """The devices of gradients for ``peer``; ``in_reply``: of tensors of its replies, not its calls."""
        key = peer, in_reply
        devices = self._gradients.get(key)
        if devices is None:
            record = self._membership.record(peer)
            devices = self._gradients[key] = for_gradients(self._membership.own, record, in_reply)
        return devices

    def maps_devices(self, peer: int) -> bool:
        """Whether this worker or ``peer`` has a device map for the other."""
        maps = self._maps_devices.get(peer)
        if maps is None:
            own, record = self._membership.own, self._membership.record(peer)
            maps = record.name in own.device_maps or own.name in record.device_maps
            self._maps_devices[peer] = maps
        return maps

    def forget(self, peer: int) -> None:
        """Drop what is cached for a lost peer."""
        for cache in (self._calls, self._replies, self._gradients):
            cache.pop((peer, False), None)
            cache.pop((peer, True), None)
        self._maps_devices.pop(peer, None)
