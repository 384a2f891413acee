"""The whole lint: what it finds, by hand-computed numbers, and what it refuses."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autocastfx
from autocastfx import lint
from autocastfx.errors import GpuError, NotCapturedError
from autocastfx.report.lint.roofline import Gpu
from benchmarks.models.tiny import CNN, EncoderLayer
from tests.golden.models import converted

# One operation a second a byte a second: nothing but what is written here decides.
SLOW = Gpu("slow", tensor_tflops=1e-6, float32_tflops=1e-7, bandwidth_gb_s=1e-2)  # 1e6, 1e5 FLOP/s and 1e7 bytes/s


MODELS = {"cnn": CNN, "encoder_layer": EncoderLayer}


class Net(nn.Module):
    """A linear layer and what no tensor core runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 100, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).softmax(-1)


def made(dtype: torch.dtype = torch.float16, weights: str = "cast", op_list: str = "default") -> autocastfx.AmpModule:
    return autocastfx.convert(Net(), torch.ones(32, 64), dtype=dtype, weights=weights, op_list=op_list)


def test_times_by_hand() -> None:
    found = lint(made(torch.bfloat16), SLOW)
    flops = 2 * 32 * 64 * 100
    assert found.before.in_products == pytest.approx(flops / 1e5)  # 4.096 s, where its bytes take 5 ms
    assert found.before.seconds == pytest.approx(flops / 1e5 + 2 * 3200 * 4 / 1e7)
    assert found.after.in_products == pytest.approx(flops / 1e6)
    casts = sum(cast.bytes for cast in made(torch.bfloat16).plan.casts)
    softmax = 3200 * (2 + 4)
    assert found.after.seconds == pytest.approx(flops / 1e6 + (casts + softmax) / 1e7)
    assert found.speedup == found.before.seconds / found.after.seconds
    assert found.limit == pytest.approx(found.before.seconds / (2 * 3200 * 4 / 1e7))


@pytest.mark.parametrize("name", ["cnn", "encoder_layer"])
def test_operations_are_those_that_torch_counts_in_a_run(name: str) -> None:
    amp_model = converted(name)
    inputs = {"cnn": (torch.ones(2, 3, 8, 8),), "encoder_layer": (torch.ones(2, 9, 16), torch.zeros(2, 1, 9, 9))}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        MODELS[name]()(*inputs[name])
    assert sum(op.flops or 0 for op in lint(amp_model).ops) == counter.get_total_flops() > 0


def test_ops_are_told_with_their_bound() -> None:
    ops = {op.node: op for op in lint(made(torch.bfloat16), SLOW).ops}
    assert list(ops) == ["x_bfloat16", "linear_weight_bfloat16", "linear", "softmax"]
    linear = ops["linear"]
    assert (linear.flops, linear.bytes) == (409_600, 2 * (2048 + 6400 + 3200))
    assert linear.intensity == linear.flops / linear.bytes
    assert (linear.bound, ops["softmax"].bound) == ("compute", "memory")
    assert (ops["x_bfloat16"].op, ops["x_bfloat16"].module) == ("cast", "for x")


def test_a_model_whose_kernels_take_less_than_to_start_them_is_said_to_be_small() -> None:
    amp_model = made(torch.bfloat16)
    fast, slow = lint(amp_model, "A100"), lint(amp_model, SLOW)
    assert (fast.launches, len(fast.ops)) == (pytest.approx(2e-5), 4)
    assert (fast.is_small, slow.is_small) == (True, False)
    assert "small: starting 4 kernels takes about 20 µs, they themselves " in str(fast)
    assert "small: " not in str(slow)
    assert json.loads(fast.to_json())["is_small"] is True
    seconds = slow.after.seconds
    for factor, is_small in ((seconds / 1.9e-5, True), (seconds / 2.1e-5, False)):
        gpu = Gpu("edge", *(factor * rate for rate in (SLOW.tensor_tflops, SLOW.float32_tflops, SLOW.bandwidth_gb_s)))
        assert lint(amp_model, gpu).is_small is is_small


def test_odd_sizes_are_those_of_products_in_16_bits() -> None:
    (odd,) = lint(made()).odd_sizes
    assert (odd.name, odd.operand, odd.size, odd.padded) == ("N", "linear.weight", 100, 104)
    assert odd.wasted == pytest.approx(4 / 104)
    wide = autocastfx.OpList.of({"deny": ["linear"]}, name="wide")
    in_float32 = lint(
        autocastfx.convert(Net(), torch.ones(32, 64), op_list=["default", wide], dtype="float16", check=False)
    )
    assert in_float32.odd_sizes == ()
    assert in_float32.float32_products == ("linear",)


def test_working_copies_cost_nothing_in_a_pass() -> None:
    cast, cached = lint(made()), lint(made(weights="cached"))
    gone = {op.node: op for op in cast.ops}["linear_weight_float16"]
    assert gone.bytes == 6 * 6400
    assert cached.after.seconds == pytest.approx(cast.after.seconds - gone.seconds)


def test_a_list_that_follows_torch_autocast_is_linted_too() -> None:
    found = lint(made(op_list="torch_autocast_cuda"))
    assert [odd.node for odd in found.odd_sizes] == ["linear"]
    assert found.speedup > 0


def test_the_report_says_for_whose_kernels_the_plan_was_decided() -> None:
    model = nn.Sequential(nn.Conv1d(8, 8, 1), nn.Flatten(), nn.Unflatten(1, (8, 2, 2, 2)), nn.AvgPool3d(2))
    x, advice = torch.ones(2, 8, 8), 'decided for kernels of cpu: convert(..., device="cuda")'
    here = lint(autocastfx.convert(model, x, dtype=torch.bfloat16, check=False))
    there = lint(autocastfx.convert(model, x, dtype=torch.bfloat16, device="cuda", check=False))
    assert (here.device, there.device) == ("cpu", "cuda")
    assert advice in str(here)
    assert advice not in str(there)
    assert {op.node: op.reads for op in here.ops}["avg_pool3d"] == ("float32",), "for want of a kernel"
    assert {op.node: op.reads for op in there.ops}["avg_pool3d"] == ("bfloat16",)


def test_nothing_is_run_and_nothing_is_changed() -> None:
    amp_model, state = converted("encoder_layer"), torch.get_rng_state()
    before = autocastfx.dump(amp_model)
    assert lint(amp_model) == lint(amp_model)
    assert autocastfx.dump(amp_model) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_moves_nothing_takes_no_time() -> None:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.t()

    found = lint(autocastfx.convert(Nothing(), torch.ones(2, 3), dtype="float16", check=False))
    assert (found.speedup, found.limit, found.ops) == (1, 1, ())
    assert "sizes: no product is known to run in float16" in str(found)


def test_sizes_are_those_of_the_first_call_where_no_inputs_were_given() -> None:
    amp_model = autocastfx.convert(Net(), dtype="float16")
    with pytest.raises(NotCapturedError, match="before the first call: call the model once, or give convert"):
        lint(amp_model)
    amp_model(torch.ones(32, 64))
    assert lint(amp_model).odd_sizes == lint(made()).odd_sizes


def test_json_holds_everything() -> None:
    found = lint(made())
    data = json.loads(found.to_json())
    assert data["gpu"]["name"] == "A100"
    assert data["odd_sizes"][0]["size"] == 100
    assert data["before"] == {"seconds": found.before.seconds, "in_products": found.before.in_products}
    assert data["speedup"] == found.speedup
    assert len(data["ops"]) == len(found.ops)


def test_a_limit_without_end_is_null_in_json() -> None:
    found = lint(autocastfx.convert(nn.Linear(8, 8), torch.ones(8, 8), dtype="float16", check=False))
    assert found.limit == float("inf")
    assert json.loads(found.to_json(), parse_constant=pytest.fail)["limit"] is None


def test_what_cannot_be_linted_is_refused() -> None:
    with pytest.raises(TypeError, match="not a Net: convert the model first"):
        lint(Net())  # type: ignore[arg-type]
    with pytest.raises(GpuError, match="no GPU is known as 'B100'"):
        lint(made(), "B100")
    with pytest.raises(GpuError, match=r"V100 take float16, not bfloat16: .* convert with dtype=torch\.float16"):
        lint(made(torch.bfloat16), "V100")
    with pytest.raises(NotCapturedError, match="before the first call: call the model once"):
        lint(pickle.loads(pickle.dumps(made())))
