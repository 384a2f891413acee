"""Numbers that forward reads from tensors: computed anew in each call, as the model does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autocastfx
from autocastfx.errors import CaptureError
from tests.invariants.pair import LOW, Net, Pair, net

ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([2, 5, 3, 1])


def _length(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
    place = torch.arange(int(lengths.max()))
    mask = (place[None] < lengths[:, None]).float()
    return m.a(x) * mask.mean(-1, keepdim=True)


def _by_map(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
    first, second = map(int, (lengths[0], lengths[1]))
    return m.a(x) + first * 0.5 + second


def _scale_by_item(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return m.a(x / m.scale.item())


def _scale_by_float(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return m.a(x) * float(m.scale) + float(lengths.sum()) / float(x.shape[0])


def _scale_of_a_result(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
    """The number comes from a 16-bit value."""
    y = m.a(x)
    return m.b(y) * (2.0 / y.detach().abs().max().item())


def _rounded_toward_zero(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
    return m.a(x) * int(m.scale) + int(-m.scale * 3)


def _plain_uses(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
    """The same names do what Python's do with all else."""
    n = int(lengths.max())
    assert isinstance(3, int)
    assert not isinstance(3.0, int)
    assert issubclass(bool, int)
    assert type(n.node.hint if isinstance(n, torch.SymInt) else n) in (type(None), int)
    assert (int("12"), int("ff", 16), int.from_bytes(b"\x02", "big")) == (12, 255, 2)
    assert (float("inf"), float.fromhex("0x1p-1")) == (float("inf"), 0.5)
    return m.a(x) + n


READS = (
    _length,
    _by_map,
    _scale_by_item,
    _scale_by_float,
    _scale_of_a_result,
    _rounded_toward_zero,
    _plain_uses,
)


def model(function: Callable[..., Any]) -> Net:
    torch.manual_seed(0)
    return net(function, scale=torch.tensor(1.7))


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("function", READS)
def test_numbers_are_those_of_each_call(function: Callable[..., Any], low: torch.dtype) -> None:
    pair = Pair.of(model(function), (ROWS, LENGTHS), low)
    for mode in (True, False):
        pair.train(mode).agree(ROWS, LENGTHS)
        pair.train(mode).agree(torch.randn(3, 8), torch.tensor([7, 1, 2]))
    for held in (pair.original, pair.eager):
        held.scale.fill_(2.6)
    pair.agree(ROWS, LENGTHS)
    assert len(pair.amp_model.variants) <= 4, "for each mode one of the first size, and one of others"


def test_the_names_mean_what_they_did_after_a_capture_and_after_a_failed_one() -> None:
    def fails(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
        raise ValueError(str(int(lengths.max()) * 0))

    autocastfx.convert(model(_length), (ROWS, LENGTHS), dtype=torch.bfloat16)
    with pytest.raises(CaptureError):
        autocastfx.convert(model(fails), (ROWS, LENGTHS), dtype=torch.bfloat16)
    assert not {"int", "float"} & vars(sys.modules[__name__]).keys()


def test_a_branch_on_such_a_number_is_refused_with_its_line() -> None:
    def branches(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
        n = int(lengths.max())
        return m.a(x) if n > 3 else x

    with pytest.raises(CaptureError, match=r"At .*test_numbers\.py:\d+: return m\.a\(x\) if n > 3 else x"):
        autocastfx.convert(model(branches), (ROWS, LENGTHS), dtype=torch.bfloat16)


def test_code_that_compares_types_by_identity_is_captured() -> None:
    def by_identity(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
        kind = 1.0 if type(x.ndim) is int else 2.0
        return m.a(x) * kind + torch.arange(int(lengths.max())).sum()

    pair = Pair.of(model(by_identity), (ROWS, LENGTHS), torch.bfloat16)
    pair.agree(ROWS, LENGTHS)
    pair.agree(ROWS, LENGTHS + 3)
