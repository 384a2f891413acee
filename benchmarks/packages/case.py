"""A model of a package: its maker, its inputs, its loss, and how the package itself trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Given = tuple[tuple[Any, ...], dict[str, Any]]
Train = Callable[[nn.Module, torch.dtype | None], None]


def sum_of_squares(output: Any, *_: Any) -> Tensor:
    """The mean square of each floating output, summed: a loss for what is no loss yet."""
    leaves = pytree.tree_leaves(output)
    return torch.stack([leaf.float().square().mean() for leaf in leaves if is_floating(leaf)]).sum()


def is_floating(leaf: Any) -> bool:
    """Whether a leaf of an output is a floating tensor."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


@dataclass(frozen=True)
class Case:
    """A model as a package makes it.

    Attributes:
        name: unique in its package.
        build: makes the model in training mode; it is called after a seed.
        inputs: positional and keyword arguments of a call, after a seed; None where only the package trains the model.
        loss: of the output and the arguments, one number.
        checkpointed: makes the model with activation checkpointing, where the package has it.
        train: trains it as the package does, with plain SGD, and with a loss scale where the dtype is float16.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Given] | None
    loss: Callable[[Any, Given], Tensor] = sum_of_squares
    checkpointed: Callable[[], nn.Module] | None = None
    train: Train | None = None
