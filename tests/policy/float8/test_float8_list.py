"""Float8 rules of op lists: read, merged, written, compared, and what several of them say of one op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import fx

from autocastfx import OpList, load_op_list
from autocastfx.cli.main import main
from autocastfx.errors import OpListError
from autocastfx.policy.float8 import Float8Choice, Product
from autocastfx.policy.match import Matcher
from tests.helpers import op_list

OUTPUT, _, OF_WEIGHT = Product


def said(lists: OpList, op: str = "linear", *modules: str, device: str = "cpu") -> Float8Choice | None:
    graph = fx.Graph()
    node = graph.call_function(getattr(torch.ops.aten, op).default, (graph.placeholder("x"),))
    node.meta["nn_module_stack"] = {path: (path, "m.Module") for path in ("", *modules)}
    return Matcher(lists, device).float8_of(node)


def listed(**keys: Any) -> OpList:
    return OpList.of({"float8": [{"ops": ["linear"], **keys}]})


def test_the_rule_that_fits_best_gives_the_reason() -> None:
    rules = [{"ops": ["linear"], "reason": "all"}, {"ops": ["linear"], "devices": ["cpu"], "reason": "here"}]
    for given in (rules, rules[::-1]):
        choice = said(OpList.of({"float8": given}))
        assert choice is not None
        assert choice.reason == "here"


def test_a_rule_says_what_it_is_given_and_the_rest_has_defaults(tmp_path: Path) -> None:
    lists = op_list(
        tmp_path,
        """\
        float8:
          - ops: [linear, addmm]
            recipe: tensorwise
            products: [weight_gradient, output]
            least: {K: 32, M: 4096}
            last: false
            reason: measured
        """,
    )
    choice = said(lists, "addmm")
    assert choice is not None
    assert (choice.recipe, choice.products) == ("tensorwise", (OUTPUT, OF_WEIGHT)), "in the order of the words"
    assert (choice.least, choice.last, choice.emulate) == ((("M", 4096), ("K", 32)), False, False)
    assert (choice.reason, str(choice.source)) == ("measured", f"{tmp_path / 'test.yaml'}:2:19")
    assert said(lists, "mm") is None
    plain = said(listed())
    assert plain is not None
    assert (plain.recipe, plain.products, plain.least, plain.last) == ("rowwise", tuple(Product), (), True)


def test_the_narrower_rule_wins_setting_by_setting() -> None:
    modules = [
        {"path": "layers.*", "float8": {"products": ["output"]}},
        {"path": "layers.0.mlp", "float8": {"recipe": "tensorwise"}, "ops": ["linear"]},
        {"path": "lm_head", "float8": False, "reason": "the vocabulary"},
    ]
    lists = OpList.of({"float8": [{"ops": ["linear"], "least": {"N": 64}}], "modules": modules})
    assert lists.modules == (), "these entries give no category"
    inside = said(lists, "linear", "layers", "layers.0", "layers.0.mlp")
    assert inside is not None
    assert (inside.recipe, inside.products, inside.least) == ("tensorwise", (OUTPUT,), (("N", 64),))
    head = said(lists, "linear", "lm_head")
    assert head is not None
    assert (head.products, head.reason) == ((), "the vocabulary")
    other = said(lists, "mm", "layers", "layers.0", "layers.0.mlp")
    assert other is not None
    assert (other.recipe, other.products) == ("rowwise", (OUTPUT,)), (
        "a rule for modules is for all ops, if it names none"
    )


def test_a_module_may_have_a_category_and_float8_in_one_entry() -> None:
    lists = OpList.of({"modules": [{"path": "head", "category": "float32", "float8": False}]})
    assert (lists.modules[0].wanted, lists.float8[0].effect.products) == ("float32", ())


def test_devices_and_ranks() -> None:
    lists = listed(devices="cuda", recipe="tensorwise")
    assert said(lists) is None
    on_cuda = said(lists, device="cuda")
    assert on_cuda is not None
    assert on_cuda.recipe == "tensorwise"
    pair = [{"path": "a.*", "float8": True}, {"path": "*.b", "float8": False}]
    with pytest.raises(OpListError, match=r"both fit equally well\. Give one of the two a narrower path, or a higher"):
        said(OpList.of({"modules": pair}), "linear", "a", "a.b")
    ranked = OpList.of({"modules": [pair[0], {**pair[1], "rank": 1}]})
    later = OpList.of({"modules": pair[:1]}) | OpList.of({"modules": pair[1:]})
    for one in (ranked, later):
        choice = said(one, "linear", "a", "a.b")
        assert choice is not None
        assert choice.products == ()


def test_a_later_list_is_laid_over_an_earlier_one() -> None:
    merged = listed(recipe="tensorwise", least={"M": 32}) | listed(emulate=True, least={"M": 16})
    choice = said(merged)
    assert choice is not None
    assert (choice.recipe, choice.least, choice.emulate) == ("tensorwise", (("M", 16),), True)
    ours = {"float8": [{"ops": ["mm", "linear"], "products": [], "reason": "ours"}]}
    places = [said(OpList.of(ours) | later) for later in (listed(least={"M": 16}), listed(products=["output"]))]
    assert [one and (str(one.source), one.reason) for one in places] == [
        ("OpList:float8[0].ops[1]", "ours"),
        ("OpList:float8[0].ops[0]", ""),
    ]
    assert (merged | OpList()).float8 == merged.float8 == (OpList() | merged).float8


EVERYTHING = {
    "float8": [
        {"ops": ["linear", "mm"], "recipe": "rowwise_gw_hp", "products": ["output"], "least": {"M": 2}, "last": False},
        {"ops": ["addmm"], "emulate": True, "reason": "slow", "devices": ["cpu", "cuda"]},
    ],
    "modules": [
        {"path": "a", "category": "low"},
        {"path": "b", "float8": False, "reason": "the head"},
        {"path": "c.*", "float8": {"recipe": "tensorwise", "last": True}, "ops": ["linear"], "rank": 2},
        {"path": "d", "float8": True},
        {"path": "e", "float8": {"products": [], "recipe": "rowwise"}},
    ],
}


def test_what_is_written_reads_back_equal() -> None:
    lists = OpList.of(EVERYTHING) | OpList.of({"modules": [{"path": "b", "float8": True}], "product_depth": None})
    assert OpList.of(yaml.safe_load(lists.text())) == lists
    assert "float8" not in OpList.of({"deny": ["exp"]}).text()
    alone = OpList.of({"modules": [{"path": "b", "float8": False}]})
    assert alone.text() == "modules:\n- {path: b, float8: false}\n"


def test_two_lists_are_compared_rule_by_rule() -> None:
    before = listed(recipe="tensorwise", least={"M": 32})
    after = (
        before | OpList.of({"modules": [{"path": "lm_head", "float8": False}]}) | listed(products="output", last=False)
    )
    assert [str(change) for change in before.diff(after)] == [
        "float8 of linear: tensorwise; from M 32 → tensorwise; output; from M 32; not the last product",
        "float8 of products in lm_head: nothing → none",
    ]


def test_lists_check_accepts_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    op_list(tmp_path, "extends: float8\nmodules:\n  - {path: lm_head, float8: false}\n")
    assert main(["lists", "check", str(tmp_path / "test.yaml")]) == 0
    assert "good; 1 rules, and " in capsys.readouterr().out
    (tmp_path / "wrong.yaml").write_text("float8:\n  - {ops: [linear], recipe: rowise}\n")
    assert main(["lists", "check", str(tmp_path / "wrong.yaml")]) != 0
    assert "wrong.yaml:2:29: 'recipe' is tensorwise or" in "".join(capsys.readouterr())


def test_the_preset_has_the_rules_of_bfloat16_and_linears_in_float8() -> None:
    preset = load_op_list("float8")
    assert preset.rules == load_op_list("bfloat16").rules
    (rule,) = preset.float8
    says = rule.effect
    assert (rule.ops, says.recipe, says.last, says.emulate, rule.shipped) == (("linear",), "rowwise", False, None, True)
    assert not any(load_op_list(name).float8 for name in ("default", "float16", "bfloat16", "conservative"))


WRONG = {
    "recipe": (
        {"recipe": "rowise"},
        "'recipe' is tensorwise or rowwise or rowwise_gw_hp or mxfp8, not 'rowise' .did you mean",
    ),
    "torchao's word": ({"recipe": "rowwise_with_gw_hp"}, "did you mean 'rowwise_gw_hp'"),
    "product": (
        {"products": ["outputs"]},
        "'products' is output or input_gradient .*not 'outputs' .did you mean 'output'",
    ),
    "no number": ({"least": {"M": "many"}}, "expected a whole number of at least 1, or null, found the word 'many'"),
    "negative": ({"least": {"M": -16}}, "expected a whole number of at least 1, or null, found the word '-16'"),
    "size": ({"least": {"Q": 16}}, "'Q' is no size of a product. Known: M, N, K"),
    "one size": ({"least": 16}, "expected 'key: value' lines, found the word '16'"),
    "flag": ({"emulate": "yes"}, "expected true or false, found 'yes' as text"),
    "recipe lacks it": (
        {"recipe": "rowwise_gw_hp", "products": ["weight_gradient"]},
        "the recipe rowwise_gw_hp has no float8 weight_gradient: leave it out",
    ),
    "op": ({"ops": ["softmax"]}, "softmax has no float8 products. Those that have: linear, addmm, mm, matmul"),
    "no op": ({"ops": []}, r"this entry names no op: give it 'ops: \[\.\.\.\]'"),
    "key": ({"recipee": "rowwise"}, "'recipee' is no key of an entry under 'float8' .did you mean 'recipe'"),
}


@pytest.mark.parametrize(("keys", "message"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_entry_is_one_clear_error(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(OpListError, match=message):
        listed(**keys)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "a", "float8": "rowwise"}, "a recipe is a key of its own: write float8: {recipe: rowwise}"),
        ({"path": "a", "float8": ["output"]}, "expected true or false, found a list"),
        ({"path": "a", "float8": "no"}, "expected true or false, found 'no' as text"),
        ({"float8": False}, "this entry has no 'path': an entry is {path: …, float8: …}"),
        ({"path": "a..b", "float8": False}, "the glob 'a..b' has an empty name between dots"),
        ({"path": "a", "float8": {"ops": ["mm"]}}, "'ops' is no key of 'float8' in a module's entry"),
        ({"path": "a"}, "this entry has no 'category'"),
    ],
)
def test_a_wrong_entry_for_modules_is_one_clear_error(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(OpListError, match=message):
        OpList.of({"modules": [entry]})


def test_an_op_has_one_entry() -> None:
    with pytest.raises(
        OpListError, match=r"float8\[1\]\.ops\[0\]: 'float8 of linear' is listed twice, first at OpList:float8\[0\]"
    ):
        OpList.of({"float8": [{"ops": ["linear"]}, {"ops": ["linear"]}]})
    with pytest.raises(OpListError, match="expected a list"):
        OpList.of({"float8": True})
