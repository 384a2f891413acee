"""One model of the zoo: how it is built, what it is called with, and whether it is to be refused."""

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
    """Inputs made inside are those of one of many draws."""
    token = _NUMBER.set(number)
    try:
        yield
    finally:
        _NUMBER.reset(token)


def generator(batch: int, size: int) -> torch.Generator:
    """The source of random inputs of these sizes. It gives the same numbers each time, and others in another draw."""
    return torch.Generator().manual_seed(1000 * batch + size + 1_000_003 * _NUMBER.get())


@dataclass(frozen=True)
class ZooModel:
    """One model of the zoo.

    Attributes:
        name: unique in the zoo.
        build: makes the model, its weights drawn from a fixed seed.
        inputs: keyword inputs for a batch and a size.
        refused: where the model must be refused, a regular expression that the error has to match.
        refused_in: the modes of such a model that must be.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    refused: str = ""
    refused_in: tuple[str, ...] = ("train", "eval")
