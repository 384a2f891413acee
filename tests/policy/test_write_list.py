"""Saving a list and reading it back, and the lines in which two lists differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autocastfx
from autocastfx import OpList, load_op_list, presets
from autocastfx.errors import OpListError
from autocastfx.policy.rule import Category
from autocastfx.policy.write_list import Change

WHEN: dict[str, list[dict[str, Any] | None]] = {
    "gelu": [None, {"approximate": "none"}, {"approximate": ["none", "tanh"]}],
    "softmax": [None, {"dim": -1}, {"dim": [0, 1], "dtype": None}],
    "layer_norm": [None, {"eps": 1e-17}, {"eps": [1e-5, 0.5], "cudnn_enable": True}],
    "my_lib::op": [None, {"mode": ["no", "1e-3", "ä: #", ""], "n": [1, 2.5, None, False]}],
}
KEYS = [(op, i, device) for op, whens in WHEN.items() for i in range(len(whens)) for device in ("", "cpu", "cuda")]
REASONS = st.sampled_from(["", "why", "no", "1e-3", "a: b # c", "ä 'ö' \"ü\"\nnew line", "x" * 200])
PATHS = st.sampled_from(["head", "layers.*", "**.attn", "re:^a\\.\\d+$", "layers.[0-3]"])
OPS = st.sampled_from([[], ["exp"], ["exp", "softmax", "my_lib::op"]])
WORDS = st.sampled_from(["low", "float32", "keep"])
DEMANDS = st.fixed_dictionaries(
    {"ops": st.sampled_from([["sin", "cos"], ["div"], ["my_lib::op"]]), "reason": REASONS},
    optional={
        "through": st.sampled_from(["free", "products", "both", "nothing"]),
        "arguments": st.just(["self"]),
        "of": st.sampled_from([["sub"], ["exp", "sub"]]),
    },
)


@st.composite
def op_lists(draw: st.DrawFn) -> OpList:
    data: dict[str, Any] = {}
    for op, i, device in draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=6)):
        body: dict[str, Any] = {"when": WHEN[op][i], "devices": device, "reason": draw(REASONS)}
        body = {key: value for key, value in body.items() if value}
        data.setdefault(str(draw(st.sampled_from(Category))), []).append({op: body} if body else op)
    modules = draw(st.lists(st.tuples(PATHS, OPS, WORDS, REASONS, st.integers(0, 2)), unique_by=str, max_size=4))
    data["modules"] = [
        {"path": p, "category": w, "reason": r, "rank": n, **({"ops": o} if o else {})} for p, o, w, r, n in modules
    ]
    data["modules"] = list({(m["path"], str(m.get("ops"))): m for m in data["modules"]}.values())
    data.update(
        draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "unlisted": st.sampled_from(["keep", "deny", "error"]),
                    "placement": st.sampled_from(["cut", "simple", "follow"]),
                    "keep_args": st.just({"batch_norm": ["weight", "bias"], "my_lib::op": ["a"]}),
                    "aliases": st.just({"my_lib::x": "exp", "some.module.f": "softmax"}),
                    "product_depth": st.sampled_from([None, 1, 8]),
                    "backward_depth": st.sampled_from([None, 1, 16]),
                    "demands": st.lists(DEMANDS, max_size=3, unique_by=lambda demand: demand["ops"][0]),
                },
            )
        )
    )
    return OpList.of(data)


CHECKS = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@CHECKS
@given(op_lists(), op_lists())
def test_saved_and_read_back(tmp_path: Path, first: OpList, second: OpList) -> None:
    for lists in (first, first | second):
        lists.save(tmp_path / "saved.yaml")
        text = (tmp_path / "saved.yaml").read_text(encoding="utf-8")
        again = load_op_list(tmp_path / "saved.yaml")
        assert again == lists
        assert again.diff(lists) == ()
        again.save(tmp_path / "saved.yaml")
        assert (tmp_path / "saved.yaml").read_text(encoding="utf-8") == text


@CHECKS
@given(op_lists(), op_lists(), op_lists())
def test_lists_differ_where_they_are_not_equal_and_merging_is_associative(a: OpList, b: OpList, c: OpList) -> None:
    assert bool(a.diff(b)) == (a != b)
    assert [(x.subject, x.before, x.after) for x in a.diff(b)] == [(x.subject, x.after, x.before) for x in b.diff(a)]
    assert (a | b) | c == a | (b | c)
    assert OpList() | a == a | OpList() == a
    assert a | a == a


@pytest.mark.parametrize("name", presets())
def test_a_shipped_list_is_saved_whole(name: str, tmp_path: Path) -> None:
    lists = load_op_list(name)
    lists.save(tmp_path / "own.yaml")
    again = load_op_list(tmp_path / "own.yaml")
    assert again == lists
    assert all(rule.reason for rule in again.rules.values())
    assert "extends" not in yaml.safe_load((tmp_path / "own.yaml").read_text())
    assert {rule.shipped for rule in again.every_rule()} == {rule.shipped for rule in lists.every_rule()} == {True}
    assert {demand.shipped for demand in again.demands} <= {True}


class Squares(nn.Module):
    """Has a square, which rules for ``mul`` leave alone unless a person wrote them, and what demands float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y * y).sum(-1) + (y * y).mean() + y.round().sum(-1) + y.where(y > 0, 0).std(-1)


@pytest.mark.parametrize(
    "own", [{}, {"infer": ["mul"]}, {"allow": ["round"]}, {"modules": [{"path": "linear", "category": "low"}]}]
)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_saved_list_decides_as_the_list_and_warns_of_no_more(name: str, own: dict[str, Any], tmp_path: Path) -> None:
    lists = load_op_list(name) | OpList.of(own)
    lists.save(tmp_path / "own.yaml")
    x = torch.randn(4, 8)
    given = (lists, tmp_path / "own.yaml")
    plans = [autocastfx.convert(Squares(), x, dtype=name, op_list=one, check=False).plan for one in given]
    before, after = ([(n.name, n.decision.category, n.decision.reason, n.placement) for n in p.nodes] for p in plans)
    assert before == after


def test_rules_that_are_marked_as_shipped_are(tmp_path: Path) -> None:
    marked = OpList.of({"deny": [{"ops": ["exp", "no_such_op"], "shipped": True}, {"ops": ["log"], "shipped": False}]})
    assert {op: rule.shipped for op, rule in marked.rules.items()} == {"exp": True, "log": False}
    with pytest.raises(OpListError, match=r"deny\[0\]\.shipped: .* true or false"):
        OpList.of({"deny": [{"ops": ["exp"], "shipped": 1}]})


def test_what_is_written_can_be_read_by_people(tmp_path: Path) -> None:
    lists = OpList.of(
        {
            "deny": [
                {"ops": ["softmax", "exp"], "reason": "grows"},
                {"gelu": {"when": {"approximate": "none"}, "devices": ["cuda", "cpu"]}},
            ],
            "modules": [{"path": "head", "category": "float32", "reason": "the last layer decides"}],
            "keep_args": {"batch_norm": ["weight"]},
        }
    )
    lists.save(str(tmp_path / "own.yaml"))
    assert (tmp_path / "own.yaml").read_text() == (
        "deny:\n"
        "- when: {approximate: none}\n"
        "  devices: [cpu, cuda]\n"
        "  ops: [gelu]\n"
        "- reason: grows\n"
        "  ops: [exp, softmax]\n"
        "modules:\n"
        "- {path: head, category: float32, reason: the last layer decides}\n"
        "keep_args:\n"
        "  batch_norm: [weight]\n"
    )


def test_differences_print_as_lines() -> None:
    first = OpList.of(
        {
            "deny": ["softmax", {"ops": ["exp"], "reason": "a"}],
            "modules": [{"path": "head", "category": "low"}],
            "keep_args": {"batch_norm": ["weight", "bias"]},
        }
    )
    second = OpList.of(
        {
            "allow": ["softmax", {"gelu": {"when": {"approximate": "none"}, "devices": "cpu"}}],
            "deny": [{"ops": ["exp"], "reason": "b"}],
            "modules": [{"path": "head", "category": "float32"}],
            "aliases": {"my_lib::x": "exp"},
            "unlisted": "deny",
            "placement": "simple",
        }
    )
    assert [str(change) for change in first.diff(second)] == [
        "alias my_lib::x: nothing → exp",
        "exp: deny (a) → deny (b)",
        "gelu where approximate=none on cpu: nothing → allow",
        "keep_args of batch_norm: weight, bias → nothing",
        "modules head: low → float32",
        "placement: nothing → simple",
        "softmax: deny → allow",
        "unlisted: nothing → deny",
    ]
    assert first.diff(first) == ()
    assert first.diff(second)[-2] == Change("softmax", "deny", "allow")


def test_an_empty_list_can_be_saved(tmp_path: Path) -> None:
    OpList().save(tmp_path / "own.yaml")
    assert load_op_list(tmp_path / "own.yaml") == OpList()
