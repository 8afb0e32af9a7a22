"""On which terms values travel to each peer: by which names, with or without history, to which devices."""

from __future__ import annotations

from zmqgrad.rpc.devices import for_answers, for_calls, for_gradients
from zmqgrad.rpc.dispatch import Doors
from zmqgrad.rpc.groups.membership import Membership, WorkerRecord
from zmqgrad.rpc.references.table import ReferenceTable
from zmqgrad.rpc.serialization.context import SerializationContext
from zmqgrad.wire.tensors import Devices


class PeerTerms:
    """What has been found out for each peer, and is asked for at every message."""

    def __init__(self, membership: Membership, references: ReferenceTable, doors: Doors) -> None:
        self._membership = membership
        self._references = references
        self._doors = doors
        # By peer, and whether with history.
        self._calls: dict[tuple[int, bool], SerializationContext] = {}
        self._answers: dict[tuple[int, bool], SerializationContext] = {}
        self._gradients: dict[tuple[int, bool], Devices] = {}  # by peer, and whether for tensors of a reply
        self._maps_devices: dict[int, bool] = {}

    def for_calls(self, peer: WorkerRecord) -> SerializationContext:
        """On which terms values travel to ``peer``."""
        key = peer.id, self._doors.with_history()
        terms = self._calls.get(key)
        if terms is None:
            same = peer.program == self._membership.own.program
            devices = for_calls(self._membership.own, peer)
            references = self._references.of(peer.id)
            terms = self._calls[key] = SerializationContext(references, same, key[1], devices)
        return terms

    def for_answers(self, peer: WorkerRecord) -> SerializationContext:
        """The same for answers: tensors go back to the devices that they came from."""
        key = peer.id, self._doors.with_history()
        terms = self._answers.get(key)
        if terms is None:
            devices = for_answers(self._membership.own, peer)
            terms = self._answers[key] = self.for_calls(peer)._replace(devices=devices)
        return terms

    def for_gradients(self, peer: int, in_reply: bool) -> Devices:
        """Where gradients for ``peer`` arrive; ``in_reply``: of tensors of its replies, not its calls."""
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
        """``peer`` is gone."""
        for known in (self._calls, self._answers, self._gradients):
            known.pop((peer, False), None)
            known.pop((peer, True), None)
        self._maps_devices.pop(peer, None)
