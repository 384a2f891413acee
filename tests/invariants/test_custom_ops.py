"""Custom ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autocastfx.graph.names import op_name
from autocastfx.graph.node import dtypes
from autocastfx.plan.plan import Precision
from tests.invariants.pair import Pair, net, placed, twice

pytestmark = pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")


@pytest.mark.parametrize(
    ("category", "precision"),
    [
        ("", Precision.FLOAT32),
        ("keep", Precision.FLOAT32),
        ("deny", Precision.FLOAT32),
        ("allow", Precision.LOW),
        ("infer", Precision.LOW),
        ("clear", Precision.LOW),
        ("promote", Precision.LOW),
    ],
)
def test_a_custom_op_has_its_category_and_unlisted_the_captured_dtype(
    category: str, precision: Precision, tmp_path: Path
) -> None:
    path, low = tmp_path / "list.yaml", torch.float16
    path.write_text(f"{category}: ['invariants::twice']\n" if category else "{}\n")
    x = torch.randn(3, 8)
    pair = Pair.of(net(lambda m, x: m.b(twice(m.a(x)))), (x,), low, op_list=["default", path])
    pair.agree(x)
    assert placed(pair.amp_model, "invariants::twice") == [precision]
    assert pair.amp_model.plan.unlisted == ({} if category else {"invariants::twice": 1})
    (node,) = [n for n in pair.amp_model.graph.nodes if op_name(n) == "invariants::twice"]
    assert dtypes(node) == (torch.float32 if precision is Precision.FLOAT32 else low,)
