"""Deterministic, idempotent, the order of the list does not matter."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx import AmpModule
from autocastfx.plan.plan import Precision
from autocastfx.policy.op_list import preset_folder
from tests.helpers import Net, with_pinned_torch
from tests.invariants.pair import HUGE, LOW, inserted_casts, twice

pytestmark = [pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")]


class Representative(nn.Module):
    """A bit of everything that the passes treat differently."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.bn = nn.Embedding(9, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.drop, self.rnn = nn.Dropout(0.1), nn.GRU(8, 8, batch_first=True)
        self.register_buffer("mask", torch.full((8, 8), HUGE).triu(1))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, i: Tensor, x: Tensor) -> dict[str, Any]:
        y = self.norm(self.embed(i) + x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        scores = q @ k.mT / 2 + self.mask[: i.shape[1], : i.shape[1]]
        y = self.drop(torch.softmax(scores.float(), -1).type_as(scores) @ v) + y
        y = self.bn(y.mT).mT
        with torch.no_grad():
            self.average.lerp_(y.mean((0, 1)), 0.1)
        y, last = self.rnn(y)
        y[:, 0] = 0.0
        values, where = y.topk(2, -1)
        return {"out": self.out(y), "last": last, "top": (values, where), "twice": twice(self.out(y))}


REPRESENTATIVE = (torch.arange(16).view(2, 8) % 9, torch.randn(2, 8, 8))


def representative(**options: Any) -> AmpModule:
    return autocastfx.convert(Representative(), REPRESENTATIVE, **{"dtype": torch.bfloat16, **options})


def codes_and_plans(amp_model: AmpModule) -> list[Any]:
    return [(v.code, v.plan) for v in amp_model.variants]


def test_conversion_is_deterministic() -> None:
    """Hashes of strings differ from run to run, and the dumps in tests/golden are the same in each."""
    first = representative()
    occupied = [fx.Graph() for _ in range(50)]  # other addresses, so that an order by id would change
    second = representative()
    del occupied
    assert codes_and_plans(first) == codes_and_plans(second)
    assert [v.guard for v in first.variants] == [v.guard for v in second.variants]


@pytest.mark.parametrize("low", LOW)
def test_conversion_is_idempotent(low: torch.dtype) -> None:
    once, call = representative(dtype=low), REPRESENTATIVE
    once.train(low is torch.float16)
    program = torch.export.export(once, call, strict=False)
    again = autocastfx.convert(program, dtype=low)
    assert [c.name for c in inserted_casts(again)] == []
    kept = copy.deepcopy(once.state_dict())
    torch.manual_seed(1)
    first = once(*call)
    once.load_state_dict(kept)
    again.load_state_dict(kept)
    torch.manual_seed(1)
    second = again(*call)
    assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True))


@pytest.mark.parametrize("low", LOW)
def test_a_model_that_is_low_already_is_unchanged(low: torch.dtype) -> None:
    i = torch.arange(6).view(2, 3)
    model = Net(
        lambda m, i: m.head(m.layer(m.embed(i))).log_softmax(-1),
        embed=nn.Embedding(9, 8),
        layer=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        head=nn.Linear(8, 9),
    ).to(low)
    eager = copy.deepcopy(model)
    nothing_denied = autocastfx.OpList.of({"allow": ["linear", "scaled_dot_product_attention"], "infer": ["add"]})
    amp_model = autocastfx.convert(model, (i,), op_list=nothing_denied)
    for mode in (True, False):
        assert not inserted_casts(amp_model.train(mode))
        assert {n.placement.run for n in amp_model.plan.nodes} <= {Precision.CAPTURED, Precision.LOW}
        torch.manual_seed(0)
        expected = eager.train(mode)(i)
        torch.manual_seed(0)
        assert torch.equal(amp_model(i), expected)


def _reordered(tree: Any, shuffle: random.Random) -> Any:
    if isinstance(tree, dict):
        items = [(k, _reordered(v, shuffle)) for k, v in tree.items()]
        shuffle.shuffle(items)
        return dict(items)
    if isinstance(tree, list):
        items = [_reordered(v, shuffle) for v in tree]
        shuffle.shuffle(items)
        return items
    return tree


@with_pinned_torch
@pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")  # a copy of a shipped list is one's own
@pytest.mark.parametrize("low", LOW)
def test_the_order_of_the_lists_entries_does_not_matter(low: torch.dtype, tmp_path: Path) -> None:
    name = str(low).removeprefix("torch.")
    shuffle = random.Random(0)
    for preset in ("base", name):
        tree = yaml.safe_load((preset_folder() / f"{preset}.yaml").read_text())
        if "extends" in tree:
            tree["extends"] = str(tmp_path / "base.yaml")
        # keep_args lists name arguments by their words, so their order has no meaning either
        (tmp_path / f"{preset}.yaml").write_text(yaml.safe_dump(_reordered(tree, shuffle), sort_keys=False))
    usual, shuffled = representative(dtype=low), representative(dtype=low, op_list=tmp_path / f"{name}.yaml")
    assert [v.code for v in shuffled.variants] == [v.code for v in usual.variants]
    for ours, theirs in zip(usual.plan.nodes, shuffled.plan.nodes, strict=True):
        assert ours.placement == theirs.placement
        assert (ours.decision.category, ours.decision.reason) == (theirs.decision.category, theirs.decision.reason)
