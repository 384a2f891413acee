"""Module patterns and conditions on arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autocastfx.policy.rule import Category, Condition, Rule, Runs, Scalar, Selector, module_pattern


@pytest.mark.parametrize(
    ("path", "covered", "left"),
    [
        ("head", ["head"], ["", "head.0", "ahead", "a.head"]),
        ("layers.*.attn", ["layers.0.attn", "layers.10.attn"], ["layers.attn", "layers.0.1.attn", "layers.0.attn.q"]),
        ("*", ["a", "10"], ["", "a.b"]),
        ("**", ["", "a", "a.b.c"], []),
        ("encoder.**", ["encoder", "encoder.a", "encoder.a.b"], ["", "decoder", "encoders"]),
        ("**.attn", ["attn", "a.attn", "a.b.attn"], ["attn.q", "cross_attn"]),
        ("encoder.**.attn", ["encoder.attn", "encoder.0.x.attn"], ["attn", "encoder.0.attn.q"]),
        ("layers.1?", ["layers.10", "layers.1a"], ["layers.1", "layers.100"]),
        ("layers.[0-3]", ["layers.0", "layers.3"], ["layers.4", "layers.03"]),
        ("layers.[!0-3]", ["layers.4"], ["layers.0", "layers."]),
        ("*_attn", ["cross_attn", "_attn"], ["attn", "x.cross_attn"]),
        (r"re:^blocks\.\d+$", ["blocks.0", "blocks.12"], ["blocks", "blocks.0.x"]),
        (r"re:blocks\.1", ["blocks.1"], ["blocks.10", "x.blocks.1"]),  # the whole path, as a glob
        (r"re:(.*\.)?attn", ["attn", "a.b.attn"], ["attn.q"]),
        ("re:", [""], ["a"]),
    ],
)
def test_what_a_pattern_covers(path: str, covered: list[str], left: list[str]) -> None:
    selector = Selector(path=path)
    assert [p for p in covered + left if selector.covers(p)] == covered


NAMES = st.text(alphabet="ab0_", min_size=1, max_size=3)


@settings(max_examples=100)
@given(names=st.lists(NAMES, max_size=4), place=st.integers(0, 4))
@example(names=[], place=0)
def test_globs_made_of_a_path_cover_it(names: list[str], place: int) -> None:
    path = ".".join(names)
    assert Selector(path=".".join([*names[:place], "**", *names[place:]])).covers(path)
    if names:
        assert Selector(path=path).covers(path)
        assert Selector(path=".".join(["*"] * len(names))).covers(path)
        assert not Selector(path=".".join(["*"] * (len(names) + 1))).covers(path)


@pytest.mark.parametrize("path", ["a..b", "", ".a", "a**", "[", "a.[z-a]", "a b", "re:(", "re:a{2,1}"])
def test_wrong_patterns_say_why(path: str) -> None:
    with pytest.raises(ValueError, match=r"the glob|no regular expression"):
        module_pattern(path)


@pytest.mark.parametrize(
    ("given", "wanted", "holds"),
    [
        ("none", "none", True),
        ("tanh", "none", False),
        (None, None, True),
        (None, "none", False),
        (0, None, False),
        (0, False, False),
        (False, 0, False),
        (True, True, True),
        (1, 1.0, True),
        (-1, -1, True),
        (1e-5, 1e-5, True),
        ("1", 1, False),
        ([1, 1], 1, True),
        ([1, 2], 1, False),
        ([], 1, False),
        (torch.float32, "float32", True),
        (torch.float32, "float16", False),
        (torch.strided, "strided", True),
        (torch.device("cpu"), "cpu", True),
        (torch.channels_last, "channels_last", True),
    ],
)
def test_a_condition_compares_value_and_kind(given: Any, wanted: Scalar, holds: bool) -> None:
    assert Condition("a", (wanted,)).holds({"a": given}) is holds
    assert Condition("a", (wanted, "other")).holds({"a": given}) is holds
    assert not Condition("b", (wanted,)).holds({"a": given})


def test_rules_print_what_they_speak_of() -> None:
    when = (Condition("dim", (-1, 1)), Condition("dtype", (None,)), Condition("keepdim", (True,)))
    rule = Rule(ops=("mean",), effect=Runs("deny"), when=when, device="cpu")
    assert rule.subject == "mean where dim=-1|1, dtype=null, keepdim=true on cpu"
    inside = Rule(path="a.*", effect=Runs("low"), ops=("exp", "log"), device="cuda")
    assert inside.subject == "modules exp, log in a.* on cuda"
    assert [Runs(word).category for word in ("low", "float32", "keep")] == ["allow", "deny", "keep"]
    assert [c.may_be_low for c in Category] == [True, False, True, True, True, False, False]
