"""What the page is given to show."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.plan.plan import Precision
from autocastfx.report.comparison import ComparedNode, ComparedParameter, ComparedVariant, Deviation
from autocastfx.report.dump import view_of
from autocastfx.report.html import page_data
from autocastfx.report.view import View, float8_clauses
from tests.golden.models import CASES, INPUTS, converted
from tests.report.shown import encoder_layer_with_symbols, in_both_modes


def deviation(error: float, **shares: float) -> Deviation:
    numbers = dict.fromkeys(("overflow", "underflow", "zeros", "nan"), 0.0)
    return Deviation("float16", error, **{**numbers, **shares})


def compared(name: str, error: float = 0.0, **shares: float) -> ComparedNode:
    return ComparedNode(**vars(deviation(error, **shares)), name=name, op="", module="", precision="low")


def comparison(of: View, *nodes: ComparedNode, **key: str) -> autocastfx.Comparison:
    key = {"mode": of.mode, "call": of.call, "sizes": of.sizes, "low": of.plan.low, **key}
    variant = ComparedVariant(**key, device="cpu", op_list="mine")
    return autocastfx.Comparison(nodes, 0, (), (), None, variant)


def variant(amp_model: autocastfx.AmpModule) -> dict[str, Any]:
    return page_data([view_of(amp_model)], 0)["variants"][0]


def path(shown: dict[str, Any], node: dict[str, Any]) -> str:
    """Path of the module that a node stands in; of a sub-graph in parentheses."""
    names, number = [], node["in"]
    while number:
        module = shown["modules"][number]
        names.insert(0, f"({module['name']})" if module.get("runs") else module["name"])
        number = module["around"]
    return ".".join(names)


def named(shown: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in shown["nodes"]}


@pytest.mark.parametrize("name", CASES)
def test_every_decision_and_cast_of_the_plan_is_there(name: str) -> None:
    amp_model = converted(name)
    shown = variant(amp_model)
    nodes, plan = named(shown), amp_model.plan
    assert len(nodes) == len(shown["nodes"])
    for planned in plan.nodes:
        node = nodes[planned.name]
        assert node["op"] == planned.op
        assert node.get("module", "") == planned.module
        assert node["category"] == str(planned.decision.category)
        assert node.get("source", "") == str(planned.decision.source)
        assert node.get("reason", "") == planned.decision.reason
        assert node["runs"].split(",")[0] == str(planned.placement.run)
    casts = {node["name"]: (node["of"], node["to"], node.get("bytes", 0)) for node in nodes.values() if "to" in node}
    assert casts == {cast.name: (cast.value, cast.dtype, cast.bytes) for cast in plan.casts}


@pytest.mark.parametrize("name", CASES)
def test_nodes_refer_to_what_they_read_by_number(name: str) -> None:
    amp_model = converted(name)
    shown = variant(amp_model)
    nodes = named(shown)
    for node in amp_model.graph.nodes:
        reads = [shown["nodes"][i]["name"] for i in nodes[node.name]["reads"]]
        assert [read for read in reads if "/" not in read] == [read.name for read in node.all_input_nodes]


@pytest.mark.parametrize("name", CASES)
def test_it_is_json_and_the_same_each_time(name: str) -> None:
    amp_model = converted(name)
    data = page_data([view_of(amp_model)], 0)
    assert json.dumps(data, allow_nan=False) == json.dumps(page_data([view_of(CASES[name]())], 0))
    assert str(Path.cwd()) not in json.dumps(data)
    assert "site-packages" not in json.dumps(data)


def test_words_are_those_of_explain() -> None:
    amp_model = converted("encoder_layer")
    nodes = named(variant(amp_model))
    for planned in amp_model.plan.nodes:
        node = nodes[planned.name]
        parts = autocastfx.explain(amp_model, planned.name).split("\n\n")
        said = next(f"{part}\n" for part in parts if part.startswith(f"{planned.name} ("))
        assert f" {node['says']}.\n" in said
        assert f"  decided: {node['category']}, {node['reason']} ({node['source']}).\n" in said
        assert said.count("  placed: ") == len(node.get("placed", ()))
        assert all(f"  placed: {clause}.\n" in said for clause in node.get("placed", ()))
        assert f"  to change it: {node['change']}.\n" in said


def test_products_in_float8_are_told_as_by_explain() -> None:
    amp_model = converted("float8")
    nodes = named(variant(amp_model))
    assert nodes["linear"]["float8"] == (
        "products: rowwise",
        "reads layer_norm_float8_rows: layer_norm by rows, as linear_1, linear_2 do",
        "reads q_weight_float8_rows: q_weight by rows",
        "reads layer_norm_float8_columns: layer_norm by columns, as linear_1, linear_2 do",
        "reads q_weight_float8_columns: q_weight by columns",
    )
    assert nodes["linear_4"]["float8"] == ("products: no float8: no other product is computed from it",)
    shared = replace(amp_model.plan.quantized[0], readers=("linear", "linear_1"))
    assert [*float8_clauses(amp_model.plan["linear"], [shared])][-1].endswith("layer_norm by rows, as linear_1 does")
    for name, node in nodes.items():
        if clauses := node.get("float8"):
            assert "".join(f"  {clause}.\n" for clause in clauses) in autocastfx.explain(amp_model, name)
    assert {name for name, node in nodes.items() if "float8" in node} == {
        node.name for node in amp_model.plan.nodes if node.float8 is not None
    }
    assert "float8" not in json.dumps(page_data([view_of(converted("encoder_layer"))], 0))


def test_shapes_bytes_and_attributes_are_those_of_the_rows() -> None:
    view = view_of(encoder_layer_with_symbols())
    nodes = named(page_data([view], 0)["variants"][0])
    for row in view.rows:
        node = nodes[row.name]
        assert (node.get("symbols", node.get("shape", "")), node.get("size", 0)) == (row.shape, row.bytes)
        assert "=" not in node.get("shape", "")
        assert node.get("attributes", ()) == row.attributes
    assert nodes["softmax"]["attributes"] == (("dim", "-1"),)
    assert (nodes["softmax"]["shape"], nodes["softmax"]["symbols"]) == ("[3, 2, 9, 9]", "[s0=3, 2, 9, 9]")


def test_nodes_stand_in_their_modules() -> None:
    shown = variant(converted("encoder_layer"))
    nodes = named(shown)
    assert path(shown, nodes["gelu"]) == "mlp.1"
    assert path(shown, nodes["mlp_0_weight"]) == path(shown, nodes["mlp_0_weight_float16"]) == "mlp.0"
    assert path(shown, nodes["softmax"]) == path(shown, nodes["x"]) == path(shown, nodes["output"]) == ""


def test_a_sub_graph_stands_in_the_module_that_runs_it() -> None:
    shown = variant(converted("no_grad"))
    nodes = named(shown)
    runner = next(node for node in shown["nodes"] if node.get("op") == "wrap_with_set_grad_enabled")
    assert path(shown, nodes["submod_1/linear"]) == "(submod_1).teacher"
    assert path(shown, nodes["submod_1/softmax"]) == path(shown, nodes["submod_1/output"]) == "(submod_1)"
    assert "submod_1/output" in [shown["nodes"][i]["name"] for i in runner["reads"]]


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.relu(x) + 1


def test_the_path_of_its_runner_is_not_repeated_inside_a_sub_graph() -> None:
    shown = variant(autocastfx.convert(nn.Sequential(nn.Linear(8, 8), Inner()), (torch.ones(2, 8),), dtype="float16"))
    inside = next(node for node in shown["nodes"] if node["name"].endswith("/relu"))
    assert path(shown, inside) == f"1.({inside['name'].split('/')[0]})"


def test_the_shade_says_the_precision() -> None:
    amp_model = autocastfx.convert(
        nn.Softmax(-1), (torch.ones(2, 8),), op_list="torch_autocast_cuda", device="cuda", dtype="float16"
    )
    shades = {node["name"]: node["shade"] for node in variant(amp_model)["nodes"] if "shade" in node}
    assert shades == {n.name: str(n.placement.run) for n in amp_model.plan.nodes}
    nodes = named(variant(converted("no_grad")))
    assert [nodes[name].get("shade") for name in ("linear_1", "log_softmax", "clone", "x")] == [
        "low",
        "float32",
        "other",
        None,
    ]
    mixed = view_of(converted("cnn"))
    rows = tuple(_stored_float32(row) if row.name == "conv2d" else row for row in mixed.rows)
    assert named(page_data([replace(mixed, rows=rows)], 0)["variants"][0])["conv2d"]["shade"] == "mixed"


def _stored_float32(row: Any) -> Any:
    placement = replace(row.planned.placement, store=Precision.FLOAT32)
    return replace(row, planned=replace(row.planned, placement=placement))


def test_the_models_line_is_known() -> None:
    node = named(variant(converted("encoder_layer")))["softmax"]
    assert node["line"].startswith("models/tiny.py:")
    assert node["code"] == "attended = (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(x.shape)"


def test_of_an_absolute_path_of_a_list_only_the_name_is_shown(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("deny: [linear]\n")
    amp_model = autocastfx.convert(
        nn.Linear(8, 8), (torch.ones(2, 8),), op_list=["default", str(mine)], dtype="float16"
    )
    shown = variant(amp_model)
    assert named(shown)["linear"]["source"] == "mine.yaml:1:8"
    assert str(tmp_path) not in json.dumps(shown)


def both() -> tuple[View, View]:
    amp_model = in_both_modes(CASES["encoder_layer"](), *INPUTS["encoder_layer"])
    return view_of(amp_model), view_of(amp_model.eval())


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("shown", [0, 1])
def test_measured_numbers_go_to_the_variant_that_was_compared_which_is_shown_first(number: int, shown: int) -> None:
    views = both()
    found = comparison(views[number], compared("softmax", 0.25, nan=0.5, zeros=0.125), compared("linear", math.inf))
    data = page_data(views, shown, found)
    assert data["shown"] == number
    assert not any("numerics" in node for node in data["variants"][1 - number]["nodes"])
    none = {"overflow": 0.0, "underflow": 0.0, "zeros": 0.0, "nan": 0.0}
    nodes = {node["name"]: node["numerics"] for node in data["variants"][number]["nodes"] if "numerics" in node}
    assert nodes == {"softmax": {**none, "error": 0.25, "nan": 0.5, "zeros": 0.125}, "linear": {**none, "error": "inf"}}


def test_gradients_go_to_their_nodes_and_parameters_to_the_variant() -> None:
    views = both()
    node = replace(compared("softmax"), gradient=deviation(0.5))
    parameter = ComparedParameter(**vars(deviation(0.75)), name="fc.weight")
    data = page_data(views, 0, replace(comparison(views[1], node), parameters=(parameter,)))
    trained, evaluated = data["variants"]
    assert "parameters" not in trained
    assert [(p["name"], p["error"]) for p in evaluated["parameters"]] == [("fc.weight", 0.75)]
    assert named(evaluated)["softmax"]["numerics"]["gradient"]["error"] == 0.5


def test_numbers_of_another_model_are_refused() -> None:
    views = both()
    with pytest.raises(ValueError, match=r"the comparison is of another model: this one has no node 'gone'\. Give"):
        page_data(views, 0, comparison(views[0], compared("softmax"), compared("gone")))


@pytest.mark.parametrize("key", [{"mode": "mixed"}, {"call": "y=int64[1d]"}, {"sizes": "s0 == 3"}, {"low": "bfloat16"}])
def test_numbers_of_a_variant_that_is_not_there_are_refused(key: dict[str, str]) -> None:
    views = both()
    with pytest.raises(ValueError, match="is of a variant that this model lacks: ") as raised:
        page_data(views, 0, comparison(views[0], compared("softmax"), **key))
    assert next(iter(key.values())) in str(raised.value)


def test_where_an_error_begins_goes_to_the_variant_that_was_compared() -> None:
    view = view_of(converted("encoder_layer"))

    def begin(*nodes: ComparedNode) -> Any:
        return page_data([view], 0, comparison(view, *nodes))["variants"][0]["begin"]

    said = "Inf and NaN begin at softmax () in module (root)"
    assert begin(compared("linear", 0.5), compared("softmax", 0.25, overflow=0.5)) == {
        "says": said,
        "node": "softmax",
        "failing": True,
    }
    assert begin(compared("linear", 0.5)).keys() == {"says", "node"}
    assert begin(compared("linear")) == {}


def test_a_comparison_that_compared_nothing_is_taken() -> None:
    views = both()
    assert page_data(views, 0, comparison(views[1]))["shown"] == 1
