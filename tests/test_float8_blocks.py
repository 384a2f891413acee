"""The float8 stage of ``benchmarks.gpu`` that times blocks of Llama measures what it says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.stage import Given, Rounds
from benchmarks.gpu.stages.float8_blocks import BFLOAT16, LISTS, SIDES, TORCHAO, blocks

FEW = Rounds(2, 2, 0, 1)
MOST = 0.1  # of a gradient: e4m3 keeps 4 bits of each operand


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, object]]:
    sides = (BFLOAT16, "float8 rowwise")
    found = blocks(Given("cpu"), ("blocks tiny",), sides, tokens=32, rounds=FEW, compiler="eager")
    return {str(row["side"]): row for row in found}


def test_each_side_says_how_many_products_run_in_float8(rows: dict[str, dict[str, object]]) -> None:
    counts = {side: (row["in_float8"], row["of"]) for side, row in rows.items()}
    assert counts == {BFLOAT16: (0, 0), "float8 rowwise": (21, 21)}


def test_gradients_are_near_those_of_float32(rows: dict[str, dict[str, object]]) -> None:
    apart = {side: float(str(row["apart"])) for side, row in rows.items()}
    assert 0 < apart[BFLOAT16] < 4 * torch.finfo(torch.bfloat16).eps
    assert apart[BFLOAT16] < apart["float8 rowwise"] < MOST


def test_each_side_is_timed_beside_bfloat16(rows: dict[str, dict[str, object]]) -> None:
    assert all("error" not in row and row["rounds"] == 2 and "backward_to_bfloat16" in row for row in rows.values())
    assert (*LISTS, TORCHAO) == SIDES
