"""One cast per value and dtype."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autocastfx.graph.node import dtypes, origin
from tests.invariants.pair import LOW, Net, Pair, inserted_casts, net

pytestmark = pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")


def _reused(m: Net, x: Tensor, mask: Tensor) -> Any:
    y = m.a(x)
    low = [m.b(y), m.b(x), m.a(y), y @ x.t(), torch.tanh(y) @ m.a.weight, x @ m.a.weight]
    wide = [y.exp(), y.log_softmax(-1), y.softmax(0), (x + mask).exp(), m.b(y + mask), m.b(y * mask)]
    return low, wide, m.b(torch.cat([y, y.exp()])), F.layer_norm(y, (8,)), y.sum(), y


@pytest.mark.parametrize("low", LOW)
def test_one_cast_per_value_and_dtype(low: torch.dtype) -> None:
    x, mask = torch.randn(3, 8), torch.randn(3, 8)
    pair = Pair.of(net(_reused), (x, mask), low)
    pair.agree(x, mask)
    for mode in (True, False):
        casts = inserted_casts(pair.amp_model.train(mode))
        made = Counter((origin(c).value, c.args[1]) for c in casts)
        assert set(made.values()) == {1}
        assert Counter(c.value for c in pair.amp_model.plan.casts) == Counter(origin(c).value for c in casts)
        assert all(len(set(dtypes(c)) | set(dtypes(c.all_input_nodes[0]))) == 2 for c in casts), "none is needless"


@pytest.mark.parametrize("low", LOW)
def test_a_value_that_is_written_to_is_cast_where_it_is_read(low: torch.dtype) -> None:
    def run(m: Net, x: Tensor) -> Any:
        first = m.a(x)
        x.add_(1)
        return first, m.a(x)

    x = torch.randn(3, 8)
    pair = Pair.of(net(run), (x,), low)
    pair.agree(x, backward=False)
    made = Counter((origin(c).value, origin(c).rule) for c in inserted_casts(pair.amp_model))
    mutated = [n for (_, rule), n in made.items() if rule == "mutated"]
    assert sum(mutated) == 2
    assert all(n == 1 for (_, rule), n in made.items() if rule != "mutated")
