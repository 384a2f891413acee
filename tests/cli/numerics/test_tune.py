"""``autocastfx tune``, driven as a person would, with good and with bad input."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import autocastfx
from autocastfx.numerics.plan_search import Budget
from autocastfx.numerics.tune import Tuned
from tests.cli.run_command import run

MODELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model():
    return nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.LayerNorm(16), nn.Linear(16, 4))


def plain():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def other():
    return nn.Sequential(nn.Conv1d(8, 4, 1), nn.Flatten())


def batches(most=3):
    return [(torch.randn(32, 8), torch.randint(4, (32,))) for _ in range(most)]


def images():
    return [(torch.randn(2, 8, 1), torch.randint(4, (2,))) for _ in range(3)]


def loss():
    return lambda output, batch: nn.functional.cross_entropy(output, batch[1])


def first():
    return lambda batch: batch[0]


measured = []


def interrupted():
    def loss(output, batch):
        measured.append(None)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return nn.functional.cross_entropy(output, batch[1])

    return loss


def number():
    return 3
"""
HOW = ("--loss", "tune_models:loss", "--inputs", "tune_models:first", "--dtype", "bfloat16")
TUNE = ("tune", "tune_models:model", *HOW)
COMMAND = (*TUNE, "--batches", "tune_models:batches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tune")
    (folder / "tune_models.py").write_text(MODELS)
    (folder / "other.json").write_text("{}")
    yield folder
    sys.modules.pop("tune_models", None)


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def expected(**options: object) -> Tuned:
    """What ``tune`` finds for the same model and batches."""
    models = sys.modules["tune_models"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = models.model()
        torch.manual_seed(0)
        batches = models.batches()
    return autocastfx.tune(model, batches, models.loss(), inputs=models.first(), dtype="bfloat16", **options)  # type: ignore[arg-type]


def test_it_prints_the_report_of_tune_and_writes_list_and_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    state = torch.get_rng_state()
    target, picture = tmp_path / "tuned.yaml", tmp_path / "front.svg"
    code, out, err = run(capsys, *COMMAND, "-o", str(target), "--plot", str(picture))
    assert torch.equal(torch.get_rng_state(), state)
    found = expected()
    assert (code, out, err) == (0, found.report() + "\n", "")
    assert found.gains
    assert target.read_text(encoding="utf-8") == found.text()
    assert ElementTree.fromstring(picture.read_text(encoding="utf-8")).tag.endswith("svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["front.svg", "tuned.yaml"]


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ("bytes=0.9", Budget(bytes=0.9)),
        ("error=0.02", Budget(error=0.02)),
        ("torch_autocast_cpu", "torch_autocast_cpu"),
    ],
)
def test_a_budget_is_a_number_or_a_list(capsys: pytest.CaptureFixture[str], given: str, budget: str | Budget) -> None:
    code, out, _ = run(capsys, *COMMAND, "--budget", given, "--json", "--probes", "2")
    found, told = expected(budget=budget, probes=2), json.loads(out)
    assert code == int(not found.gains)
    assert told["budget"] == {"error": found.budget.error, "bytes": found.budget.bytes, "share": None}
    assert told["tuned"] == vars(found.point)
    assert (told["op_list"], told["gains"]) == (found.text(), found.gains)


def test_the_error_of_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *COMMAND, "--of", "output", "--mode", "eval", "--held-out", "2", "--json")
    assert code == 0
    assert json.loads(out)["sensitivity"].startswith("sensitivity of the output to bfloat16")


def test_a_share_of_products_in_float8(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "measured.json")
    options = ("--float8", "tensorwise", "--share", "0.5", "--probes", "2", "--json")
    code, out, _ = run(capsys, *COMMAND, *options)
    found, told = expected(float8="tensorwise", share=0.5, probes=2), json.loads(out)
    assert code == 0
    assert told["budget"]["share"] == 0.5
    assert told["tuned"]["share"] == found.point.share >= 0.5
    assert told["op_list"] == found.text()
    assert "recipe: tensorwise" in told["op_list"]
    assert json.loads(run(capsys, *COMMAND, *options, "--sensitivity", file)[1])["tuned"]["share"] >= 0.5
    assert autocastfx.Sensitivity.load(file).float8 == "tensorwise"
    # The same file serves a command without float8, and no other recipe, of which the first is meant if none is named.
    assert run(capsys, *COMMAND, "--probes", "2", "--sensitivity", file)[0] == 0
    told_apart = "by 2 probes and float8 tensorwise, and this command asks for the gradient in bfloat16 by 2 and float8"
    for named, other in (((), "rowwise"), (("rowwise_gw_hp",), "rowwise_gw_hp")):
        code, _, err = run(capsys, *COMMAND, "--float8", *named, "--probes", "2", "--sensitivity", file)
        assert code == 2
        assert re.search(rf"{told_apart} {other}\b", err), err


def test_another_recipe_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(capsys, *COMMAND, "--float8", "rowise")
    assert ended.value.code == 2
    assert "'rowise'" in (said := capsys.readouterr().err)
    assert "did you mean 'rowwise'?" in said


def test_nothing_to_gain_is_told_and_the_list_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "tune", "tune_models:plain", *HOW, "--batches", "tune_models:batches")
    assert code == 0
    assert "nothing to gain" in out


def test_what_is_measured_is_kept_and_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    sys.modules["tune_models"].measured.clear()
    options = ("--batches", "tune_models:batches", "--sensitivity", str(file))
    stopped = [word.replace("tune_models:loss", "tune_models:interrupted") for word in TUNE]
    code, out, err = run(capsys, *stopped, *options)
    assert (code, out) == (130, "")
    assert err.endswith(f"autocastfx: the same command goes on from {file}\nautocastfx: interrupted\n")
    assert autocastfx.Sensitivity.load(file).batches == 1
    code, out, _ = run(capsys, *TUNE, *options)
    assert code == 0
    kept, whole = autocastfx.Sensitivity.load(file), expected().sensitivity
    assert kept.batches == whole.batches == 2
    for one, other in zip(kept.effects, whole.effects, strict=True):
        assert one.key == other.key
        assert one.error == pytest.approx(other.error, rel=1e-2)  # a file holds four digits
    before = file.stat().st_mtime_ns
    assert run(capsys, *TUNE, *options)[:2] == (0, out)
    assert file.stat().st_mtime_ns == before


def test_a_file_of_another_measurement_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "measured.json")
    assert run(capsys, *COMMAND, "--probes", "1", "--sensitivity", file)[0] == 0
    code, _, err = run(capsys, *COMMAND, "--sensitivity", file)
    assert code == 2
    assert "the gradient in bfloat16 by 1 probes, and this command asks for the gradient in bfloat16 by 8" in err
    options = (*HOW, "--batches", "tune_models:images", "--probes", "1", "--sensitivity", file)
    code, _, err = run(capsys, "tune", "tune_models:other", *options)
    assert (code, err) == (
        2,
        f"autocastfx: error: {file} was measured for another model: measure into another file.\n",
    )


BAD = {
    "no such model": (["tune", "tune_models:modle", "--batches", "tune_models:batches"], 2, "did you mean 'model'?"),
    "no batches": ([*TUNE, "--batches", "tune_models:number"], 2, "gave a int: batches are an iterable"),
    "too few": ([*TUNE, "--batches", "tune_models:batches(most=1)"], 3, "there are 1 batches, of which 1 are held out"),
    "no loss": (
        ["tune", "tune_models:model", "--batches", "tune_models:batches", "--loss", "tune_models:number"],
        2,
        "tune_models:number gave a int: the factory of a loss returns a function.",
    ),
    "no function": (
        ["tune", "tune_models:model", "--batches", "tune_models:batches", "--inputs", "tune_models:number"],
        2,
        "the factory of a function of a batch returns a function.",
    ),
    "targets": (
        ["tune", "tune_models:model", "--batches", "tune_models:batches", "--loss", "tune_models:loss"],
        2,
        "a batch does not fit Sequential.forward: too many positional arguments. Where a batch holds targets too, say "
        "which part the model takes: inputs=lambda batch: batch[0]. Here that is --inputs.",
    ),
    "no error": ([*COMMAND, "--budget", "error=small"], 2, "--budget error=small: error is a finite number above 0"),
    "no bytes": ([*COMMAND, "--budget", "bytes=0"], 2, "--budget bytes=0: bytes is a finite number above 0"),
    "an endless one": ([*COMMAND, "--budget", "error=inf"], 2, "error is a finite number above 0, such as error=0.1."),
    "no such list": ([*COMMAND, "--budget", "no.yaml"], 2, "cannot read the op list no.yaml"),
    "share alone": ([*COMMAND, "--share", "0.5"], 2, "share is of products in float8: give float8 too"),
    "too large a share": ([*COMMAND, "--float8", "--share", "65"], 2, "above 0 and at most 1, not 65.0."),
    "no number": ([*COMMAND, "--float8", "--share", "nan"], 2, "above 0 and at most 1, not nan."),
    "share and budget": (
        [*COMMAND, "--float8", "--share", "0.5", "--budget", "error=0.1"],
        2,
        "share takes the place of a budget, which is Budget(error=0.1, bytes=None): leave one of the two out.",
    ),
    "float8 in bytes": (
        [*COMMAND, "--float8", "--budget", "bytes=0.9"],
        2,
        "a budget of bytes says nothing of float8, which only adds errors: give an error, or share.",
    ),
    "no probes": ([*COMMAND, "--probes", "0"], 2, "--probes is a number from 1 on, not 0."),
    "none to judge on": ([*COMMAND, "--held-out", "0"], 2, "--held-out is a number from 1 on, not 0."),
    "too little": ([*COMMAND, "--budget", "bytes=0.01"], 3, "no plan keeps the budget"),
    "another file": ([*COMMAND, "--sensitivity", "other.json"], 2, "other.json holds no sensitivity"),
    "no folder": ([*COMMAND, "-o", "no/x.yaml"], 2, "the folder no does not exist"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_error_is_a_line_and_an_exit_code(capsys: pytest.CaptureFixture[str], what: str) -> None:
    argv, expected_code, said = BAD[what]
    code, out, err = run(capsys, *argv)
    assert (code, out) == (expected_code, "")
    assert err.startswith("autocastfx: error: ")
    assert said in err
