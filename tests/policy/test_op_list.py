"""Op lists: reading, merging, looking up."""

from __future__ import annotations

import pickle
import random
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from autocastfx import OpList, load_op_list, presets
from autocastfx.errors import KeyPath, OpListError
from autocastfx.policy import kernel_facts
from autocastfx.policy import op_list as op_list_module
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import preset_folder, preset_path
from autocastfx.policy.rule import Category, Rule, Runs
from autocastfx.policy.yaml_tree import parse_file
from tests.helpers import op_list, with_pinned_torch


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


def categories(lists: OpList, *ops: str) -> list[str | None]:
    return [str(rule.category) if (rule := lists.rule(op)) else None for op in ops]


# -- one list ---------------------------------------------------------------------------------------------------------


def test_a_rule_has_its_category_its_reason_and_its_place(tmp_path: Path) -> None:
    lists = op_list(
        tmp_path,
        """\
        allow:
          - reason: products
            ops: [mm, bmm]
          - linear
        deny: [exp]
        """,
    )
    rule = lists.rules["bmm"]
    assert (rule.ops, rule.category, rule.reason) == (("bmm",), Category.ALLOW, "products")
    assert str(rule.source) == f"{tmp_path / 'test.yaml'}:3:15"
    assert lists.rules["linear"].reason == ""
    assert str(lists.rules["linear"].source).endswith(":4:5")
    assert lists.rule("exp") == Rule(ops=("exp",), effect=Runs("deny"))  # the place is no part of what a rule says
    assert lists.rule("log") is None
    assert lists.name == "test"


def test_order_within_a_file_does_not_matter(tmp_path: Path) -> None:
    blocks = [
        "allow:\n  - {ops: [mm, linear], reason: a}\n  - bmm\n",
        "deny: [exp, log]\n",
        "infer: [add]\n",
        "keep_args: {batch_norm: [weight, bias]}\n",
        "aliases: {my_lib::linear: linear}\n",
        "unlisted: deny\n",
        "extends: base\n",
    ]
    first = op_list(tmp_path, "".join(blocks))
    for seed in range(5):
        random.Random(seed).shuffle(blocks)
        again = op_list(tmp_path, "".join(blocks))
        assert again == first
    assert op_list(tmp_path, "allow: [linear, bmm, mm]").rules == op_list(tmp_path, "allow: [mm, linear, bmm]").rules


@pytest.mark.parametrize(
    ("text", "category"),
    [("keep", Category.KEEP), ("deny", Category.DENY), ("error", Category.BAN), (None, None)],
)
def test_unlisted(text: str | None, category: Category | None, tmp_path: Path) -> None:
    lists = op_list(tmp_path, f"unlisted: {text}" if text else "deny: [exp]")
    assert lists.unlisted is category


def test_an_in_place_op_takes_the_rule_of_its_out_of_place_form_unless_it_is_listed(tmp_path: Path) -> None:
    lists = op_list(tmp_path, "allow: [add]\ndeny: [mul, mul_, exp]\nkeep: [exp_]\nkeep_args: {batch_norm: [weight]}")
    assert categories(lists, "add", "add_", "mul_", "exp", "exp_") == ["allow", "allow", "deny", "deny", "keep"]
    assert categories(lists, "sub_") == [None]
    assert lists.kept("batch_norm_") == ("weight",)
    assert lists.kept("add_") == ()
    assert categories(lists, "__and__", "_") == [None, None]


def test_aliases(tmp_path: Path) -> None:
    lists = op_list(
        tmp_path,
        """\
        deny: [softmax, "my_lib::listed"]
        keep_args: {batch_norm: [weight]}
        aliases:
          my_lib::softmax: softmax
          my_lib::listed: linear
          my_lib::nothing: linear
          my_lib::norm: batch_norm
          some.module.softmax: softmax
        """,
    )
    assert categories(lists, "my_lib::softmax", "my_lib::softmax_", "some.module.softmax") == ["deny"] * 3
    assert categories(lists, "my_lib::listed", "my_lib::nothing") == ["deny", None]
    assert lists.kept("my_lib::norm") == ("weight",)
    assert list(lists.names_of("my_lib::softmax_")) == ["my_lib::softmax_", "my_lib::softmax", "softmax"]


def test_keep_args(tmp_path: Path) -> None:
    lists = op_list(tmp_path, "keep_args: {batch_norm: running_mean, 'my_lib::op': [whatever], linear: [bias, weight]}")
    assert lists.kept("batch_norm") == ("running_mean",)
    assert lists.kept("my_lib::op") == ("whatever",)
    assert lists.kept("linear") == ("bias", "weight")
    assert lists.kept("mm") == ()


@pytest.mark.parametrize(
    ("listed", "name"),
    [
        ("torch.nn.LayerNorm", "torch.nn.modules.normalization.LayerNorm"),
        ("torch.relu", "relu"),
        ("torch.nn.functional.linear", "linear"),
        ("torch.nn.functional.cross_entropy", "torch.nn.functional.cross_entropy"),
        ("torch.Tensor.add", "add"),
        ("torch.optim.lr_scheduler_of_tomorrow.f", "torch.optim.lr_scheduler_of_tomorrow.f"),
        ("package.not_.loaded", "package.not_.loaded"),
    ],
)
def test_a_dotted_path_means_what_stands_there(listed: str, name: str, tmp_path: Path) -> None:
    assert list(op_list(tmp_path, f"deny: [{listed}]").rules) == [name]


# -- several lists ----------------------------------------------------------------------------------------------------


def test_the_later_list_wins_key_by_key(tmp_path: Path) -> None:
    first = write(
        tmp_path / "first.yaml",
        """\
        allow: [mm, linear]
        unlisted: deny
        keep_args: {batch_norm: [weight], linear: [bias]}
        aliases: {"a::x": mm, "a::y": mm}
        """,
    )
    second = write(
        tmp_path / "second.yaml",
        """\
        deny: [linear, exp]
        keep_args: {batch_norm: [bias]}
        aliases: {"a::y": exp}
        """,
    )
    merged = load_op_list([first, second])
    assert categories(merged, "mm", "linear", "exp", "a::x", "a::y") == ["allow", "deny", "deny", "allow", "deny"]
    assert merged.kept("batch_norm") == ("bias",)
    assert merged.kept("linear") == ("bias",)
    assert merged.unlisted is Category.DENY  # the second says nothing of it
    assert merged.name == "first+second"
    assert merged == load_op_list(first).merged(load_op_list(second))
    reverse = load_op_list([second, first])
    assert categories(reverse, "linear", "exp", "a::y") == ["allow", "deny", "allow"]
    assert categories(load_op_list(first), "linear") == ["allow"]  # as it was


def test_the_later_unlisted_wins(tmp_path: Path) -> None:
    keep = write(tmp_path / "keep.yaml", "unlisted: keep")
    error = write(tmp_path / "error.yaml", "unlisted: error")
    assert load_op_list([keep, error]).unlisted is Category.BAN
    assert load_op_list([error, keep]).unlisted is Category.KEEP


def test_merging_is_associative_and_an_empty_list_changes_no_rule(tmp_path: Path) -> None:
    texts = ["allow: [mm, exp]\nunlisted: deny", "deny: [exp]\naliases: {'a::b': exp}", "keep: [mm]\nunlisted: error"]
    a, b, c = (load_op_list(write(tmp_path / f"{i}.yaml", text)) for i, text in enumerate(texts))
    assert a.merged(b).merged(c) == a.merged(b.merged(c))
    assert OpList().merged(a) == a
    assert a.merged(OpList(name="empty")).rules == a.rules


def test_extends(tmp_path: Path) -> None:
    write(tmp_path / "grand.yaml", "allow: [mm, exp]\nunlisted: error")
    write(tmp_path / "left.yaml", "extends: grand.yaml\ndeny: [mm]")
    write(tmp_path / "right.yaml", "extends: [grand.yaml]\ninfer: [exp]")
    both = load_op_list(write(tmp_path / "both.yaml", "extends: [left.yaml, right.yaml]\nkeep: [add]"))
    # right.yaml brings grand.yaml's mm again, after left.yaml's
    assert categories(both, "mm", "exp", "add") == ["allow", "infer", "keep"]
    assert both.unlisted is Category.BAN
    assert both.name == "both"
    assert str(both.rules["mm"].source) == f"{tmp_path / 'grand.yaml'}:1:9"
    own = load_op_list(write(tmp_path / "own.yaml", "extends: float16\nallow: [softmax]"))
    assert categories(own, "softmax", "pow", "linear") == ["allow", "deny", "allow"]


def test_extends_is_read_beside_the_list_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    write(tmp_path / "inner" / "parent.yaml", "deny: [exp]")
    child = write(tmp_path / "inner" / "child.yaml", "extends: parent.yaml")
    monkeypatch.chdir(tmp_path)
    assert list(load_op_list(child).rules) == ["exp"]
    assert list(load_op_list("inner/child.yaml").rules) == ["exp"]
    assert list(load_op_list(Path("inner") / "child.yaml").rules) == ["exp"]


def test_a_ring_through_a_link_is_a_ring(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "extends: b.yaml")
    (tmp_path / "b.yaml").symlink_to(tmp_path / "a.yaml")
    with pytest.raises(OpListError, match=r"a\.yaml:1:10: this list extends itself: a\.yaml → b\.yaml\.$"):
        load_op_list(tmp_path / "a.yaml")


def test_merging_replaces_rules_of_the_same_conditions_devices_and_paths(tmp_path: Path) -> None:
    first = write(
        tmp_path / "first.yaml",
        """\
        deny:
          - gelu: {when: {approximate: none}}
          - gelu: {when: {approximate: tanh}}
          - exp: {devices: [cpu, cuda]}
        modules:
          - {path: head, category: low}
          - {path: head, category: low, ops: [exp]}
        """,
    )
    second = write(
        tmp_path / "second.yaml",
        """\
        extends: first.yaml
        allow:
          - gelu: {when: {approximate: none}, reason: second}
          - exp: {devices: cuda}
          - exp
        modules:
          - {path: head, category: float32}
        """,
    )
    for merged in (load_op_list([first, second]), load_op_list(second)):
        said = {rule.subject: str(rule.category) for rule in merged.lines.values() if rule.when or rule.device}
        assert said == {
            "gelu where approximate=none": "allow",
            "gelu where approximate=tanh": "deny",
            "exp on cpu": "deny",
            "exp on cuda": "allow",
        }
        assert [(r.subject, r.wanted, r.rank) for r in merged.modules] == [
            ("modules exp in head", "low", 0),
            ("modules head", "float32", 1),
        ]
        assert [str(rule.category) for d in ("cpu", "cuda", "mps") if (rule := merged.rule("exp", d))] == [
            "deny",
            "allow",
            "allow",
        ]
    assert load_op_list(second).ops() == {"gelu", "exp"}


# -- in Python --------------------------------------------------------------------------------------------------------


def test_of_is_the_yaml_in_python(tmp_path: Path) -> None:
    data = {
        "extends": "float16",
        "deny": ["my_lib::op", {"gelu": {"when": {"approximate": "none"}}}, {"ops": ("exp2",), "reason": "grows"}],
        Category.ALLOW: ["exp"],
        "modules": [{"path": "layers.*.attn", "category": "low"}],
        "unlisted": "deny",
    }
    lists = OpList.of(data)
    data["allow"] = data.pop(Category.ALLOW)
    data["deny"][2]["ops"] = ["exp2"]
    path = tmp_path / "list.yaml"
    path.write_text(yaml.safe_dump(data))
    assert lists == load_op_list(path)
    assert lists.name == "OpList"
    assert str(lists.rules["exp2"].source) == "OpList:deny[2].ops[0]"
    assert str(lists.modules[0].source) == "OpList:modules[0]"
    assert lists.rule("mm") == load_op_list("float16").rule("mm")
    assert (lists.rules["mm"].shipped, lists.rules["exp"].shipped) == (True, False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"deny": ["softmx"]}, "mine:deny[0]: no ATen op is named 'softmx' (did you mean 'softmax'?). "),
        ({"dney": []}, "mine:dney: 'dney' is no key of an op list (did you mean 'deny'?). "),
        ({"deny": [True]}, "mine:deny[0]: expected text, found 'true' as bool. "),
        ({"deny": [{"gelu": {"when": {"approximate": 1.5}}}]}, "mine:deny[0].gelu.when.approximate: 'approximate' of "),
        ({"deny": [{"layer_norm": {"when": {"eps": "1e-3"}}}]}, "mine:deny[0].layer_norm.when.eps: 'eps' of "),
        ({"deny": "exp"}, "mine:deny: expected a list ('- …' lines or [a, b]), found the word 'exp'"),
        ({"deny": ["exp"], "allow": ["exp"]}, "mine:deny[0]: op 'exp' is listed twice: as allow at mine:allow[0] and "),
        ({"modules": [{"path": "re:("}]}, "mine:modules[0]: this entry has no 'category'"),
        ({"modules": [{"path": "re:(", "category": "low"}]}, "mine:modules[0].path: '(' is no regular expression: "),
        ({"deny": [len]}, "mine:deny[0]: an op list holds text, numbers, lists and mappings, no builtin_function"),
        ({"extends": "nowhere.yaml"}, "mine:extends: there is no file 'nowhere.yaml' in "),
        ({"extends": "flaot16"}, "mine:extends: no preset is named 'flaot16' (did you mean 'float16'?). "),
        ({1: []}, "mine:1: expected text, found '1' as int. "),
        (["deny"], "mine: expected 'key: value' lines, found a list"),
    ],
)
def test_errors_of_python_data_name_the_key_path(data: Any, message: str) -> None:
    with pytest.raises(OpListError) as caught:
        OpList.of(data, name="mine")
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value.source, KeyPath)


def test_an_object_in_python_data_is_refused_with_its_name() -> None:
    for target, words in {
        torch.ops.aten.mm.dtype: "no OpOverload: write 'mm'",
        torch.nn.LSTM: "no type: write 'torch.nn.modules.rnn.LSTM'",
        torch.ones(1): "no Tensor",
        lambda x: x: "no function",
    }.items():
        with pytest.raises(OpListError, match=f"^mine:allow.0.: an op list holds .*, {words}$"):
            OpList.of({"allow": [target]}, name="mine")


def test_python_data_in_a_ring() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(OpListError, match=r"^mine: this is not an op list: it is nested too deeply\.$"):
        OpList.of({"deny": ring}, name="mine")


@pytest.mark.parametrize("data", [{"reduction_depth": 10**5000}, {"deny": [10**5000]}, {10**5000: ["sum"]}])
def test_a_number_of_thousands_of_digits_in_python_data(data: Any) -> None:
    with pytest.raises(OpListError, match=r"^mine:.* an op list takes no int of 16610 bits$"):
        OpList.of(data, name="mine")


def test_an_op_list_does_not_follow_the_data_it_was_made_of() -> None:
    rule = Rule(ops=("exp",), effect=Runs("deny"))
    lines = {rule.key: rule}
    lists = OpList(lines=lines)
    lines.clear()
    assert list(lists.rules) == ["exp"]


# -- what can be given ------------------------------------------------------------------------------------------------


def test_an_op_list_is_itself() -> None:
    lists = OpList(name="mine")
    assert load_op_list(lists) is lists
    assert load_op_list([]) == OpList()


def test_default_stands_for_the_preset_of_the_dtype() -> None:
    assert load_op_list("default") == load_op_list("float16")
    assert load_op_list("default", default="bfloat16") == load_op_list("bfloat16")
    assert load_op_list(["default"], default="bfloat16").rules == load_op_list("bfloat16").rules


def test_unknown_preset() -> None:
    with pytest.raises(OpListError) as caught:
        load_op_list("float61")
    names = ", ".join(presets())
    assert str(caught.value) == (
        f"no preset is named 'float61' (did you mean 'float16'?). Presets: {names}; a path ends in .yaml."
    )
    with pytest.raises(OpListError, match=r"^no preset is named 'zzz'\. Presets: "):
        preset_path("zzz")
    with pytest.raises(OpListError, match="no preset is named 'kernel_facts'"):
        load_op_list("kernel_facts")


def test_an_op_list_pickles(tmp_path: Path) -> None:
    text = (
        "aliases: {'a::b': mm}\nunlisted: error\nmodules: [{path: head, category: low}]\ndeny: [{exp: {devices: cpu}}]"
    )
    lists = load_op_list(["float16", write(tmp_path / "own.yaml", text)])
    again = pickle.loads(pickle.dumps(lists))
    assert again == lists
    assert again.modules == lists.modules != ()
    assert again.rules["linear"].source == lists.rules["linear"].source
    with pytest.raises(TypeError):
        again.rules["linear"] = lists.rules["mm"]


def test_an_op_list_is_immutable() -> None:
    lists = load_op_list("float16")
    with pytest.raises(TypeError):
        lists.rules["linear"] = lists.rules["mm"]  # pyright: ignore[reportIndexIssue]
    with pytest.raises(AttributeError):
        lists.name = "other"  # pyright: ignore[reportAttributeAccessIssue]


# -- the shipped lists ------------------------------------------------------------------------------------------------


def test_presets() -> None:
    assert {"base", "bfloat16", "float16"} <= set(presets())
    assert "kernel_facts" not in presets()
    assert all(preset_path(name).is_file() for name in presets())


@pytest.mark.parametrize("name", presets())
def test_shipped_list(name: str) -> None:
    lists = load_op_list(name)
    assert lists.name == name
    assert lists.unlisted is not None
    for op, rule in lists.rules.items():
        assert rule.reason, f"{op} has no reason"
        assert str(rule.source).startswith("op_lists/")
    for op, arguments in lists.keep_args.items():
        assert op in lists.rules
        assert arguments


@with_pinned_torch
@pytest.mark.parametrize("name", presets())
def test_a_shipped_list_names_nothing_that_the_pinned_torch_lacks(name: str, tmp_path: Path) -> None:
    elsewhere = shutil.copy(preset_path(name), tmp_path)  # there it is checked as anybody's
    assert load_op_list(elsewhere) == load_op_list(name)


@with_pinned_torch
def test_the_kernel_facts_name_nothing_that_the_pinned_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_facts, "parse_file", lambda path, *, shown, shipped: parse_file(path, shown=shown))
    assert load_kernel_facts()


@pytest.mark.parametrize("gone", ["gone", "mm.gone", "gone.default", "torch.gone", "torch.nn.functional.gone"])
def test_a_shipped_list_may_name_what_this_torch_lacks(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"""\
        placement: follow
        deny: [mm, {gone}, mm.dtype, my_lib::op, torch.nn.LayerNorm]
        keep_args: {{{gone}: [a], mm: [mat2]}}
        """
    everywhere = f"""\
        aliases: {{{gone}: mm, my_lib::further: {gone}, my_lib::other: mm}}
        set_dtype: [{gone}, sum]
        reduction_depth: {{{gone}: 3, "*": 4, sum: 5}}
        demands: [{{ops: [{gone}, sin]}}, {{ops: [div], of: [{gone}]}}, {{ops: [sqrt], of: [{gone}, sub]}}]
        modules:
          - {{path: a, category: allow, ops: [{gone}]}}
          - {{path: b, category: allow, ops: [{gone}, mm]}}
        """
    text = textwrap.dedent(text) + (textwrap.dedent(everywhere) if "." not in gone else "")
    path = write(tmp_path / "other.yaml", text)
    if gone != "gone.default":  # in anybody's list a Python path
        with pytest.raises(OpListError, match="gone"):
            load_op_list(path)
    monkeypatch.setattr(op_list_module, "preset_folder", lambda: tmp_path)
    found = load_op_list(path)
    norm = "torch.nn.modules.normalization.LayerNorm"
    assert (set(found.rules), set(found.keep_args)) == ({"mm", "mm.dtype", "my_lib::op", norm}, {"mm"})
    assert all(rule.shipped for rule in found.every_rule())
    if "." not in gone:
        assert (dict(found.aliases), found.set_dtype) == ({"my_lib::other": "mm"}, {"sum"})
        assert set(found.reduction_depth) == {"*", "sum"}
        assert {demand.ops: demand.effect.of for demand in found.demands} == {("sin",): (), ("sqrt",): ("sub",)}
        assert [(rule.path, rule.ops) for rule in found.modules] == [("b", ("mm",))]  # one without ops speaks of all
    found.save(tmp_path / "saved.yaml")
    assert load_op_list(tmp_path / "saved.yaml") == found


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_each_op_stands_in_one_category(name: str) -> None:
    """The loader refuses an op twice in one file; a default list does not overrule its base either."""
    own = parse_file(preset_folder() / f"{name}.yaml", shown=name)
    ops = [
        op.text
        for category in Category
        for group in own.child(category.value).entries()
        for op in group.child("ops").as_strings()
    ]
    assert len(ops) == len(set(ops))
    assert not set(ops) & load_op_list("base").rules.keys()
    assert load_op_list(name).rules.keys() == load_op_list("base").rules.keys() | set(ops)


EXPECTED = {
    "allow": "linear matmul mm bmm addmm baddbmm einsum conv1d conv2d conv3d scaled_dot_product_attention lstm",
    "deny": "exp log softmax log_softmax layer_norm cross_entropy_loss nll_loss mse_loss sum pow scatter_add index_add",
    "infer": "add add_ sub mul mul_ div gelu silu sigmoid tanh batch_norm mean",
    "clear": "view reshape transpose permute slice relu relu_ max_pool2d dropout where masked_fill_ clone copy_",
    "promote": "cat stack eq lt argmax topk sort max maximum index_put index_put_ scatter floor",
    "keep": "embedding arange zeros randn bernoulli item",
}


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("category", EXPECTED)
def test_what_the_default_lists_say(name: str, category: str) -> None:
    lists = load_op_list(name)
    assert {op: categories(lists, op)[0] for op in EXPECTED[category].split()} == dict.fromkeys(
        EXPECTED[category].split(), category
    )


def test_batch_norm_keeps_its_statistics() -> None:
    lists = load_op_list("bfloat16")
    schema = torch.ops.aten.batch_norm.default._schema
    tensors = [a.name for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]") and a.name != "input"]
    assert list(lists.kept("batch_norm")) == tensors


@pytest.mark.parametrize(
    ("word", "category"), [("keep", Category.KEEP), ("deny", Category.DENY), ("error", Category.BAN)]
)
def test_a_list_made_in_python_may_say_unlisted_by_its_word(word: str, category: Category) -> None:
    made = OpList(unlisted=word)  # pyright: ignore[reportArgumentType]
    assert made.unlisted is category
    assert made == OpList(unlisted=category) == OpList.of({"unlisted": word})


def test_an_unknown_word_for_unlisted_is_refused() -> None:
    with pytest.raises(OpListError, match=r"unlisted is keep, deny, error or None, not 'kep'\."):
        OpList(unlisted="kep")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["my_lib.a-b", "my lib.twice", "my_lib..twice"])
def test_a_dotted_name_of_which_a_part_is_no_python_name_is_refused(name: str) -> None:
    with pytest.raises(OpListError, match=r"OpList:deny\[0\]"):
        OpList.of({"deny": [name]})


def test_a_list_is_shown_in_a_line() -> None:
    own = OpList.of({"allow": ["mm"], "modules": [{"path": "a", "category": "float32"}]})
    assert repr(own).startswith("OpList('OpList', 2 rules: ")
    assert repr(load_op_list("bfloat16")).startswith("OpList('bfloat16', ")


def test_a_difference_tells_of_ranks() -> None:
    inner = {"path": "a.*", "category": "low"}
    one, other = (OpList.of({"modules": [{"path": "a.**", "category": "float32", "rank": n}, inner]}) for n in (0, 2))
    assert [str(change) for change in one.diff(other)] == ["modules a.**: float32 → float32 at rank 1"]


@pytest.mark.parametrize("given", [3, None, 0.5], ids=str)
def test_what_is_no_list_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="op_list is a name, a path, an OpList or several of them, not "):
        load_op_list(given)
