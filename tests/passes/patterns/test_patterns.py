"""What models write out is found as they write it, and only that; the operator is as exact and keeps less."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import activations

import autocastfx
from autocastfx.graph.node import attributes_of
from autocastfx.passes.patterns.patterns import PATTERNS
from autocastfx.passes.recompose import recompose
from autocastfx.plan.plan import Precision
from autocastfx.policy.rule import Category
from tests.decided import decided
from tests.helpers import Function, relative_error, saved_bytes

EPS = torch.finfo(torch.float32).eps
WIDTH = 16


def t5_norm(x: Tensor, w: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance + 1e-6))


def llama_norm(x: Tensor, w: Tensor) -> Tensor:
    y = x.to(torch.float32)
    return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def gemma_norm(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).type_as(x)


def plain_norm(x: Tensor, w: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(x.ndim - 1, keepdim=True) + 1e-5)


def gated_norm(x: Tensor, w: Tensor) -> Tensor:
    return (x + w) * t5_norm(x, w)


def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return w * ((x - mean) / torch.sqrt(variance + 1e-5)) + w.flip(0)


def layer_norm_of_var(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (y - y.mean(-1, True)) * torch.rsqrt(y.var(-1, keepdim=True, unbiased=False) + 1e-5) * w


def layer_norm_of_correction(x: Tensor, w: Tensor) -> Tensor:
    return w * ((x - x.mean(-1, True)) / torch.sqrt(torch.var(x, -1, correction=0, keepdim=True) + 1e-5))


def softmax(x: Tensor, w: Tensor) -> Tensor:
    e = torch.exp(x - x.max(dim=-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def softmax_of_rows(x: Tensor, w: Tensor) -> Tensor:
    e = (x - x.amax(1, keepdim=True).detach()).exp()
    return e / e.sum(dim=1, keepdim=True)


def erf_gelu(x: Tensor, w: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def megatron_erf_gelu(x: Tensor, w: Tensor) -> Tensor:
    return x * (0.5 * (1.0 + torch.erf(x * 0.70710678)))


def swish(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x) * x


def quick(x: Tensor, w: Tensor) -> Tensor:
    return activations.QuickGELUActivation()(x)


WRITTEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], ...]] = {
    "rms_norm": (t5_norm, llama_norm, gemma_norm, plain_norm, gated_norm),
    "layer_norm": (layer_norm, layer_norm_of_var, layer_norm_of_correction),
    "softmax": (softmax, softmax_of_rows),
    "erf_gelu": (erf_gelu, megatron_erf_gelu),
    "silu": (swish,),
    "quick_gelu": (quick,),
}
CASES = [(name, function) for name, functions in WRITTEN.items() for function in functions]
IDS = [function.__name__ for _, function in CASES]


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return 2 * torch.randn(5, 7, WIDTH), torch.randn(WIDTH)


def traced(function: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    found = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*given)
    found.graph.eliminate_dead_code()
    return found


def recomposed(function: Callable[..., Any], *given: Tensor) -> tuple[fx.GraphModule, list[str]]:
    module = traced(function, *given)
    found = recompose(module.graph, PATTERNS, lambda node: (), attributes_of(module, module.graph))
    module.recompile()
    return module, [one.pattern for one in found]


def with_gradients(function: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in given]
    y = function(*leaves)
    torch.manual_seed(1)
    found = torch.autograd.grad(y, leaves, torch.randn(y.shape).to(y.dtype), allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


@pytest.mark.parametrize(("name", "function"), CASES, ids=IDS)
def test_float32_numbers_and_gradients_are_those_written_out(name: str, function: Callable[..., Tensor]) -> None:
    given = inputs()
    module, found = recomposed(function, *given)
    assert found == [name]
    for before, after in zip(with_gradients(function, *given), with_gradients(module, *given), strict=True):
        # None is a sum of more than 35 terms, each of which is rounded once more or less, in either.
        assert (after - before).abs().max() <= 35 * EPS * before.abs().max()


@pytest.mark.parametrize(("name", "function"), CASES, ids=IDS)
def test_backward_keeps_less(name: str, function: Callable[..., Tensor]) -> None:
    x, w = (t.requires_grad_() for t in inputs())
    module, _ = recomposed(function, x.detach(), w.detach())
    kept, before = saved_bytes(lambda: module(x, w)), saved_bytes(lambda: function(x, w))
    assert kept < before or (function is plain_norm and kept == before)  # which keeps its input and the roots, too


@pytest.mark.parametrize("function", [t5_norm, llama_norm, gemma_norm])
def test_an_rms_norm_is_the_same_to_the_bit(function: Callable[..., Tensor]) -> None:
    x, w = inputs()
    module, _ = recomposed(function, x, w)
    assert torch.equal(module(x, w), function(x, w))


# -- what stays -------------------------------------------------------------------------------------------------------


def inner_value_is_read(x: Tensor, w: Tensor) -> Any:
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (x * rstd), rstd


def maxima_are_read(x: Tensor, w: Tensor) -> Any:
    largest = x.max(-1, keepdim=True)
    e = torch.exp(x - largest.values)
    return e / e.sum(-1, keepdim=True), largest.indices


def rms(x: Tensor, y: Tensor | None = None, dims: Any = -1, power: float = 2, half: float = -0.5) -> Tensor:
    return x * ((x if y is None else y).pow(power).mean(dims, keepdim=True) + 1e-6).pow(half)


def shifted(x: Tensor, by: Tensor, dims: int = -1) -> Tensor:
    e = torch.exp(x - by)
    return e / e.sum(dims, keepdim=True)


NOT_QUITE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an inner value is given back": inner_value_is_read,
    "the places of the maxima are given back": maxima_are_read,
    "rms over another dimension": lambda x, w: rms(x, dims=1),
    "rms over two dimensions": lambda x, w: rms(x, dims=(1, 2)),
    "the cube": lambda x, w: rms(x, power=3.0),
    "the third root": lambda x, w: rms(x, half=-1 / 3),
    "rms of another value": lambda x, w: rms(x, x + 1),
    "a square that is no mean": lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
    "epsilon is a value": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w[0]),
    "epsilon outside the root": lambda x, w: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6),
    "float64 inside": lambda x, w: x * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6).float(),
    "float16": lambda x, w: rms(x.half()),
    "written into afterwards": lambda x, w: (y := x + 1, z := rms(y), y.zero_(), z)[-1],
    "a variance of a sample": lambda x, w: (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5),
    "a variance with a correction": lambda x, w: (
        (x - x.mean(-1, True)) * torch.rsqrt(torch.var(x, -1, correction=1, keepdim=True) + 1e-5)
    ),
    "the mean of another dimension": lambda x, w: (x - x.mean(1, True)) * (x.var(-1, False, True) + 1e-5).rsqrt(),
    "a deviation and epsilon": lambda x, w: (x - x.mean(-1, True)) / (x.std(-1, unbiased=False, keepdim=True) + 1e-5),
    "another slope": lambda x, w: x * torch.sigmoid(1.7 * x),
    "the sigmoid of another value": lambda x, w: x * torch.sigmoid(x + 1),
    "the root of 3": lambda x, w: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(3.0))),
    "no maximum": lambda x, w: shifted(x, w),
    "the largest of other dimensions": lambda x, w: shifted(x, x.amax(1, keepdim=True)),
    "the sum of other dimensions": lambda x, w: shifted(x, x.amax(-1, keepdim=True), 1),
}


@pytest.mark.parametrize("name", NOT_QUITE)
def test_what_is_not_quite_it_stays(name: str) -> None:
    module = traced(NOT_QUITE[name], *inputs())
    before = str(module.graph)
    assert recompose(module.graph, PATTERNS, lambda node: (), attributes_of(module, module.graph)) == ()
    assert str(module.graph) == before


def test_a_factor_of_another_shape_stays_outside() -> None:
    module, found = recomposed(lambda x, w: rms(x) * (x + w), *inputs())
    assert found == ["rms_norm"]
    assert sum("mul" in str(node.target) for node in module.graph.nodes) == 1


def test_a_cast_before_a_norm_goes_with_it_only_if_nothing_else_reads_it() -> None:
    def shared(x: Tensor, w: Tensor) -> Any:
        y = x.float()
        return rms(y), y.exp()

    for function, casts in ((llama_norm, 0), (shared, 1)):
        module, found = recomposed(function, *inputs())
        assert found == ["rms_norm"]
        assert sum("aten.to" in str(node.target) for node in module.graph.nodes) == casts


def test_the_models_own_island_around_an_activation_is_kept() -> None:
    def island(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).float()
        return (y * torch.sigmoid(y)) @ w

    given = torch.randn(8, 8), torch.randn(8, 8)
    plan = decided(island, *given, dtype=torch.bfloat16).plan
    (found,) = plan.recomposed
    assert plan[found.node].dtype == "float32"
    assert [node.placement.run for node in plan.nodes if node.op == "to"] == [Precision.FLOAT32]


# -- in models --------------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS_IN = {"input_ids": torch.arange(8)[None] % 32}


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return transformers.T5EncoderModel(transformers.T5Config(vocab_size=32, **sizes, use_cache=False))


def llama() -> nn.Module:
    return transformers.LlamaModel(transformers.LlamaConfig(vocab_size=32, **SIZES, use_cache=False))


def gemma() -> nn.Module:
    sizes = {**SIZES, "num_key_value_heads": 1, "head_dim": 8}
    return transformers.GemmaModel(transformers.GemmaConfig(vocab_size=32, **sizes, use_cache=False))


def clip() -> nn.Module:
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(vocab_size=32, max_position_embeddings=16, **SIZES, eos_token_id=7)
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (t5, {"rms_norm": 3}),
        (llama, {"rms_norm": 3}),
        (gemma, {"rms_norm": 3, "tanh_gelu": 0}),
        (clip, {"quick_gelu": 1}),
    ],
    ids=["t5", "llama", "gemma", "clip"],
)
def test_models_are_recomposed_in_every_layer(make: Callable[[], nn.Module], expected: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    amp_model, as_written = (
        autocastfx.convert(model, (), IDS_IN, dtype=torch.bfloat16, recompose=switch) for switch in (True, False)
    )
    assert Counter(r.pattern for r in amp_model.plan.recomposed) == Counter(expected)
    assert as_written.plan.recomposed == ()
    exact, found, before = (m(**IDS_IN).last_hidden_state.detach() for m in (model, amp_model, as_written))
    # As near as before: each is off by roundings of the same size, and of no more values.
    assert relative_error(found, exact) <= 1.25 * relative_error(before, exact)
    assert relative_error(found, exact) < 4 * torch.finfo(torch.bfloat16).eps
    kept = [saved_bytes(lambda m=m: m(**IDS_IN).last_hidden_state) for m in (amp_model, as_written)]
    assert kept[0] < kept[1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(llama_norm(self.up(x), self.weight))


def test_a_list_decides_of_a_recomposed_norm_by_the_name_of_torchs() -> None:
    model, (x, _) = Block(), inputs()
    plan = decided(model, x, dtype=torch.bfloat16, fold="none").plan
    (found,) = plan.recomposed
    norm = plan[found.node]
    assert (norm.op, norm.decision.category, norm.dtype) == ("rms_norm", Category.DENY, "float32")
    lists = ["default", autocastfx.OpList.of({"allow": ["rms_norm"]})]
    amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16, op_list=lists)
    assert amp_model.plan[found.node].dtype == "bfloat16"
    assert relative_error(amp_model(x).detach(), model(x).detach()) < 4 * torch.finfo(torch.bfloat16).eps
    unpickled = pickle.loads(pickle.dumps(amp_model))
    assert torch.equal(unpickled(x), amp_model(x))
    assert f"{found.node}" in autocastfx.dump(amp_model)
    assert "rms_norm" in str(autocastfx.explain(amp_model, found.node))


@pytest.mark.parametrize("preset", ["torch_autocast_cpu", "torch_autocast_cuda", "apex_o1"])
def test_lists_that_follow_autocast_recompose_nothing(preset: str) -> None:
    model = Function(lambda x, w: quick(layer_norm(llama_norm(x, w), w), w))
    assert decided(model, *inputs(), dtype=torch.bfloat16, op_list=preset).plan.recomposed == ()
