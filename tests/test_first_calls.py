"""The first calls of somebody new, as typed without reading: what each says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from autocastfx.errors import CaptureError, LossScaleError, UnscaledStepWarning
from tests.helpers import heard

X, Y = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))


class Overflows(nn.Module):
    """Its square is beyond float16's range."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer((self.inner(x) * 1000).square()) * 1e-6


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))


def test_1_several_inputs_options_and_batches_are_given_in_a_wrong_form() -> None:
    convert: Any = autocastfx.convert
    with pytest.raises(TypeError, match=r"Several inputs of one call go in a tuple: convert\(model, \(a, b\)\)"):
        convert(small(), X, Y)
    with pytest.raises(TypeError, match=r'Options go by name: convert\(model, example_inputs, dtype="bfloat16"\)'):
        convert(small(), X, "bfloat16")
    for tool in (autocastfx.check, autocastfx.sensitivity, autocastfx.tune):
        with pytest.raises(ValueError, match=r"say which part the model takes: inputs=lambda batch: batch\[0\]"):
            tool(small(), [(X, Y)] * 2, F.mse_loss, dtype="bfloat16")
    with pytest.raises(CaptureError, match=r"go one by one: compare\(None, amp_model, \*batch\)"):
        autocastfx.compare(None, convert(small(), X, dtype="bfloat16"), (X, Y))


def test_2_a_conversion_that_changes_nothing_says_so() -> None:
    with heard() as told:
        autocastfx.convert(nn.Linear(4, 4), torch.randn(2, 4), dtype="bfloat16")
        autocastfx.convert(small(), X, dtype="bfloat16", fold="kernel")
    first, second = [line for line in told if "changes nothing" in line or "no op" in line]
    assert first.startswith("Linear: no op of the model runs in 16 bits. linear: ")
    assert second.startswith('Sequential: fold="kernel" changes nothing: ')


def test_3_a_capture_in_the_middle_of_training_is_told() -> None:
    amp_model = autocastfx.convert(small(), X, dtype="bfloat16")
    amp_model(X)
    with heard() as told:
        amp_model(X[:3])
    assert re.match("capturing variant 2: .* size mismatch at index 0", told[-1])


def test_4_an_overflow_leads_to_its_node_and_a_rule() -> None:
    amp_model = autocastfx.convert(Overflows(), X, dtype="float16")
    scale = autocastfx.DynamicLossScale(1.0, min=1.0)
    optimizer = autocastfx.LossScalingOptimizer(torch.optim.SGD(amp_model.parameters(), lr=0.1), loss_scale=scale)
    optimizer.backward(amp_model(X).sum())
    with pytest.raises(LossScaleError, match=r"find_overflow\(amp_model, .*watch\(amp_model\)"):
        optimizer.step()
    found = autocastfx.find_overflow(amp_model, X)
    assert found is not None
    assert found.op_list is not None
    assert "casts" in autocastfx.explain(amp_model, found.name)
    mended = autocastfx.convert(Overflows(), X, dtype="float16", op_list=["default", found.op_list])
    assert mended(X).isfinite().all()
    assert f"find_overflow: {found.name} (cast to float16) in module (root) gives 97 Inf" in str(
        autocastfx.explain(mended, "linear_1")
    )


def test_4_a_bare_optimizer_is_told_of() -> None:
    amp_model = autocastfx.convert(small(), X, dtype="float16")
    F.mse_loss(amp_model(X), Y).backward()
    with pytest.warns(UnscaledStepWarning, match="wrap it in an autocastfx.LossScalingOptimizer"):
        torch.optim.SGD(amp_model.parameters(), lr=0.1).step()


def test_5_the_time_beside_torch_autocast() -> None:
    text = str(autocastfx.time(small(), [X], lambda output, _: output.sum(), dtype="bfloat16", rounds=3))
    assert [line.split("  ")[0] for line in text.splitlines()[2:6]] == [
        *("float32", "torch.autocast", "converted", "cached and kernel")
    ]
    assert re.search("faster than torch.autocast|is the fastest", text.splitlines()[-1])


def test_6_a_gradient_that_is_rounding_alone_is_told_as_such() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    checked = autocastfx.check(
        model, [X], lambda output, _: output.square().sum() + output[:, 0].sum(), dtype="bfloat16"
    )
    assert not checked.inexact
    assert "zero but for rounding, in float32 too, as of a bias before a batch norm: gradient of 0.bias" in str(checked)


def test_7_a_conversion_says_what_its_check_took() -> None:
    with heard() as told:
        autocastfx.convert(small(), X, dtype="bfloat16")
    assert re.search(r"^converted Sequential in .* s: capture .*, check \d+\.\d$", told[-1])
