"""Why a node runs in the precision that it runs in, in words."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.plan.plan import Precision, Why
from autocastfx.policy.op_list import preset_folder
from benchmarks.models.zoo import ZOO
from tests.helpers import Function


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.a(x)
        y = torch.relu(torch.softmax(h, -1) + 1) * h
        self.average.mul_(0.9).add_(torch.tanh(h).mean(0) * 0.1)
        return self.b(y).float().argmax(-1), (h * 1e6).sum(), x > 0


@functools.cache
def amp_model() -> autocastfx.AmpModule:
    return autocastfx.convert(Model(), (torch.randn(4, 8),), dtype=torch.float16)


def explained(what: str) -> list[str]:
    return autocastfx.explain(amp_model(), what).splitlines()


def test_what_a_list_says_outright() -> None:
    assert explained("softmax") == [
        "softmax (softmax) in module (root) runs in float32: its category is deny, "
        "and its kernel reads linear in 16 bits.",
        "  decided: deny, exponentials, logarithms and what is made of them (op_lists/base.yaml:33:100).",
        "  to change it: write softmax under allow in a list of your own; or set run to low in an edited plan, "
        "convert(plan=...).",
    ]


def test_a_cast_and_the_read_of_a_copy_tell_who_reads_them_and_why_these_run_so() -> None:
    cast = explained("x_float16")
    assert cast[0] == (
        "x_float16 casts x to float16, as its readers run so: linear. Values beyond float16's range are clipped to it."
    )
    assert cast[2:] == explained("linear")[:3]
    with pytest.raises(KeyError, match=re.escape("'x_float61' (did you mean 'x_float16'?)")):
        explained("x_float61")
    cached = autocastfx.convert(Model(), (torch.randn(4, 8),), dtype="bfloat16", weights="cached")
    lines = autocastfx.explain(cached, "a_weight_bfloat16").splitlines()
    assert lines[0] == "a_weight_bfloat16 reads the bfloat16 copy of a.weight, as its readers run so: linear."
    assert lines[2].startswith("linear (linear) in module a runs in 16 bits")


def test_a_module_and_a_pattern_explain_what_runs_inside() -> None:
    assert [line for line in explained("b") if not line.startswith("  ") and line] == [
        "layer_norm (layer_norm) in module b.0 runs in float32: its category is deny.",
        "linear_1 (linear) in module b.1 runs in 16 bits: its category is allow.",
    ]
    assert explained("b.*") == explained("b")
    assert "under modules the rule {path: b.1, category: float32}" in explained("linear_1")[2]


def test_an_op_explains_all_its_nodes() -> None:
    heads = [line for line in explained("mul") if line and not line.startswith("  ")]
    assert {head.split()[0] for head in heads} >= {"mul", "mul_1", "mul_2"}


def test_unknown_names_are_errors_with_the_nearest() -> None:
    with pytest.raises(
        KeyError, match=r"no node, op or module of the plan is called 'sofmax' \(did you mean 'softmax'"
    ):
        explained("sofmax")
    with pytest.raises(TypeError, match="convert or enable the model first"):
        autocastfx.explain(Model(), "mul")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bert-eager", "gpt2", "resnet"])
@pytest.mark.filterwarnings("ignore:.*hundreds of times slower")
def test_every_node_of_real_models_has_a_reason_whose_rule_is_where_it_says(name: str) -> None:
    zoo_model = next(model for model in ZOO if model.name == name)
    inputs: Any = zoo_model.inputs(2, 2)
    amp_model = autocastfx.convert(zoo_model.build(), (), inputs, dtype=torch.float16, check=False)
    known = {node.name for node in amp_model.plan.nodes}
    for node in amp_model.plan.nodes:
        paragraphs = autocastfx.explain(amp_model, node.name).split("\n\n")
        (own,) = [p for p in paragraphs if p.startswith(f"{node.name} (")]
        if node.placement.run is Precision.CAPTURED:
            assert re.match(rf"{node.name} \({re.escape(node.op)}\) in module \S+ runs as captured: \S", own)
            continue
        assert re.search(r"^  to change it: \S", own, re.MULTILINE)
        listed = re.search(r"\(op_lists/([\w.]+):(\d+):(\d+)\)", own)
        if listed is not None:
            line = (preset_folder() / listed[1]).read_text(encoding="utf-8").splitlines()[int(listed[2]) - 1]
            assert re.match(r"\w+", line[int(listed[3]) - 1 :])
        else:
            assert re.search(r"\((forced:[\w-]+|unlisted|sub-graph|eligibility)\)", own)
        if node.placement.because.why is Why.AFTER:
            assert node.placement.because.nodes[0] in known
            assert "reached directly" in own or "reached through" in own


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="explain takes the name of a node, op or module, such as 'softmax', not 3"):
        autocastfx.explain(autocastfx.convert(nn.ReLU(), torch.ones(2), dtype="float16"), 3)  # pyright: ignore[reportArgumentType]


def test_what_was_recomposed_and_of_what() -> None:
    def gelu(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)

    amp_model = autocastfx.convert(Function(gelu), (torch.randn(4, 8),), dtype=torch.bfloat16, check=False)
    (one,) = amp_model.plan.recomposed
    lines = autocastfx.explain(amp_model, one.node).splitlines()
    assert lines[1] == f"  recomposed: quick_gelu, of {', '.join(one.replaced)}; not so with recompose=False."
    assert len(one.replaced) == 3
    assert "recomposed" not in "\n".join(explained("softmax"))


def test_a_cause_that_was_taken_out_of_the_graph_is_still_named() -> None:
    amp_model = autocastfx.convert(Function(lambda x: (x @ x).exp() + 1.0), (torch.ones(4, 4),), dtype=torch.bfloat16)
    exp = next(node for node in amp_model.graph.nodes if node.name == "exp")
    exp.replace_all_uses_with(exp.all_input_nodes[0])
    amp_model.graph.erase_node(exp)
    amp_model.recompile()
    assert "placed: exp (exp) is deny" in autocastfx.explain(amp_model, "add")


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.layer(x)
        return nn.functional.cross_entropy(found, y), found.softmax(-1), x.log_softmax(-1)


def test_what_a_float32_op_reads_in_16_bits_is_said_everywhere() -> None:
    amp_model = autocastfx.convert(Scored(), (torch.ones(4, 16), torch.arange(4)), dtype="bfloat16", check=False)
    for op in ("cross_entropy_loss", "softmax"):
        said = autocastfx.explain(amp_model, op)
        assert "runs in float32: its category is deny, and its kernel reads linear in 16 bits.\n" in said
    assert "16 bits" not in autocastfx.explain(amp_model, "log_softmax").partition("\n")[0]  # it reads the input
    for full in (False, True):
        lines = autocastfx.dump(amp_model, full=full, width=None).splitlines()
        reading = [line.split()[0] for line in lines if "reads linear in 16 bits" in line]
        assert reading == ["cross_entropy_loss", "softmax"]
    assert "its category is deny, and its kernel reads linear in 16 bits" in autocastfx.dump(amp_model, format="html")
