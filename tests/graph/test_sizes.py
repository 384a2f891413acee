"""Sizes for the example inputs."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autocastfx.graph.node import example, example_size

ENVIRONMENT = ShapeEnv()
ROWS, COLUMNS = FakeTensorMode(shape_env=ENVIRONMENT).from_tensor(torch.ones(3, 4)).shape


def test_a_symbolic_number_is_that_of_the_example() -> None:
    assert isinstance(ROWS, torch.SymInt)
    assert [example(n) for n in (ROWS, ROWS * COLUMNS + 1)] == [3, 13]
    fraction, is_three, is_less = torch.sym_float(ROWS), ROWS == 3, COLUMNS < 4
    assert (example(fraction), type(example(fraction))) == (3.0, float)
    assert (example(is_three), example(is_less)) == (True, False)
    assert ENVIRONMENT.guards == [], "to ask settles nothing"


def test_another_value_is_itself() -> None:
    assert [example(n) for n in (5, 0.5, False, "a", None)] == [5, 0.5, False, "a", None]
    assert [example_size(n) for n in (5, None)] == [5, None]


def test_a_size_that_depends_on_data_has_none_and_counts_as_one() -> None:
    unknown = ENVIRONMENT.create_unbacked_symint()
    assert example(unknown) is None
    assert example(unknown * ROWS) is None
    assert (example_size(unknown), example_size(ROWS)) == (1, 3)


def test_a_size_found_equal_to_one_of_the_inputs_is_that() -> None:
    later = ENVIRONMENT.create_unbacked_symint()
    torch._check(later == ROWS)
    assert example(later) == 3
    assert example(later + COLUMNS) == 7
