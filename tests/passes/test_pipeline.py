"""Decisions alone are those of the whole conversion, and leave out what is read off the rewritten graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autocastfx
from autocastfx.errors import BannedOpError
from autocastfx.numerics.sensitivity import captured_of
from autocastfx.passes.insert_casts import InsertCasts
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.plan import Plan
from autocastfx.plan.sensitivity import Effect
from autocastfx.policy.op_list import OpList


class Switch(nn.Module):
    """A matrix product in one branch of a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cond(x.sum() > 0, lambda x: (x @ x).exp(), lambda x: x @ x, (x,)))


def switch() -> tuple[nn.Module, dict[str, Any]]:
    return Switch(), {"x": torch.ones(8, 8)}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))
    return model, {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}


def low_gpt2() -> tuple[nn.Module, dict[str, Any]]:
    model, batch = gpt2()
    return model.to(torch.bfloat16), batch


def both(model: nn.Module, batch: Mapping[str, Any], **options: Any) -> tuple[Plan, Plan]:
    """The plan of a conversion, and the decisions alone."""
    amp_model = autocastfx.convert(model, (), batch, dtype="bfloat16", **options)
    variant = amp_model.variants[0]
    return variant.plan, amp_model._plan_by(amp_model._original.converter, variant)


@pytest.mark.parametrize("options", [{}, {"weights": "cached", "fold": "kernel"}], ids=["exact", "kernel"])
@pytest.mark.parametrize("made", [gpt2, switch])
def test_decisions_are_those_of_the_conversion(made: Any, options: dict[str, Any]) -> None:
    plan, decided = both(*made(), **options)
    assert plan.nodes
    assert decided == replace(plan, casts=(), copies=())


def test_decisions_for_a_16_bit_model_are_those_of_the_conversion() -> None:
    plan, decided = both(*low_gpt2(), op_list="conservative")
    assert plan.casts
    assert decided == replace(plan, casts=(), copies=())


def test_decisions_predict_the_same_error() -> None:
    model, batch = gpt2()
    found = autocastfx.sensitivity(model, [batch], lambda output, _: output.loss, dtype="bfloat16", progress=False)
    plan, decided = both(model, batch, sensitivity=found)
    assert plan.error
    assert plan.casts
    assert decided == replace(plan, casts=(), copies=())


@pytest.mark.parametrize(("name", "error"), [("linear", 1e-3), ("another", None)])
@pytest.mark.filterwarnings("ignore:1 of 1 measured nodes match no node")
def test_no_error_is_predicted_of_a_graph_of_which_nothing_was_measured(name: str, error: float | None) -> None:
    measured = autocastfx.Sensitivity("gradient", "bfloat16", 1, 1, (Effect("eval", name, "linear", "", (1e-3,)),))
    plans = both(nn.Linear(8, 8).eval(), {"input": torch.ones(2, 8)}, sensitivity=measured)
    assert [plan.error for plan in plans] == [error, error]


@pytest.fixture
def small() -> autocastfx.AmpModule:
    return autocastfx.convert(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4), dtype="bfloat16")


def test_decisions_refuse_what_the_list_bans(small: autocastfx.AmpModule) -> None:
    converter = cast("Converter", small._original.converter)
    ban = OpList.of({"modules": [{"path": "**", "ops": ["tanh"], "category": "ban"}]})
    banning = replace(converter, op_list=converter.op_list.merged(ban))
    with pytest.raises(BannedOpError, match="tanh"):
        small._plan_by(banning, small.variants[0])


def test_nothing_is_rewritten_for_decisions(small: autocastfx.AmpModule, monkeypatch: pytest.MonkeyPatch) -> None:
    (variant,), converter = small.variants, small._original.converter
    before = str(captured_of(variant).graph)

    def refuse(self: InsertCasts, state: Any) -> Any:
        raise AssertionError("casts were put in")

    monkeypatch.setattr(InsertCasts, "__call__", refuse)
    small._plan_by(converter, variant)
    assert str(captured_of(variant).graph) == before
    with pytest.raises(AssertionError, match="casts were put in"):
        small._variant_by(converter, variant)
