"""Abstract values with the sizes of the example."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autocastfx.abstract import concrete_sizes


def test_a_value_that_lives_no_longer_is_not_taken_for_a_later_one() -> None:
    """Python gives a new object the id of one that is gone."""
    concrete = concrete_sizes(fx.Graph())
    with FakeTensorMode():
        for size in range(100):
            assert concrete(torch.empty(size)).shape == (size,)


def test_one_value_becomes_one_value() -> None:
    concrete = concrete_sizes(fx.Graph())
    with FakeTensorMode():
        abstract = torch.empty(2)
    first, second = concrete((abstract, abstract))
    assert first is second
