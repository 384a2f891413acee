"""One small model of the corpus, and how exact a person who writes mixed precision by hand would want it.

A demand is counted, never measured: the 16-bit values on the longest chain of the hand-written version, and the factor
by which the model hands their relative error on. A rounding is off by half the dtype's epsilon at most; as a
chain's roundings do not all point one way, half an epsilon for each is a bound with room.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["Call", "Case", "Demand", "Loss", "weighted_sum"]

Loss = Callable[[Any, tuple[Any, ...]], Tensor]


@dataclass(frozen=True)
class Demand:
    """How far a result may be from exact arithmetic, relative to its own norm.

    Attributes:
        roundings: 16-bit values on the longest chain to the result; 0 where an expert keeps all of it in float32. A
            first product has three (input, weight, result), one that follows it two (weight, result), other work one.
        condition: the factor on the relative error of these values: 0.05 where they make up 5 % of the result.
        gradient: the same for gradients, which run through the chain a second time.
    """

    roundings: int
    condition: float = 1.0
    gradient: float | None = None

    def bound(self, dtype: torch.dtype, *, backward: bool = False) -> float:
        """The error allowed, relative to the norm of what is exact."""
        rounding = torch.finfo(dtype).eps / 2
        if backward:
            return 2 * self.roundings * (self.condition if self.gradient is None else self.gradient) * rounding
        return self.roundings * self.condition * rounding


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


def weighted_sum(outputs: Any, args: tuple[Any, ...]) -> Tensor:
    """A loss that every element of every output counts in, each with a weight of its own; a single number as it is."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(())
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weights = torch.randn(leaf.shape, generator=generator, dtype=torch.float64) if leaf.ndim else torch.ones(())
            wide = torch.promote_types(leaf.dtype, torch.float32)
            total = total + (leaf.to(wide) * weights.to(wide)).sum()
    return total


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: unique in the corpus.
        build: makes the model; its weights are drawn from a fixed seed.
        inputs: the arguments for a size: a tensor, a tuple of positional, a dictionary of named ones, or a ``Call``.
            Gradients are judged for the parameters, and for inputs that require them.
        point: the principle that the model is for.
        demand: what an expert demands of every result.
        why: how the demand is counted.
        islands: what the expert computes in float32: names of methods and submodules of the model.
        tensors: other demands, by the name that the judge gives a tensor ("output 1", "gradient scale").
        sizes: of the two calls.
        exact: whether a float64 copy runs, which is then the reference; else the float32 model is.
        loss: from the outputs and the positional arguments to the number that gradients are taken of.
        draw: which of many draws of the inputs.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    point: str
    demand: Demand
    why: str
    islands: tuple[str, ...] = ()
    tensors: Mapping[str, Demand] = field(default_factory=dict[str, Demand])
    sizes: tuple[int, int] = (8, 12)
    exact: bool = True
    loss: Loss = weighted_sum
    draw: int = 0

    def __str__(self) -> str:
        return self.name

    def model(self) -> nn.Module:
        torch.default_generator.manual_seed(0)
        return self.build()

    def with_islands(self) -> nn.Module:
        """The model as the expert writes it, to run under torch.autocast."""
        model = self.model()
        for name in self.islands:
            held = model.get_submodule(name) if name in dict(model.named_modules()) else model
            method = "forward" if held is not model else name
            setattr(held, method, _in_float32(getattr(held, method)))
        return model

    def call(self, size: int) -> Call:
        torch.default_generator.manual_seed(size + 1_000_003 * self.draw)
        inputs = self.inputs(size)
        if isinstance(inputs, Call):
            return inputs
        if isinstance(inputs, dict):
            return Call(kwargs=inputs)
        return Call(inputs if isinstance(inputs, tuple) else (inputs,))

    def demanded(self, tensor: str) -> Demand:
        return self.tensors.get(tensor, self.demand)


def _in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """The usual decorator of hand-written mixed precision: floating arguments in float32, and no autocast inside."""

    def widen(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    @functools.wraps(method)
    def island(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(widen, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            return method(*args, **kwargs)

    return island
