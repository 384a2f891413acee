"""What a transformers model keeps in float32 are rules under the user's lists."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.plan.plan import Precision
from autocastfx.policy.kernel_facts import kept_in_float32

transformers: Any = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
IDS = torch.arange(12).view(2, 6)


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.T5Config(**SIZES, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config).eval()


class Named(nn.Module):
    """A module with the attributes of a transformers model."""

    def __init__(self, *, always: tuple[str, ...] = (), in_float16: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._keep_in_fp32_modules = set(in_float16)
        self._keep_in_fp32_modules_strict = set(always)
        self.layers = nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 4)}) for _ in range(3)])
        self.extra = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "norm": nn.LayerNorm(4)})
        self.gate = nn.BatchNorm1d(4)
        self.lone = nn.Parameter(torch.ones(4))


def paths(model: nn.Module, low: torch.dtype = torch.bfloat16) -> list[str]:
    return sorted(rule.path for rule in kept_in_float32(model, low).modules)


def test_t5_keeps_its_last_products_in_float16_alone() -> None:
    model = t5()
    rules = kept_in_float32(model, torch.float16).modules
    assert [rule.path for rule in rules] == [
        "decoder.block.*.layer.*.DenseReluDense.wo",
        "encoder.block.*.layer.*.DenseReluDense.wo",
    ]
    assert {(rule.wanted, rule.reason, str(rule.source)) for rule in rules} == {
        (
            "tf32",
            "T5ForConditionalGeneration keeps 'wo' in float32 (_keep_in_fp32_modules); "
            "its products run in TF32 on CUDA",
            "T5ForConditionalGeneration:_keep_in_fp32_modules",
        )
    }
    assert paths(model) == []


def test_the_modules_are_those_whose_parameters_transformers_loads_in_float32() -> None:
    """Its own matching is asked: which names of a checkpoint its plan of dtypes fits."""
    from transformers import core_model_loading

    model: Any = t5()
    plan = model._get_dtype_plan(torch.float16)
    pattern = core_model_loading.build_glob_alternation(list(plan))[0]
    loaded = {name for name in model.state_dict() if pattern.search(name)}
    rules = kept_in_float32(model, torch.float16).modules
    covered = {n for n, _ in model.named_parameters() if any(r.covers(n.rpartition(".")[0]) for r in rules)}
    assert covered == loaded != set()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("norm", ["extra.norm", "layers.*.norm"]),
        ("layers.1.norm", ["layers.1.norm"]),
        ("layers.*.up", ["layers.*.up"]),
        ("extra", ["extra"]),
        ("inner.0", ["extra.inner.0"]),
        ("running_mean", ["gate"]),
        ("num_batches", ["gate"]),
        ("lone", []),
        ("nowhere", []),
    ],
)
def test_parts_of_names_are_searched_as_transformers_does(part: str, expected: list[str]) -> None:
    assert paths(Named(always=(part,))) == expected
    assert paths(Named(always=(part,)), torch.float16) == expected
    assert paths(Named(in_float16=(part,)), torch.float16) == expected
    assert paths(Named(in_float16=(part,))) == []


def test_what_is_no_name_is_left_out() -> None:
    model = Named(always=("extra",))
    model._keep_in_fp32_modules_strict = {"extra", re.compile("layers"), 1}  # type: ignore[assignment]
    assert paths(model) == ["extra"]


def test_models_inside_others_are_read_with_their_paths() -> None:
    outer = nn.ModuleDict({"a": Named(always=("extra",)), "b+": nn.Sequential(Named(always=("gate",)))})
    assert paths(outer) == ["a.extra", r"re:b\+\.0\.gate"]
    rules = kept_in_float32(outer, torch.bfloat16).modules
    assert any(rule.covers("b+.0.gate") for rule in rules)


def test_a_model_that_is_named_as_a_whole() -> None:
    (rule,) = kept_in_float32(Named(always=("*",)), torch.bfloat16).modules
    assert rule.covers("")


@pytest.mark.parametrize("is_low", [True, False])
def test_a_conversion_follows_them_and_says_so(is_low: bool) -> None:
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}
    model = t5().half() if is_low else t5()
    amp_model = autocastfx.convert(model, inputs, dtype="float16", check=False)
    wo = [node for node in amp_model.plan.nodes if node.module.endswith(".wo")]
    assert {node.placement.run for node in wo} == {Precision.FLOAT32}
    assert "T5ForConditionalGeneration keeps 'wo' in float32 (_keep_in_fp32_modules)" in autocastfx.dump(amp_model)
    assert "_keep_in_fp32_modules" in autocastfx.explain(amp_model, wo[0].name)
    assert amp_model.plan.op_list == "float16"
    mine = autocastfx.OpList.of({"modules": [{"path": "**.wo", "category": "low"}]}, name="mine")
    other = autocastfx.convert(model, inputs, dtype="float16", op_list=["default", mine], check=False)
    assert {node.placement.run for node in other.plan.nodes if node.module.endswith(".wo")} == {Precision.LOW}


def test_lists_that_follow_torch_autocast_do_not() -> None:
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}
    amp_model = autocastfx.convert(t5(), inputs, dtype="float16", op_list="torch_autocast_cpu", check=False)
    wo = [node for node in amp_model.plan.nodes if node.module.endswith(".wo")]
    assert {node.placement.run for node in wo} == {Precision.LOW}


def test_nothing_is_kept_when_conversions_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}
    model = t5().half()
    monkeypatch.setenv("AUTOCASTFX_DISABLE", "1")
    with pytest.warns(UserWarning, match="AUTOCASTFX_DISABLE=1 is set"):
        amp_model = autocastfx.convert(model, inputs)
    assert not amp_model.plan.casts
    assert torch.equal(amp_model(**inputs).logits, model(**inputs).logits)
