"""The text dump. Kept ones are in tests/golden/*.txt: ``python -m tests.golden`` writes them anew."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autocastfx
from autocastfx.policy.op_list import preset_folder
from tests.golden.models import CASES, comparable, converted, kept
from tests.report.shown import encoder_layer_with_symbols

WHY = re.compile(r"(?:allow|deny|infer|clear|promote|keep) \[(\d+)\]")
SOURCE = re.compile(r"(?:(\w+) |\()(op_lists/\w+\.yaml):(\d+):(\d+)(?=[;)])")


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
def test_one_line_for_each_node_if_asked_for(name: str) -> None:
    amp_model = converted(name)
    names = [line[2:].split()[0] for line in table(amp_model, full=True)]
    own = [name for name in names if "/" not in name]
    assert own == [node.name for node in amp_model.graph.nodes]
    assert len(names) == len(set(names))
    assert {n.name for n in amp_model.plan.nodes} <= set(names)
    assert {c.name for c in amp_model.plan.casts} <= set(names)


@pytest.mark.parametrize("name", CASES)
def test_else_a_line_for_each_op_and_input(name: str) -> None:
    amp_model = converted(name)
    names = [line[2:].split()[0] for line in table(amp_model)]
    graphs = [amp_model.graph, *(m.graph for m in amp_model._active.modules() if isinstance(m, fx.GraphModule))]
    kinds = {node.name: node.op for graph in graphs for node in graph.nodes}
    casts = {cast.name for cast in amp_model.plan.casts}
    assert {kinds[name.rpartition("/")[2]] for name in names} <= {"placeholder", "call_function", "output"}
    assert {n.name for n in amp_model.plan.nodes} <= set(names)
    assert casts
    assert casts.isdisjoint(names)


@pytest.mark.parametrize("name", [name for name in CASES if name != "float8"])  # products have reasons without a place
def test_a_reason_is_given_once_with_where_its_ops_are_listed(name: str) -> None:
    text = autocastfx.dump(converted(name), width=None)
    notes = dict(re.findall(r"^\[(\d+)\] (.*)$", text, re.MULTILINE))
    assert notes
    assert len({note.partition(" (")[0] for note in notes.values()}) == len(notes)
    used: dict[str, set[str]] = {}
    for line in table(converted(name), full=True, width=None):
        if found := WHY.search(line):
            used.setdefault(found[1], set()).add(line[2:].split()[1].rstrip("_"))
    assert list(used) == list(notes), "numbered in the order of the table, and each one used"
    for number, note in notes.items():
        sources = SOURCE.findall(note)
        assert sources or note.endswith(("(sub-graph)", "(forced:user-cast)"))
        for op, file, line, column in sources:
            listed = (preset_folder() / Path(file).name).read_text(encoding="utf-8").splitlines()[int(line) - 1]
            word = re.match(r"\w+", listed[int(column) - 1 :])
            assert word is not None
            assert word[0] in used[number]
            assert word[0] == op.rstrip("_") or not op


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("full", [False, True])
def test_columns_are_aligned(name: str, full: bool) -> None:
    title, *lines = autocastfx.dump(converted(name), width=None, full=full).split("\n\n")[1].splitlines()
    whole = [line for line in lines if WHY.search(line)]
    assert whole
    for heading in ("op", "module", "dtype", "shape", "runs", "why") if full else ("module", "dtype", "runs", "why"):
        start = title.index(f"  {heading}")
        assert all(line[start : start + 2] == "  " for line in whole)
        assert heading in ("dtype", "shape") or all(line[start + 2] != " " for line in whole)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"full": True}, {"summary": True}, {"only": "casts"}], ids=str)
@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_line_is_wider_than_asked_for(name: str, options: dict[str, Any], width: int) -> None:
    lines = autocastfx.dump(converted(name), width=width, **options).splitlines()
    assert max(map(len, lines)) <= width
    assert len(table(converted(name), width=width, **options)) == len(table(converted(name), width=None, **options))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("full", [False, True])
def test_the_number_of_a_reason_is_never_cut(name: str, full: bool) -> None:
    wide, narrow = (table(converted(name), width=width, full=full) for width in (None, 40))
    assert [WHY.findall(line) for line in narrow] == [WHY.findall(line) for line in wide]


def test_without_a_width_nothing_is_shortened() -> None:
    assert "…" in autocastfx.dump(converted("no_grad"), width=80, full=True)
    text = autocastfx.dump(converted("no_grad"), width=None, full=True)
    assert "…" not in text
    assert "of submod_1/teacher_weight for submod_1/linear\n" in text


def test_a_name_loses_its_middle() -> None:
    lines = table(converted("no_grad"), width=60, full=True)
    names = [line[2:].split()[0] for line in lines]
    (short,) = {name for name in names if name.startswith("to_")}
    assert short == "to_1", "a short name stays whole"
    cut = [name for name in names if "…" in name]
    whole = [node.name for node in converted("no_grad").graph.nodes]
    assert any(re.fullmatch(re.escape(cut[0]).replace("…", ".+"), name) for name in whole)


@pytest.mark.parametrize("wrong", [{"width": 39}, {"full": True, "summary": True}], ids=str)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"width is at least 40 characters|give one of them"):
        autocastfx.dump(converted("cnn"), **wrong)


@pytest.mark.parametrize("format", ["json", "dot", "html", "python", "graphml"])
def test_arguments_of_the_text_are_refused_with_other_formats(format: str) -> None:
    with pytest.raises(ValueError, match=f"are for the format 'text', not for '{format}'"):
        autocastfx.dump(converted("cnn"), format=format, only="low")


def test_a_line_says_which_operands_are_cast() -> None:
    assert " x, weight, bias → bfloat16 " in row(converted("no_grad"), "linear_1")
    inside = row(converted("no_grad"), "submod_1/linear")
    assert " x, teacher_weight, teacher_bias → bfloat16 " in inside
    assert row(converted("no_grad"), "output").endswith(" of linear_1 → float32, sum_1, clone, mean")
    first = row(converted("encoder_layer"), "linear")
    assert " weight, bias → float16; x → float16 (saturating) " in first or " x → float16 (saturating); " in first


class Shared(nn.Module):
    """A cast that two products read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.b(x)


def test_a_cast_that_was_named_above_is_in_brackets() -> None:
    amp_model = autocastfx.convert(Shared(), (torch.randn(8, 8),), dtype=torch.bfloat16)
    assert len(amp_model.plan.casts) == 4
    assert "  x, weight → bfloat16  " in row(amp_model, "linear")
    assert "  (x), weight → bfloat16  " in row(amp_model, "linear_1")
    assert "\ncasts in brackets: those that an op above reads too\n" in autocastfx.dump(amp_model)
    assert "casts in brackets" not in autocastfx.dump(converted("cnn"))
    assert "first column" not in autocastfx.dump(amp_model)
    assert "\nfirst column: + made by the conversion\n" in autocastfx.dump(amp_model, full=True)
    counts = autocastfx.dump(amp_model, summary=True).splitlines()
    assert next(line.split() for line in counts if line.startswith("linear ")) == ["linear", "2", "2", "3"]
    assert next(line.split() for line in counts if line.startswith("output ")) == ["output", "0", "0", "1"]


def test_shapes_are_shown_and_sizes_that_may_differ_named() -> None:
    amp_model = encoder_layer_with_symbols()
    assert "sizes that may differ from call to call: s0=3 in the example inputs\n" in autocastfx.dump(amp_model)
    assert " [s0, 9, 48] " in row(amp_model, "linear")
    assert " [48, 16]" in row(amp_model, "qkv_weight", full=True)
    assert "sizes that may differ" not in autocastfx.dump(converted("encoder_layer"))


def test_only_shows_a_part() -> None:
    amp_model = converted("no_grad")
    by_precision = {p: names(amp_model, only=p) for p in ("low", "float32", "captured")}
    assert by_precision["low"] == ["submod_1/linear", "linear_1"]
    assert by_precision["captured"] == ["clone", "mean"]
    assert names(amp_model, only="deny") == ["submod_1/softmax", "to", "log_softmax", "sum_1"]
    assert names(amp_model, only="keep") == ["softmax", "to_1"], "what is captured was not decided"
    assert names(amp_model, only="mul") == ["mul", "mul_1"]
    assert names(amp_model, only="casts") == ["submod_1/linear", "linear_1", "output"]
    assert "\nshown: 2 of 13 nodes, only mul\n" in autocastfx.dump(amp_model, only="mul")
    assert autocastfx.dump(amp_model, only="ban").endswith("\n\nno node fits\n")


def test_full_shows_what_the_selected_nodes_read() -> None:
    found = names(converted("no_grad"), only="linear", module="student", full=True)
    casts = [f"{name}_bfloat16" for name in ("x", "student_weight", "student_bias")]
    assert found == ["student_weight", "student_bias", *casts, "linear_1"]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("mlp", ["linear_2", "gelu", "linear_3"]),
        ("mlp.*", ["linear_2", "gelu", "linear_3"]),
        ("mlp.1", ["gelu"]),
        ("re:norm[12]", ["layer_norm", "layer_norm_1"]),
    ],
)
def test_module_shows_what_is_inside(module: str, expected: list[str]) -> None:
    assert names(converted("encoder_layer"), module=module) == expected
    text = autocastfx.dump(converted("encoder_layer"), module=module)
    assert f"\nshown: {len(expected)} of 29 nodes, in {module}\n" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"only": "floot32"}, r"or an op of the model, not 'floot32' \(did you mean 'float32'\?\)"),
        ({"only": "linaer"}, r"not 'linaer' \(did you mean 'linear'\?\)"),
        ({"module": "mpl.0"}, r"no module of the model matches 'mpl.0' \(did you mean 'mlp.0'\?\)"),
        ({"module": "re:("}, r"module is a path of modules or a pattern of it, not 're:\('"),
    ],
    ids=str,
)
def test_an_unknown_name_is_refused_with_the_nearest(options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        autocastfx.dump(converted("encoder_layer"), **options)


def test_the_summary_counts_what_the_table_lists() -> None:
    amp_model = converted("encoder_layer")
    head, ops, modules = autocastfx.dump(amp_model, summary=True).split("\n\n")
    assert head.splitlines() == autocastfx.dump(amp_model).splitlines()[: len(head.splitlines())]
    assert ops.splitlines()[0].split() == ["op", "nodes", "low", "float32", "casts"]
    counts = {line.split()[0]: [int(n) for n in line.split()[1:]] for line in ops.splitlines()[1:]}
    assert {op: n for op, (n, *_) in counts.items()} == dict(Counter(n.op for n in amp_model.plan.nodes))
    assert {op: low for op, (_, low, _, _) in counts.items() if low} == {
        op: n for (op, precision), n in amp_model.plan.by_op().items() if precision == "low"
    }
    assert sum(casts for *_, casts in counts.values()) == len(amp_model.plan.casts)
    lines = {line.split()[0]: line.split()[1:] for line in modules.splitlines()[1:]}
    assert lines["mlp.1"] == ["1", "1", "1", "0", "0"]
    assert sum(int(line[1]) for line in lines.values()) == len(amp_model.plan.nodes)


def test_modules_that_differ_in_numbers_alone_are_counted_as_one_line() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 8, bias=False))
    amp_model = autocastfx.convert(layers, (torch.randn(2, 8),), dtype=torch.bfloat16, check=False)
    lines = autocastfx.dump(amp_model, summary=True).split("\n\n")[2].splitlines()
    assert [line.split() for line in lines[1:5]] == [
        ["0", "1", "1", "1", "3"],
        ["*", "3", "1", "1", "2"],
        ["4", "1", "1", "1", "1"],
        ["(root)", "1", "0", "0", "1"],
    ]
    assert lines[5].startswith("modules whose paths differ in numbers alone")


def test_header_counts_what_the_table_shows() -> None:
    amp_model = converted("encoder_layer")
    header, rows = autocastfx.dump(amp_model).split("\n\n")[0].splitlines(), table(amp_model, full=True)
    casts = [line for line in rows if line.split()[2] == "cast"]
    saturating = sum(line.endswith("saturating") for line in casts)
    to_float32 = sum("→ float32" in line for line in casts)
    planned = [amp_model.plan[n.name].placement.run for n in amp_model.graph.nodes if n.name in names_of(amp_model)]
    assert header[0] == "autocastfx: float16 on cpu, op list float16"
    assert header[1] == "model: EncoderLayer"
    assert header[2].startswith("variant: 1 of 1, train mode, called with x=float32[3d]")
    assert header[3].startswith(f"nodes: {planned.count('low')} low (float16), {planned.count('float32')} float32, ")
    assert header[4] == (
        f"casts: {len(casts)}, of which {len(casts) - to_float32} to float16 and {to_float32} to float32; "
        f"{saturating} saturating"
    )
    traffic, by_casts = amp_model.plan.traffic, sum(cast.bytes for cast in amp_model.plan.casts)
    assert 0 < by_casts < traffic.moved <= traffic.moved_simply
    moved = f"bytes moved: {traffic.moved:,}, of which by casts {by_casts:,}; "
    assert header[5] == f"{moved}by TensorFlow's rule {traffic.moved_simply:,}"
    assert saturating


def test_a_node_without_float32_values_is_shown_briefly() -> None:
    line = row(converted("no_grad"), "clone")
    assert line.split() == ["clone", "(root)", "int64", "[2]", "captured"]


def test_sub_graph_is_indented_below_the_node_that_runs_it() -> None:
    amp_model = converted("no_grad")
    lines = table(amp_model)
    runner = next(i for i, line in enumerate(lines) if "softmax (wrap_with_set_grad_enabled)" in line)
    inside = [line for line in lines if "submod_1/" in line.split()[0] or "submod_1/" in line.split()[1]]
    assert lines[runner + 1 : runner + 1 + len(inside)] == inside
    assert all(line[2:].startswith("  submod_1/") for line in inside)


def test_casts_of_the_model_are_apart_from_those_of_the_conversion() -> None:
    amp_model = converted("no_grad")
    assert row(amp_model, "to").startswith("* to ")
    (number,) = re.findall(r"\[(\d+)\]$", row(amp_model, "to"))
    assert f"\n[{number}] the model's own cast to float32 (forced:user-cast)\n" in autocastfx.dump(amp_model)
    cast = row(amp_model, "x_bfloat16", full=True)
    assert cast.startswith("+ x_bfloat16 ")
    assert cast.endswith("of x for linear_1")
    assert "float32 → bfloat16" in cast


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
    assert row(amp_model, "linear").endswith("keep [1]")
    assert autocastfx.dump(amp_model).endswith("\n\n[1] in no list (unlisted)\n")


def test_of_an_absolute_path_only_the_name_is_shown(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("deny: [linear]\n")
    amp_model = autocastfx.convert(
        Follows(), (torch.randn(2, 8),), dtype=torch.bfloat16, op_list=["default", str(mine)]
    )
    assert str(amp_model.plan["linear"].decision.source) == f"{mine}:1:8"
    assert row(amp_model, "linear").endswith("deny [1]")
    assert "\n[1] no reason given (mine.yaml:1:8)\n" in autocastfx.dump(amp_model)


def table(amp_model: autocastfx.AmpModule, **options: Any) -> list[str]:
    """The lines of the table, without its titles."""
    return autocastfx.dump(amp_model, **{"width": None, **options}).split("\n\n")[1].splitlines()[1:]


def row(amp_model: autocastfx.AmpModule, name: str, **options: Any) -> str:
    return next(line for line in table(amp_model, **options) if line[2:].split()[0] == name)


def names(amp_model: autocastfx.AmpModule, **options: Any) -> list[str]:
    return [line[2:].split()[0] for line in table(amp_model, **options)]


def names_of(amp_model: autocastfx.AmpModule) -> set[str]:
    return {n.name for n in amp_model.plan.nodes}


def test_a_list_that_follows_autocast_places_by_no_cost() -> None:
    x = torch.rand(2, 8)
    amp_model = autocastfx.convert(
        torch.nn.Linear(8, 8), (x,), dtype=torch.bfloat16, op_list="torch_autocast_cpu", check=False
    )
    line = next(line for line in autocastfx.dump(amp_model).splitlines() if line.startswith("bytes moved"))
    assert line == f"bytes moved by casts: {6 * (16 + 64 + 8 + 16)}"  # input, weight, bias, output
