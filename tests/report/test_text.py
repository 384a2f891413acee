"""The text dump. Kept ones are in tests/golden/*.txt: ``python -m tests.golden`` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.policy.presets import preset_folder
from tests.golden.models import CASES, comparable, converted, kept

SOURCE = re.compile(r"\((op_lists/\w+\.yaml):(\d+):(\d+)\)$")


@pytest.mark.usefixtures("both_modes")
@pytest.mark.parametrize("name", CASES)
def test_kept_dump(name: str) -> None:
    shown = comparable(autocastfx.dump(converted(name)))
    assert shown == kept(name).read_text(encoding="utf-8"), "run `python -m tests.golden` and review what changed"


@pytest.mark.parametrize("name", CASES)
def test_twice_the_same(name: str) -> None:
    assert autocastfx.dump(CASES[name]()) == autocastfx.dump(converted(name))


@pytest.mark.parametrize("name", CASES)
def test_no_path_of_this_machine(name: str) -> None:
    assert str(Path.cwd()) not in autocastfx.dump(converted(name))
    assert "site-packages" not in autocastfx.dump(converted(name))


@pytest.mark.parametrize("name", CASES)
def test_one_line_for_each_node(name: str) -> None:
    amp_model = converted(name)
    names = [line[2:].split()[0] for line in table(amp_model)]
    own = [name for name in names if "/" not in name]
    assert own == [node.name for node in amp_model.graph.nodes]
    assert len(names) == len(set(names))
    assert {n.name for n in amp_model.plan.nodes} <= set(names)
    assert {c.name for c in amp_model.plan.casts} <= set(names)


@pytest.mark.parametrize("name", CASES)
def test_a_source_is_where_the_op_is_listed(name: str) -> None:
    sourced = [(line.split(), found) for line in table(converted(name)) if (found := SOURCE.search(line))]
    assert sourced
    for words, found in sourced:
        op = words[1].rstrip("_")
        line = (preset_folder() / Path(found[1]).name).read_text(encoding="utf-8").splitlines()[int(found[2]) - 1]
        assert re.match(rf"{op}\b", line[int(found[3]) - 1 :])


@pytest.mark.parametrize("name", CASES)
def test_columns_are_aligned(name: str) -> None:
    title, *lines = autocastfx.dump(converted(name)).split("\n\n")[1].splitlines()
    whole = [line for line in lines if line.endswith(")") and not line.startswith("+")]
    assert whole
    for heading in ("op", "module", "dtype", "runs", "category", "placed because", "reason"):
        start = title.index(f"  {heading}")
        assert all(line[start : start + 2] == "  " for line in whole)
        assert heading == "dtype" or all(line[start + 2] != " " for line in whole)


@pytest.mark.usefixtures("both_modes")
def test_header_counts_what_the_table_shows() -> None:
    amp_model = converted("encoder_layer")
    header, rows = autocastfx.dump(amp_model).split("\n\n")[0].splitlines(), table(amp_model)
    casts = [line for line in rows if line.split()[2] == "cast"]
    saturating = sum(line.endswith("saturating") for line in casts)
    to_float32 = sum("→ float32" in line for line in casts)
    planned = [amp_model.plan[n.name].placement.run for n in amp_model.graph.nodes if n.name in names_of(amp_model)]
    assert header[0] == "autocastfx: float16 on cpu, op list float16"
    assert header[1].startswith("variant: 1 of 2, train mode, called with x=float32[3d]")
    assert header[2].startswith(f"nodes: {planned.count('low')} low (float16), {planned.count('float32')} float32, ")
    assert header[3] == (
        f"casts: {len(casts)}, of which {len(casts) - to_float32} to float16 and {to_float32} to float32; "
        f"{saturating} saturating"
    )
    traffic, by_casts = amp_model.plan.traffic, sum(cast.bytes for cast in amp_model.plan.casts)
    assert 0 < by_casts < traffic.moved <= traffic.moved_simply
    moved = f"bytes moved: {traffic.moved:,}, of which by casts {by_casts:,}; "
    assert header[4] == f"{moved}by TensorFlow's rule {traffic.moved_simply:,}"
    assert saturating


def test_a_node_without_float32_values_is_shown_briefly() -> None:
    line = row(converted("no_grad"), "clone")
    assert line.split() == ["clone", "clone", "(root)", "int64", "captured"]


def test_sub_graph_is_indented_below_the_node_that_runs_it() -> None:
    amp_model = converted("no_grad")
    lines = table(amp_model)
    runner = next(i for i, line in enumerate(lines) if " wrap_with_set_grad_enabled " in line)
    inside = [line for line in lines if "submod_1/" in line.split()[0] or "submod_1/" in line.split()[1]]
    assert lines[runner + 1 : runner + 1 + len(inside)] == inside
    assert all(line[2:].startswith("  submod_1/") for line in inside)


def test_casts_of_the_model_are_apart_from_those_of_the_conversion() -> None:
    amp_model = converted("no_grad")
    assert row(amp_model, "to").startswith("* to ")
    assert "forced:user-cast" in row(amp_model, "to")
    assert row(amp_model, "x_bfloat16").startswith("+ x_bfloat16 ")
    assert row(amp_model, "x_bfloat16").endswith("float32 → bfloat16  of x for linear_1")


class Follows(nn.Module):
    """A cast that follows another value's dtype, which capture takes out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu().to(x.dtype))


def test_what_is_no_longer_in_the_graph_is_shown_where_it_was() -> None:
    amp_model = autocastfx.convert(Follows(), (torch.randn(2, 8),), dtype=torch.bfloat16)
    (relu,) = [node for node in amp_model.graph.nodes if node.name == "relu"]
    relu.replace_all_uses_with(relu.args[0])
    amp_model.graph.erase_node(relu)
    lines = table(amp_model)
    gone = next(i for i, line in enumerate(lines) if line.startswith("- relu "))
    assert lines[gone - 1].split()[0] == "linear"
    assert "nodes: 2 low (bfloat16), 0 float32, 0 captured" in autocastfx.dump(amp_model)


def test_a_node_that_the_caller_added_is_not_in_the_plan() -> None:
    amp_model = CASES["cnn"]()
    last = next(node for node in amp_model.graph.nodes if node.op == "output")
    with amp_model.graph.inserting_before(last):
        amp_model.graph.call_function(torch.relu, (last.args[0][0],))
    assert row(amp_model, "relu_1").endswith("not in the plan")


def test_unlisted_ops_are_counted() -> None:
    ops = autocastfx.OpList(name="mine")
    amp_model = autocastfx.convert(Follows(), (torch.randn(2, 8),), dtype=torch.bfloat16, op_list=ops)
    assert "unlisted ops: linear (2), relu (1)\n" in autocastfx.dump(amp_model)
    assert row(amp_model, "linear").endswith("in no list (unlisted)")


def test_of_an_absolute_path_only_the_name_is_shown(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("deny: [linear]\n")
    amp_model = autocastfx.convert(
        Follows(), (torch.randn(2, 8),), dtype=torch.bfloat16, op_list=["default", str(mine)]
    )
    assert str(amp_model.plan["linear"].decision.source) == f"{mine}:1:8"
    assert row(amp_model, "linear").endswith("(mine.yaml:1:8)")


def table(amp_model: autocastfx.AmpModule) -> list[str]:
    """The lines of the table, without its titles."""
    return autocastfx.dump(amp_model).split("\n\n")[1].splitlines()[1:]


def row(amp_model: autocastfx.AmpModule, name: str) -> str:
    return next(line for line in table(amp_model) if line[2:].split()[0] == name)


def names_of(amp_model: autocastfx.AmpModule) -> set[str]:
    return {n.name for n in amp_model.plan.nodes}


def test_a_list_that_follows_autocast_places_by_no_cost() -> None:
    x = torch.rand(2, 8)
    amp_model = autocastfx.convert(torch.nn.Linear(8, 8), (x,), dtype=torch.bfloat16, op_list="torch_autocast_cpu")
    line = next(line for line in autocastfx.dump(amp_model).splitlines() if line.startswith("bytes moved"))
    assert line == f"bytes moved by casts: {6 * (16 + 64 + 8 + 16)}"  # input, weight, bias, output
