"""Positional arguments behind options that take several values, and the help of each command."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import pytest

from autocastfx.cli.main import _EXAMPLES, _LIST_EXAMPLES, main, parser_of_all
from autocastfx.cli.parser import in_order

NET, X, IDS = "tests.cli.nets:Net", "float32[2,8]", "ids=int64[2,8]<10"


def parsed(line: str) -> argparse.Namespace:
    return parser_of_all().parse_args(shlex.split(line))


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (f"explain {NET} --inputs '{X}' softmax", {"what": ["softmax"], "inputs": [X]}),
        (f"explain {NET} --inputs '{X}' '{IDS}' softmax gelu", {"what": ["softmax", "gelu"], "inputs": [X, IDS]}),
        (f"explain {NET} softmax --inputs '{X}' gelu", {"what": ["softmax", "gelu"], "inputs": [X]}),
        (f"explain --inputs '{X}' {NET} softmax", {"what": ["softmax"], "inputs": [X], "model": NET}),
        (f"explain {NET} --inputs a:inputs b:softmax", {"what": ["b:softmax"], "inputs": ["a:inputs"]}),
        (f"explain {NET} --inputs '{X}' --op-list a.yaml softmax", {"what": ["softmax"], "op_list": ["a.yaml"]}),
        (f"explain {NET} --inputs '{X}' softmax --json", {"what": ["softmax"], "json": True}),
        (f"explain {NET} --inputs='{X}' softmax", {"what": ["softmax"], "inputs": [X]}),
        (f"explain {NET} --inp '{X}' softmax", {"what": ["softmax"], "inputs": [X]}),
        (f"dump --inputs '{X}' {NET}", {"model": NET, "inputs": [X]}),
        (f"dump --op-list default mine.yaml {NET}", {"model": NET, "op_list": ["default", "mine.yaml"]}),
        (f"dump --calibrate '{X}' {NET} --dtype float16", {"model": NET, "calibrate": [X], "dtype": "float16"}),
        (f"dump {NET} --inputs '{X}' '{IDS}' -o out.json", {"model": NET, "inputs": [X, IDS]}),
        (f"lists check a.yaml b.yaml --model {NET} --inputs '{X}'", {"list": ["a.yaml", "b.yaml"], "inputs": [X]}),
        (f"lists check --inputs '{X}' a.yaml", {"list": ["a.yaml"], "inputs": [X]}),
        (f"tune --float8 rowwise --batches n:b {NET}", {"model": NET, "float8": "rowwise"}),
        ("run --dtype float16 train.py --inputs 3 x", {"script": "train.py", "arguments": ["--inputs", "3", "x"]}),
    ],
)
def test_positional_arguments_behind_options(line: str, wanted: dict[str, Any]) -> None:
    found = vars(parsed(line))
    assert {name: found[name] for name in wanted} == wanted


def test_what_is_not_understood_is_left_to_argparse() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--ab", nargs="+")
    parser.add_argument("--ac")
    for args in (["--ab", "1", "2", "--", "x"], ["--a", "1", "x"], ["--unknown", "x"]):
        assert in_order(parser, args) == args
    assert in_order(parser, ["--ab", "1", "2"]) == ["2", "--ab", "1"]
    assert in_order(parser, ["--ab", "1", "--ac", "2", "x"]) == ["x", "--ab", "1", "--ac", "2"]


@pytest.mark.parametrize("command", [*_EXAMPLES, *(f"lists {name}" for name in _LIST_EXAMPLES)])
def test_help_ends_with_an_example_that_can_be_parsed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    said = capsys.readouterr().out
    program, _, example = said.rstrip().rpartition("\n")[2].strip().partition(" ")
    assert program == "autocastfx"
    assert example.startswith(command)
    parsed(example)
    assert said.splitlines()[-2] == "example:"


def test_help_groups_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["dump", "--help"])
    said = capsys.readouterr().out
    places = [said.index(f"\n{title}:\n") for title in ("the model and a call of it", "the conversion", "the output")]
    assert places == sorted(places)
    assert said.count("the output:") == 1
    model, conversion, output = (
        said[a:b] for a, b in zip(places, [*places[1:], said.index("\noptions:")], strict=True)
    )
    assert "--inputs" in model
    assert "--recompose" in conversion
    assert "--summary" in output
