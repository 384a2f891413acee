"""Code that is exchanged after a model was converted runs in the next call, and the former again when it is back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError
from tests.invariants.pair import distance


class _Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def mixed(self, x: Tensor) -> Tensor:
        return x * 2


class _Block(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(self.of_class(self.mixed(super().forward(x)))) * self.scale + F.gelu(x)

    @staticmethod
    def shifted(x: Tensor) -> Tensor:
        return x + 1

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x * 1.5

    @property
    def scale(self) -> float:
        return 2.0


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(), _Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).float()


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
OTHERS: dict[str, tuple[Any, str, Any]] = {
    "forward of a block": (_Block, "forward", lambda _, x: x * 7),
    "forward of its base": (_Base, "forward", lambda _, x: x * 7),
    "forward of a torch layer": (nn.Linear, "forward", lambda _, x: x * 7),
    "forward of a container": (nn.Sequential, "forward", lambda _, x: x * 7),
    "forward of the model": (_Model, "forward", lambda _, x: x * 7),
    "call of a block": (_Block, "__call__", lambda _, x: x * 7),
    "method of its base": (_Base, "mixed", lambda _, x: x * 7),
    "static method": (_Block, "shifted", staticmethod(lambda x: x * 7)),
    "class method": (_Block, "of_class", classmethod(lambda _, x: x * 7)),
    "property": (_Block, "scale", property(lambda _: 7.0)),
    "torch function": (F, "gelu", lambda x: x * 7),
}


@pytest.mark.parametrize("way", ["convert", "enable"])
@pytest.mark.parametrize("what", OTHERS)
def test_other_code_runs_at_once(what: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call does what the model itself does now; so does the one after the former code is back."""
    owner, name, other = OTHERS[what]
    model = _Model()
    plain = copy.deepcopy(model)
    call: Any
    if way == "convert":
        call = autocastfx.convert(model, (X,), dtype="bfloat16")
    else:
        call = autocastfx.enable(model, dtype="bfloat16")
    before = plain(X)
    assert distance(call(X), before) < 2**-6
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, other)
        assert distance(plain(X), before) > 0.1
        assert distance(call(X), plain(X)) < 2**-6
    assert distance(call(X), before) < 2**-6


def test_a_call_in_which_dynamo_captures_nothing_is_refused() -> None:
    """It would run in float32 without a word."""
    amp_model = autocastfx.convert(_Model(), (X,), dtype="bfloat16")
    with torch._dynamo.config.patch(disable=True), pytest.raises(CaptureError, match="captures nothing of _Model"):
        amp_model(X[:3])  # no graph is there for it
