"""stable-baselines3: policies, whose own methods the algorithms call instead of forward."""

from __future__ import annotations

from typing import Any

import torch
from stable_baselines3 import DQN, PPO
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given

_STEPS = 24


def _ppo() -> Any:
    return PPO(
        "MlpPolicy",
        "Pendulum-v1",
        n_steps=8,
        batch_size=8,
        n_epochs=1,
        learning_rate=1e-3,
        policy_kwargs={"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}},
        seed=0,
        device="cpu",
    )


def _dqn() -> Any:
    return DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_starts=8,
        batch_size=8,
        learning_rate=1e-3,
        policy_kwargs={"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}},
        seed=0,
        device="cpu",
    )


def _train_ppo(policy: nn.Module, _: torch.dtype | None) -> None:
    algorithm = _ppo()
    algorithm.policy = policy
    algorithm.learn(_STEPS)


def _observations() -> Given:
    return (torch.randn(8, 3),), {}


def _loss(output: Any, _: Given) -> Tensor:
    actions, values, log_likelihood = output
    return actions.square().mean() + values.square().mean() - log_likelihood.mean()


def _q_net() -> nn.Module:
    return _dqn().policy.q_net.train()


def _states() -> Given:
    return (torch.randn(8, 4),), {}


CASES = (
    Case("PPO", lambda: _ppo().policy.train(), _observations, _loss, train=_train_ppo),
    Case("DQN's network", _q_net, _states),
)
