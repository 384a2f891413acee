"""Attention with dropout is written out where torch would widen it, that of few tokens is ours, and only there."""

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
from autocastfx.errors import BannedOpError
from autocastfx.plan.plan import Recomposed
from autocastfx.runtime.operators.short_attention import TOKENS, short_attention
from tests.decided import rewritten
from tests.helpers import Function, op_list, relative_error, saved_bytes, text, unchecked

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
        # roundings of scores, weights and results, which are independent of each other
        assert relative_error(found, expected) <= 2 * EPS
        assert relative_error(other, expected) <= 2 * EPS


@pytest.mark.parametrize("length", [8, 12, 15])
def test_causal_attention_of_any_length(length: int) -> None:
    function = Function(functools.partial(attend, is_causal=True))
    model = kernel(function, (Q, K, V))
    given = (torch.randn(2, 3, length, 16), K, V)
    assert len(written_out(model)) == 1
    for found, expected in zip(*(result_and_gradients(f, *given) for f in (model, function)), strict=True):
        assert relative_error(found, expected) <= 2 * EPS


class Attending(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend(q, k, v, mask)


@pytest.mark.parametrize("mask", [SEEN, BIAS], ids=["bool", "float"])
def test_it_is_written_out_in_a_graph_of_dynamo_too(mask: Tensor) -> None:
    """Whose abstract values take no tensor that is not abstract, as the one that an operator makes of a number."""
    torch.compiler.reset()
    model = autocastfx.enable(Attending(), dtype="bfloat16", fold="kernel")
    torch.manual_seed(0)
    found = model(Q, K, V, mask)
    torch.manual_seed(0)
    assert relative_error(found, attend(Q, K, V, mask)) <= 2 * EPS
    backend = autocastfx.backend_of(model)
    assert backend is not None
    assert [len(graph.plan.recomposed) if graph.plan else 0 for graph in backend.graphs] == [1]


LOWEST = torch.finfo(torch.float32).min
DEAD = SEEN.clone()
DEAD[:, :, 3] = False
HIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "truth values": lambda seen: seen,
    "-inf": lambda seen: torch.where(seen, 0.0, -torch.inf),
    "sum of two masks": lambda seen: torch.where(seen, 0.0, LOWEST) + torch.where(seen, 0.0, LOWEST),
    "beyond the range": lambda seen: (1 - seen.float()) * LOWEST * 2.0,
    "a table": lambda seen: functional.embedding((~seen).long(), torch.tensor([[0.0], [-torch.inf]])).squeeze(-1),
}


@pytest.mark.parametrize("mask", HIDING.values(), ids=HIDING)
def test_rows_that_are_masked_whole_give_zero_as_torchs_do(mask: Callable[[Tensor], Tensor]) -> None:
    function = Function(lambda q, k, v, seen: attend(q, k, v, mask(seen)))
    model = kernel(function, (Q, K, V, DEAD))
    assert len(written_out(model)) == 1
    found, expected = (result_and_gradients(f, Q, K, V, DEAD) for f in (model, function))
    assert (found[0][:, :, 3] == 0).all()
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) <= 2 * EPS


def test_it_keeps_less_for_backward() -> None:
    given = [torch.randn(2, 3, 64, 16) for _ in range(3)]
    function = Function(attend)
    model, whole = kernel(function, given), kernel(function, given, recompose=False)
    leaves = [t.requires_grad_() for t in given]
    assert saved_bytes(lambda: model(*leaves)) <= 0.6 * saved_bytes(lambda: whole(*leaves))


LEFT: dict[str, dict[str, Any]] = {
    "nothing is dropped": {"dropout_p": 0.0},
    "heads in groups": {"enable_gqa": True},
}


@pytest.mark.parametrize("options", LEFT.values(), ids=LEFT)
def test_it_stays(options: dict[str, Any]) -> None:
    model = kernel(Function(functools.partial(attend, **options)), (Q, K, V))
    assert not written_out(model)
    assert "scaled_dot_product_attention" in {n.op for n in model.plan.nodes}


@unchecked
@pytest.mark.parametrize("given", [(Q[:0], K[:0], V[:0]), (Q[..., :0], K[..., :0], V)], ids=["batch", "head"])
def test_it_stays_where_a_size_is_zero(given: tuple[Tensor, ...]) -> None:
    assert not written_out(kernel(Function(functools.partial(attend, scale=None)), given))


@unchecked
def test_a_mask_that_is_larger_than_the_scores_is_refused_as_before() -> None:
    model = kernel(Function(attend), (Q[:1], K[:1], V[:1], SEEN))
    assert not written_out(model)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        model(Q[:1], K[:1], V[:1], SEEN)


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


@pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")
@pytest.mark.parametrize("op", ["scaled_dot_product_attention", "matmul"])
@pytest.mark.parametrize("category", ["deny", "keep", "ban"])
def test_a_list_decides(tmp_path: Path, op: str, category: str) -> None:
    lists = ["bfloat16", op_list(tmp_path, f"{category}: [{op}]")]
    if (op, category) == ("scaled_dot_product_attention", "ban"):
        with pytest.raises(BannedOpError):
            kernel(Function(attend), (Q, K, V), op_list=lists)
    else:
        assert not written_out(kernel(Function(attend), (Q, K, V), op_list=lists))


@pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")
@pytest.mark.parametrize("category", ["ban", "keep"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_ban_on_a_part_is_none_on_the_whole(tmp_path: Path, category: str, dropout: float) -> None:
    lists = ["bfloat16", op_list(tmp_path, f"{category}: [softmax]")]
    function = Function(functools.partial(attend, dropout_p=dropout))
    assert kernel(function, (Q, K, V), op_list=lists).plan.recomposed == ()


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
    model.eval()(torch.randn(2, 8, 16))
    found = [[one.pattern for one in variant.plan.recomposed] for variant in model.variants]
    assert sorted(found) == [["math_attention"], ["short_attention"]]
    x = torch.randn(3, 5, 16)  # another batch, another length
    expected = seeded(lambda: block.train()(x)).detach()
    assert relative_error(seeded(lambda: model.train()(x)).detach(), expected) <= 2 * EPS


def test_the_range_of_the_whole_is_that_of_the_last_part() -> None:
    x = torch.randn(2, 8, 16)
    model = kernel(Block().train(), calibrate=[(x,)], headroom=torch.finfo(LOW).max / 1e-3)
    reasons = {part: model.plan[f"attention_{part}"].decision.reason for part in ("scores", "values")}
    assert reasons["values"].startswith("its output reached")
    assert reasons["scores"].startswith("its input"), "its own output was not measured"


# -- attention of few tokens ----------------------------------------------------------------------------------------

attend_all = functools.partial(attend, dropout_p=0.0)


def made_short(model: autocastfx.AmpModule) -> list[tuple[str, ...]]:
    found = [one.replaced for one in model.plan.recomposed if one.pattern == "short_attention"]
    assert len(found) == sum(node.target is short_attention for node in model.graph.nodes)
    return found


def test_the_graph_with_attention_of_few_tokens() -> None:
    def shown(**options: Any) -> str:
        found = rewritten(attend_all, Q, K, V, SEEN, dtype=LOW, fold="kernel", keep_output_dtype=False, **options)
        return found.replace("scaled_dot_product_attention", "sdpa")

    assert (
        shown()
        == shown(recompose=False)
        == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
        + args_2_bfloat16: bf16 = to(args_2)
          sdpa: bf16 = sdpa(args_0_bfloat16, args_1_bfloat16, args_2_bfloat16, args_3)
          return sdpa
    """)
    )
    assert made_short(kernel(Function(attend_all), (Q, K, V, SEEN)))
    assert not made_short(kernel(Function(attend_all), (Q, K, V, SEEN), recompose=False))


def test_the_plan_says_which_attention_is_of_few_tokens() -> None:
    plan = kernel(Function(attend_all), (Q, K, V, BIAS)).plan
    name = "scaled_dot_product_attention"
    assert plan.recomposed == (Recomposed("short_attention", name, (name,)),)
    assert plan[name].op == name
    assert autocastfx.Plan.from_json(plan.to_json()) == plan
    again = kernel(Function(attend_all), (Q, K, V, BIAS), plan=plan)
    assert again.plan.recomposed == plan.recomposed


# As many scores as the operator wants before it computes them anew.
MANY = [torch.randn(2, 3, n, 16, generator=torch.Generator().manual_seed(n)) for n in (40, 36, 36)]
MANY_SEEN, MANY_BIAS = SEEN.repeat(1, 1, 5, 3), BIAS.repeat(1, 1, 5, 3)


@pytest.mark.parametrize(
    "mask",
    [None, MANY_SEEN, MANY_BIAS, torch.where(MANY_SEEN, MANY_BIAS, -torch.inf)],
    ids=["no", "bool", "float", "inf"],
)
def test_few_tokens_give_what_torch_gives_but_for_roundings(
    mask: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    function = Function(lambda q, k, v: attend_all(q, k, v, mask))
    model = kernel(function, MANY, keep_output_dtype=False)
    assert made_short(model)
    result = model(*(t.clone().requires_grad_() for t in MANY))
    assert type(result.grad_fn).__name__ == "_RecomputedBackward"
    for found, expected in zip(*(result_and_gradients(f, *MANY) for f in (model, function)), strict=True):
        assert relative_error(found, expected) <= 2 * EPS


@pytest.mark.parametrize("length", [5, TOKENS, TOKENS + 1])
def test_a_call_may_bring_another_number_of_tokens(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    x = torch.randn(1, 2, 8, 16)
    function = Function(lambda x: attend_all(x, x, x))
    model = kernel(function, (x,))
    assert made_short(model)
    given = torch.randn(1, 2, length, 16)
    for found, expected in zip(*(result_and_gradients(f, given) for f in (model, function)), strict=True):
        assert relative_error(found, expected) <= 2 * EPS


LONG = torch.randn(1, 1, TOKENS + 1, 16)
NOT_SHORT: dict[str, Callable[[], autocastfx.AmpModule]] = {
    "many queries": lambda: kernel(Function(attend_all), (LONG, K[:1, :1], V[:1, :1])),
    "many keys": lambda: kernel(Function(attend_all), (Q[:1, :1], LONG, LONG)),
    "without heads": lambda: kernel(Function(attend_all), (Q[0], K[0], V[0])),
    "heads in groups": lambda: kernel(Function(functools.partial(attend_all, enable_gqa=True)), (Q, K, V)),
    **{
        reason: lambda options=options: kernel(Function(attend_all), (Q, K, V), **options)
        for reason, options in OTHERWISE.items()
    },
}


@pytest.mark.parametrize("converted", NOT_SHORT.values(), ids=NOT_SHORT)
def test_attention_stays_torchs(converted: Callable[[], autocastfx.AmpModule]) -> None:
    assert not made_short(converted())


@pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")
@pytest.mark.parametrize("op", ["scaled_dot_product_attention", "matmul"])
@pytest.mark.parametrize("category", ["deny", "keep"])
def test_a_list_decides_of_attention_of_few_tokens(tmp_path: Path, op: str, category: str) -> None:
    lists = ["bfloat16", op_list(tmp_path, f"{category}: [{op}]")]
    assert not made_short(kernel(Function(attend_all), (Q, K, V), op_list=lists))
