"""What one model of the zoo is: how it is built, what it is called with, and whether it is to be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Inputs", "ZooModel"]

Inputs = Callable[[int, int], dict[str, Any]]


@dataclass(frozen=True)
class ZooModel:
    """One model of the zoo.

    Attributes:
        name: unique in the zoo.
        build: makes the model, its weights drawn from a fixed seed.
        inputs: keyword inputs for a batch and a size.
        refused: where the model must be refused, a regular expression that the error has to match.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    refused: str = ""
