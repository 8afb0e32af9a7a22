"""Reinforcement learning in which the policy decides for all observers at once.

    python examples/batch_reinforcement_learning.py
    python examples/batch_reinforcement_learning.py --backend torch    # the same over torch's own RPC

As in ``reinforcement_learning.py``, each observer has a pole on a cart and asks the agent for an action in
each step. Here the agent collects the states of all observers, evaluates its policy for them in one batch,
and then replies to all. So ``select_action`` returns a future: with ``@rpc.functions.async_execution`` the
reply is sent when the future is done, and no thread waits for it.
"""

from __future__ import annotations

import argparse
import os
import threading

import torch
import torch.multiprocessing as mp
from cartpole import CartPole
from torch import Tensor, nn

parser = argparse.ArgumentParser(description="Reinforcement learning with batched decisions.")
parser.add_argument("--backend", choices=("zmqgrad", "torch"), default="zmqgrad", help="whose RPC to use")
parser.add_argument("--workers", type=int, default=3, help="one agent and the observers (default: 3)")
parser.add_argument("--iterations", type=int, default=15, help="updates of the policy (default: 15)")
OPTIONS = parser.parse_args()
if OPTIONS.workers < 2:
    parser.error("--workers must be at least 2")

if OPTIONS.backend == "torch":
    from torch.distributed import rpc
else:
    from zmqgrad import rpc

STEPS = 200  # of each observer in an iteration
DISCOUNT = 0.98


class Observer:
    """An environment, on the worker where this object lives.

    Args:
        number: of the observer, from 0.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.environment = CartPole(seed=number)
        self.state = self.environment.reset()

    def run(self, agent: rpc.RRef) -> tuple[list[float], list[bool]]:
        """Take all steps of an iteration; when the pole falls, a new episode begins.

        Returns:
            For each step its reward, and whether it was the last one of an episode.
        """
        rewards, ends = [], []
        for _ in range(STEPS):
            action = rpc.rpc_sync(agent.owner(), Agent.select_action, args=(agent, self.number, self.state))
            self.state, reward, is_over = self.environment.step(action)
            if is_over:
                self.state = self.environment.reset()
            rewards.append(reward)
            ends.append(is_over)
        return rewards, ends


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
        self.states: list[Tensor] = []  # one for each step, shape (observers, 4)
        self.actions: list[Tensor] = []  # one for each step, shape (observers,)
        self.lock = threading.Lock()  # guards the batch that is being collected
        self.batch = torch.zeros(len(observers), 4)
        self.waiting = 0
        self.decision: torch.futures.Future[Tensor] = torch.futures.Future()

    @staticmethod
    @rpc.functions.async_execution
    def select_action(agent: rpc.RRef, observer: int, state: Tensor) -> torch.futures.Future[int]:
        """Return a future of an observer's action. It is done when all observers have asked.

        Args:
            agent: reference to the agent, on the agent itself.
            observer: number of the observer that asks.
            state: of its environment, shape (4,).
        """
        self = agent.local_value()
        with self.lock:
            decision = self.decision
            action = decision.then(lambda future: int(future.value()[observer]))
            self.batch[observer] = state
            self.waiting += 1
            if self.waiting < len(self.observers):
                return action
            actions = self.decide(self.batch)
            self.batch = torch.zeros_like(self.batch)
            self.waiting = 0
            self.decision = torch.futures.Future()
        decision.set_result(actions)  # replies to all observers
        return action

    @torch.no_grad()
    def decide(self, states: Tensor) -> Tensor:
        """Draw an action for each state, shape (observers,)."""
        actions = torch.multinomial(self.policy(states).softmax(dim=1), 1).squeeze(1)
        self.states.append(states)
        self.actions.append(actions)
        return actions

    def run_iteration(self) -> float:
        """Let all observers take their steps, and improve the policy.

        Returns:
            The mean length of an episode.
        """
        agent = rpc.RRef(self)
        results = torch.futures.wait_all([observer.rpc_async().run(agent) for observer in self.observers])
        self.improve(torch.tensor([discounted_returns(rewards, ends) for rewards, ends in results]))
        episodes = sum(1 + sum(ends[:-1]) for _, ends in results)
        return STEPS * len(self.observers) / episodes

    def improve(self, returns: Tensor) -> None:
        """Make actions with high returns more likely, and forget them.

        Args:
            returns: shape (observers, steps).
        """
        states, actions = torch.stack(self.states, dim=1), torch.stack(self.actions, dim=1)
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        log_probabilities = self.policy(states).log_softmax(dim=2).gather(2, actions.unsqueeze(2)).squeeze(2)
        loss = -(log_probabilities * advantages).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.states.clear()
        self.actions.clear()


def discounted_returns(rewards: list[float], ends: list[bool]) -> list[float]:
    """Return the discounted sum of the rewards from each step to the end of its episode."""
    returns, following = [], 0.0
    for reward, is_end in zip(reversed(rewards), reversed(ends), strict=True):
        following = reward + (0.0 if is_end else DISCOUNT * following)
        returns.append(following)
    return returns[::-1]


def run_agent(observers: list[str]) -> None:
    """Train the policy, and print how long the pole stays upright."""
    agent = Agent(observers)
    for iteration in range(1, OPTIONS.iterations + 1):
        length = agent.run_iteration()
        print(f"iteration {iteration:3}: mean length of an episode {length:5.1f}", flush=True)


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
