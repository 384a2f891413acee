"""Abstract values with the sizes of the example."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from autocastfx.graph.sizes import any_size, concrete_sizes


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


def test_a_value_keeps_all_but_its_symbols_even_inside_another_mode() -> None:
    with FakeTensorMode():
        abstract = torch.empty_strided((2, 3), (1, 4), dtype=torch.float16, device="meta")
        ordinary = torch.empty(4, dtype=torch.int32)
        found, plain, number, nothing = concrete_sizes(fx.Graph())([abstract, ordinary, 3, None])
    assert isinstance(found, FakeTensor)
    assert (found.shape, found.stride(), found.dtype, found.device.type) == ((2, 3), (1, 4), torch.float16, "meta")
    assert isinstance(plain, FakeTensor)
    assert (plain.shape, plain.dtype, plain.device.type) == ((4,), torch.int32, "cpu")
    assert plain.fake_mode is found.fake_mode is not abstract.fake_mode
    assert (number, nothing) == (3, None)
    with found.fake_mode:
        assert (plain + 1).shape == (4,)


@pytest.mark.parametrize("step", [0, -1])
def test_a_slice_with_a_step_that_torch_refuses_is_refused(step: int) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(6), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC]))
    with mode, any_size(), pytest.raises(RuntimeError, match="step must be positive"):
        torch.ops.aten.slice.Tensor(x, 0, 0, 4, step)
