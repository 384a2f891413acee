"""Attention with dropout is written out where torch would widen it, and only there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autocastfx
from autocastfx.plan import Recomposed
from tests.helpers import Function, op_list, relative_error, rewritten, saved_bytes, text

LOW = torch.bfloat16
EPS = torch.finfo(LOW).eps
Q, K, V = (torch.randn(2, 3, n, 16, generator=torch.Generator().manual_seed(n)) for n in (8, 12, 12))
SEEN = torch.ones(2, 1, 8, 12, dtype=torch.bool).tril(4)
BIAS = torch.randn(1, 3, 8, 12, generator=torch.Generator().manual_seed(1))
kernel = functools.partial(autocastfx.convert, dtype=LOW, fold="kernel")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, mask, **{"dropout_p": 0.5, "scale": 0.25, **options})


def seeded(run: Callable[[], Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return run()


def result_and_gradients(model: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    y = seeded(lambda: model(*leaves))
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    out = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    return [y.detach(), *torch.autograd.grad(y, asked, out.to(y.dtype))]


def written_out(model: autocastfx.AmpModule) -> list[tuple[str, ...]]:
    return [one.replaced for one in model.plan.recomposed if one.pattern == "math_attention"]


def test_the_graph_before_and_after() -> None:
    def shown(**options: Any) -> str:
        found = rewritten(attend, Q, K, V, SEEN, dtype=LOW, fold="kernel", keep_output_dtype=False, **options)
        return found.replace("scaled_dot_product_attention", "sdpa").replace("attention_", "")

    assert shown(recompose=False) == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
        + args_2_bfloat16: bf16 = to(args_2)
          sdpa: bf16 = sdpa(args_0_bfloat16, args_1_bfloat16, args_2_bfloat16, args_3)
          return sdpa
    """)
    assert shown() == text("""
          scaled: f32 = mul(args_0)
        + scaled_bfloat16: bf16 = to(scaled)
          keys: f32 = transpose(args_1)
        + keys_bfloat16: bf16 = to(keys)
          scores: bf16 = matmul(scaled_bfloat16, keys_bfloat16)
          masked: bf16 = where(args_3, scores)
          softmax: bf16 = _safe_softmax(masked)
          dropout: bf16 = dropout(softmax)
        + args_2_bfloat16: bf16 = to(args_2)
          values: bf16 = matmul(dropout, args_2_bfloat16)
          return values
    """)


def test_the_plan_says_what_was_written_out() -> None:
    plan = kernel(Function(attend), (Q, K, V, BIAS)).plan
    name = "scaled_dot_product_attention"
    assert plan.recomposed == (Recomposed("math_attention", "attention_values", (name,)),)
    assert plan["attention_scores"].decision.reason
    assert [str(plan[f"attention_{part}"].placement.run) for part in ("scores", "softmax", "values")] == ["low"] * 3
    assert autocastfx.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "mask", [None, SEEN, BIAS, torch.where(SEEN, BIAS, -torch.inf)], ids=["no", "bool", "float", "inf"]
)
@pytest.mark.parametrize("scale", [0.25, 1.0, 0.3], ids=str)
def test_it_drops_the_same_and_gives_what_torch_gives_but_for_roundings(mask: Tensor | None, scale: float) -> None:
    given = (Q, K, V) if mask is None else (Q, K, V, mask)
    function = Function(functools.partial(attend, scale=scale))
    model = kernel(function, given, keep_output_dtype=False)
    assert len(written_out(model)) == 1
    low = [t.to(LOW) if t.is_floating_point() else t for t in given]
    reference = result_and_gradients(function, *[t.float() if t.is_floating_point() else t for t in low])
    bare = result_and_gradients(function, *low)
    for found, expected, other in zip(result_and_gradients(model, *given), reference, bare, strict=True):
        # scores, weights, dropped weights and the result are rounded, and scaled queries; in backward as many again
        assert relative_error(found, expected) <= 5 * EPS
        assert relative_error(other, expected) <= 5 * EPS


@pytest.mark.parametrize("length", [8, 12, 15])
def test_causal_attention_of_any_length(length: int) -> None:
    function = Function(functools.partial(attend, is_causal=True))
    model = kernel(function, (Q, K, V))
    given = (torch.randn(2, 3, length, 16), K, V)
    assert len(written_out(model)) == 1
    for found, expected in zip(*(result_and_gradients(f, *given) for f in (model, function)), strict=True):
        assert relative_error(found, expected) <= 5 * EPS


def test_rows_that_are_masked_whole_give_zero_as_torchs_do() -> None:
    mask = SEEN.clone()
    mask[:, :, 3] = False
    model = kernel(Function(attend), (Q, K, V, mask))
    y, *gradients = result_and_gradients(model, Q, K, V, mask)
    assert (y[:, :, 3] == 0).all()
    assert (y[:, :, 4] != 0).any()
    assert all(g.isfinite().all() for g in gradients)


def test_it_keeps_less_for_backward() -> None:
    given = [torch.randn(2, 3, 64, 16) for _ in range(3)]
    function = Function(attend)
    model, whole = kernel(function, given), kernel(function, given, recompose=False)
    leaves = [t.requires_grad_() for t in given]
    assert saved_bytes(lambda: model(*leaves)) <= 0.6 * saved_bytes(lambda: whole(*leaves))


def hidden(x: Tensor, table: Tensor) -> Tensor:
    """Attention with a mask of finite numbers: those of a table, and one that hides."""
    bias = functional.embedding(torch.arange(8)[:, None] + torch.arange(8), table).permute(2, 0, 1)
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    return attend(x, x, x, torch.where(seen, bias, torch.finfo(torch.float32).min).expand(2, -1, -1, -1))


@pytest.mark.parametrize(
    ("function", "given", "softmax"),
    [
        pytest.param(attend, (Q, K, V), "softmax", id="no mask"),
        pytest.param(hidden, (Q, torch.randn(15, 3)), "softmax", id="a mask that is finite"),
        pytest.param(attend, (Q, K, V, BIAS), "_safe_softmax", id="a mask from outside"),
        pytest.param(attend, (Q, K, V, SEEN), "_safe_softmax", id="a mask of truth values"),
    ],
)
def test_rows_are_looked_at_where_they_may_be_masked_whole(
    function: Callable[..., Tensor], given: tuple[Tensor, ...], softmax: str
) -> None:
    ops = [n.op for n in kernel(Function(function), given).plan.nodes]
    assert [op for op in ops if "softmax" in op] == [softmax]


LEFT: dict[str, dict[str, Any]] = {
    "nothing is dropped": {"dropout_p": 0.0},
    "heads in groups": {"enable_gqa": True},
    "a scale by a size that is not fixed": {"scale": None},
}


@pytest.mark.parametrize("options", LEFT.values(), ids=LEFT)
def test_it_stays(options: dict[str, Any]) -> None:
    model = kernel(Function(functools.partial(attend, **options)), (Q, K, V))
    assert not written_out(model)
    assert "scaled_dot_product_attention" in {n.op for n in model.plan.nodes}


OTHERWISE: dict[str, dict[str, Any]] = {
    "fold": {"fold": "exact"},
    "float16 holds no large scores": {"dtype": torch.float16},
    "not asked for": {"recompose": ("softmax",)},
    "for another device": {"device": "cuda"},
    "no list lets it run in 16 bits": {"op_list": autocastfx.OpList(unlisted="keep")},
}


@pytest.mark.parametrize("options", OTHERWISE.values(), ids=OTHERWISE)
def test_it_stays_where(options: dict[str, Any]) -> None:
    assert not written_out(kernel(Function(attend), (Q, K, V), **options))


def test_it_stays_where_a_list_denies_it(tmp_path: Path) -> None:
    lists = ["bfloat16", op_list(tmp_path, "deny: [scaled_dot_product_attention]")]
    assert not written_out(kernel(Function(attend), (Q, K, V), op_list=lists))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return attend(q, k, v, dropout_p=0.5 if self.training else 0.0, scale=None)


def test_a_model_in_evaluation_keeps_torchs() -> None:
    block = Block()
    model = kernel(block, (torch.randn(2, 8, 16),))
    found = [[one.pattern for one in variant.plan.recomposed] for variant in model.variants]
    assert sorted(found) == [[], ["math_attention"]]
    x = torch.randn(3, 5, 16)  # another batch, another length
    expected = seeded(lambda: block.train()(x)).detach()
    assert relative_error(seeded(lambda: model.train()(x)).detach(), expected) <= 5 * EPS


def test_ranges_of_the_whole_are_those_of_the_last_part() -> None:
    block = Block().train()
    x = torch.randn(2, 8, 16)
    model = kernel(block, calibrate=[(x,)], headroom=1.0)
    assert "math_attention" in {one.pattern for one in model.plan.recomposed}
