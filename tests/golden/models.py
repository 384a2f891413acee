"""The converted models whose dumps are kept in this folder, and how a dump is compared with what is kept."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import autocastfx
from benchmarks.models.tiny import CNN, Attention, EncoderLayer, NoGrad

FOLDER = Path(__file__).parent
INPUTS: dict[str, tuple[Tensor, ...]] = {
    "cnn": (torch.randn(2, 3, 8, 8),),
    "encoder_layer": (torch.randn(2, 9, 16), torch.zeros(2, 1, 9, 9)),
    "no_grad": (torch.randn(2, 8), torch.arange(2)),
    "float8": (torch.randn(2, 16, 64),),
}


def cnn() -> autocastfx.AmpModule:
    return autocastfx.convert(CNN().train(), INPUTS["cnn"], dtype=torch.bfloat16)


def encoder_layer() -> autocastfx.AmpModule:
    return autocastfx.convert(EncoderLayer().train(), INPUTS["encoder_layer"], dtype="float16")


def no_grad() -> autocastfx.AmpModule:
    return autocastfx.convert(NoGrad().train(), INPUTS["no_grad"], dtype=torch.bfloat16)


def float8() -> autocastfx.AmpModule:
    rules = {
        "extends": "bfloat16",
        "float8": [{"ops": ["linear"], "last": False}],
        "modules": [{"path": "out", "float8": {"products": ["output"]}}],
    }
    lists = autocastfx.OpList.of(rules, name="float8_linears")
    return autocastfx.convert(Attention().train(), INPUTS["float8"], dtype="bfloat16", op_list=lists)


CASES: dict[str, Callable[[], autocastfx.AmpModule]] = {
    "cnn": cnn,
    "encoder_layer": encoder_layer,
    "no_grad": no_grad,
    "float8": float8,
}


LINTS = ("cnn", "encoder_layer")


@functools.cache
def converted(name: str) -> autocastfx.AmpModule:
    """The model of a case, in train mode, made once. Leave it as it is."""
    return CASES[name]()


def kept(name: str) -> Path:
    """Where the dump of a case is kept."""
    return FOLDER / f"{name}.txt"


def kept_lint(name: str) -> Path:
    """Where the lint of a case is kept."""
    return FOLDER / f"lint_{name}.txt"


def comparable(dump: str) -> str:
    """A dump without the lines and columns of the op lists, which move with every edit of a list, nor breaks."""
    notes = re.sub(r"^\[\d+\] .*(?:\n    .*)*", lambda note: re.sub(r"\n +", " ", note[0]), dump, flags=re.MULTILINE)
    return re.sub(r"\.yaml:\d+:\d+(?=[);])", ".yaml", notes)
