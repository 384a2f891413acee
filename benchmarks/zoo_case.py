"""A model of the zoo: its factory, its inputs, and the error if it must be refused."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Inputs", "ZooModel", "draw", "generator"]

Inputs = Callable[[int, int], dict[str, Any]]
_NUMBER = ContextVar("number", default=0)


@contextmanager
def draw(number: int) -> Generator[None]:
    """While open, inputs are made from the draw of this number."""
    token = _NUMBER.set(number)
    try:
        yield
    finally:
        _NUMBER.reset(token)


def generator(batch: int, size: int) -> torch.Generator:
    """Return a generator for random inputs of these sizes: the same numbers each time, others in another draw."""
    return torch.Generator().manual_seed(1000 * batch + size + 1_000_003 * _NUMBER.get())


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo.

    Attributes:
        name: unique in the zoo.
        build: makes the model, its weights drawn from a fixed seed.
        inputs: keyword inputs for a batch and a size.
        refused: a regular expression that the error must match, if the model must be refused.
        refused_in: the modes in which it must be refused.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    refused: str = ""
    refused_in: tuple[str, ...] = ("train", "eval")
