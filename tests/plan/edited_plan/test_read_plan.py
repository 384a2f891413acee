"""Reading the text of a plan that a person edited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from autocastfx import Plan
from autocastfx.errors import PlanError, Source
from autocastfx.plan.edited_plan import read_plan
from autocastfx.plan.plan import Precision
from autocastfx.policy.rule import Category
from tests.plan.test_plan import PLANS

NODE = '{"name": "mul", "op": "mul", "placement": {"run": "low"}}'
DIGITS = "1" * 5000


def message(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    return str(caught.value).replace(f"{path.parent}/", "")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=PLANS)
def test_what_a_plan_says_is_read_from_it_and_from_its_text(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    if len({node.name for node in plan.nodes}) < len(plan.nodes):
        for given in (plan, path):
            with pytest.raises(PlanError, match="has two lines"):
                read_plan(given)
        return
    lines = plan.to_json().split("\n")
    by_text, by_value = read_plan(path).lines, read_plan(plan).lines
    for node in plan.nodes:
        read, source = by_text[node.name], by_text[node.name].source
        assert (read.op, read.module, read.category) == (node.op, node.module, node.decision.category)
        assert (read.run, read.store, read.reason) == (
            node.placement.run,
            node.placement.store,
            node.decision.reason,
        )
        assert isinstance(source, Source)
        assert lines[source.line - 1][source.column - 1 :] == "{"
        assert lines[source.line].strip() == f'"name": {json.dumps(node.name, ensure_ascii=False)},'
        assert str(by_value[node.name].source) == f"plan:nodes[{plan.nodes.index(node)}]"
    assert list(by_text) == list(by_value)


def test_a_line_may_leave_out_what_it_does_not_ask_for(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(
        '{"nodes": [{"name": "a", "op": "mul"}, {"op": "mul", "name": "b", "decision": {"category": "deny"}}, '
        + NODE
        + "]}"
    )
    a, b, mul = read_plan(str(path)).lines.values()
    assert (a.module, a.category, a.run, a.store) == (None, None, None, None)
    assert (b.category, b.run) == (Category.DENY, None)
    assert (mul.category, mul.run, mul.store) == (None, Precision.LOW, None)
    assert str(mul.source) == f"{path}:1:102"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1:1: this is not JSON: Expecting value."),
        ('{"nodes": [\n {"name" "a"}\n]}', "2:10: this is not JSON: Expecting ':' delimiter."),
        ('{"nodes": [' + NODE + "]} x", "1:72: this is not JSON: Extra data."),
        ("[" * 100_000, "1:1: this is not JSON: it is nested too deeply."),
        ("[" * 990 + "]" * 990, "1:1: this is not JSON: it is nested too deeply."),
        (
            '{"nodes": [{"name": "a", "op": "b",\n "module": ' + DIGITS + "}]}",
            "2:12: this is not JSON: an integer has 5000 ",
        ),
        (
            '{"nodes": [{"name": "' + DIGITS + '", "op": "b", "module": ' + DIGITS + "}]}",
            "1:5046: this is not JSON: an integer",
        ),
        ("[]", "1:1: a plan is an object with keys, not []."),
        ("{}", "1:1: a plan has the key 'nodes' with a list of nodes."),
        ('{"nodes": {}}', "1:1: a plan has the key 'nodes' with a list of nodes."),
        ('{"node": []}', "1:1: 'node' is no key of a plan (did you mean 'nodes'?). Known: low, device, "),
        ('{"nodes": [3]}', "1:12: a node is an object with keys, not 3."),
        ('{"nodes": [\n  {"op": "mul"}]}', "2:3: this node has no 'name', by which it would be found."),
        ('{"nodes": [{"name": "mul"}]}', "1:12: this node has no 'op', by which it would be found."),
        ('{"nodes": [{"name": 3, "op": "mul"}]}', "1:12: this node has no 'name', "),
        (
            '{"nodes": [{"name": "a", "op": "b", "placment": 1}]}',
            "1:12: 'placment' is no key of a node (did you mean 'pl",
        ),
        ('{"nodes": [{"name": "a", "op": "b", "placement": []}]}', ""),
        (
            '{"nodes": [{"name": "a", "op": "b", "placement": "low"}]}',
            '1:12: a placement is an object with keys, not "low".',
        ),
        (
            '{"nodes": [{"name": "a", "op": "b", "placement": {"runs": "low"}}]}',
            "1:12: 'runs' is no key of a placement (did you mean 'run'?). Known: run, store, because, as_stored.",
        ),
        (
            '{"nodes": [{"name": "a", "op": "b", "placement": {"run": "lwo"}}]}',
            "1:12: 'run' is low or float32 or captured or given, not 'lwo' (did you mean 'low'?).",
        ),
        (
            '{"nodes": [{"name": "a", "op": "b", "placement": {"run": ["low"]}}]}',
            "1:12: 'run' is low or float32 or captured or given, not ['low'] (did you mean 'low'?).",
        ),
        (
            '{"nodes": [{"name": "a", "op": "b", "decision": {"category": "alow"}}]}',
            "1:12: 'category' is allow or deny or infer or clear or promote or keep or ban, not 'alow' (did",
        ),
        (
            '{"nodes": [' + NODE + ",\n" + NODE + "]}",
            "2:1: node 'mul' has two lines, the first at plan.json:1:12. Keep one.",
        ),
    ],
)
def test_wrong_text(text: str, expected: str, tmp_path: Path) -> None:
    if not expected:  # an empty list says nothing, as an empty object does
        (tmp_path / "plan.json").write_text(text)
        assert read_plan(tmp_path / "plan.json").lines["a"].run is None
        return
    assert message(tmp_path / "plan.json", text).startswith(f"plan.json:{expected}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"^cannot read the plan nowhere\.json: No such file or directory\.$"):
        read_plan("nowhere.json")
    with pytest.raises(
        PlanError, match=r"^cannot read the plan a\0b: its path has a NUL character, which no file name"
    ):
        read_plan("a\0b")
    with pytest.raises(
        PlanError, match=r"^cannot read the plan a\ud800: its path has a character that no file name has"
    ):
        read_plan("a\ud800")
    (tmp_path / "plan.json").write_bytes(b"\xff")
    with pytest.raises(PlanError, match=r"plan\.json:1:1: this is not UTF-8 text"):
        read_plan(tmp_path / "plan.json")


def test_what_is_no_plan() -> None:
    wrong: Any = {"nodes": []}
    with pytest.raises(TypeError, match=r"a plan is a Plan or the path of its text, not a dict"):
        read_plan(wrong)
