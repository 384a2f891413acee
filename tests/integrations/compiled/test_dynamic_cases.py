"""Models that no single graph holds: enabled, they give float32's numbers and dtypes, and what is left out is told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import autocastfx
from autocastfx.errors import CaptureError, UncapturedGraphWarning
from benchmarks.models.hand import HAND, dynamic
from benchmarks.models.zoo import ZooModel
from tests.helpers import relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
BY_BOTH = ("as-many-as-needed", "k-from-a-tensor")  # a size that is read from a tensor alone
# Code that Dynamo skips: a loop that it breaks in, an LSTM, what a checkpoint calls, a number that is put into a text.
TOLD = (
    *("own-class-inside", "experts-by-where", "experts-by-nonzero", "packed-lstm"),
    *("checkpointed-numbers", "checkpointed-experts", "prints-its-loss"),
)


def tensors(outputs: Any) -> list[Tensor]:
    held = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    return torch.utils._pytree.tree_leaves(held)


def products_in_float32(model: Any, inputs: dict[str, Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as events:
        model(**inputs)
    found: Any = events.profiler.kineto_results.events()
    return sum(
        event.name() in ("aten::addmm", "aten::mm", "aten::bmm") and event.dtypes()[0] == "float" for event in found
    )


@pytest.mark.parametrize("case", dynamic.CASES, ids=lambda case: case.name)
def test_enabled_it_is_right_and_what_is_not_captured_is_told(case: ZooModel) -> None:
    model, exact = case.build(), case.build()
    autocastfx.enable(model, dtype=LOW)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in (12, 9):
            model(**case.inputs(2, size))
    assert any(one.category is UncapturedGraphWarning for one in told) == (case.name in TOLD)
    assert products_in_float32(model, case.inputs(2, 9)) == 0  # it has only been called in training so far
    for training in (True, False):
        model.train(training)
        exact.train(training)
        found, wanted = tensors(model(**case.inputs(2, 9))), tensors(exact(**case.inputs(2, 9)))
        assert [t.dtype for t in found] == [t.dtype for t in wanted]
        errors = [relative_error(one.detach(), other.detach()) for one, other in zip(found, wanted, strict=True)]
        assert 0 < max(errors) < 8 * torch.finfo(LOW).eps
        if training:
            torch.stack([t.float().mean() for t in found if t.requires_grad]).sum().backward()
            assert any(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("case", dynamic.CASES, ids=lambda case: case.name)
def test_convert_refuses_it_and_names_the_other_way(case: ZooModel) -> None:
    assert case.name not in {one.name for one in HAND}
    if case.name in BY_BOTH:
        amp_model = autocastfx.convert(case.build(), (), case.inputs(2, 12), dtype=LOW)
        found, wanted = amp_model(**case.inputs(3, 9)), case.build()(**case.inputs(3, 9))
        assert relative_error(found, wanted) < 8 * torch.finfo(LOW).eps
    else:
        with pytest.raises(CaptureError, match=r"[Cc]onvert in\s*place, with autocastfx\.enable"):
            autocastfx.convert(case.build(), (), case.inputs(2, 12), dtype=LOW)
