"""What a measured sensitivity predicts, in dumps, explanations, comparisons of plans and on the page."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.plan.plan import joint_error
from autocastfx.plan.sensitivity import Effect
from autocastfx.report.dump import view_of
from autocastfx.report.html import page_data
from tests.browser import Browser, needs_browser
from tests.report.shown import Shown

X = torch.randn(4, 8)
FLOAT32 = autocastfx.OpList.of({"deny": ["linear"]}, name="wide")


def effect(name: str, op: str, module: str, error: float, returns: dict[str, tuple[float]] | None = None) -> Effect:
    return Effect("eval", name, op, module, (error,), returns=returns or {})


EFFECTS = (
    effect("linear", "linear", "0", 3e-3),
    effect("layer_norm", "layer_norm", "1", 4e-4, returns={"linear": (2e-4,)}),
    effect("linear_1", "linear", "2", 2e-3),
)
MEASURED = autocastfx.Sensitivity("gradient", "bfloat16", 1, 1, EFFECTS)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).eval()


def converted(measured: autocastfx.Sensitivity | None = MEASURED, *lists: autocastfx.OpList) -> autocastfx.AmpModule:
    return autocastfx.convert(model(), (X,), dtype="bfloat16", op_list=["default", *lists], sensitivity=measured)


def explained(amp_model: autocastfx.AmpModule, what: str) -> list[str]:
    return [line for line in autocastfx.explain(amp_model, what).splitlines() if line.startswith("  error: ")]


def test_explain_says_what_16_bits_change_and_would_change() -> None:
    amp_model = converted()
    assert explained(amp_model, "0") == ["  error: 16 bits here change the gradient by 3.0e-03."]
    assert explained(amp_model, "1") == [
        "  error: 16 bits around it, which round what it passes back, change the gradient by 2.0e-04. "
        "In 16 bits it would change the gradient by 4.0e-04."
    ]
    unpickled = pickle.loads(pickle.dumps(amp_model))
    unpickled(X)
    assert explained(unpickled, "0") == explained(amp_model, "0")
    of_output = replace(MEASURED, of="output")
    assert explained(converted(of_output), "0") == ["  error: 16 bits here change the output by 3.0e-03."]


def test_explain_tells_of_an_overflow_in_place_of_an_error() -> None:
    overflowing = replace(MEASURED, effects=(EFFECTS[0], replace(EFFECTS[1], overflows=True), EFFECTS[2]))
    assert explained(converted(overflowing), "1")[0].endswith("2.0e-04. In 16 bits a value would overflow.")


def test_what_was_not_measured_has_no_error() -> None:
    part = replace(MEASURED, effects=EFFECTS[:1])
    assert explained(converted(part), "2") == []
    other = replace(MEASURED, effects=(effect("conv2d", "conv2d", "", 1.0),))
    with pytest.warns(autocastfx.errors.UnmatchedMeasurementWarning, match="1 of 1 measured nodes match no node"):
        amp_model = converted(other)
    assert amp_model.plan.error is None
    assert "error" not in autocastfx.dump(amp_model)


@pytest.mark.parametrize("full", [False, True])
def test_the_dump_has_a_line_and_a_column_for_it(full: bool) -> None:
    amp_model = converted()
    head, table, _ = autocastfx.dump(amp_model, width=None, full=full).split("\n\n")
    assert amp_model.plan.error is not None
    assert f"predicted error of the gradient: {amp_model.plan.error:.1e}" in head.splitlines()
    assert "error: what the 16 bits of this node, or of what it reads, are predicted to change" in head.splitlines()
    title, *lines = table.splitlines()
    start = title.index("error")
    cells = {line.split()[0]: line[start:].split()[0] for line in lines if " allow " in line or " deny " in line}
    assert cells == {"linear": "3.0e-03", "layer_norm": "2.0e-04", "linear_1": "2.0e-03"}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight @ self.weight


def test_the_summary_adds_up_the_effects_of_a_module() -> None:
    layers = nn.Sequential(Twice(), Twice(), Twice(), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)).eval()
    errors = (3e-3, -1e-3, 3e-3, 2e-3, 4e-3, -3e-3)
    names = ("matmul", *(f"matmul_{i}" for i in range(1, 6)))
    effects = [effect(name, "matmul", str(i // 2), errors[i]) for i, name in enumerate(names)]
    measured = replace(MEASURED, effects=(*effects, effect("linear", "linear", "4", 2e-3)))
    amp_model = autocastfx.convert(layers, (X,), dtype="bfloat16", sensitivity=measured)
    _, ops, table = autocastfx.dump(amp_model, summary=True).split("\n\n")
    assert "error" not in ops
    title, *lines = table.splitlines()
    start = title.index("error")
    cells = {line.split()[0]: line[start:].strip() for line in lines if len(line) > start and line.split()[1].isdigit()}
    assert cells == {"0": "2.0e-03", "*": "5.0e-03", "4": "2.0e-03"}, "5.0e-03 in module 1, 1.0e-03 in module 2"
    assert lines[-1].startswith("error: what the 16 bits of a module's own nodes")
    unpickled = pickle.loads(pickle.dumps(amp_model))
    unpickled(X)
    assert autocastfx.dump(unpickled, summary=True).endswith(table)
    plain = autocastfx.convert(layers, (X,), dtype="bfloat16", check=False)
    assert "error" not in autocastfx.dump(plain, summary=True)


def test_nodes_together_have_the_error_of_the_plan() -> None:
    plan = converted().plan
    assert joint_error(plan.nodes) == plan.error
    assert joint_error([plan["linear"], plan["layer_norm"]]) == pytest.approx(3e-3 + 2e-4)
    assert joint_error([plan["linear"]]) == plan["linear"].error
    assert joint_error(converted(None).plan.nodes) is None
    again = autocastfx.Plan.from_json(plan.to_json())
    assert again == plan
    assert joint_error(again.nodes) is None


def test_graphs_for_other_tools_have_it() -> None:
    graph = nx.parse_graphml(autocastfx.dump(converted(), format="graphml"))
    found = {name: data["error"] for name, data in graph.nodes.items() if "error" in data}
    assert found == pytest.approx({"linear": 3e-3, "layer_norm": 2e-4, "linear_1": 2e-3})
    labels = [line for line in autocastfx.dump(converted(), format="dot").splitlines() if "error 2.0e-04" in line]
    (label,) = labels
    assert label.strip().startswith('"layer_norm" [label="layer_norm')
    assert '"error' not in autocastfx.dump(converted(None), format="graphml")
    assert "error" not in autocastfx.dump(converted(None), format="dot")


def test_without_a_measurement_dumps_are_as_before() -> None:
    plain, measured = converted(None), converted()
    for format in ("text", "json"):
        assert "error" not in autocastfx.dump(plain, format=format)
        assert "error" in autocastfx.dump(measured, format=format)
    codes = [autocastfx.dump(one, format="python").splitlines() for one in (plain, measured)]
    assert [line for line in codes[1] if line not in codes[0]] == ["# predicted error of the gradient: 5.2e-03"]


def test_a_model_that_is_float32_throughout_has_an_error_of_0() -> None:
    wide = converted(MEASURED, FLOAT32)
    assert wide.plan.error == 0
    assert "predicted error of the gradient: 0.0e+00" in autocastfx.dump(wide)


def test_plans_that_differ_tell_both_errors() -> None:
    before, after = converted().plan, converted(MEASURED, FLOAT32).plan
    line = str(autocastfx.diff(before, after)).splitlines()[2]
    assert line.endswith(f"{after.traffic.moved:,}; predicted error: {before.error:.1e} → 0.0e+00")
    again = autocastfx.diff(autocastfx.Plan.from_json(before.to_json()), autocastfx.Plan.from_json(after.to_json()))
    assert str(again).splitlines()[2] == line


def test_an_error_is_no_decision() -> None:
    found = autocastfx.diff(converted(None).plan, converted().plan)
    assert not found
    assert "predicted" not in str(found)


def test_the_page_holds_errors_and_sentences() -> None:
    nodes = {node["name"]: node for node in page_data([view_of(converted())], 0)["variants"][0]["nodes"]}
    assert nodes["linear"]["predicted"] == 3e-3
    assert nodes["linear"]["predicts"] == "16 bits here change the gradient by 3.0e-03."
    assert "predicted" not in nodes["input_1"]
    plain = page_data([view_of(converted(None))], 0)["variants"][0]["nodes"]
    assert not any({"predicted", "predicts"} & node.keys() for node in plain)


@needs_browser
def test_boxes_take_the_colour_of_their_predicted_errors(page: Browser, shown: Callable[..., Shown]) -> None:
    page.open(shown(converted()).path)
    page.choose("#colour", "predicted")
    assert "to 3.0e-3" in page.text("#legend")
    assert "predicted error 3.0e-3" in page.text("#view")
    assert (page.count(".box.heat4"), page.count(".box.heat0")) == (2, 1)
    page.search("linear_1")
    assert "16 bits here change the gradient by 2.0e-03." in page.text("#panel")
    page.click("#reset")
    page.open(shown(converted(None)).path)
    assert page.count("#colour option[value=predicted]:disabled") == 1


@needs_browser
def test_a_closed_module_has_the_predicted_error_of_all_inside(page: Browser, shown: Callable[..., Shown]) -> None:
    inner = nn.Sequential(*model())
    effects = [replace(one, module=f"0.{one.module}") for one in EFFECTS]
    measured = replace(MEASURED, effects=tuple(effects))
    amp_model = autocastfx.convert(nn.Sequential(inner, nn.ReLU()).eval(), (X,), dtype="bfloat16", sensitivity=measured)
    page.open(shown(amp_model).path)
    page.choose("#colour", "predicted")
    group = "Model.build(JSON.parse(document.querySelector('#data').textContent).variants[0], true).groups[1].predicted"
    assert amp_model.plan.error == pytest.approx(3e-3 + 2e-4 + 2e-3)
    assert page.run(f"return {group}") == pytest.approx(amp_model.plan.error)
