"""Whole jobs under a seeded scheduler, so that every race has a number.

    from zmqgrad.testing.simulation import simulate
    simulate(train, workers=4, seeds=200)

See docs/concepts/simulation.md.
"""

from __future__ import annotations

from zmqgrad.testing.simulation.campaign import Faults, Run, SimulationFailed, run_seed, simulate
from zmqgrad.testing.simulation.scheduler import Failure

__all__ = ["Failure", "Faults", "Run", "SimulationFailed", "run_seed", "simulate"]
