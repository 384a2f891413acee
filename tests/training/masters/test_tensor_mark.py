"""Writes to a tensor that its mark sees."""

from __future__ import annotations

import torch
from torch import nn

from autocastfx.training.masters import TensorMark


def test_a_mark_fits_until_the_tensor_is_written_to() -> None:
    parameter = nn.Parameter(torch.ones(3))
    mark = TensorMark(parameter)
    parameter.sum().backward()
    assert mark.fits(parameter)
    with torch.no_grad():
        parameter.add_(1)
    assert not mark.fits(parameter)
    assert TensorMark(parameter).fits(parameter)


def test_other_memory_does_not_fit() -> None:
    parameter = nn.Parameter(torch.ones(3))
    mark, before = TensorMark(parameter), parameter.data
    parameter.data = torch.ones(3)
    assert not mark.fits(parameter)
    parameter.data = before
    assert mark.fits(parameter)


def test_other_memory_at_the_same_address_does_not_fit() -> None:
    memory = bytearray(12)
    parameter = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32))
    mark = TensorMark(parameter)
    parameter.data = torch.frombuffer(memory, dtype=torch.float32)
    assert mark.pointer == parameter.data_ptr()
    assert not mark.fits(parameter)
