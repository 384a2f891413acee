"""NumPy's draws in an enabled model use NumPy's random state, and leave torch's alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError
from tests.helpers import relative_error

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "an array": lambda x: x * torch.from_numpy(np.random.randn(4, 16)).float(),
    "a number": lambda x: x * float(np.random.rand(1)[0]),
    "a choice": lambda x: x * int(np.random.choice([1, 2, 3])),
    "a branch": lambda x: x * 2 if np.random.choice([True, False]) else x,
    "an order": lambda x: x[np.random.permutation(4)],
}


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.draw = nn.Linear(16, 16), draw

    def forward(self, x: Tensor) -> Any:
        return self.draw(self.linear(x))


@pytest.mark.filterwarnings("ignore::autocastfx.errors.UncapturedGraphWarning")
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_numpys(name: str) -> None:
    plain, model = Drawing(DRAWS[name]), autocastfx.enable(Drawing(DRAWS[name]), dtype="bfloat16")
    found = list[tuple[list[Tensor], Any, Tensor]]()
    for one in (plain, model):
        np.random.seed(3)
        torch.manual_seed(3)
        found.append(([one(X).detach() for _ in range(4)], np.random.rand(), torch.rand(1)))
    (expected, after, of_torch), (ours, our_after, our_torch) = found
    assert all(relative_error(a, b) < 4 * torch.finfo(torch.bfloat16).eps for a, b in zip(ours, expected, strict=True))
    assert (our_after, our_torch) == (after, of_torch)


def test_a_converted_model_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"a random number of NumPy's: randn draws in Python\n.*\nDraw by torch's"):
        autocastfx.convert(Drawing(DRAWS["an array"]), (X,), dtype="bfloat16")
