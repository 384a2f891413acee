"""Values of inputs that a cast to float16 clips are counted and told of once; masks are meant to be clipped."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.errors import ClippedValuesWarning
from autocastfx.runtime.quick_graph import count_clipped
from tests.helpers import Net

LARGE = torch.full((4, 8), 1000.0).index_put((torch.tensor([1, 2]), torch.tensor([3, 4])), torch.tensor([7e4, -9e5]))
FITTING = LARGE.clamp(-65_504, 65_504)


def model_of_prices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def converted(model: nn.Module, way: str) -> nn.Module:
    if way == "convert":
        return autocastfx.convert(model, (FITTING,), dtype="float16")
    return autocastfx.enable(model, dtype="float16")


@pytest.mark.parametrize("way", ["convert", "enable"])
def test_clipped_values_are_told_once_with_their_number(way: str) -> None:
    model = converted(model_of_prices(), way)
    model(FITTING)
    with pytest.warns(ClippedValuesWarning, match="^2 values of '.*' were beyond 65,504 and clipped in float16"):
        model(LARGE)
    model(LARGE)


def test_infinities_and_nan_are_kept_and_not_counted() -> None:
    x = FITTING.clone()
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    model = converted(model_of_prices(), "convert")
    assert not model(x)[0].isfinite().any()
    x[1, 1] = 1e6
    with pytest.warns(ClippedValuesWarning, match="^1 values"):
        model(x)


def test_a_mask_is_clipped_without_a_word() -> None:
    x, mask = torch.rand(4, 8), torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
    amp_model = autocastfx.convert(
        Net(lambda m, x, mask: (x @ x.mT + mask).softmax(-1) @ x), (x, mask), dtype="float16", fold="kernel"
    )
    assert amp_model(x, mask).isfinite().all()


def test_bfloat16_and_calibrated_models_clip_nothing() -> None:
    model = model_of_prices()
    for options in ({"dtype": "bfloat16"}, {"dtype": "float16", "calibrate": [LARGE]}):
        autocastfx.convert(model, (LARGE,), **options)(LARGE)  # pyright: ignore[reportArgumentType]


def test_a_check_tells_of_clipped_values() -> None:
    with pytest.warns(ClippedValuesWarning):
        autocastfx.check(model_of_prices(), [LARGE], dtype="float16")


def test_what_is_stored_exported_or_compiled_has_the_plain_operator() -> None:
    amp_model: Any = converted(model_of_prices(), "convert")
    assert "saturating_cast" in amp_model.code
    for made in (copy.deepcopy(amp_model), torch.compile(amp_model, backend="eager", fullgraph=True)):
        made(FITTING)
    assert "saturating_cast" in str(torch.export.export(amp_model, (FITTING,)).graph)
    assert amp_model(LARGE.clamp(-1, 1)).isfinite().all()
    assert torch.vmap(amp_model)(LARGE[None]).isfinite().all()


def test_a_graph_without_such_casts_stays_as_it_is() -> None:
    assert not count_clipped(torch.fx.symbolic_trace(lambda x: x.half()).graph)


@pytest.mark.gpu
def test_on_a_gpu_a_later_call_tells_what_earlier_ones_clipped() -> None:
    fitting, large = FITTING.cuda(), LARGE.cuda()
    model = autocastfx.convert(model_of_prices().cuda(), (fitting,), dtype="float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(large)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    model(fitting)  # the copy of an earlier number may have been in progress
    torch.cuda.synchronize()
    with pytest.warns(ClippedValuesWarning, match="^2 values"):
        model(fitting)
