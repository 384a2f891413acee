"""Which rule decides a node, whatever the order of the list, and which rules decide none."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Set
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import autocastfx
from autocastfx import OpList
from autocastfx.errors import OpListError, UnmatchedRuleWarning
from autocastfx.graph.walk import all_nodes
from autocastfx.policy.match import MatchedRules, Matcher
from autocastfx.policy.op_list import load_op_list
from tests.helpers import Function, op_list


def unmatched(
    lists: OpList, device: str, nodes: Iterable[fx.Node], decided: Set[object] = frozenset()
) -> tuple[str, ...]:
    """What is said of rules of ``lists`` that match none of ``nodes``."""
    matched = MatchedRules(lists)
    matched.add(device, nodes, decided)
    return matched.unmatched()


aten = torch.ops.aten


def made(target: Any, *args: Any, path: str = "", kind: str = "m.Module", **kwargs: Any) -> fx.Node:
    """A node as if the module at ``path`` of class ``kind`` had made it."""
    graph = fx.Graph()
    node = graph.call_function(target, (graph.placeholder("x"), *args), kwargs)
    stack = {"": ("", "m.Root")}
    if path:
        stack[path] = (path, kind)
    node.meta["nn_module_stack"] = stack
    return node


def said(lists: OpList, node: fx.Node, device: str = "cpu") -> str | None:
    rule = Matcher(lists, device)(node)
    return None if rule is None else rule.reason


GELU = made(aten.gelu.default, path="layers.1.mlp")
TANH = made(aten.gelu.default, path="layers.1.mlp", approximate="tanh")
EXP = made(aten.exp.default, path="layers.1.attn")


def test_module_then_condition_then_op() -> None:
    rules: dict[str, Any] = {
        "deny": [{"ops": ["gelu", "exp"], "reason": "op"}],
        "allow": [{"gelu": {"when": {"approximate": "tanh"}, "reason": "when"}}],
        "modules": [{"path": "layers.1.attn", "category": "low", "reason": "module"}],
    }
    lists = OpList.of(rules)
    assert [said(lists, n) for n in (GELU, TANH, EXP)] == ["op", "when", "module"]
    rules["modules"][0]["path"] = "**"
    assert [said(OpList.of(rules), n) for n in (GELU, TANH, EXP)] == ["module"] * 3
    assert said(lists, made(aten.log.default)) is None


def test_a_default_is_a_value_like_any_other() -> None:
    lists = OpList.of({"deny": [{"gelu": {"when": {"approximate": ["none", "tanh"]}, "reason": "x"}}]})
    assert said(lists, GELU) == said(lists, TANH) == "x"
    lists = OpList.of({"deny": [{"softmax": {"when": {"dtype": None, "dim": [-1, 1]}, "reason": "x"}}]})
    assert said(lists, made(aten.softmax.int, -1)) == "x"
    assert said(lists, made(aten.softmax.int, 0)) is None
    assert said(lists, made(aten.softmax.int, -1, torch.float32)) is None


def test_more_conditions_win_and_equal_ones_must_agree() -> None:
    both = {"softmax": {"when": {"dim": 1, "dtype": None}, "reason": "two"}}
    one = {"softmax": {"when": {"dim": 1}, "reason": "one"}}
    node = made(aten.softmax.int, 1)
    assert said(OpList.of({"deny": [both], "allow": [one]}), node) == "two"
    assert said(OpList.of({"allow": [both], "deny": [one]}), node) == "two"
    other = {"softmax": {"when": {"dtype": None}, "reason": "other"}}
    for data in ({"deny": [one], "allow": [other]}, {"allow": [other], "deny": [one]}):
        with pytest.raises(OpListError) as caught:
            said(OpList.of(data), node)
        assert str(caught.value) == (
            "OpList:allow[0].softmax: 'softmax where dtype=null' is allow here, and 'softmax where dim=1' is deny at "
            "OpList:deny[0].softmax: both fit node 'softmax_int' equally well. Give one of the two a further condition."
        )
    assert said(OpList.of({"deny": [one, other]}), node) in ("one", "other")


def test_conditions_on_an_in_place_op_and_through_an_alias() -> None:
    lists = OpList.of({"deny": [{"add": {"when": {"alpha": 2}, "reason": "x"}}], "aliases": {"sub": "add"}})
    for target in (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor):
        assert said(lists, made(target, 1, alpha=2)) == "x"
        assert said(lists, made(target, 1)) is None
    lists = OpList.of(
        {
            "deny": [{"add": {"when": {"alpha": 2}, "reason": "out"}}],
            "allow": [{"add_": {"when": {"alpha": 2}, "reason": "in"}}],
        }
    )
    assert said(lists, made(aten.add_.Tensor, 1, alpha=2)) == "in"


def test_devices() -> None:
    lists = OpList.of(
        {
            "allow": [{"ops": ["exp"], "reason": "all"}, {"gelu": {"devices": "cuda", "reason": "cuda"}}],
            "deny": [{"exp": {"devices": ["cpu", "mps"], "reason": "some"}}],
            "modules": [{"path": "layers.*.mlp", "category": "float32", "devices": ["xpu"], "reason": "xpu"}],
        }
    )
    assert [said(lists, EXP, d) for d in ("cpu", "mps", "cuda")] == ["some", "some", "all"]
    assert [said(lists, GELU, d) for d in ("cpu", "cuda", "xpu")] == [None, "cuda", "xpu"]
    later = OpList.of({"infer": [{"exp": {"devices": "cpu", "reason": "later"}}]})
    assert [said(lists | later, EXP, d) for d in ("cpu", "mps", "cuda")] == ["later", "some", "all"]


def entry(path: str, reason: str, category: str = "low", **more: Any) -> dict[str, Any]:
    return {"path": path, "category": category, "reason": reason, **more}


LISTED = {"deny": ["exp", "gelu"]}


def test_the_innermost_module_wins_then_named_ops_then_the_later_list() -> None:
    rules = [entry("**.attn", "inner"), entry("layers.*", "outer", "float32", ops=["exp"])]
    assert said(OpList.of({**LISTED, "modules": rules}), EXP) == "inner"
    rules = [entry("layers.1.*", "all"), entry("layers.*.attn", "exp", "float32", ops=["exp"])]
    assert said(OpList.of({**LISTED, "modules": rules}), EXP) == "exp"
    rules = [entry("layers.1.*", "all"), entry("layers.*.attn", "cpu", "float32", devices="cpu")]
    assert [said(OpList.of({**LISTED, "modules": rules}), EXP, d) for d in ("cpu", "cuda")] == ["cpu", "all"]
    first, second = (OpList.of({**LISTED, "modules": [e]}) for e in (entry("**.attn", "1"), entry("*.1.attn", "2")))
    assert (said(first | second, EXP), said(second | first, EXP)) == ("2", "1")
    third = OpList.of({"modules": [entry("**.attn", "3")]})
    assert said(first | second | third, EXP) == "3"
    assert [r.reason for r in (first | second | third).modules] == ["2", "3"]  # the first has the third's path


def test_a_module_that_only_holds_others_covers_them() -> None:
    for path in ("layers", "layers.1", "**"):
        assert said(OpList.of({**LISTED, "modules": [entry(path, "x")]}), EXP) == "x"
    assert said(OpList.of({**LISTED, "modules": [entry("layer", "x")]}), EXP) == ""
    assert said(OpList.of({**LISTED, "modules": [entry("re:", "root only")]}), EXP) == "root only"


def test_rules_of_one_list_that_fit_equally_well_must_agree() -> None:
    rules = [entry("**.attn", "a"), entry("layers.1.*", "b", "float32")]
    for modules in (rules, rules[::-1]):
        with pytest.raises(OpListError) as caught:
            said(OpList.of({**LISTED, "modules": modules}), EXP)
        assert (
            "both fit node 'exp_default' equally well. Give one of the two a narrower path, or a higher 'rank'."
            in str(caught.value)
        )
        assert "OpList:modules[0]: " in str(caught.value)
        assert "at OpList:modules[1]: " in str(caught.value)
    rules[0]["rank"] = 1
    assert said(OpList.of({**LISTED, "modules": rules}), EXP) == "a"
    rules[1]["rank"] = 7
    assert said(OpList.of({**LISTED, "modules": rules}), EXP) == "b"


def test_a_module_rule_that_lowers_passes_over_what_keeps_its_dtype_unless_it_names_it() -> None:
    rand, unknown = made(aten.rand_like.default, path="a"), made(aten.special_i0.default, path="a")
    lists = OpList.of({"keep": ["rand_like"], "modules": [entry("a", "module")]})
    assert (said(lists, rand), said(lists, unknown)) == ("", None)
    named = OpList.of({"keep": ["rand_like"], "modules": [entry("a", "module", ops=["rand_like", "special_i0"])]})
    assert (said(named, rand), said(named, unknown)) == ("module", "module")
    high = OpList.of({"keep": ["rand_like"], "modules": [entry("a", "module", "float32")]})
    assert (said(high, rand), said(high, unknown)) == ("module", "module")


def test_a_class_is_an_op_rule() -> None:
    node = made(aten.exp.default, path="a", kind="my.Attention")
    lists = OpList.of({"deny": [{"ops": ["my.Attention"], "reason": "class"}], "allow": ["exp"]})
    assert said(lists, node) == "class"
    per_device = OpList.of({"allow": [{"my.Attention": {"devices": "cpu", "reason": "device"}}]})
    assert [said(lists | per_device, node, d) for d in ("cpu", "cuda")] == ["device", "class"]


# Entries of which no two fit a node equally well: whatever their order and however they are spread over lists, the same
# rule wins.
ENTRIES: list[tuple[str, Any]] = [
    ("allow", {"ops": ["exp"], "reason": "1"}),
    ("infer", {"ops": ["gelu"], "reason": "2"}),
    ("allow", {"gelu": {"when": {"approximate": "tanh"}, "reason": "3"}}),
    ("deny", {"gelu": {"when": {"approximate": "none"}, "devices": "cuda", "reason": "4"}}),
    ("deny", {"exp": {"devices": ["cpu"], "reason": "5"}}),
    ("modules", entry("layers", "6", ops=["exp"])),
    ("modules", entry("layers.*", "7", "float32")),
    ("modules", entry("layers.*.mlp", "8", devices=["xpu"])),
]


@settings(max_examples=60)
@given(st.permutations(ENTRIES), st.lists(st.integers(0, len(ENTRIES)), max_size=3))
def test_order_does_not_matter(entries: list[tuple[str, Any]], cuts: list[int]) -> None:
    def of(part: list[tuple[str, Any]]) -> OpList:
        data: dict[str, list[Any]] = {}
        for category, item in part:
            data.setdefault(category, []).append(item)
        return OpList.of(data)

    usual = of(ENTRIES)
    edges = [0, *sorted(cuts), len(entries)]
    spread = OpList()
    for start, end in pairwise(edges):
        spread |= of(entries[start:end])
    assert of(entries) == usual
    for node in (GELU, TANH, EXP, made(aten.exp.default), made(aten.gelu.default)):
        for device in ("cpu", "cuda", "xpu"):
            assert said(spread, node, device) == said(usual, node, device)


# -- rules that decide nothing ----------------------------------------------------------------------------------------


def test_rules_that_match_nothing_are_named_with_the_nearest_name(tmp_path: Path) -> None:
    lists = op_list(
        tmp_path,
        """\
        extends: base
        allow: [exp2, log]
        deny:
          - gelu: {when: {approximate: tanh}}
          - exp: {devices: cuda}
          - my.Atention
        modules:
          - {path: layer.*, category: low}
          - {path: layers.1, category: low, ops: [softmax]}
        """,
    )
    nodes = [GELU, EXP, made(aten.log_.default, path="a", kind="my.Attention")]
    assert [message.replace(f"{tmp_path}/", "") for message in unmatched(lists, "cpu", nodes)] == [
        "test.yaml:2:9: no node of the model is 'exp2' (did you mean 'exp'?).",
        "test.yaml:4:5: no gelu of the model has approximate=tanh.",
        "test.yaml:6:5: no node of the model is 'my.Atention' (did you mean 'my.Attention'?).",
        "test.yaml:8:5: no module of the model matches 'layer.*' (did you mean 'layers.1'?).",
        "test.yaml:9:5: none of softmax runs in the modules 'layers.1'.",
    ]
    places = [message.partition(": ")[0].removeprefix(f"{tmp_path}/") for message in unmatched(lists, "cpu", [TANH])]
    assert places == ["test.yaml:2:9", "test.yaml:2:15", "test.yaml:6:5", "test.yaml:8:5", "test.yaml:9:5"]
    assert len(unmatched(lists, "cuda", nodes)) == 5  # exp on cuda is matched, too


def test_a_rule_for_a_device_whose_op_runs_on_another_names_the_device(tmp_path: Path) -> None:
    lists = op_list(
        tmp_path,
        "deny:\n- exp: {devices: cuda}\n- gelu: {devices: cuda, when: {approximate: none}}\n",
    )
    matched = MatchedRules(lists)
    matched.add("cpu", [GELU, EXP])
    matched.add("cuda", [TANH])
    assert [message.partition(": ")[2] for message in matched.unmatched()] == [
        "no exp of the model runs on cuda.",
        "no gelu of the model runs on cuda and has approximate=none.",
    ]


def test_a_demand_of_no_op_of_the_model_is_reported(tmp_path: Path) -> None:
    lists = op_list(tmp_path, "demands:\n  - reason: it needs digits\n    ops: [exp, exp2]")
    (message,) = unmatched(load_op_list(["default", lists]), "cpu", [EXP])
    assert message.endswith("test.yaml:3:16: no node of the model is 'exp2' (did you mean 'exp'?).")


def test_a_rule_that_another_one_beats_has_matched() -> None:
    lists = OpList.of({"deny": ["exp"], "allow": [{"gelu": {"when": {"approximate": "none"}}}, "gelu"]})
    lists |= OpList.of({"modules": [entry("layers", "a"), entry("layers.1", "b")]})
    assert unmatched(lists, "cpu", [GELU, EXP]) == ()


def test_nodes_of_subgraphs_count() -> None:
    inner = fx.Graph()
    inner.output(inner.call_function(aten.exp.default, (inner.placeholder("x"),)))
    outer = fx.Graph()
    x, body = outer.placeholder("x"), outer.get_attr("body")
    outer.output(outer.call_function(torch.ops.higher_order.wrap_with_set_grad_enabled, (False, body, x)))
    names = [n.name for n in all_nodes(outer, {"body": fx.GraphModule({}, inner)})]
    assert names == ["wrap_with_set_grad_enabled", "exp_default"]


def test_a_rule_that_decided_an_op_of_another_name_has_matched(tmp_path: Path) -> None:
    lists = op_list(tmp_path, "deny: [square]")
    places = {rule.source for rule in lists.every_rule()}
    assert len(unmatched(lists, "cpu", [EXP])) == 1
    assert unmatched(lists, "cpu", [EXP], places) == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnmatchedRuleWarning)
        autocastfx.convert(Function(lambda x: x * x), (torch.ones(2),), op_list=["default", lists], dtype="float16")
