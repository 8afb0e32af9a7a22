"""Reinforcement learning with one agent and several observers.

    python examples/reinforcement_learning.py
    python examples/reinforcement_learning.py --backend torch    # the same over torch's own RPC

Each observer has an environment, a pole on a cart. The agent has the policy: a network that decides from the
state of an environment whether to push to the left or to the right. In every iteration the agent starts an
episode on each observer. The observers call the agent back in each step to ask for an action, and return the
rewards. When all episodes have ended, the agent improves the policy (REINFORCE: actions that were followed by
more reward than others become more likely). ``batch_reinforcement_learning.py`` shows how to evaluate the
policy for all observers at once.
"""

from __future__ import annotations

import argparse
import os
from itertools import chain

import torch
import torch.multiprocessing as mp
from cartpole import CartPole
from torch import Tensor, nn

parser = argparse.ArgumentParser(description="Reinforcement learning with one agent and several observers.")
parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose RPC to use")
parser.add_argument("--workers", type=int, default=3, help="one agent and the observers (default: 3)")
parser.add_argument("--iterations", type=int, default=12, help="updates of the policy (default: 12)")
OPTIONS = parser.parse_args()
if OPTIONS.workers < 2:
    parser.error("--workers must be at least 2")

if OPTIONS.backend == "torch":
    from torch.distributed import rpc
else:
    from zmqgrad import rpc

EPISODES = 4  # of each observer in an iteration
LONGEST_EPISODE = 100
DISCOUNT = 0.98


class Observer:
    """An environment, on the worker where this object lives.

    Args:
        number: of the observer, from 0.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.environment = CartPole(seed=number)

    def run_episode(self, agent: rpc.RRef) -> list[float]:
        """Play until the pole falls. The agent chooses each action. Returns the rewards."""
        state, is_over, rewards = self.environment.reset(), False, []
        while not is_over and len(rewards) < LONGEST_EPISODE:
            action = agent.rpc_sync().select_action(self.number, state)
            state, reward, is_over = self.environment.step(action)
            rewards.append(reward)
        return rewards


class Agent:
    """The policy, and what it decided in the current iteration.

    Args:
        observers: names of the workers.
    """

    def __init__(self, observers: list[str]) -> None:
        self.observers = [rpc.remote(name, Observer, args=(number,)) for number, name in enumerate(observers)]
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.03)
        # For each observer; its steps in order.
        self.generators = [torch.Generator().manual_seed(number) for number in range(len(observers))]
        self.states: list[list[Tensor]] = [[] for _ in observers]
        self.actions: list[list[int]] = [[] for _ in observers]

    @torch.no_grad()
    def select_action(self, observer: int, state: Tensor) -> int:
        """Draw an action, with the probabilities that the policy gives. The observers call this."""
        probabilities = self.policy(state).softmax(dim=0)
        action = int(torch.multinomial(probabilities, 1, generator=self.generators[observer]))
        self.states[observer].append(state)
        self.actions[observer].append(action)
        return action

    def run_episodes(self) -> list[list[float]]:
        """Run one episode on each observer, all at the same time. Returns the rewards of each."""
        agent = rpc.RRef(self)
        return torch.futures.wait_all(
            [observer.rpc_async().run_episode(agent) for observer in self.observers]
        )

    def run_iteration(self) -> float:
        """Run some episodes and improve the policy. Returns the mean of their total rewards."""
        returns: list[list[float]] = [[] for _ in self.observers]
        total = 0.0
        for _ in range(EPISODES):
            for observer, rewards in enumerate(self.run_episodes()):
                returns[observer] += discounted_returns(rewards)
                total += sum(rewards)
        self.improve(torch.tensor(list(chain.from_iterable(returns))))
        return total / (EPISODES * len(self.observers))

    def improve(self, returns: Tensor) -> None:
        """Make actions with high returns more likely, and forget them.

        Args:
            returns: of all steps, the first observer's first.
        """
        states = torch.stack(list(chain.from_iterable(self.states)))
        actions = torch.tensor(list(chain.from_iterable(self.actions)))
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        log_probabilities = self.policy(states).log_softmax(dim=1)[torch.arange(len(actions)), actions]
        loss = -(log_probabilities * advantages).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for observer in range(len(self.observers)):
            self.states[observer].clear()
            self.actions[observer].clear()


def discounted_returns(rewards: list[float]) -> list[float]:
    """Return the discounted sum of the rewards from each step to the end of the episode."""
    returns, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + DISCOUNT * following
        returns.append(following)
    return returns[::-1]


def run_agent(observers: list[str]) -> None:
    """Train the policy, and print how long the pole stays upright."""
    agent = Agent(observers)
    for iteration in range(1, OPTIONS.iterations + 1):
        reward = agent.run_iteration()
        print(f"iteration {iteration:3}: mean reward of an episode {reward:5.1f}", flush=True)


def run_worker(rank: int, world_size: int) -> None:
    """Take part as the agent or as an observer, until the training is done."""
    torch.set_num_threads(1)  # the workers share the cores of one machine
    rpc.init_rpc("agent" if rank == 0 else f"observer{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        run_agent(observers=[f"observer{observer}" for observer in range(1, world_size)])
    rpc.shutdown()  # waits for the others; an observer serves calls until then


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(OPTIONS.workers,), nprocs=OPTIONS.workers)
