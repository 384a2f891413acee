"""What 16 bits cost each node: predicted errors beside true ones, and what cannot be measured."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import autocastfx
from autocastfx import Sensitivity
from autocastfx.errors import SensitivityError, UnsupportedError
from autocastfx.numerics.compare import TargetDistance
from autocastfx.plan.plan import Precision
from autocastfx.plan.sensitivity import added, rms
from tests.helpers import Net

PROBES = 64  # an error is known within 1/sqrt(2 * 64) = 9 %
WITHIN = 4 / (2 * PROBES) ** 0.5  # four standard deviations


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))


def made(build: Callable[[], nn.Module] = MLP) -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return build()


def batch(seed: int = 0, rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, generator=generator), torch.randint(4, (rows,), generator=generator)


def loss(output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def inputs(batch: Any) -> torch.Tensor:
    return batch[0]


def measured(model: nn.Module, **options: Any) -> Sensitivity:
    given = {"loss_fn": loss, "inputs": inputs, "progress": False, **options}
    return autocastfx.sensitivity(model, [batch()], **given)


@pytest.mark.parametrize("of", ["gradient", "output"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_whole_lists_are_predicted(of: str, dtype: str) -> None:
    model = made()
    found = measured(model, of=of, dtype=dtype, probes=PROBES)
    judge = TargetDistance(model, [batch()], loss, of, inputs)
    for op_list, fold in (("default", "exact"), ("default", "kernel"), ("conservative", "exact")):
        options: dict[str, Any] = {"dtype": dtype, "op_list": op_list, "fold": fold, "sensitivity": found}
        amp_model = autocastfx.convert(model, inputs(batch()), **options)
        true = judge(amp_model, getattr(torch, dtype))
        assert amp_model.plan.error == pytest.approx(true, rel=WITHIN)
        assert 0 < true < 0.02


def test_the_bias_of_a_plan_is_what_its_errors_have_in_common() -> None:
    """Inputs far from 0 meet the rounding of the weights alike in all batches."""
    model, batches = made(), [(batch(seed)[0] + 3, batch(seed)[1]) for seed in range(8)]
    found = autocastfx.sensitivity(
        model, batches, loss, inputs=inputs, dtype="bfloat16", probes=2 * PROBES, progress=False
    )
    amp_model = autocastfx.convert(model, inputs(batches[0]), dtype="bfloat16", sensitivity=found)

    def gradient(module: nn.Module, one: Any) -> torch.Tensor:
        grads = torch.autograd.grad(loss(module(inputs(one)), one), list(model.parameters()))
        return torch.cat([grad.flatten() for grad in grads]).double()

    exact = [gradient(model, one) for one in batches]
    errors = [(gradient(amp_model, one) - g) / g.norm() for one, g in zip(batches, exact, strict=True)]
    products = [float(a @ b) for a, b in itertools.combinations(errors, 2)]
    true = math.sqrt(sum(products) / len(products))
    signature = added([node.effect for node in amp_model.plan.nodes if node.effect])
    bias, least = found.bias(signature), found.least_bias(rms(signature))
    assert bias**2 == pytest.approx(true**2, abs=4 * least**2)
    assert 2 * least < true < 0.9 * rms(signature), "an estimate of 0 fails too"


@pytest.mark.parametrize("name", ["linear", "layer_norm", "gelu", "linear_1"])
def test_single_nodes_are_predicted(name: str, tmp_path: Any) -> None:
    model = made()
    found = measured(model, dtype="bfloat16", probes=PROBES)
    path = {"linear": "first", "layer_norm": "norm", "gelu": "re:^$", "linear_1": "last"}[name]
    rules = [{"path": p, "category": "float32"} for p in ("first", "norm", "last")]
    rules = [rule for rule in rules if rule["path"] != path]
    rules.append({"path": path, "category": "low", "ops": [name.removesuffix("_1")]})
    if name != "gelu":
        rules.append({"path": "re:^$", "category": "float32", "ops": ["gelu"]})
    op_list = ("default", autocastfx.OpList.of({"modules": rules}))
    amp_model = autocastfx.convert(
        model, inputs(batch()), dtype="bfloat16", op_list=op_list, fold="none", sensitivity=found
    )
    assert [n.name for n in amp_model.plan.nodes if n.placement.run is Precision.LOW] == [name]
    true = TargetDistance(model, [batch()], loss, "gradient", inputs)(amp_model, torch.bfloat16)
    assert amp_model.plan.error == pytest.approx(true, rel=WITHIN)


class Cancelling(nn.Module):
    """Adds 1000 and takes it away again: digits that 16 bits do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raised = torch.tanh(self.first(x)) + 1000
        return self.last(raised - 1000)


def test_a_planted_ill_conditioned_node_is_the_worst() -> None:
    found = measured(made(Cancelling), dtype="bfloat16")
    worst = max(found.effects, key=lambda effect: effect.error)
    assert worst.op in ("add", "sub")
    others = [effect.error for effect in found.effects if effect.op not in ("add", "sub")]
    assert worst.error > 10 * max(others)


class Detached(nn.Module):
    """Gradients stop; what is rounded before does not."""

    def __init__(self, *, no_grad: bool) -> None:
        super().__init__()
        self.first, self.last, self.no_grad = nn.Linear(16, 16), nn.Linear(16, 4), no_grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.no_grad:
            with torch.no_grad():
                hidden = self.first(x)
        else:
            hidden = self.first(x).detach()
        return self.last(torch.tanh(hidden))


@pytest.mark.parametrize("no_grad", [False, True])
def test_rounding_passes_where_gradients_stop(no_grad: bool) -> None:
    model = made(lambda: Detached(no_grad=no_grad))
    found = measured(model, dtype="bfloat16", probes=PROBES)
    rules = autocastfx.OpList.of({"modules": [{"path": "last", "category": "float32"}]})
    amp_model = autocastfx.convert(
        model, inputs(batch()), dtype="bfloat16", op_list=("default", rules), sensitivity=found
    )
    true = TargetDistance(model, [batch()], loss, "gradient", inputs)(amp_model, torch.bfloat16)
    assert true > 1e-4
    assert amp_model.plan.error == pytest.approx(true, rel=WITHIN)


def test_the_model_and_random_numbers_are_unchanged() -> None:
    def build() -> nn.Module:
        layers = (nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 4))
        return nn.Sequential(*layers)

    model = made(build).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = measured(model, dtype="bfloat16")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert {effect.op for effect in found.effects} >= {"linear", "batch_norm", "tanh", "dropout"}
    assert measured(model, dtype="bfloat16") == found  # random ops draw the same numbers each time


def test_ops_that_write_in_place_are_measured_under_their_names() -> None:
    def build(inplace: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.SiLU(inplace), nn.Linear(32, 4)).train()

    found, apart = (measured(made(lambda i=i: build(i)), dtype="bfloat16") for i in (True, False))
    assert not found.unmeasured
    assert {effect.op for effect in found.effects} == {"linear", "batch_norm", "silu_", "output"}
    assert [effect.computes for effect in found.effects] == [effect.computes for effect in apart.effects]


class Doubled(nn.Module):
    """Writes into a part of a value, which is read whole later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * 3
        hidden[:, :16].mul_(2)
        return self.last(hidden)


def test_a_value_whose_change_is_seen_is_left_out_and_told() -> None:
    found = measured(made(Doubled), dtype="bfloat16")
    assert set(found.unmeasured.values()) == {"it shares a storage that is written into"}
    assert {"mul", "mul_"} <= found.unmeasured.keys()
    assert "linear" not in found.unmeasured


def test_transformers_are_measured_whole() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, use_cache=False)  # type: ignore[arg-type]
    model = made(lambda: transformers.LlamaForCausalLM(config)).train()
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    given = [{"input_ids": ids, "labels": ids}]
    found = autocastfx.sensitivity(model, given, dtype="bfloat16", probes=32, progress=False)
    assert not found.unmeasured
    amp_model = autocastfx.convert(model, (), given[0], dtype="bfloat16", sensitivity=found)
    true = TargetDistance(model, given, None, "gradient", None)(amp_model, torch.bfloat16)
    assert amp_model.plan.error == pytest.approx(true, rel=4 / 64**0.5)


def test_batches_and_probes_make_the_length_of_a_signature() -> None:
    options: dict[str, Any] = {"inputs": inputs, "dtype": "bfloat16", "probes": 3, "progress": False}
    both = autocastfx.sensitivity(made(), [batch(0), batch(1)], loss, **options)
    assert (both.batches, both.probes) == (2, 3)
    assert {len(effect.computes) for effect in both.effects if effect.op != "output"} == {6}
    alone = autocastfx.sensitivity(made(), [batch(0)], loss, **options)
    assert alone["linear"].computes == both["linear"].computes[:3]


def no_number(output: Any, batch: Any) -> torch.Tensor:
    return output


def zero(output: Any, batch: Any) -> torch.Tensor:
    return (output * 0).sum()


def detached(output: Any, batch: Any) -> torch.Tensor:
    return output.detach().sum()


def infinite(output: Any, batch: Any) -> torch.Tensor:
    return (output * float("inf")).sum()


@torch.library.custom_op("test_sensitivity::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: torch.mul(gradient, 2, out=torch.empty_like(gradient)))


def out_of_place() -> nn.Module:
    return Net(lambda m, x: m.last(doubled(m.first(x))), first=torch.nn.Linear(4, 4), last=torch.nn.Linear(4, 1))


def test_a_gradient_that_cannot_be_differentiated_again_is_told() -> None:
    said = r"the gradient cannot be differentiated again: mul\(\): functions with out=.* Measure of='output'"
    batches = [torch.randn(3, 4)]
    with pytest.raises(SensitivityError, match=said):
        autocastfx.sensitivity(out_of_place(), batches, loss_fn=lambda y, _: y.sum(), dtype="bfloat16")
    assert autocastfx.sensitivity(out_of_place(), batches, of="output", dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_fn": no_number}, r"the loss is a tensor of shape \[64, 4\]: loss_fn returns one number"),
        ({"loss_fn": None}, r"the loss is a tensor of shape \[64, 4\]: give loss_fn\(output, batch\)"),
        ({"loss_fn": lambda output, batch: 1.0}, "the loss is float"),
        ({"loss_fn": zero}, "the gradient of a batch is zero"),
        ({"loss_fn": lambda output: output.sum()}, r"loss_fn\(output, batch\) raised TypeError: .* a tuple of 2: "),
        ({"loss_fn": detached}, "does not depend on anything that requires a gradient"),
        ({"loss_fn": infinite}, "the gradient of a batch is not finite in float32"),
        ({"inputs": None}, "a batch does not fit MLP.forward: .*inputs=lambda batch: batch"),
    ],
)
def test_what_cannot_be_measured_is_one_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SensitivityError, match=said):
        measured(made(), dtype="bfloat16", **options)


def test_no_batches_is_an_error() -> None:
    with pytest.raises(SensitivityError, match="there are no batches"):
        autocastfx.sensitivity(made(), [], loss)


def test_frozen_parameters_are_an_error_for_gradients_alone() -> None:
    model = made().requires_grad_(False)
    with pytest.raises(SensitivityError, match="no parameter requires a gradient"):
        measured(model, dtype="bfloat16")
    assert measured(model, dtype="bfloat16", of="output").effects


def test_a_converted_model_is_refused() -> None:
    amp_model = autocastfx.convert(made(), inputs(batch()), dtype="bfloat16")
    with pytest.raises(UnsupportedError, match="converted already"):
        measured(amp_model)


def test_a_model_of_16_bits_is_refused() -> None:
    low, x = made().bfloat16(), [(batch()[0].bfloat16(), batch()[1])]
    with pytest.raises(UnsupportedError, match="16-bit already"):
        autocastfx.sensitivity(low, x, loss, inputs=inputs, progress=False)
    with pytest.raises(UnsupportedError, match="16-bit already"):
        autocastfx.tune(low, x * 2, loss, inputs=inputs, progress=False)
    with pytest.raises(UnsupportedError, match="sensitivity was given"):
        autocastfx.convert(low, x[0][0], sensitivity=measured(made(), dtype="bfloat16"))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"of": "loss"}, "of is one of 'gradient', 'output', not 'loss'"), ({"probes": 0}, "probes is a count")],
)
def test_wrong_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        measured(made(), **options)


def test_a_sensitivity_of_another_dtype_is_refused() -> None:
    found = measured(made(), dtype="bfloat16")
    with pytest.raises(SensitivityError, match="measured for bfloat16, and this converts to float16"):
        autocastfx.convert(made(), inputs(batch()), dtype="float16", sensitivity=found)


def test_values_beyond_the_range_are_told() -> None:
    class Large(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (self.first(x) * 1e5).tanh().sum()

    found = measured(made(Large), dtype="float16")
    assert any(effect.overflows for effect in found.effects)
    assert not any(effect.overflows for effect in measured(made(Large), dtype="bfloat16").effects)


def test_infinite_values_are_not_beyond_the_range() -> None:
    class Masked(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            mask = torch.arange(hidden.shape[-1]) % 2 == 0
            return super().forward(x) + hidden.masked_fill(mask, -math.inf).softmax(-1).square().sum()

    assert not any(effect.overflows for effect in measured(made(Masked), dtype="float16").effects)


class Kept(nn.Module):
    """Whose tanh, exp and softmax keep what they give for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).exp().softmax(-1))


@pytest.mark.parametrize("op", ["tanh", "exp", "softmax"])
def test_a_result_that_backward_reads_is_counted_once(op: str) -> None:
    model = made(Kept)
    found = measured(model, dtype="bfloat16", probes=PROBES)
    sides = {name: "low" if name == op else "float32" for name in ("linear", "tanh", "exp", "softmax")}
    rules = [{"path": "**", "category": side, "ops": [name]} for name, side in sides.items()]
    op_list = ("default", autocastfx.OpList.of({"modules": rules}))
    options: dict[str, Any] = {"dtype": "bfloat16", "op_list": op_list, "fold": "none", "sensitivity": found}
    amp_model = autocastfx.convert(model, inputs(batch()), **options)
    assert [n.op for n in amp_model.plan.nodes if n.placement.run is Precision.LOW] == [op]
    true = TargetDistance(model, [batch()], loss, "gradient", inputs)(amp_model, torch.bfloat16)
    assert amp_model.plan.error == pytest.approx(true, rel=WITHIN)


def test_a_sensitivity_of_another_model_is_warned_of() -> None:
    found = measured(made(), dtype="bfloat16")
    other = nn.Sequential(nn.Linear(16, 4), nn.Tanh())
    said = (
        r"4 of 4 measured nodes match no node .* 'linear' \(linear\) in module 'first'.* Measure the sensitivity again"
    )
    with pytest.warns(UserWarning, match=said):
        autocastfx.convert(other, inputs(batch()), dtype="bfloat16", sensitivity=found)
    with pytest.warns(UserWarning, match=said):
        autocastfx.tune(other, [batch()], loss, inputs=inputs, dtype="bfloat16", sensitivity=found, progress=False)


class Counted(MLP):
    """Counts by floating-point numbers, as routers of experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.cumsum((x.detach() > 0).float().sum(0), 0, dtype=torch.int32)
        return super().forward(x) * (ends[-1] / ends.max())


class Attention(MLP):
    """Views what attention gives, which has other strides in its formula than in the fused kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(4, 16, 2, 8).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
        return super().forward(attended.view(64, 16))


@pytest.mark.parametrize("build", [Counted, Attention])
@pytest.mark.parametrize("of", ["gradient", "output"])
def test_ops_that_autograd_takes_otherwise_are_run(build: Callable[[], nn.Module], of: str) -> None:
    model = made(build)
    found = measured(model, dtype="bfloat16", of=of, probes=PROBES)
    assert {effect.op for effect in found.effects} >= {"linear", "layer_norm", "gelu"}
    true = TargetDistance(model, [batch()], loss, of, inputs)
    amp_model = autocastfx.convert(model, inputs(batch()), dtype="bfloat16", sensitivity=found)
    assert amp_model.plan.error == pytest.approx(true(amp_model, torch.bfloat16), rel=WITHIN)
