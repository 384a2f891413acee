"""The judge that tests share: may a model in 16 bits be as far from float32 as it is?

The measure is torch.autocast, on the same model and inputs: each result may be 1.2 times as far from float32's, and an
epsilon. A test that needs other numbers says which. ``benchmarks.judge`` holds whole models to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import relative_error

Results = Mapping[Any, Tensor]


def mean_square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def trained_on(*inputs: Any, loss: Callable[[Any], Tensor] = mean_square) -> Callable[[nn.Module], Results]:
    """A step: what a model gives for ``inputs``, and the gradients of its parameters, by name."""

    def step(model: nn.Module) -> Results:
        model.zero_grad()
        output = model(*inputs)
        with torch.autocast("cpu", enabled=False):  # a region is left before backward
            loss(output).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"output": output.detach(), **gradients}

    return step


def assert_near(ours: Results, theirs: Results, exact: Results, *, times: float = 1.2, slack: float = 0.0) -> None:
    """Each of our results is as near to the exact one as theirs, and not all are exact."""
    errors = {name: relative_error(ours[name], value) for name, value in exact.items()}
    for name, error in errors.items():
        allowed = times * relative_error(theirs[name], exact[name]) + slack
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"
    assert any(errors.values()), "nothing is in 16 bits"


def assert_as_near_as_autocast(
    step: Callable[[Any], Results], model: nn.Module, amp_model: nn.Module, low: torch.dtype, **bounds: float
) -> None:
    """``step`` is as near to float32's results on ``amp_model`` as on ``model`` under torch.autocast."""
    exact = step(model)
    with torch.autocast("cpu", low):
        theirs = step(model)
    assert_near(step(amp_model), theirs, exact, **{"slack": torch.finfo(low).eps, **bounds})
