"""Activation checkpointing in enabled models: what is drawn again, what is kept, and checkpoints in checkpoints."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import autocastfx
from autocastfx.errors import UncapturedGraphWarning

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
PRODUCT = torch.ops.aten.addmm.default


class Dropping(nn.Module):
    """A layer with dropout behind it, under activation checkpointing in one of the ways in which people write it."""

    def __init__(self, way: str, use_reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
        self.way, self.use_reentrant = way, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "sequential":
            return checkpoint_sequential(self.block, 2, x, use_reentrant=self.use_reentrant)
        return checkpoint(self.inner if self.way == "nested" else self.block, x, use_reentrant=self.use_reentrant)

    def inner(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("way", ["module", "nested", "sequential"])
def test_gradients_are_those_of_the_mask_that_forward_drew(way: str, use_reentrant: bool, inner: str) -> None:
    model, x = Dropping(way, use_reentrant), torch.randn(7, 16, requires_grad=True)
    autocastfx.enable(model, dtype=LOW, inner=inner)
    if way == "sequential":  # Dynamo cannot capture what it calls
        with pytest.warns(UncapturedGraphWarning, match="the graph breaks in what checkpoint calls"):
            model(x)
    for _ in range(2):
        model.zero_grad()
        y = model(x)
        torch.rand(3)
        y.sum().backward()
        found = model.get_parameter("block.0.bias").grad
        assert found is not None
        assert torch.equal(found, 2.0 * (y != 0).sum(0))


class KeepsProducts(nn.Module):
    """Activation checkpointing that recomputes all but products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, [PRODUCT])
        return checkpoint(lambda x: self.layer(x).exp().sin(), x, use_reentrant=False, context_fn=contexts)


class Called(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_keeps_what_its_policy_says() -> None:
    model, x = KeepsProducts(), torch.randn(7, 16)
    loss = autocastfx.enable(model, dtype=LOW)(x).sum()
    with Called() as backward:
        loss.backward()
    assert backward.counts[PRODUCT] == 0
    assert backward.counts[torch.ops.aten.exp.default] == 1


def test_a_compiler_gets_the_policy_of_selective_checkpointing() -> None:
    backward: list[Any] = []

    def note(graph: fx.GraphModule, _: Any) -> Any:
        backward.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=note,
        partition_fn=min_cut_rematerialization_partition,
    )
    autocastfx.enable(KeepsProducts(), dtype=LOW, inner=compiler)(torch.randn(7, 16)).sum().backward()
    assert torch.ops.aten.exp.default in backward
    assert PRODUCT not in backward


class Skipped(nn.Module):
    """A block that Dynamo skips, so that it runs in float32 first, and under torch.autocast then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1):
            if x.sum().item() < 1e9:
                x = Sine.apply(self.layer(x))
        return x


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_skipped", [False, True])
def test_blocks_that_a_loop_checkpoints_are_recomputed_as_they_ran(is_skipped: bool, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Skipped() if is_skipped else nn.Linear(16, 16) for _ in range(2))), torch.randn(7, 16)
    autocastfx.enable(model, dtype=LOW)
    for _ in range(3):
        y, plain = x.clone().requires_grad_(True), x
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if is_skipped else "error", UncapturedGraphWarning)
            for block in model:
                y = checkpoint(block, y, use_reentrant=use_reentrant)
        model.zero_grad()
        y.square().sum().backward()
        for block in model:
            plain = block(plain)
        model_grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        plain.square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(model_grads, model.parameters(), strict=True))
