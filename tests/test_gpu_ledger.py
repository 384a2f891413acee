"""``python -m benchmarks.gpu.ledger`` counts what the kernels of a step move and compute."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from benchmarks.gpu import ledger
from benchmarks.gpu.ledger import FUSED, RATES, Ledger, count, optimizer_bytes, product_kind
from benchmarks.training import AUTOCAST, DEFAULT, FASTEST, HALF


def test_a_kernel_takes_the_longer_of_two_times() -> None:
    """That of its bytes or that of its operations, and no less than a launch."""
    found = Ledger()
    found.add("product", 4e9, 1e6)
    assert found.milliseconds() == pytest.approx(1e3 * 4e9 / RATES["product"].bytes)
    found.add("product", 1.0, 680e9)
    assert found.kernels["product"].count == 2
    assert found.kernels["product"].seconds == pytest.approx(4e9 / 4e12 + 680e9 / 680e12)
    found.add("elementwise", 2.0)
    assert found.kernels["elementwise"].seconds == ledger._LAUNCH


@pytest.mark.parametrize(
    ("columns", "kind"), [(50304, "product"), (30522, "product, sizes of 2"), (50257, "product, odd sizes")]
)
def test_the_sizes_of_a_product_choose_its_kernel(columns: int, kind: str) -> None:
    with torch.device("meta"):
        rows, matrix = torch.empty(4, 64, dtype=torch.float16), torch.empty(64, columns, dtype=torch.float16)
        assert product_kind(rows, matrix) == kind
        assert product_kind(rows, torch.empty(columns, 64, dtype=torch.float16).mT) == kind
        assert product_kind(rows.float(), matrix.float()) == "product, float32"


def _counted(model: str, side: str) -> dict[str, tuple[int, int, float]]:
    found = count(model, side).kernels
    return {kind: (one.count, int(one.bytes), one.flops) for kind, one in found.items() if kind != "optimizer"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_step_of_bert_runs() -> None:
    """Products compute the same on all sides; casts of activations and weights are where a side has them."""
    found = {side: _counted("BERT tiny", side) for side in (AUTOCAST, DEFAULT, FASTEST, HALF)}
    assert found[HALF] == _counted("BERT tiny", HALF)  # each time the same
    flops = {side: sum(one[2] for one in kinds.values()) for side, kinds in found.items()}
    assert len(set(flops.values())) == 1
    casts = {side: kinds.get("cast", (0, 0, 0.0))[1] for side, kinds in found.items()}
    assert casts[AUTOCAST] > casts[DEFAULT] > casts[FASTEST] > casts[HALF] == 0
    products = {side: kinds["product"][0] for side, kinds in found.items()}
    assert len(set(products.values())) == 1


@pytest.mark.parametrize("is_dense", [True, False])
def test_a_mask_that_fused_attention_refuses_is_float32_work(is_dense: bool) -> None:
    found = Ledger()
    reader = ledger.Reader(found)
    with torch.device("meta"), ledger._kernels_of_cuda(reader), reader:
        query, mask = torch.empty(2, 4, 8, 16, dtype=torch.float16), torch.empty(2, 4, 8, 8, dtype=torch.float16)
        F.scaled_dot_product_attention(query, query, query, attn_mask=mask if is_dense else mask.mT)
    assert ("attention" in found.kernels) is is_dense
    assert ("product, float32" in found.kernels) is not is_dense


def test_the_optimizers_bytes() -> None:
    """AdamW reads four numbers of each parameter and writes three; what else a side does comes on top."""
    found = {side: optimizer_bytes(side, torch.bfloat16) for side in (AUTOCAST, DEFAULT, FASTEST, FUSED, HALF)}
    assert found[AUTOCAST] == found[DEFAULT] == 28
    assert found[FASTEST] == found[FUSED] == 28 + 2  # the copies are written, and nothing is read for them
    assert found[HALF] == 28 + 6 + 2  # gradients are widened
    unscaled = 8  # gradients are read and written
    assert optimizer_bytes(DEFAULT, torch.float16) == 28 + unscaled
    assert optimizer_bytes(FASTEST, torch.float16) == 28 + unscaled + 2
    assert optimizer_bytes(HALF, torch.float16) == 28 + 6 + unscaled + 2
