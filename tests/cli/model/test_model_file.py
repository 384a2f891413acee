"""Weights and whole models from files, by the command line, and files that want to run something."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autocastfx
from autocastfx.cli.model import is_model_file, load_pickled, load_weights
from autocastfx.errors import CaptureError, ModelSpecError
from tests.cli.run_command import run

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))
"""
INPUTS = ("--inputs", "float32[2,8]", "--dtype", "float16")
RAN = "ran.txt"


class Malicious:
    """Unpickled, it writes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"echo ran > {RAN}",)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "file_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("file_models", None)


def net() -> nn.Module:
    import file_models  # type: ignore[import-not-found]  # pyright: ignore

    torch.manual_seed(7)
    return file_models.Net()


def test_weights_are_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    torch.save(model.state_dict(), "weights.pt")
    argv = ("convert", "file_models:Net", *INPUTS, "--weights", "weights.pt", "--mode", "eval", "-o", "amp.pt")
    assert run(capsys, *argv)[0] == 0
    loaded = torch.load("amp.pt", weights_only=False)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_weights_decide_what_is_decided_by_weights(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    nn.init.constant_(model.first.weight, 1e5)  # type: ignore[union-attr, arg-type]
    torch.save(model.state_dict(), "large.pt")
    assert "forced:range" not in run(capsys, "dump", "file_models:Net", *INPUTS)[1]
    assert "forced:range" in run(capsys, "dump", "file_models:Net", *INPUTS, "--weights", "large.pt")[1]


@pytest.mark.parametrize(
    "command",
    [
        ["dump", "MODEL", *INPUTS],
        ["explain", "MODEL", "relu", *INPUTS],
        ["diff", "MODEL", *INPUTS, "--op-list", "default", "--op-list", "default"],
        ["convert", "MODEL", *INPUTS, "-o", "amp.pt"],
        ["lint", "MODEL", *INPUTS],
        ["lists", "check", "default", "--model", "MODEL", *INPUTS],
    ],
    ids=lambda command: command[0],
)
def test_every_command_that_takes_a_model_takes_weights_and_a_trusted_file(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    torch.save(net(), "model.pt")
    torch.save(net().state_dict(), "weights.pt")
    from_factory = [word.replace("MODEL", "file_models:Net") for word in command]
    from_file = [word.replace("MODEL", "model.pt") for word in command]
    code, out, err = run(capsys, *from_factory, "--weights", "weights.pt")
    assert (code, err) == (0, "")
    assert run(capsys, *from_file, "--trust") == (0, out, "")
    code, _, err = run(capsys, *from_file)
    assert code == 2
    assert "model.pt is a file of a whole model, and reading one runs whatever the file says." in err
    assert "--trust" in err


def test_a_malicious_file_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(Malicious(), "evil.pt")
    torch.save({"first.weight": Malicious()}, "weights.pt")
    assert run(capsys, "dump", "evil.pt", *INPUTS)[0] == 2
    for trust in ((), ("--trust",)):
        code, out, err = run(capsys, "dump", "file_models:Net", *INPUTS, "--weights", "weights.pt", *trust)
        assert (code, out) == (2, "")
        assert "--weights takes a state_dict and runs nothing, with --trust or without" in err
    assert not Path(RAN).exists()
    with pytest.raises(ModelSpecError):  # the file does what it is here for: trusted, it runs
        load_pickled("evil.pt", trust=True)
    assert Path(RAN).exists()


def save(value: Any) -> str:
    torch.save(value, "x.pt")
    return "x.pt"


def renamed(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in net().state_dict().items()}


BAD_WEIGHTS = {
    "missing": (lambda: {"first.weight": torch.ones(16, 8)}, "it lacks first.bias, second.weight, second.bias."),
    "unknown": (
        lambda: {**net().state_dict(), "frist.weight": torch.ones(1), "b": torch.ones(1)},
        "the model has no frist.weight, b.",
    ),
    "misspelt": (
        lambda: {("frist.bias" if n == "first.bias" else n): t for n, t in net().state_dict().items()},
        "it lacks first.bias; the model has no frist.bias (did you mean 'first.bias'?).",
    ),
    "wrapped": (lambda: renamed("module."), "(all begin with 'module.': save the state_dict of the model inside)"),
    "other sizes": (
        lambda: {**net().state_dict(), "second.bias": torch.ones(5)},
        "other sizes: second.bias is [5], here [4].",
    ),
    "a checkpoint": (
        lambda: {"epoch": 3, "model": net().state_dict()},
        "'epoch' is a int, and --weights takes a state_dict alone, tensors by name. One seems to be under 'model'",
    ),
    "a list": (lambda: [torch.ones(3)], "x.pt holds a list: --weights takes a state_dict"),
    "a whole model": (net, "x.pt holds more than tensors, or is no file of torch.save (UnpicklingError)."),
}


@pytest.mark.parametrize("what", BAD_WEIGHTS)
def test_weights_that_do_not_fit_are_refused_and_the_model_is_as_before(what: str) -> None:
    make, said = BAD_WEIGHTS[what]
    model, before = net(), net().state_dict()
    with pytest.raises(ModelSpecError, match=re.escape(said)):
        load_weights(model, "file_models:Net", Path(save(make())))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is no file of torch.save"), (b"weights: 3\n", "no file of torch.save"), (None, "no such")],
)
def test_files_that_are_none_of_torch_save_are_refused(content: bytes | None, said: str) -> None:
    if content is not None:
        Path("x.pt").write_bytes(content)
    with pytest.raises(ModelSpecError, match=said):
        load_weights(net(), "file_models:Net", Path("x.pt"))
    with pytest.raises(CaptureError if content is not None else ModelSpecError, match=r"x\.pt"):
        load_pickled("x.pt", trust=True)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelSpecError, match=r"cannot read the weights .*: it is a folder"):
        load_weights(net(), "file_models:Net", tmp_path)


def test_a_trusted_file_has_to_hold_a_model() -> None:
    with pytest.raises(ModelSpecError, match=r"x\.pt holds a OrderedDict, not an nn\.Module; a state_dict is given by"):
        load_pickled(save(net().state_dict()), trust=True)
    with pytest.raises(ModelSpecError, match=r"x\.pt holds a int, not an nn\.Module\."):
        load_pickled(save(3), trust=True)


def test_the_code_of_a_trusted_model_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    save(net())
    monkeypatch.delitem(sys.modules, "file_models")
    Path("file_models.py").unlink()
    with pytest.raises(CaptureError, match=r"reading x\.pt raised ModuleNotFoundError: .* must be importable"):
        load_pickled("x.pt", trust=True)


def test_a_saved_conversion_is_not_converted_again(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(autocastfx.convert(net(), torch.ones(2, 8), dtype="float16"), "amp.pt")
    code, _, err = run(capsys, "dump", "amp.pt", *INPUTS, "--op-list", "base", "--trust")
    assert code == 2
    assert "holds a model that is converted already" in err
    code, out, err = run(capsys, "compare", "amp.pt", *INPUTS, "--trust")
    assert (code, err) == (0, "")
    assert "linear_1" in out


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("model.pt", True),
        ("runs/model.PTH", True),
        (r"C:\runs\model.pt", True),
        ("net:small", False),
        ("net:models.pt", False),
        ("net", False),
    ],
)
def test_what_counts_as_a_file(spec: str, expected: bool) -> None:
    assert is_model_file(spec) is expected
