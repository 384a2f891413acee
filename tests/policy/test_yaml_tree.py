"""What is said of wrong lists. Each file of ``lists/`` ends with a comment: the expected message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autocastfx import OpList, load_op_list
from autocastfx.errors import OpListError, Source
from autocastfx.policy.yaml_tree import legal_op_names, nearest, parse_file

FOLDER = Path(__file__).parent / "lists"
WRONG = sorted(FOLDER.glob("*.yaml"))


def message(path: Path) -> str:
    with pytest.raises(OpListError) as caught:
        load_op_list(path)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_the_corpus_is_there() -> None:
    assert len(WRONG) >= 130


@pytest.mark.timeout(20)  # a bomb of aliases has 9 ** 8 leaves
@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_wrong_list(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a list that runs code would leave its file
    expected = path.read_text().splitlines()[-1].removeprefix("# ")
    assert message(path) == expected
    assert re.match(r"\w+\.yaml:\d+:\d+: ", expected)
    assert list(tmp_path.iterdir()) == []


EMPTY = "1:1: the file is empty. A list has at least one category, such as 'deny: [my_lib::my_op]'."
NOT_TEXT = {
    "empty": (b"", EMPTY),
    "comment": (b"# deny: [exp]\n", EMPTY),
    "latin1": (b"deny:\n  - exp # caf\xe9\n", "2:14: this is not UTF-8 text: invalid continuation byte."),
    "utf16": ("deny: [exp]".encode("utf-16"), "1:1: this is not UTF-8 text: invalid start byte."),
    "nul": (b"deny:\n  - exp\0\n", "2:8: this is not YAML: the character #x0000 is not allowed."),
    "control": (b"deny: [exp]\nallow: [\x07mm]\n", "2:9: this is not YAML: the character #x0007 is not allowed."),
    "quote": (
        b"deny: ['exp]\n",
        "2:1: this is not YAML: while scanning a quoted scalar, found unexpected end of stream.",
    ),
    "digits": (b"reduction_depth: " + b"1" * 5000, "1:18: a number has 5000 digits. An op list takes 1000 at most."),
    "nested": (b"deny: " + b"[" * 5000 + b"]" * 5000, "1:1: this is not an op list: it is nested too deeply."),
}


@pytest.mark.parametrize("name", NOT_TEXT)
def test_no_list_at_all(name: str, tmp_path: Path) -> None:
    content, expected = NOT_TEXT[name]
    path = tmp_path / "list.yaml"
    path.write_bytes(content)
    assert message(path) == f"list.yaml:{expected}"


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert message(tmp_path / "none.yaml") == "cannot read the op list none.yaml: No such file or directory."
    (tmp_path / "folder.yaml").mkdir()
    assert message(tmp_path / "folder.yaml") == "cannot read the op list folder.yaml: Is a directory."


def test_error_knows_its_place(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("# ä\ndeny: ['ä', exp]\n")
    with pytest.raises(OpListError) as caught:
        load_op_list(path)
    assert caught.value.source == Source(str(path), 2, 8)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("\ufeffdeny: [exp]\n", id="byte order mark"),
        pytest.param("deny:\r\n- exp\r\n", id="CRLF"),
        pytest.param("---\ndeny: [exp]\n...\n", id="document marks"),
        pytest.param('{"deny": ["exp"]}', id="JSON"),
        pytest.param("deny: [!!str exp]\nkeep:\n", id="standard tag, empty category"),
        pytest.param("deny: [&one exp]\naliases: {my_lib::exp: *one}\n", id="alias of a word"),
        pytest.param("deny:\n  - {ops: exp, reason: one word in place of a list}\n", id="one word"),
    ],
)
def test_right_list(content: str, tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(content, encoding="utf-8")
    assert list(load_op_list(path).rules) == ["exp"]


WORDS = st.sampled_from(
    [
        *("allow", "deny", "keep_args", "aliases", "extends", "unlisted", "ops", "reason", "keep", "exp", "mm", "add_"),
        *("batch_norm", "weight", "add.Tensor", "aten::mm", "my_lib::op", "a.b.c", "torch.relu", "torch.nn.Linear"),
        *("torch..", ".", "::", "when", "devices", "modules", "path", "category", "low", "cpu", "head", "gelu"),
        *("approximate", "none", "dim", "rank"),
    ]
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.binary(max_size=3)
SCALARS = WORDS | PLAIN | st.text(max_size=3)
TREES = st.recursive(SCALARS, lambda t: st.lists(t, max_size=3) | st.dictionaries(SCALARS, t, max_size=3), max_leaves=8)
JUNK = st.text(alphabet=" \t\n-:[]{}&*!|>'\"#%@`a", max_size=4)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(WORDS, TREES, max_size=3) | TREES, junk=JUNK)
@example(tree={"deny": ["torch.relu", "relu"]}, junk="")
def test_whatever_the_file_it_is_a_list_or_an_error_with_its_place(tmp_path: Path, tree: object, junk: str) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True) + junk, encoding="utf-8")
    wrong: OpListError | None = None
    try:
        load_op_list(path)
    except OpListError as error:
        wrong = error
    if wrong is not None:
        assert wrong.source is not None
        assert str(wrong).startswith(f"{path}:{wrong.source.line}:{wrong.source.column}: ")


ARGUMENTS = st.sampled_from(["approximate", "dim", "dtype", "n"])
BODIES = st.fixed_dictionaries(
    {}, optional={"when": st.dictionaries(ARGUMENTS, SCALARS), "devices": WORDS, "reason": SCALARS}
)
MODULE = st.fixed_dictionaries({"path": SCALARS, "category": WORDS}, optional={"ops": st.lists(WORDS), "rank": PLAIN})
LISTS = st.fixed_dictionaries(
    {},
    optional={
        "deny": st.lists(st.dictionaries(WORDS, BODIES, min_size=1, max_size=1) | SCALARS, max_size=3),
        "modules": st.lists(MODULE, max_size=2),
        "extends": st.sampled_from(["float16", "nothing"]),
    },
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=LISTS | st.dictionaries(WORDS, TREES, max_size=3))
@example(data={"deny": [{"softmax": {"when": {"dim": [0, -1], "dtype": None}, "devices": ["cpu"]}}]})
@example(data={"deny": [{"layer_norm": {"when": {"eps": 1e-17}}}], "modules": [{"path": "a.*", "category": "low"}]})
def test_python_data_is_checked_as_yaml_is(tmp_path: Path, data: dict[str, object]) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    found: list[OpList | OpListError] = []
    for read in (lambda: load_op_list(path), lambda: OpList.of(data, name="data")):
        try:
            found.append(read())
        except OpListError as error:
            found.append(error)
    in_yaml, in_python = found
    assert isinstance(in_yaml, OpListError) == isinstance(in_python, OpListError), found
    if isinstance(in_python, OpListError):
        assert str(in_python).startswith("data:") or str(in_python).startswith("data: ")
    else:
        assert in_python == in_yaml


def test_a_bare_name_of_a_python_function_of_torch_stands_for_it(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("deny: [cross_entropy, interpolate, layer_norm]")
    names = ["torch.nn.functional.cross_entropy", "torch.nn.functional.interpolate", "layer_norm"]
    assert list(load_op_list(path).rules) == names
    path.write_text("allow: [cross_entropy]\ndeny: [torch.nn.functional.cross_entropy]")
    with pytest.raises(OpListError, match=r"list\.yaml:2:8: op 'torch\.nn\.functional\.cross_entropy' is listed twice"):
        load_op_list(path)


def test_the_tree_holds_text_only(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("a: {b: [c, 'no']}\n")
    tree = parse_file(path, shown="shown.yaml")
    words = tree.child("a").child("b").as_strings()
    assert [(w.text, str(w.source)) for w in words] == [("c", "shown.yaml:1:9"), ("no", "shown.yaml:1:12")]
    assert tree.child("z").is_missing
    assert tree.child("z").as_strings() == ()
    assert tree.child("z").as_text(default="d") == "d"


def test_nearest_is_deterministic_and_may_be_nothing() -> None:
    assert nearest("lineaar", legal_op_names()) == " (did you mean 'linear'?)"
    assert nearest("ab", ["aa", "ac"]) == nearest("ab", ["ac", "aa"])
    assert nearest("qqqq", ["linear"]) == ""


def test_legal_names_are_those_of_aten() -> None:
    assert {"linear", "add", "add_", "_softmax", "getitem"} <= legal_op_names()
    assert not any("." in name or "::" in name for name in legal_op_names())
    assert all(hasattr(torch.ops.aten, name) for name in ("linear", "scaled_dot_product_attention", "layer_norm"))
