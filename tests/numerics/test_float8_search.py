"""Float8, product by product: effects against single products that ran, predictions of plans, and what is chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autocastfx
from autocastfx import Budget, Gpu, OpList, Sensitivity
from autocastfx.errors import SensitivityError, UnsupportedError
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.float8_search import product_of
from autocastfx.numerics.tune import Tuned
from autocastfx.plan.plan import Plan, PlannedNode
from autocastfx.plan.sensitivity import rms
from autocastfx.policy.float8 import Product

LOW = torch.bfloat16
OPTIONS: dict[str, Any] = {"dtype": LOW, "progress": False}


class Mixing(nn.Module):
    """Two projections that read one value, an MLP and a head; one weight is used by ``addmm``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.up, self.down, self.head = nn.Linear(64, 128), nn.Parameter(torch.randn(128, 64) / 11), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm(x)
        x = x + self.q(read) * torch.sigmoid(self.k(read))
        return self.head(torch.addmm(x.new_zeros(64), F.gelu(self.up(x)), self.down) + x)


def loss(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


BATCHES = [torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def mixing() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Mixing()


@pytest.fixture(scope="module")
def measured() -> tuple[nn.Module, Sensitivity]:
    model = mixing()
    return model, autocastfx.sensitivity(model, BATCHES[:2], loss, float8=True, probes=16, **OPTIONS)


@pytest.fixture(scope="module")
def tuned(measured: tuple[nn.Module, Sensitivity]) -> Tuned:
    return autocastfx.tune(measured[0], BATCHES, loss, float8=True, share=0.6, sensitivity=measured[1], **OPTIONS)


def in_float8(plan: Plan) -> dict[str, tuple[Product, ...]]:
    return {node.name: node.float8.products for node in plan.nodes if node.float8 is not None}


# -- measuring --------------------------------------------------------------------------------------------------------


def test_without_float8_nothing_is_written(measured: tuple[nn.Module, Sensitivity]) -> None:
    _, found = measured
    assert Sensitivity.from_json(found.to_json()).to_json() == found.to_json()
    assert Sensitivity.from_json(found.to_json())["addmm"].sizes == (32, 64, 128)
    without = replace(found, float8="", effects=tuple(replace(e, products={}, sizes=()) for e in found.effects))
    assert not any(word in without.to_json() for word in ("float8", "products", "sizes"))
    assert Sensitivity.from_json(without.to_json()).float8 == ""  # as files from before are read
    with pytest.raises(SensitivityError, match="float8 is 'rowwise' here and '' there"):
        found.merged(without)


# -- predicting -------------------------------------------------------------------------------------------------------


def test_a_plan_tells_the_part_of_each_product(measured: tuple[nn.Module, Sensitivity]) -> None:
    model, found = measured
    lists = OpList.of(
        {"extends": "bfloat16", "float8": [{"ops": ["linear"], "products": ["output", "weight_gradient"]}]}
    )
    amp_model = autocastfx.convert(model, BATCHES[0], dtype=LOW, op_list=lists, sensitivity=found)
    plain = autocastfx.convert(model, BATCHES[0], dtype=LOW, sensitivity=found)
    true = TargetDistance(model, BATCHES[:2], loss, "gradient", None)(amp_model, LOW)
    assert amp_model.plan.error == pytest.approx(true, rel=0.4)
    assert true > 4 * (plain.plan.error or 0.0)
    up = amp_model.plan["linear_2"]
    parts = {one.product: one.error for one in up.float8.errors} if up.float8 is not None else {}
    assert parts == {Product(name): rms(part) for name, part in found["linear_2"].products.items()}
    chosen = math.hypot(parts[Product.OUTPUT], parts[Product.WEIGHT_GRADIENT], plain.plan["linear_2"].error or 0.0)
    assert up.error == pytest.approx(chosen, rel=0.3)
    words = f"output {parts[Product.OUTPUT]:.1e}, input_gradient {parts[Product.INPUT_GRADIENT]:.1e} (not in float8)"
    for text in (autocastfx.dump(amp_model, width=None), autocastfx.explain(amp_model, "up")):
        assert words in " ".join(text.split())
    assert Plan.from_json(amp_model.plan.to_json()).to_json() == amp_model.plan.to_json()


def test_products_of_another_recipe_are_told_as_not_measured(measured: tuple[nn.Module, Sensitivity]) -> None:
    model, found = measured
    lists = OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear"], "recipe": "tensorwise"}]})
    told = "leaves out the float8 products of 4 nodes, and is too small: they run by tensorwise, and .* by rowwise"
    with pytest.warns(UserWarning, match=told):
        amp_model = autocastfx.convert(model, BATCHES[0], dtype=LOW, op_list=lists, sensitivity=found)
    assert "float8 here change" not in autocastfx.explain(amp_model, "up")
    plan = amp_model.plan
    assert plan.error_in_words.endswith(", without 4 nodes in float8 that were not measured")


# -- choosing ---------------------------------------------------------------------------------------------------------


def test_a_share_has_less_error_than_whole_layers(measured: tuple[nn.Module, Sensitivity], tuned: Tuned) -> None:
    model, found = measured
    assert 0.6 <= tuned.point.share < 0.75
    assert tuned.gains
    flops = {e.name: e.flops for e in found.effects if e.products}
    chosen = in_float8(tuned.plan)
    assert sum(flops[name] * len(own) for name, own in chosen.items()) / (3 * sum(flops.values())) == tuned.point.share
    judge = TargetDistance(model, BATCHES[-1:], loss, "gradient", None)
    assert judge(tuned.convert(model, BATCHES[0]), LOW) == pytest.approx(tuned.point.measured, rel=1e-3)
    whole = OpList.of(
        {"extends": "bfloat16", "float8": [{"ops": ["linear", "addmm"]}], "modules": [{"path": "up", "float8": False}]}
    )
    assert judge(autocastfx.convert(model, BATCHES[0], dtype=LOW, op_list=whole), LOW) > 1.2 * (
        tuned.point.measured or 1
    )
    assert "at least 60% of products in float8" in tuned.report()
    assert "<svg" in tuned.plot()


def test_the_list_read_back_gives_the_plan(
    measured: tuple[nn.Module, Sensitivity], tuned: Tuned, tmp_path: Path
) -> None:
    tuned.save(tmp_path / "tuned.yaml")
    assert (tmp_path / "tuned.yaml").read_text().startswith("extends: bfloat16\n")
    options: dict[str, Any] = {"dtype": LOW, "op_list": tmp_path / "tuned.yaml", "sensitivity": measured[1]}
    plan = autocastfx.convert(measured[0], BATCHES[0], **options).plan
    assert in_float8(plan) == in_float8(tuned.plan)
    assert (plan.quantized, plan.casts, plan.error) == (tuned.plan.quantized, tuned.plan.casts, tuned.plan.error)
    entries = [rule for rule in tuned.rules.float8 if rule.path]
    assert [rule.path for rule in entries] == ["head", "k", "q", "re:^$", "up"] or len({r.path for r in entries}) == 5
    for rule in entries:
        assert rule.reason.startswith("tuned: ")
        assert all(f"{product} " in rule.reason for product in Product)


def gpu(tflops: float) -> Gpu:
    return Gpu("toy", tflops, tflops / 10, 1e3, float8_tflops=2 * tflops)


@pytest.mark.parametrize(("error", "tflops"), [(0.02, 1e-3), (0.02, 1e6), ("default", 1e-3)])
def test_an_error_is_kept_in_the_least_time(measured: tuple[nn.Module, Sensitivity], error: Any, tflops: float) -> None:
    budget = Budget(error=error) if error != "default" else error
    found = autocastfx.tune(
        *(measured[0], BATCHES, loss), budget=budget, float8=True, sensitivity=measured[1], gpu=gpu(tflops), **OPTIONS
    )
    assert found.point.measured is not None
    assert found.point.measured <= (found.budget.error or 0.0)
    if tflops > 1:  # bytes alone take time, and quantising moves more of them than it saves
        assert found.point.share == 0
        assert "saves" in found.text() or not found.rules.float8
    elif error != "default":
        assert found.point.share > 0.4
        assert found.point.saved > 0


def test_rules_of_the_list_stay(measured: tuple[nn.Module, Sensitivity]) -> None:
    own = OpList.of(
        {
            "extends": "bfloat16",
            "modules": [{"path": "up", "float8": {"products": ["output"]}}, {"path": "head", "float8": False}],
        }
    )
    found = autocastfx.tune(
        *(measured[0], BATCHES, loss), op_list=own, float8=True, share=0.5, sensitivity=measured[1], **OPTIONS
    )
    chosen = in_float8(found.plan)
    assert chosen["linear_3"] == ()
    assert set(chosen["linear_2"]) <= {Product.OUTPUT}


KEPT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "rule": (
        {"float8": [{"ops": ["linear", "addmm"], "products": []}]},
        r"be: 0%, by operations\. The list mine keeps out 69%: the rule at OpList:float8\[0\]\.ops\[0\] leaves it out; "
        r"31%: the rule at OpList:float8\[0\]\.ops\[1\] leaves it out\. Give a smaller share or another op_list\.",
    ),
    "modules": (
        {
            "modules": [
                {"path": "up", "float8": False, "reason": "by hand"},
                {"path": "q", "category": "float32"},
                {"path": "head", "float8": {"products": ["output"]}},
            ]
        },
        r"be: 49%, .* keeps out 31%: the rule at OpList:modules\[0\] \(by hand\) leaves it out; 15%: the node runs in "
        r"float32 \(OpList:modules\[1\]\); 5%: the rule at OpList:modules\[2\] leaves it out\. Give",
    ),
    "sizes": ({"float8": [{"ops": ["linear"], "least": {"M": 64}}]}, "keeps out 69%: M is 32, less than 64"),
    "recipe": (
        {"modules": [{"path": "up", "float8": {"recipe": "tensorwise"}}]},
        "keeps out 31%: its recipe is tensorwise, and rowwise was measured",
    ),
    "many": (
        {"modules": [{"path": path, "float8": False} for path in ("q", "k", "up", "head")]},
        r"31%: .*modules\[2\].*; and 1 other reasons\. Give",
    ),
}


@pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")
@pytest.mark.parametrize(("rules", "said"), KEPT_OUT.values(), ids=list(KEPT_OUT))
def test_a_share_that_a_list_rules_out_names_its_rules(
    measured: tuple[nn.Module, Sensitivity], rules: dict[str, Any], said: str
) -> None:
    lists = replace(OpList.of({"extends": "bfloat16", **rules}), name="mine")
    with pytest.raises(SensitivityError, match=said):
        autocastfx.tune(
            *(measured[0], BATCHES, loss), op_list=lists, float8=True, share=1.0, sensitivity=measured[1], **OPTIONS
        )


def test_a_share_by_a_recipe_without_kernels() -> None:
    found = autocastfx.tune(mixing(), BATCHES, loss, float8="mxfp8", share=0.5, probes=4, **OPTIONS)
    assert {n.float8.recipe for n in found.plan.nodes if n.float8 is not None and n.float8.products} == {"mxfp8"}
    assert 0.5 <= found.point.share < 1
    assert found.point.saved <= 0, "quantising takes time, and no product gains any"


def test_a_share_of_a_model_without_such_products_is_refused() -> None:
    with pytest.raises(SensitivityError, match="the model has no product that can run in float8: one of a weight"):
        autocastfx.tune(nn.Linear(64, 15), BATCHES, loss, float8=True, share=0.5, probes=1, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"share": 0.5}, "share is of products in float8: give float8 too"),
        ({"share": 1.5, "float8": True}, "share is a fraction above 0 and at most 1, not 1.5"),
        ({"share": 0.0, "float8": True}, "not 0.0"),
        ({"share": "0.5", "float8": True}, "share is a fraction above 0 and at most 1, not '0.5'"),
        ({"share": True, "float8": True}, "share is a fraction above 0 and at most 1, not True"),
        ({"share": 0.5, "float8": True, "budget": Budget(error=0.1)}, "share takes the place of a budget"),
        ({"float8": True, "budget": Budget(bytes=1.0)}, "a budget of bytes says nothing of float8"),
        (
            {"float8": "nvfp4"},
            "float8 is True or one of 'tensorwise', 'rowwise', 'rowwise_gw_hp', 'mxfp8', not 'nvfp4'",
        ),
        ({"float8": ["rowwise"]}, r"not \['rowwise'\]"),
        ({"float8": 1}, "'mxfp8', not 1"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        autocastfx.tune(mixing(), BATCHES, loss, **OPTIONS, **options)


def test_a_recipe_that_is_none_is_not_measured() -> None:
    with pytest.raises(
        ValueError, match="float8 is True or one of 'tensorwise', 'rowwise', 'rowwise_gw_hp', 'mxfp8', not 'row'"
    ):
        autocastfx.sensitivity(mixing(), BATCHES, loss, float8="row", **OPTIONS)


@pytest.mark.parametrize(
    ("dtype", "missing", "said"),
    [
        ("float16", "", "float16 gradients are multiplied by a loss scale, .*: tune with dtype='bfloat16'"),
        (
            "bfloat16",
            "too old",
            r"cpu has no float8 products: too old\. Tune without float8, or from a list that says emulate",
        ),
    ],
)
def test_what_float8_cannot_serve_is_refused_before_measuring(
    dtype: str, missing: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("it measures")

    monkeypatch.setattr("autocastfx.numerics.sensitivity.Measuring.add", never)
    monkeypatch.setattr("autocastfx.numerics.tune.missing_products", lambda *_: missing)
    with pytest.raises(UnsupportedError, match=said):
        autocastfx.tune(mixing(), BATCHES, loss, float8=True, share=0.5, dtype=dtype, progress=False)
    emulated = OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear", "addmm"], "emulate": True}]})
    with pytest.raises(AssertionError, match="it measures"):
        autocastfx.tune(mixing(), BATCHES, loss, float8=True, share=0.5, op_list=emulated, **OPTIONS)


def test_a_sensitivity_of_16_bits_is_refused(measured: tuple[nn.Module, Sensitivity]) -> None:
    model, found = measured
    plain = replace(found, float8="")
    with pytest.raises(SensitivityError, match="in bfloat16 and float8 rowwise: measure it alike"):
        autocastfx.tune(model, BATCHES, loss, float8=True, share=0.5, sensitivity=plain, **OPTIONS)
    lists = OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear"]}]})
    with pytest.raises(UnsupportedError, match="measures 16 bits alone"):
        autocastfx.convert(model, BATCHES[0], dtype=LOW, op_list=lists, sensitivity=plain)


def test_the_roofline_of_a_product(tuned: Tuned) -> None:
    node: PlannedNode = next(n for n in tuned.plan.nodes if n.float8 is not None and n.float8.products)
    one = product_of(node, Product.OUTPUT, 0.1, (4096, 2048, 1024), None, gpu(1e-3))
    flops = 2 * 4096 * 2048 * 1024
    assert one.flops == flops
    assert one.gain == pytest.approx(flops / 1e9 * 1e12 / 2)  # half of the time, in bytes at 1 TB/s
    assert sorted(one.reads.values()) == [3 * 2048 * 1024, 3 * 4096 * 1024]
    bound = product_of(node, Product.WEIGHT_GRADIENT, 0.1, (4096, 2048, 1024), None, gpu(1e9))
    assert bound.gain == pytest.approx(4096 * 2048 + 4096 * 1024)  # a byte less of each element that it reads
