"""Device maps: from each device of this worker to the device of another worker where its tensors arrive.

The tensors of a call follow the caller's map for its callee. The reply follows the inverse of the same map,
so a tensor returns to the device that it was sent from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zmqgrad.errors import ArgumentTypeError, ConfigurationError
from zmqgrad.wire.tensors.devices import Route

if TYPE_CHECKING:
    from zmqgrad.rpc.membership.worker_info import WorkerRecord

DeviceMap = dict[torch.device, torch.device]
Names = dict[str, str]
"""A device map as it is published: names of devices."""


_ONE_TO_ONE = "`set_device_map` only supports 1-to-1 mapping"


def to_device(device: Any) -> torch.device:
    """Convert ``device`` (a number, a name or a ``torch.device``).

    Raises:
        ConfigurationError: if it is neither a CUDA device with an index nor the CPU.
    """
    try:
        meant = torch.device("cuda", device) if type(device) is int else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as e:
        raise ConfigurationError(f"device_maps or devices: {device!r} is no device: {e}") from e
    if meant.type == "cpu":
        return torch.device("cpu")
    if meant.type != "cuda" or meant.index is None or meant.index < 0:
        raise ConfigurationError(f"a device is cpu, or cuda with its number (cuda:0), not {device!r}")
    return meant


def to_device_map(device_map: Mapping[Any, Any], before: Mapping[Any, Any] | None = None) -> DeviceMap:
    """Validate ``device_map`` and merge it into ``before``.

    Raises:
        ConfigurationError: if a key or value is not a device, or if the map is not one-to-one.
    """
    full: DeviceMap = {}
    for part in (before or {}, device_map):
        if not isinstance(part, Mapping):
            raise ConfigurationError(f"a device map is a dict from device to device, not {part!r}")
        for source, target in part.items():
            here, there = to_device(source), to_device(target)
            other = full.setdefault(here, there)
            if other != there:
                raise ConfigurationError(f"{_ONE_TO_ONE}, trying to map {here} to {there} and {other}")
    for target in full.values():
        sources = [str(k) for k, v in full.items() if v == target]
        if len(sources) > 1:
            raise ConfigurationError(f"{_ONE_TO_ONE}, trying to map {' and '.join(sources)} to {target}")
    return full


def to_devices(devices: Sequence[Any]) -> list[torch.device]:
    """Convert ``devices`` to a list of CUDA devices.

    Raises:
        ConfigurationError: if one of them is not a CUDA device, or is a duplicate.
    """
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise ArgumentTypeError(f"devices must be a list of CUDA devices, not {devices!r}")
    meant = [to_device(device) for device in devices]
    for device in meant:
        if device.type != "cuda":
            raise ConfigurationError(
                f"`set_devices` expect a list of CUDA devices, but got device type {device.type}."
            )
    if len(set(meant)) != len(meant):
        raise ConfigurationError(f"duplicate devices: {[str(d) for d in meant]}")
    return meant


def check_present(devices: Iterable[torch.device], count: int, where: str, what: str) -> None:
    """Check that the CUDA devices among ``devices`` exist ``where`` there are ``count``.

    Raises:
        ConfigurationError: naming the first that does not exist.
    """
    for device in devices:
        if device.type == "cuda" and device.index >= count:
            raise ConfigurationError(f"{what} names {device}, but {where} has {count} CUDA devices")


def check_group(records: Iterable[WorkerRecord]) -> None:
    """Check that the device maps of all workers lead to known workers and existing devices.

    Raises:
        ConfigurationError: the same on all workers.
    """
    by_name = {record.name: record for record in records}
    for record in by_name.values():
        for to, names in record.device_maps.items():
            target = by_name.get(to)
            if target is None:
                raise ConfigurationError(
                    f"Node {record.name} has invalid target node names in its device maps: "
                    f"there is no such worker as {to}; there are {', '.join(by_name)}"
                )
            if target.device_count >= 0:
                wrong = "target devices with invalid indices in its device map"
                devices = map(torch.device, names.values())
                check_present(
                    devices, target.device_count, to, f"Node {record.name} has {wrong} for {to}: it"
                )


def published(maps: Mapping[str, DeviceMap]) -> dict[str, Names]:
    """``maps`` by names of devices, as published in the record of a worker."""
    return {to: {str(k): str(v) for k, v in each.items()} for to, each in maps.items()}


def for_calls(own: WorkerRecord, peer: WorkerRecord) -> Route:
    """The device route of tensors in calls of ``own`` to ``peer``."""
    names = own.device_maps.get(peer.name, {})
    route = Route({torch.device(k): torch.device(v) for k, v in names.items()})
    route.missing = f"Request device mapping is not available for destination {peer.name}"
    return route


def for_replies(own: WorkerRecord, peer: WorkerRecord) -> Route:
    """The device route of tensors in replies of ``own`` to ``peer``."""
    route = Route({v: k for k, v in for_calls(peer, own).items()})
    route.missing = f"Response device mapping is not available for destination {peer.name}"
    return route


def for_gradients(own: WorkerRecord, peer: WorkerRecord, in_reply: bool) -> Route:
    """The device route of gradients for ``peer``, of tensors in its calls or (``in_reply``) replies.

    It is the inverse of the route of the tensors: each gradient arrives on the device of its tensor.
    """
    return for_calls(own, peer) if in_reply else for_replies(own, peer)
