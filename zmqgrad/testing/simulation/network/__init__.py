"""A network of simulated hosts and processes, and stand-ins for the modules by which programs reach it.

The stand-ins have what zmqgrad uses of ``socket``, ``select``, ``zmq`` and the descriptors of ``os``, and
behave as Linux and libzmq do; one suite of tests runs against them and against reality. Nothing here starts
a thread: a :class:`Scheduler` decides what happens when, so that a seed repeats it.
"""

from __future__ import annotations

from zmqgrad.testing.simulation.network.faults import Faults
from zmqgrad.testing.simulation.network.kernel import Process
from zmqgrad.testing.simulation.network.network import Network
from zmqgrad.testing.simulation.network.scheduler import Deadlock, ManualScheduler, Scheduler

__all__ = ["Deadlock", "Faults", "ManualScheduler", "Network", "Process", "Scheduler"]
