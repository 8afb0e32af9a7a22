"""The entry points ``zmqgrad`` and ``zmqgrad-etcd`` of ``torchrun.handlers``.

torchelastic loads them while it is imported itself. So this module must not import it: whoever imported
:mod:`zmqgrad.interop.torchrun` first would have it load a module that is only half there.
"""

from __future__ import annotations

from typing import Any


def rendezvous_backend() -> Any:
    """The function that creates handlers, from torchelastic's ``RendezvousParameters``."""
    return _zmqgrad


def etcd_backend() -> Any:
    """The same with the state of the rendezvous in etcd."""
    return _etcd


def _zmqgrad(parameters: Any) -> Any:
    from zmqgrad.interop import torchrun

    return torchrun.create("zmqgrad", parameters)


def _etcd(parameters: Any) -> Any:
    from zmqgrad.interop import torchrun

    return torchrun.create("etcd", parameters)
