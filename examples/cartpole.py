"""A pole balanced on a cart, for the reinforcement learning examples. It needs no other package.

The equations of motion are those of Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve
difficult learning control problems" (1983), without friction. ``gymnasium`` offers the same task as
CartPole-v1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GRAVITY = 9.8
CART_MASS, POLE_MASS, POLE_HALF_LENGTH = 1.0, 0.1, 0.5
FORCE = 10.0
STEP_SECONDS = 0.02
TRACK_LIMIT = 2.4
ANGLE_LIMIT = math.radians(12)


class CartPole:
    """The task: push the cart left or right so that the pole does not fall.

    A state is a tensor of position, velocity, angle and angular velocity, shape (4,). Each step is rewarded
    with 1.

    Args:
        seed: determines the initial states.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._state = (0.0, 0.0, 0.0, 0.0)

    def reset(self) -> Tensor:
        """Begin an episode: everything nearly at rest, the pole nearly upright. Returns the state."""
        state = torch.rand(4, generator=self._generator) * 0.1 - 0.05
        self._state = tuple(state.tolist())
        return state

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        """Push to the left (0) or to the right (1) for 20 ms.

        Returns: The new state, the reward, and whether the episode is over (the pole fell, the cart left the
        track).
        """
        position, velocity, angle, spin = self._state
        total_mass = CART_MASS + POLE_MASS
        push = (FORCE if action == 1 else -FORCE) + POLE_MASS * POLE_HALF_LENGTH * spin**2 * math.sin(angle)
        spin_change = (GRAVITY * math.sin(angle) - math.cos(angle) * push / total_mass) / (
            POLE_HALF_LENGTH * (4 / 3 - POLE_MASS * math.cos(angle) ** 2 / total_mass)
        )
        acceleration = (push - POLE_MASS * POLE_HALF_LENGTH * spin_change * math.cos(angle)) / total_mass
        self._state = (
            position + STEP_SECONDS * velocity,
            velocity + STEP_SECONDS * acceleration,
            angle + STEP_SECONDS * spin,
            spin + STEP_SECONDS * spin_change,
        )
        is_over = abs(self._state[0]) > TRACK_LIMIT or abs(self._state[2]) > ANGLE_LIMIT
        return torch.tensor(self._state), 1.0, is_over
