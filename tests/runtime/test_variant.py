"""A graph is converted again when what its decisions rest on has changed, and not before."""

from __future__ import annotations

import torch

import autocastfx
from autocastfx.runtime.variant import FixedTensor, Variant
from tests.integrations.test_graph_run import Differences

X = torch.randn(2, 16)


def only(amp_model: autocastfx.AmpModule) -> Variant:
    amp_model(X)
    (variant,) = amp_model.variants
    return variant


def test_other_numbers_convert_again_and_the_same_ones_do_not() -> None:
    model = Differences()
    amp_model = autocastfx.convert(model, X, dtype="bfloat16")
    first, stencil = only(amp_model), model.get_buffer("stencil")
    stencil.mul_(1.0)
    assert only(amp_model) is first
    model.register_buffer("stencil", stencil.clone())
    assert only(amp_model) is first
    model.get_buffer("stencil").copy_(torch.randn(16, 16))
    again = only(amp_model)
    assert again is not first
    assert again.plan["matmul"].placement != first.plan["matmul"].placement
    model.get_buffer("stencil").zero_()
    assert only(amp_model) is again, "nothing rests on it any more"


def test_a_tensor_is_as_before_until_it_is_written_or_another() -> None:
    tensor = torch.ones(2)
    fixed = FixedTensor.of(0, tensor, ("facts",))
    assert fixed.is_as_before([tensor])
    assert not fixed.is_as_before([tensor.clone()])
    assert not fixed.is_as_before([tensor.add_(0.0)])
