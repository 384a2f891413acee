"""A node's kernel in 16 bits beside float32 on the same rounded inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

import autocastfx
from autocastfx.graph.node import uses
from autocastfx.numerics.node_effects import Replay, Roundings, rounding, saturated
from autocastfx.numerics.segments import Read
from autocastfx.passes.analysis.units import Ports
from autocastfx.policy.kernel_facts import load_kernel_facts
from tests.helpers import Function

PORTS = Ports(autocastfx.load_op_list("bfloat16"), load_kernel_facts())


def captured(function: Any, *inputs: torch.Tensor) -> fx.Node:
    amp_model = autocastfx.convert(Function(function), inputs, dtype="bfloat16")
    graph = amp_model.variants[0].captured
    assert graph is not None
    return next(node for node in graph.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_difference_is_the_kernels_alone(low: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(8, 8, generator=generator) for _ in range(2))
    node = captured(lambda a, b: a @ b, x, w)
    values: dict[fx.Node, Any] = dict(zip(node.all_input_nodes, (x, w), strict=True))
    reads = [Read(node, place, use) for place, use in enumerate(uses(node))]
    gradient = torch.randn(8, 8, generator=generator)
    found = Replay(PORTS, low)(node, values.__getitem__, reads, [gradient])
    rounded = [t.to(low).float() for t in (x, w)]
    exact = rounded[0] @ rounded[1]
    eps = torch.finfo(low).eps
    assert found.values[0] is not None
    assert 0 < float(found.values[0].abs().max()) <= eps * float(exact.abs().max())
    back = gradient.to(low).float() @ rounded[1].T
    assert found.gradients[0] is not None
    assert 0 < float(found.gradients[0].abs().max()) <= eps * float(back.abs().max())
    expected = (x.to(low) @ w.to(low)).float() - exact
    torch.testing.assert_close(found.values[0].float(), expected, rtol=2**-8, atol=0.0)  # kept in bfloat16


def test_a_view_has_no_difference() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    node = captured(lambda a: a.transpose(0, 1), x)
    found = Replay(PORTS, torch.bfloat16)(node, lambda _: x, [Read(node, 0, uses(node)[0])], [x.T.contiguous()])
    assert (found.values, found.gradients) == ((None,), (None,))


def test_small_gradients_are_scaled_as_a_loss_scale_does() -> None:
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    node = captured(lambda a: torch.tanh(a), x)
    reads, small = [Read(node, 0, uses(node)[0])], torch.full((16,), 1e-9)  # below float16's least number
    lost, kept = (
        Replay(PORTS, torch.float16, scale)(node, lambda _: x, reads, [small]).gradients[0] for scale in (1.0, 2.0**24)
    )
    assert lost is None  # both are 0
    assert kept is not None
    assert 0 < float(kept.abs().max()) < 1e-11


def test_random_ops_are_rounded_alone() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    node = captured(lambda a: F.dropout(a, 0.5, training=True), x)
    found = Replay(PORTS, torch.bfloat16)(node, lambda _: x, [Read(node, 0, uses(node)[0])], [x])
    assert found.values[0] is not None
    assert torch.equal(found.values[0].float(), rounding(x, torch.bfloat16).bfloat16().float())
    assert found.gradients == (None,)


def test_masks_saturate() -> None:
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([0.0, lowest, float("-inf"), 1.0])
    most = torch.finfo(torch.float16).max
    assert saturated(mask, torch.float16).tolist() == [0.0, -most, float("-inf"), 1.0]
    assert rounding(mask, torch.float16).tolist() == [0.0, -most - lowest, 0.0, 0.0]


def test_roundings_of_views_are_those_of_copies() -> None:
    whole = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    roundings = Roundings(torch.bfloat16)
    for view in (whole, whole.T, whole[2:5, ::3], whole.view(4, 24), whole[:, :1].expand(8, 5), whole[0, 0]):
        expected = rounding(view.clone(), torch.bfloat16).bfloat16()
        torch.testing.assert_close(roundings(view), expected, rtol=0, atol=0)
    small = whole * 1e-9
    expected = rounding(small.T.clone(), torch.float16, 2.0**20).bfloat16()
    torch.testing.assert_close(Roundings(torch.float16)(small.T, 2.0**20), expected, rtol=0, atol=0)


def test_no_change_is_infinite() -> None:
    lowest = torch.tensor([torch.finfo(torch.float32).min, 1.0])
    assert Roundings(torch.float16)(lowest).isfinite().all()
