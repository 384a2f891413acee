"""Build graphs of any size, shaped like real models. Values are abstract: nothing is computed or allocated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from autocastfx.graph.node import set_value

__all__ = ["SHAPES"]

aten = torch.ops.aten
BATCH, TOKENS, WIDTH, HEADS = 8, 128, 256, 4


class _Builder:
    """A graph under construction; each call gives the size of its result."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()

    @property
    def size(self) -> int:
        return len(self.graph.nodes)

    def _valued(self, node: fx.Node, *sizes: Sequence[int], dtypes: Sequence[torch.dtype] = ()) -> fx.Node:
        with self.mode:
            made = [torch.empty(s, dtype=d) for s, d in zip(sizes, dtypes or [torch.float32] * len(sizes), strict=True)]
        set_value(node, made[0] if len(made) == 1 else tuple(made))
        return node

    def input(self, *size: int) -> fx.Node:
        return self._valued(self.graph.placeholder(f"x{self.size}"), size)

    def parameter(self, *size: int) -> fx.Node:
        return self._valued(self.graph.create_node("get_attr", f"p{self.size}"), size)

    def call(self, function: Any, size: Sequence[int], *args: Any) -> fx.Node:
        return self._valued(self.graph.call_function(function, args), size)

    def like(self, function: Any, x: fx.Node, *args: Any) -> fx.Node:
        """Add a call whose result has the size of its first argument."""
        return self.call(function, x.meta["val"].shape, x, *args)

    def linear(self, x: fx.Node, width: int) -> fx.Node:
        *leading, before = x.meta["val"].shape
        weight, bias = self.parameter(width, before), self.parameter(width)
        return self.call(aten.linear.default, (*leading, width), x, weight, bias)

    def norm(self, x: fx.Node) -> fx.Node:
        width = x.meta["val"].shape[-1]
        return self.like(aten.layer_norm.default, x, [width], self.parameter(width), self.parameter(width))

    def add(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.like(aten.add.Tensor, a, b)

    def done(self, *outputs: fx.Node) -> fx.Graph:
        self.graph.output(outputs)
        return self.graph


def residual(size: int) -> fx.Graph:
    """Build a deep chain: transformer blocks that add to one residual stream, which a norm reads in each block."""
    b = _Builder()
    x = b.input(BATCH, TOKENS, WIDTH)
    split, heads = (BATCH, TOKENS, HEADS, WIDTH // HEADS), (BATCH, HEADS, TOKENS, WIDTH // HEADS)
    while b.size < size - 1:
        normed, parts = b.norm(x), []
        for _ in range(3):
            part = b.call(aten.view.default, split, b.linear(normed, WIDTH), list(split))
            parts.append(b.call(aten.transpose.int, heads, part, 1, 2))
        mixed = b.call(aten.scaled_dot_product_attention.default, heads, *parts)
        mixed = b.call(aten.transpose.int, split, mixed, 1, 2)
        mixed = b.call(aten.reshape.default, (BATCH, TOKENS, WIDTH), mixed, [BATCH, TOKENS, WIDTH])
        x = b.add(x, b.like(aten.dropout.default, b.linear(mixed, WIDTH), 0.1, True))
        hidden = b.like(aten.gelu.default, b.linear(b.norm(x), 4 * WIDTH))
        x = b.add(x, b.like(aten.dropout.default, b.linear(hidden, WIDTH), 0.1, True))
    return b.done(b.norm(x))


def experts(size: int) -> fx.Graph:
    """Build a wide layer: a float32 router weighs experts side by side, and their results are added up."""
    b = _Builder()
    x = b.norm(b.input(BATCH * TOKENS, WIDTH))
    scores = b.like(aten.softmax.int, b.linear(x, 64), -1)
    total = b.like(aten.zeros_like.default, x)
    while b.size < size - 1:
        weight = b.call(aten.select.int, (BATCH * TOKENS,), scores, 1, 0)
        weight = b.call(aten.unsqueeze.default, (BATCH * TOKENS, 1), weight, -1)
        gate = b.like(aten.silu.default, b.linear(x, 2 * WIDTH))
        expert = b.linear(b.like(aten.mul.Tensor, gate, b.linear(x, 2 * WIDTH)), WIDTH)
        total = b.add(total, b.like(aten.mul.Tensor, expert, weight))
    return b.done(total)


def unet(size: int) -> fx.Graph:
    """Build two long arms: the way up reads the result of each step of the way down, in reverse order."""
    b = _Builder()
    channels, side = 32, 16

    def block(x: fx.Node) -> fx.Node:
        weight = b.parameter(channels, x.meta["val"].shape[1], 3, 3)
        x = b.call(aten.conv2d.default, (BATCH, channels, side, side), x, weight, None, [1, 1], [1, 1])
        x = b.like(aten.group_norm.default, x, 8, b.parameter(channels), b.parameter(channels))
        return b.like(aten.silu.default, x)

    x = b.input(BATCH, 4, side, side)
    skips = []
    while b.size < size // 2:
        x = block(x)
        skips.append(x)
    for skip in reversed(skips):
        x = block(b.call(aten.cat.default, (BATCH, 2 * channels, side, side), [x, skip], 1))
        if b.size >= size - 1:
            break
    return b.done(x)


def mixed(size: int) -> fx.Graph:
    """Build ops of every category on values drawn from a fixed seed, mostly recent ones."""
    b, draw = _Builder(), random.Random(0)
    values = [b.input(BATCH, TOKENS, WIDTH)]
    plain = (aten.relu.default, aten.gelu.default, aten.tanh.default, aten.exp.default, aten.clone.default)
    pairs = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default)
    while b.size < size - 1:
        recent = values[-1 - min(int(draw.expovariate(0.5)), len(values) - 1)]
        kind = draw.random()
        if kind < 0.25:
            made = b.linear(recent, WIDTH)
        elif kind < 0.35:
            made = b.norm(recent)
        elif kind < 0.4:
            made = b.like(aten.softmax.int, recent, -1)
        elif kind < 0.7:
            made = b.like(draw.choice(plain), recent)
        else:
            made = b.like(draw.choice(pairs), recent, draw.choice(values))
        values.append(made)
    return b.done(values[-1])


SHAPES: dict[str, Callable[[int], fx.Graph]] = {"residual": residual, "experts": experts, "unet": unet, "mixed": mixed}
