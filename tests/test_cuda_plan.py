"""The estimates of a step on CUDA are exact sums, on models whose every tensor can be counted by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from benchmarks import cuda_plan
from benchmarks.cuda_dispatch import cuda_autocast, cuda_operators
from benchmarks.cuda_plan import AUTOCAST, EXACT, HALF, KERNEL, SIDES, Row
from benchmarks.kernel_costs import BANDWIDTH, FLOOR, KernelCosts
from benchmarks.models import FullModel

BATCH, BEFORE, AFTER = 8, 32, 16
CAST = 6  # bytes an element
CUDNN, FLASH, EFFICIENT = (f"_scaled_dot_product_{kind}_attention" for kind in ("cudnn", "flash", "efficient"))


class Layer(nn.Module):
    """The mean of a linear layer's float32 results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(BEFORE, AFTER)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.linear(x).float().mean(),)


LAYER = FullModel(Layer, lambda: {"x": torch.empty(BATCH, BEFORE)})


def costs(work: Callable[[], object]) -> KernelCosts:
    """Run ``work`` on the meta device, with the operators of CUDA."""
    with torch.device("meta"), cuda_operators(), KernelCosts(nn.Identity(), []) as found:
        work()
    return found


def half(*shape: int, **options: Any) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device="meta", **options)


# ---- a step ----------------------------------------------------------------------------------------------------------

WEIGHTS, X, Y = AFTER * BEFORE + AFTER, BATCH * BEFORE, BATCH * AFTER


@pytest.mark.parametrize("side", SIDES)
def test_a_linear_layer_is_estimated_by_arithmetic(side: str) -> None:
    row = cuda_plan.estimate("layer", LAYER, side)
    # the result and its gradient; weight and bias, their gradients, and the input
    casts, elements = (2, 2 * Y) if side == HALF else (2 + 2 + 2 + 1, 2 * Y + 2 * WEIGHTS + X)
    assert (row.casts, row.cast_bytes) == (casts, CAST * elements)
    # forward and backward: the product (then of the weight alone, and the bias's sum), the mean (then ones, a division)
    product = 2 * (AFTER + X + AFTER * BEFORE + Y) + 2 * (Y + X + AFTER * BEFORE) + 2 * (Y + AFTER)
    mean = (4 * Y + 4) + 4 + (4 + 4 * Y)
    saturates = side.startswith("fold=")  # the input, which is clamped; its cast then reads it once more
    spared = 2 if side.endswith(" cached") else 0  # weight and bias are cast by one kernel, and so are their gradients
    assert row.kernels == row.casts - spared + 3 + 3 + (1 if saturates else 0)
    assert row.moved_bytes == row.cast_bytes + product + mean + (8 * X + 4 * X if saturates else 0)
    assert row.ms == pytest.approx(1e3 * FLOOR * row.kernels), "each kernel is small"
    assert row.ms == pytest.approx(sum(row.ms_of.values()))
    assert row.saved_bytes == 0, "of inputs nothing counts"


# ---- an operator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "moved"),
    [
        (lambda: half(64, 32) @ half(32, 16), 2 * (64 * 32 + 32 * 16 + 64 * 16)),
        (lambda: half(8, 4).t().add_(1.0), 2 * 32 + 2 * 32),
        (lambda: (x := half(8)) * x, 2 * 8 + 2 * 8),
        (lambda: half(8).expand(4, 8) + half(4, 8), 2 * (8 + 32 + 32)),
        (lambda: half(8).copy_(torch.empty(8)), 4 * 8 + 2 * 8),
        (lambda: torch.zeros_like(half(8)), 2 * 8),
        (lambda: nn.functional.embedding(torch.empty(3, dtype=torch.long), half(1000, 4)), 2 * 12 + 8 * 3 + 2 * 12),
        (lambda: torch.softmax(half(4, 8), -1, dtype=torch.float32), 2 * 32 + 4 * 32),
        (lambda: nn.functional.dropout(half(8), 0.1, training=True), 2 * 8 + 2 * 8 + 8),
        (lambda: half(8, 4).t().unsqueeze(0).detach(), 0),
    ],
    ids=["mm", "in place", "twice", "expanded", "copy", "shape", "gather", "widening softmax", "dropout", "views"],
)
def test_a_kernel_reads_its_inputs_once_and_writes_its_outputs_once(work: Callable[[], object], moved: int) -> None:
    found = costs(work)
    assert (found.bytes, found.kernels) == (moved, int(moved > 0))


def test_a_kernel_takes_the_longest_of_three_times() -> None:
    n, wide = 4096, torch.empty(4096, 4096, device="meta")
    assert costs(lambda: half(n, n) @ half(n, n)).seconds == {"mm": 2 * n**3 / 989e12}
    assert costs(lambda: wide @ wide).seconds == {"mm": 2 * n**3 / 67e12}
    assert costs(lambda: wide + 1.0).seconds == {"add": 2 * 4 * n**2 / BANDWIDTH}
    assert costs(lambda: half(2) + 1.0).seconds == {"add": FLOOR}


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    dtype: torch.dtype = torch.float16,
    dropout: float = 0.0,
    queries: int = 128,
    keys: int = 128,
    width: int = 64,
) -> KernelCosts:
    lengths = (queries, keys, keys)
    given = [torch.empty(2, 4, n, width, dtype=dtype, device="meta", requires_grad=True) for n in lengths]
    learned = [t for t in (*given, mask) if t is not None and t.requires_grad]
    gradient = torch.empty_like(given[0])

    def work() -> None:
        found = nn.functional.scaled_dot_product_attention(*given, mask, dropout, is_causal)
        torch.autograd.grad(found, learned, gradient)

    return costs(work)


def chosen(found: KernelCosts) -> str:
    """The kernel of attention, forward and backward."""
    (name,) = (op for op in found.seconds if "attention" in op and not op.endswith("_backward"))
    assert f"{name}_backward" in found.seconds
    return name


def test_attention_is_cudnns_where_torch_takes_it() -> None:
    for found in (
        *(attention(), attention(is_causal=True), attention(dtype=torch.bfloat16), attention(dropout=0.125)),
        *(attention(half(2, 1, 128, 128)), attention(half(128, 128)), attention(width=128), attention(queries=1)),
    ):
        assert chosen(found) == CUDNN
    causal, masked = attention(is_causal=True), attention(half(2, 1, 128, 128))
    values, mask = 2 * 2 * 4 * 128 * 64, 2 * 2 * 128 * 128
    sums = 4 * 2 * 4 * 128  # the logarithms of the sums of exponents, and numbers of the random state besides
    assert 12 * values + 2 * sums <= causal.bytes <= 12 * values + 2 * sums + 64
    assert masked.bytes - causal.bytes == pytest.approx(2 * mask, abs=64), "it is read once for all heads, twice"


def test_other_attention_is_flash_without_a_mask_and_memory_efficient_with_one() -> None:
    for found in (
        *(attention(dropout=0.1), attention(width=192), attention(width=68), attention(keys=1)),
        attention(queries=1, dropout=0.5),
    ):
        assert chosen(found) == FLASH
    for found in (
        *(attention(half(2, 1, 128, 128), dropout=0.1), attention(dtype=torch.float32)),
        *(attention(half(4, 128, 128)), attention(half(1, 1, 128, 128, requires_grad=True))),
    ):
        assert chosen(found) == EFFICIENT


def test_a_mask_of_truth_values_is_made_a_floating_one_and_a_learned_one_has_a_gradient_for_each_row() -> None:
    truth = torch.empty(2, 1, 128, 128, dtype=torch.bool, device="meta")
    assert {"where", CUDNN} <= attention(truth).seconds.keys()
    assert {"where", EFFICIENT} <= attention(truth, dropout=0.1).seconds.keys()
    learned = attention(half(1, 1, 128, 128, requires_grad=True))
    fixed = attention(half(1, 1, 128, 128), dropout=0.1)
    assert learned.bytes - fixed.bytes >= 2 * (2 * 2 * 4 * 128 * 128), "written, then added up"
    assert "sum" in learned.seconds


def test_attention_of_heads_in_groups_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="heads in groups"), cuda_operators():
        nn.functional.scaled_dot_product_attention(half(1, 4, 8, 8), *[half(1, 2, 8, 8)] * 2, enable_gqa=True)


# ---- torch.autocast --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A norm that two layers read, attention, a softmax and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(BEFORE), nn.Linear(BEFORE, 64), nn.Linear(BEFORE, 64)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        normed = self.norm(x)
        a, b = (layer(normed).unsqueeze(1).unsqueeze(1) for layer in (self.first, self.second))
        mixed = nn.functional.scaled_dot_product_attention(a, b, b).flatten(1)
        mixed = mixed.softmax(-1) + self.first.weight.sum(-1).pow(2) + self.first(normed)
        return (nn.functional.cross_entropy(mixed @ mixed.t(), labels),)


def test_casts_are_those_of_the_preset_of_torch_autocast() -> None:
    inputs = {"x": torch.empty(BATCH, BEFORE), "labels": torch.zeros(BATCH, dtype=torch.long)}
    model = FullModel(Block, lambda: {name: tensor.to("meta") for name, tensor in inputs.items()})
    row = cuda_plan.estimate("block", model, AUTOCAST)
    with torch.device("meta"):
        module = Block()
        given = model.inputs()
    preset = {"op_list": "torch_autocast_cuda", "dtype": torch.float16, "device": "cuda", "keep_output_dtype": False}
    converted = autocastfx.convert(module, (), given, **preset)
    with torch.device("meta"), cuda_operators(), KernelCosts(converted, given.values()) as found:
        converted(**given)[0].backward()
    casts = (found.weights, found.gradients, found.activations)
    assert (row.casts, row.cast_bytes) == (sum(c.count for c in casts), sum(c.bytes for c in casts))
    assert (row.kernels, row.moved_bytes) == (found.kernels, found.bytes)


def test_a_cast_of_a_parameter_is_kept_for_the_region_alone() -> None:
    linear, x = nn.Linear(4, 4, bias=False, device="meta"), torch.empty(2, 4, device="meta")

    def work() -> None:
        for _ in range(2):
            with cuda_autocast(torch.float16):
                assert linear(linear(x)).dtype == torch.float16
        assert linear(x).dtype == torch.float32

    found = costs(work)
    assert found.weights.count + found.activations.count == 2 * (1 + 1), "in each region the weight, and the input"
    assert not torch.is_autocast_enabled("cuda")


def test_what_torch_autocast_refuses_is_refused() -> None:
    x = torch.empty(2, device="meta")
    with pytest.raises(RuntimeError, match="refuses binary_cross_entropy"), cuda_autocast(torch.float16):
        nn.functional.binary_cross_entropy(x, x)


# ---- goals -----------------------------------------------------------------------------------------------------------


def row(model: str, side: str, ms: float, **ms_of: float) -> Row:
    return Row(model, side, 1, 0, 0, 0, 0, ms, ms_of)


def test_a_goal_is_told_with_the_operators_that_miss_it() -> None:
    rows = [row("a", AUTOCAST, 10.0, mm=9.0, add=1.0), row("b", AUTOCAST, 10.0, mm=10.0)]
    rows += [row("a", EXACT, 12.0, mm=9.0, add=1.5, clamp=1.5), row("b", EXACT, 6.0, mm=6.0)]
    rows += [row("a", KERNEL, 9.0, mm=9.0), row("b", KERNEL, 9.0, mm=9.0)]
    lines = [line for goal in cuda_plan.goals(rows) for line in goal.lines()]
    assert lines == [
        "MISSED   fold=exact: 1.200 times torch.autocast on a, the most of all models; at most 1.00",
        "         a, 1.200: clamp +1.500 ms, add +0.500 ms",
        "reached  fold=exact: 0.849 times torch.autocast in the geometric mean; at most 0.95",
        "MISSED   fold=kernel: 0.900 times torch.autocast in the geometric mean; at most 0.85",
        "         a, 0.900: ",
        "         b, 0.900: ",
    ]


def test_a_missed_goal_is_the_exit_status_and_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_plan, "FULL", {"layer": LAYER})
    path = tmp_path / "rows.json"
    for limit, status in ((0.1, 1), (10.0, 0)):
        monkeypatch.setattr(cuda_plan, "EACH_LIMITS", {EXACT: limit})
        monkeypatch.setattr(cuda_plan, "MEAN_LIMITS", {KERNEL: 10.0})
        assert cuda_plan.main(["--json", str(path)]) == status
        printed = capsys.readouterr()
        assert ("MISSED" in printed.out) == bool(status)
        assert printed.err.count("layer") == (len(SIDES) if status else 0), (
            "the rows that are kept are not estimated again"
        )
    assert [held["side"] for held in json.loads(path.read_text())["rows"]] == list(SIDES)


def test_a_model_that_is_not_known_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cuda_plan.main(["--models", "GPT-2 b8 s1024;GPT-5"])
    assert error.value.code == 2
    assert "unknown: GPT-5; there are ResNet-50 b32; " in capsys.readouterr().err
