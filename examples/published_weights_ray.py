"""``published_weights.py`` over Ray, for comparison: the same learner, actors and episodes.

    pip install ray torch
    python examples/published_weights_ray.py

Ray's objects are immutable, as published versions are. But nothing tells an actor that there is a newer one:
another actor (``Weights``) has a number and a reference, and is asked before each episode.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import deque
from typing import Any, NamedTuple

import ray
import torch
from cartpole import CartPole
from torch import Tensor, nn

EPISODES = 16  # of an update
LONGEST_EPISODE = 100
DISCOUNT = 0.98
PATIENCE = 60.0  # seconds


def make_policy() -> nn.Module:
    """Return a network that decides from the state whether to push to the left or to the right."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


class Episode(NamedTuple):
    """What an actor saw and did, step by step, and the version of the policy that decided."""

    states: Tensor
    actions: Tensor
    version: int


@ray.remote(num_cpus=0)
class Replay:
    """The newest episodes. A method that waits lets others run, as this is an asyncio actor."""

    def __init__(self) -> None:
        self.episodes: deque[Episode] = deque(maxlen=EPISODES)
        self.added = asyncio.Condition()

    async def add(self, episode: Episode) -> None:
        """Add an episode; drop the oldest if there are too many."""
        async with self.added:
            self.episodes.append(episode)
            self.added.notify()

    async def take(self) -> list[Episode]:
        """Wait for the episodes of an update, and return them."""
        async with self.added:
            await self.added.wait_for(lambda: len(self.episodes) == EPISODES)
            episodes = list(self.episodes)
            self.episodes.clear()
            return episodes


@ray.remote(num_cpus=0)
class Weights:
    """The number of the newest version, and a reference to it."""

    def __init__(self) -> None:
        self.version, self.refs = 0, []

    def publish(self, refs: list[ray.ObjectRef]) -> int:
        """Replace the version. The reference is in a list, as Ray would pass its value otherwise."""
        self.version, self.refs = self.version + 1, refs
        return self.version

    def newest(self) -> tuple[int, list[ray.ObjectRef]]:
        """Return the number of the newest version, and the reference."""
        return self.version, self.refs


@ray.remote
def act(seed: int, last_version: int) -> list[int]:
    """Play in a process of its own until the learner has published its last version."""
    torch.set_num_threads(1)
    environment, generator = CartPole(seed), torch.Generator().manual_seed(seed)
    replay, weights = ray.get_actor("replay"), ray.get_actor("weights")
    policy, versions = make_policy(), []
    while True:
        version, (ref,) = ray.get(weights.newest.remote())
        if version == last_version:
            return versions
        policy.load_state_dict(ray.get(ref))
        ray.get(replay.add.remote(play(environment, policy, generator, version)))
        versions.append(version)


@torch.no_grad()
def play(environment: CartPole, policy: nn.Module, generator: torch.Generator, version: int) -> Episode:
    """Play one episode: until the pole falls, or for long enough."""
    state, is_over = environment.reset(), False
    states: list[Tensor] = []
    actions: list[int] = []
    while not is_over and len(states) < LONGEST_EPISODE:
        states.append(state)
        actions.append(int(torch.multinomial(policy(state).softmax(dim=0), 1, generator=generator)))
        state, _, is_over = environment.step(actions[-1])
    return Episode(torch.stack(states), torch.tensor(actions), version)


def improve(policy: nn.Module, optimizer: torch.optim.Optimizer, episodes: list[Episode]) -> None:
    """Make actions that were followed by a long time upright more likely."""
    # Each step is rewarded with 1: the discounted sum of n rewards is (1 - DISCOUNT**n) / (1 - DISCOUNT).
    left = torch.cat([torch.arange(len(episode.actions), 0, -1) for episode in episodes])
    returns = (1 - DISCOUNT**left) / (1 - DISCOUNT)
    advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
    states, actions = (torch.cat(each) for each in list(zip(*episodes, strict=True))[:2])
    log_probabilities = policy(states).log_softmax(dim=1)[torch.arange(len(actions)), actions]
    optimizer.zero_grad()
    (-log_probabilities * advantages).mean().backward()
    optimizer.step()


def publish(weights: Any, policy: nn.Module) -> int:
    """Make the weights of ``policy`` the newest version, and return its number."""
    return ray.get(weights.publish.remote([ray.put(policy.state_dict())]))


def main() -> None:
    """Run the learner, and print what it and the actors did."""
    parser = argparse.ArgumentParser(description="Reinforcement learning with weights in Ray's object store.")
    parser.add_argument("--workers", type=int, default=5, help="one learner and the actors (default: 5)")
    parser.add_argument("--updates", type=int, default=15, help="of the policy (default: 15)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the workers share the cores of one machine
    ray.init(num_cpus=options.workers, include_dashboard=False)
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
    replay = Replay.options(name="replay").remote()
    weights = Weights.options(name="weights").remote()
    version = publish(weights, policy)
    acting = [act.remote(seed, version + options.updates) for seed in range(1, options.workers)]
    for update in range(1, options.updates + 1):
        episodes = ray.get(replay.take.remote(), timeout=PATIENCE)
        reward = sum(len(episode.actions) for episode in episodes) / EPISODES
        staleness = [version - episode.version for episode in episodes]
        improve(policy, optimizer, episodes)
        version = publish(weights, policy)
        print(
            f"update {update:3}: mean reward of an episode {reward:5.1f}, "
            f"staleness {sum(staleness) / EPISODES:.1f}, at most {max(staleness)}",
            flush=True,
        )
    for actor, versions in enumerate(ray.get(acting), start=1):
        print(f"actor{actor}: {len(versions)} episodes with {len(set(versions))} of {version} versions")
    ray.shutdown()


if __name__ == "__main__":
    main()
