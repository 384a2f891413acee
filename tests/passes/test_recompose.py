"""recompose puts one operator where a model writes its formula out, and only there."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from transformers import activations

import autocastfx
from autocastfx.passes.patterns.patterns import PATTERNS
from autocastfx.passes.recompose import _is_wide, recompose
from autocastfx.plan.plan import Plan, Recomposed
from tests.decided import decided, rewritten, traced
from tests.helpers import Function, op_list, relative_error, text

SCALE = math.sqrt(2 / math.pi)
EPS = torch.finfo(torch.float32).eps


def new_gelu(x: Tensor, cube: float = 0.044715, scale: float = SCALE, power: float = 3.0, half: float = 0.5) -> Tensor:
    return half * x * (1.0 + torch.tanh(scale * (x + cube * torch.pow(x, power))))


def fast_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def swapped(x: Tensor) -> Tensor:
    return (torch.tanh((0.044715 * x**3 + x) * SCALE) + 1) * (x * 0.5)


def product(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(SCALE * (x + 0.044715 * x * x * x)))


def cube(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(SCALE * (x + 0.044715 * (x * x * x))))


def distribution(x: Tensor) -> Tensor:
    return x * (0.5 * (1.0 + torch.tanh(SCALE * (x + 0.044715 * torch.pow(x, 3)))))


def megatron(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (new_gelu, fast_gelu, swapped, product, cube, distribution, megatron)
}
WRITTEN |= {
    "NewGELUActivation": activations.NewGELUActivation(),
    "FastGELUActivation": activations.FastGELUActivation(),
    "AccurateGELUActivation": activations.AccurateGELUActivation(),
    "rounded numbers": partial(new_gelu, scale=0.797884, cube=0.044715 * (1 + 5e-7)),
    "own cast inside": lambda x: 0.5 * x * (1 + torch.tanh((SCALE * (x + 0.044715 * x**3)).to(torch.float32))),
}


def captured(function: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    """A copy of the graph of ``function`` as captured."""
    return traced(function, *inputs)


def done(graph: fx.Graph) -> tuple[Recomposed, ...]:
    return recompose(graph, PATTERNS, lambda node: (), {})


@pytest.mark.parametrize("name", WRITTEN)
def test_every_way_to_write_it_is_one_operator(name: str) -> None:
    graph = captured(lambda x: WRITTEN[name](x), torch.randn(3, 4))
    before = [n.name for n in graph.nodes if n.op == "call_function"]
    (found,) = done(graph)
    graph.lint()
    assert (found.pattern, found.replaced) == ("tanh_gelu", tuple(before))
    (made,) = (n for n in graph.nodes if n.op == "call_function")
    assert made.name == found.node == f"{before[-1]}_gelu"
    assert made.target is torch.ops.aten.gelu.default
    assert made.kwargs == {"approximate": "tanh"}
    assert (made.meta["val"].shape, made.meta["val"].dtype) == ((3, 4), torch.float32)


def test_the_graph_before_and_after() -> None:
    def mlp(x: Tensor, w: Tensor) -> Tensor:
        return new_gelu(x @ w) @ w

    inputs = torch.rand(8, 8), torch.rand(8, 8)
    assert rewritten(mlp, *inputs, dtype=torch.bfloat16, recompose=False) == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
          matmul: bf16 = matmul(args_0_bfloat16, args_1_bfloat16)
        + matmul_float32: f32 = to(matmul)
          mul: bf16 = mul(matmul)
          pow_1: f32 = pow(matmul_float32)
          mul_1: f32 = mul(pow_1)
          add: f32 = add(matmul_float32, mul_1)
          mul_2: f32 = mul(add)
          tanh: f32 = tanh(mul_2)
          add_1: f32 = add(tanh)
          mul_3: f32 = mul(mul, add_1)
        + mul_3_bfloat16: bf16 = to(mul_3)
          matmul_1: bf16 = matmul(mul_3_bfloat16, args_1_bfloat16)
        + matmul_1_float32: f32 = to(matmul_1)
          return matmul_1_float32
    """)
    assert rewritten(mlp, *inputs, dtype=torch.bfloat16) == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
          matmul: bf16 = matmul(args_0_bfloat16, args_1_bfloat16)
          mul_3_gelu: bf16 = gelu(matmul)
          matmul_1: bf16 = matmul(mul_3_gelu, args_1_bfloat16)
        + matmul_1_float32: f32 = to(matmul_1)
          return matmul_1_float32
    """)


# -- what stays -------------------------------------------------------------------------------------------------------


def shown(x: Tensor) -> tuple[Tensor, Tensor]:
    t = torch.tanh(SCALE * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), t


def written_between(x: Tensor) -> Tensor:
    y = x + 1
    half = 0.5 * y
    y.add_(1)
    return half * (1 + torch.tanh(SCALE * (y + 0.044715 * y**3)))


def written_into_its_view(x: Tensor) -> Tensor:
    y = x + 1
    result = new_gelu(y[0])
    y.zero_()
    return result


def half_in_float64(x: Tensor) -> Tensor:
    inner = (SCALE * (x + 0.044715 * x**3)).double()
    return 0.5 * x * (1 + torch.tanh(inner).float())


NOT_QUITE: dict[str, Callable[..., Any]] = {
    "another cube": lambda x: new_gelu(x, cube=0.0447),
    "another scale": lambda x: new_gelu(x, scale=0.7979),
    "a scale just outside the tolerance": lambda x: new_gelu(x, scale=SCALE * (1 + 2e-6)),
    "another half": lambda x: new_gelu(x, half=0.25),
    "the square": lambda x: new_gelu(x, power=2.0),
    "the fourth power": lambda x: new_gelu(x, power=4.0),
    "one is not in the product": lambda x: 0.5 * x * 1 + torch.tanh(SCALE * (x + 0.044715 * x**3)),
    "the scale is of one term": lambda x: 0.5 * x * (1 + torch.tanh(SCALE * x + 0.044715 * x**3)),
    "the cube of a product": lambda x: 0.5 * x * (1 + torch.tanh(SCALE * (x + (0.044715 * x) ** 3))),
    "a difference": lambda x: 0.5 * x * (1 - torch.tanh(SCALE * (x + 0.044715 * x**3))),
    "another function": lambda x: 0.5 * x * (1 + torch.sigmoid(SCALE * (x + 0.044715 * x**3))),
    "an alpha": lambda x: 0.5 * x * (1 + torch.tanh(SCALE * torch.add(x, 0.044715 * x**3, alpha=2))),
    "a number to the power of x": lambda x: 0.5 * x * (1 + torch.tanh(SCALE * (x + 0.044715 * torch.pow(3.0, x)))),
    "the input detached once": lambda x: 0.5 * x.detach() * (1 + torch.tanh(SCALE * (x + 0.044715 * x**3))),
    "a value inside is given back": shown,
    "the input is written into between": written_between,
    "the input's storage is written into": written_into_its_view,
    "float64 inside": half_in_float64,
    "float64": lambda x: new_gelu(x.double()),
    "float16": lambda x: new_gelu(x.half()),
    "two inputs": lambda x: 0.5 * x * (1 + torch.tanh(SCALE * ((x + 1) + 0.044715 * x**3))),
    "a tensor for a number": lambda x: x[0, 0] * x * (1 + torch.tanh(SCALE * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("name", NOT_QUITE)
def test_what_is_not_quite_it_stays(name: str) -> None:
    graph = captured(NOT_QUITE[name], torch.randn(3, 4))
    before = str(graph)
    assert done(graph) == ()
    assert str(graph) == before


@pytest.mark.parametrize(
    "other", [torch.empty(3, 4, device="meta"), torch.ones(3, 4).to_sparse()], ids=["device", "layout"]
)
def test_a_value_of_another_kind_inside_stays(other: Tensor) -> None:
    graph = captured(WRITTEN["own cast inside"], torch.randn(3, 4))
    next(n for n in graph.nodes if n.target is torch.ops.aten.to.dtype).meta["val"] = other
    assert done(graph) == ()


def test_a_result_that_is_written_into_is_still_recomposed() -> None:
    def inplace(x: Tensor) -> Tensor:
        return new_gelu(x).mul_(2)

    x = torch.randn(3, 4)
    amp_model = autocastfx.convert(Function(inplace), (x,), dtype="float16")
    assert len(amp_model.plan.recomposed) == 1
    torch.testing.assert_close(amp_model(x), inplace(x))


def test_nothing_is_read_through_a_recomposed_value_that_is_written_into() -> None:
    def twice(x: Tensor) -> Tensor:
        y = new_gelu(x)
        z = new_gelu(y)
        y.zero_()
        return z

    (found,) = done(captured(twice, torch.randn(3, 4)))
    assert found.node == "mul_3_gelu"


def test_recomposing_again_changes_nothing() -> None:
    graph = captured(lambda x: new_gelu(fast_gelu(x)) + cube(x), torch.randn(3, 4))
    assert [r.pattern for r in done(graph)] == ["tanh_gelu"] * 3
    graph.lint()
    before = str(graph)
    assert done(graph) == ()
    assert str(graph) == before


# -- numbers ----------------------------------------------------------------------------------------------------------


def forward_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """What float32 may miss of the formula, and of its derivative, at ``x``.

    1 + tanh(u) and 1 - tanh(u)**2 are off by a few ulp of 1 at most, for |u| * (1 - tanh(u)**2) < 1/2 bounds what an
    error of u does. They are multiplied by x / 2, and by x / 2 * u'.
    """
    slope = SCALE * (1 + 3 * 0.044715 * x.double() ** 2)
    return 4 * EPS * x.double().abs(), 4 * EPS * (1 + x.double().abs() * slope)


@pytest.mark.parametrize("name", [n for n in WRITTEN if n not in ("rounded numbers", "own cast inside")])
def test_float32_is_as_near_to_the_exact_formula_as_before(name: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([0.0, 1e-30, -1e-30, 1e4, -1e4])])
    graph = captured(lambda x: WRITTEN[name](x), x)
    assert len(done(graph)) == 1
    recomposed = fx.GraphModule(nn.Module(), graph)
    exact = forward_and_gradient(new_gelu, x.double())
    for function in (WRITTEN[name], lambda x: recomposed(x)[0]):
        found = forward_and_gradient(function, x)
        for result, reference, bound in zip(found, exact, bounds(x), strict=True):
            assert ((result.double() - reference).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_round_the_result_and_the_gradient_once(dtype: torch.dtype) -> None:
    def mlp(x: Tensor, w: Tensor) -> Tensor:
        return new_gelu(x @ w) @ w

    x, one = torch.linspace(-6, 6, 512).to(dtype).float().view(-1, 8), torch.eye(8)  # exact in 16 bits, as products are
    amp_model = autocastfx.convert(Function(mlp), (x, one), dtype=dtype)
    (found,) = amp_model.plan.recomposed
    assert amp_model.plan[found.node].dtype == str(dtype).removeprefix("torch.")
    results = forward_and_gradient(lambda x: amp_model(x, one), x)
    exact = forward_and_gradient(new_gelu, x.double())
    info = torch.finfo(dtype)
    for result, reference, bound in zip(results, exact, bounds(x), strict=True):
        once = info.eps / 2 * reference.abs() + info.smallest_normal * info.eps
        assert ((result.double() - reference).abs() <= once + bound).all()


# -- in a conversion --------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = activations.NewGELUActivation()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Frozen(nn.Module):
    """An MLP whose first layer runs without gradients, in a sub-graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)


@pytest.fixture(scope="module")
def frozen() -> autocastfx.AmpModule:
    return autocastfx.convert(Frozen(), (torch.randn(2, 8),), dtype=torch.bfloat16)


def test_the_plan_says_what_was_recomposed_in_sub_graphs_too(frozen: autocastfx.AmpModule) -> None:
    plan = frozen.plan
    inner, outer = plan.recomposed
    assert inner.node.startswith("submod_")
    assert all(name.rpartition("/")[0] == inner.node.rpartition("/")[0] for name in inner.replaced)
    assert "/" not in outer.node
    for found, module in ((inner, "first.act"), (outer, "second.act")):
        assert (plan[found.node].op, plan[found.node].module, plan[found.node].dtype) == ("gelu", module, "bfloat16")
        assert len(found.replaced) == 8
        assert not set(found.replaced) & {node.name for node in plan.nodes}
    assert Plan.from_json(plan.to_json()) == plan


def test_the_dump_counts_what_was_recomposed(frozen: autocastfx.AmpModule) -> None:
    assert "\nrecomposed: tanh_gelu (2)\n" in autocastfx.dump(frozen)
    assert "\n# recomposed: tanh_gelu (2)\n" in autocastfx.dump(frozen, format="python")
    as_written = autocastfx.convert(Frozen(), (torch.randn(2, 8),), recompose=False, dtype="float16", check=False)
    assert "recomposed" not in autocastfx.dump(as_written)


def test_an_unpickled_model_computes_the_same(frozen: autocastfx.AmpModule) -> None:
    x = torch.randn(3, 8)
    unpickled = pickle.loads(pickle.dumps(frozen))
    assert torch.equal(unpickled(x), frozen(x))
    frozen(torch.randn(2, 8))
    unpickled(torch.randn(2, 8))
    assert [v.plan.recomposed for v in unpickled.variants][-1] == frozen.plan.recomposed


def test_the_operator_stands_for_its_modules_and_its_line(frozen: autocastfx.AmpModule) -> None:
    made = next(n for n in frozen.graph.nodes if n.name == frozen.plan.recomposed[-1].node)
    assert "NewGELUActivation" in str(made.meta["nn_module_stack"])
    assert "tanh" in made.meta["stack_trace"]


@pytest.mark.parametrize("recompose", [False, ()])
def test_it_can_be_switched_off(recompose: Any) -> None:
    plan = decided(MLP(), torch.randn(2, 8), recompose=recompose, dtype="float16").plan
    assert (plan.recomposed, plan.by_op()["tanh", "float32"]) == ((), 1)


def test_it_can_be_asked_for_by_name() -> None:
    plan = decided(MLP(), torch.randn(2, 8), recompose=["tanh_gelu"], dtype="float16").plan
    assert len(plan.recomposed) == 1
    with pytest.raises(ValueError, match="there is no pattern 'gelu'; the patterns are tanh_gelu, "):
        autocastfx.convert(MLP(), (torch.randn(2, 8),), recompose=["gelu"], dtype="float16")


@pytest.mark.parametrize("preset", ["torch_autocast_cpu", "torch_autocast_cuda"])
def test_a_list_that_follows_autocast_recomposes_nothing(preset: str) -> None:
    plan = decided(MLP(), torch.randn(2, 8), op_list=preset, dtype="float16").plan
    assert plan.recomposed == ()
    assert any(node.op == "tanh" for node in plan.nodes)


@pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")
def test_rules_for_modules_and_bans_are_kept(tmp_path: Path) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tanh = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * x * (1 + self.tanh(SCALE * (x + 0.044715 * x**3)))

    def recomposed(rules: str) -> int:
        lists = ["default", op_list(tmp_path, rules)]
        return len(
            autocastfx.convert(
                Parts(), (torch.randn(2, 4),), op_list=lists, dtype="float16", check=False
            ).plan.recomposed
        )

    assert recomposed("deny: [tanh]") == 1
    assert recomposed("deny: [torch.nn.Tanh]") == 0
    assert recomposed("ban: [gelu]") == 0


def test_gpt2_is_recomposed_in_every_layer() -> None:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False, attn_implementation="eager"
    )
    assert config.activation_function == "gelu_new"
    torch.manual_seed(0)
    model, inputs = transformers.GPT2LMHeadModel(config).eval(), {"input_ids": torch.arange(8)[None] % 32}
    amp_model, as_written = (
        autocastfx.convert(model, (), inputs, dtype=torch.bfloat16, recompose=switch) for switch in (True, False)
    )
    modules = [amp_model.plan[found.node].module for found in amp_model.plan.recomposed]
    assert modules == ["transformer.h.0.mlp.act", "transformer.h.1.mlp.act"]
    assert as_written.plan.recomposed == ()
    # Each layer has one cast up, and one down, around what was written out.
    assert len(as_written.plan.casts) - len(amp_model.plan.casts) == 2 * 2
    assert amp_model.plan.traffic.moved < as_written.plan.traffic.moved
    exact, found = (m(**inputs).logits.detach() for m in (model, amp_model))
    assert relative_error(found, exact) < 4 * torch.finfo(torch.bfloat16).eps


def test_a_rule_for_the_operator_decides_what_is_recomposed(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("deny: [gelu]\n")
    model = Function(lambda x: new_gelu(x))
    lists = ["default", path]
    amp_model = autocastfx.convert(model, torch.randn(2, 4), op_list=lists, dtype="float16", check=False)  # warns not
    (gelu,) = [n for n in amp_model.plan.nodes if n.op == "gelu"]
    assert str(gelu.decision.source) == f"{path}:1:8"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_has_16_bit_results_beside_float32_ones_does_not_compute_in_float32_alone(dtype: torch.dtype) -> None:
    graph = fx.Graph()
    norm = graph.call_function(
        torch.ops.aten.native_layer_norm.default, (graph.placeholder("x"), [4], None, None, 1e-5)
    )
    norm.meta["val"] = torch.native_layer_norm(torch.ones(2, 4, dtype=dtype, device="meta"), [4], None, None, 1e-5)
    assert [t.dtype for t in norm.meta["val"]] == [dtype, torch.float32, torch.float32]
    assert _is_wide(norm) == (dtype == torch.float32)
