"""Reinforcement learning with one learner and several actors, which read its newest weights.

    python examples/published_weights.py
    python examples/published_weights.py --workers 3 --updates 30

Worker 0 is the learner. Each of the other workers is an actor: it plays episodes (a pole on a cart) with the
newest policy that the learner has published, and adds them to a replay buffer, which it finds by its name.
The learner takes the newest episodes, improves the policy (REINFORCE), and publishes it. An actor plays on
while the learner computes, and never sees half of an update.
``published_weights_ray.py`` is the same over Ray.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections import deque
from typing import NamedTuple

import torch
import torch.multiprocessing as mp
from cartpole import CartPole
from torch import Tensor, nn

from zmqgrad import rpc

parser = argparse.ArgumentParser(description="Reinforcement learning with published weights.")
parser.add_argument("--workers", type=int, default=5, help="one learner and the actors (default: 5)")
parser.add_argument("--updates", type=int, default=15, help="of the policy (default: 15)")
OPTIONS = parser.parse_args()
if OPTIONS.workers < 2:
    parser.error("--workers must be at least 2")

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


class Replay:
    """The newest episodes. Its methods run in several threads."""

    def __init__(self) -> None:
        self.episodes: deque[Episode] = deque(maxlen=EPISODES)
        self.added = threading.Condition()

    def add(self, episode: Episode) -> None:
        """Add an episode; drop the oldest if there are too many."""
        with self.added:
            self.episodes.append(episode)
            self.added.notify()

    def take(self) -> list[Episode]:
        """Wait for the episodes of an update, and return them."""
        with self.added:
            if not self.added.wait_for(lambda: len(self.episodes) == EPISODES, PATIENCE):
                raise TimeoutError(f"the actors have played {len(self.episodes)} episodes in {PATIENCE} s")
            episodes = list(self.episodes)
            self.episodes.clear()
            return episodes


def act(last_version: int) -> list[int]:
    """Play on this actor until the learner has published its last version. Returns the versions used."""
    seed = rpc.get_worker_info().id
    environment, generator = CartPole(seed), torch.Generator().manual_seed(seed)
    replay = rpc.get_ref("replay")
    policy, versions = make_policy(), []
    with rpc.subscribe("policy") as weights:
        while (tensors := weights.tensors).version < last_version:
            policy.load_state_dict(tensors, assign=True)  # in memory of the learner, without a copy
            replay.rpc_sync().add(play(environment, policy, generator, tensors.version))
            versions.append(tensors.version)
    return versions


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


def learn(actors: rpc.WorkerGroup) -> None:
    """Run the learner, and print what it and the actors did."""
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
    replay = rpc.remote("learner", Replay, name="replay").local_value()
    version = rpc.publish("policy", policy)
    acting = actors.call_async(act, (version + OPTIONS.updates,), timeout=0)
    for update in range(1, OPTIONS.updates + 1):
        episodes = replay.take()
        reward = sum(len(episode.actions) for episode in episodes) / EPISODES
        staleness = [version - episode.version for episode in episodes]
        improve(policy, optimizer, episodes)
        version = rpc.publish("policy", policy)
        print(
            f"update {update:3}: mean reward of an episode {reward:5.1f}, "
            f"staleness {sum(staleness) / EPISODES:.1f}, at most {max(staleness)}",
            flush=True,
        )
    for actor, versions in zip(actors, acting.wait(), strict=True):
        print(f"{actor.name}: {len(versions)} episodes with {len(set(versions))} of {version} versions")


def run_worker(rank: int, world_size: int) -> None:
    """Take part as the learner or as an actor, until the training is done."""
    torch.set_num_threads(1)  # the workers share the cores of one machine
    rpc.init_rpc("learner" if rank == 0 else f"actor{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        learn(rpc.group("actor*"))
    rpc.shutdown()  # waits for the others; an actor serves calls until then


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(OPTIONS.workers,), nprocs=OPTIONS.workers)
