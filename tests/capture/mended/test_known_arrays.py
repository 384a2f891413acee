"""Code that reads numbers from small arrays and tensors that are made of sizes and numbers alone, for any size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError, UncapturedGraphWarning
from tests.helpers import relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
SIZES = ((2, 16, 8, 6), (2, 16, 7, 6), (3, 16, 8, 6), (2, 16, 32, 10))


class Net(nn.Module):
    """A convolution, and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(16, 4, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


def _refuses_odd_sizes(x: Tensor) -> Tensor:
    rest = (np.array(x.shape[2:]) % np.power(2, 1)) > 0
    if rest.any():
        return x * len((np.where(rest)[0] + 2).tolist())
    return x


def _written(x: Tensor) -> Tensor:
    sizes = np.array(x.shape[2:])
    sizes[0] = 7
    return x * 2 if (sizes == 7).all() else x + 1


def _looping(x: Tensor) -> Tensor:
    sizes = np.array(x.shape[2:])
    while sizes.max() > 2:
        x, sizes = x + 1, sizes // 2
    return x


def _negated(x: Tensor) -> Tensor:
    is_large = not (np.array(x.shape) < 7).any()
    return x + 1 if is_large else x


KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a remainder": _refuses_odd_sizes,
    "written": _written,
    "a loop": _looping,
    "negated": _negated,
    "a product": lambda x: x * 2 if np.prod(x.shape[2:]) > 50 else x,
    "a product of numbers": lambda x: x * 2 if np.prod((2, 3)) != 1 else x,
    "a number": lambda x: x.reshape(x.shape[0], int(np.prod(x.shape[1:]))),
    "a list": lambda x: x[..., : (np.array(x.shape) // 2).tolist()[-1]],
    "a tuple": lambda x: F.adaptive_avg_pool2d(x, tuple(np.array(x.shape[2:]) // 2)),
    "numbers": lambda x: x.repeat(*(int(size) for size in np.ceil(np.array(x.shape) / 4))),
    "a bool": lambda x: x * 2 if bool(np.all(np.array(x.shape[2:]) > 7)) else x,
    "two conditions": lambda x: x * 2 if (np.array(x.shape) > 5).any() and np.array(x.shape).max() < 20 else x,
    "a tensor": lambda x: x * 2 if (torch.tensor(x.shape[2:]) % 2 > 0).any() else x,
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_made_of_sizes_is_known(name: str) -> None:
    torch.manual_seed(0)
    model = Net(KNOWN[name])
    amp_model = autocastfx.convert(model, (torch.randn(SIZES[0]),), dtype=LOW)
    for sizes in SIZES:
        x = torch.randn(sizes)
        exact = model(x).detach()
        assert relative_error(amp_model(x).detach(), exact) < 4 * torch.finfo(LOW).eps
    assert {node.dtype for node in amp_model.plan.nodes if node.op == "conv2d"} == {"bfloat16"}


def test_an_enabled_model_goes_on_without_a_break(recwarn: pytest.WarningsRecorder) -> None:
    model, x = Net(_refuses_odd_sizes), torch.randn(SIZES[1])
    exact = model(x).detach()
    autocastfx.enable(model, dtype=LOW)
    assert 0 < relative_error(model(x).detach(), exact) < 4 * torch.finfo(LOW).eps
    assert not [one for one in recwarn if one.category is UncapturedGraphWarning]


def _partly_written(x: Tensor) -> Tensor:
    numbers = torch.tensor([1.0, 2.0, 3.0])
    numbers[0] = x.sum()
    return x * 2 if (numbers > 1e9).any() else x


def _written_through_a_view(x: Tensor) -> Tensor:
    numbers = torch.tensor([1.0, 2.0, 3.0])
    numbers.view(3, 1).mul_(x.mean().detach())
    return x * 2 if numbers.sum() > 1e9 else x


ROWS = torch.tensor([2, 0, 1])
READ: dict[str, Callable[[Tensor], Tensor]] = {
    "indexed": lambda x: x * float(torch.tensor([1.0, 2.0, 3.0])[ROWS[:1]]),
    "an embedding": lambda x: x * float(F.embedding(ROWS[:1], torch.tensor([[1.0], [2.0], [3.0]]))),
    "selected": lambda x: x * float(torch.tensor([1.0, 2.0, 3.0]).index_select(0, ROWS[:1])),
    "an argument": lambda x: x * float(torch.tensor([1.0, 2.0, 3.0])[x[0, 0, 0, :1].detach().abs().argmin()[None]]),
    "drawn": lambda x: x * int(torch.tensor([5, 6])[torch.randint(0, 2, (1,))]),
}


@pytest.mark.parametrize("name", READ)
def test_a_number_of_the_data_in_a_known_tensor_is_read_in_each_call(name: str) -> None:
    torch.manual_seed(0)
    model, x = Net(READ[name]), torch.randn(SIZES[0])
    amp_model = autocastfx.convert(model, (x,), dtype=LOW)
    for seed in range(3):
        torch.manual_seed(seed)
        exact = model(x).detach()
        torch.manual_seed(seed)
        assert relative_error(amp_model(x).detach(), exact) < 4 * torch.finfo(LOW).eps


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "written": _partly_written,
    "written through a view": _written_through_a_view,
    "of an input": lambda x: x * 2 if (x.detach().numpy() > 100).any() else x,
    "indexed": lambda x: x * 2 if torch.tensor([True, False])[x[0, 0, 0, :1].detach().long() * 0] else x,
    "random": lambda x: x * 2 if torch.tensor([0.5, 0.5, 0.5]).bernoulli_().sum() > 1 else x,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_data_is_not_known(name: str) -> None:
    with pytest.raises(CaptureError, match=r"Data-dependent branching(.|\n)*with autocastfx\.enable"):
        autocastfx.convert(Net(UNKNOWN[name]), (torch.randn(SIZES[0]),), dtype=LOW)
