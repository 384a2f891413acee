"""Counts of overflow and underflow are those of the stored values."""

from __future__ import annotations

import pytest
import torch

from autocastfx.graph.magnitude import ValueCounts, count_values, read_counts

INF, NAN = float("inf"), float("nan")


def counted(value: torch.Tensor, source: torch.Tensor | None = None) -> ValueCounts:
    found = count_values(value, source)
    assert found is not None
    (counts,) = read_counts([found])
    return counts


def test_of_stored_values_subnormals_are_counted_and_zeros_are_not() -> None:
    value = torch.tensor([0.0, -0.0, 2.0**-15, -(2.0**-24), 2.0**-14, -3.0, INF, -INF, NAN], dtype=torch.float16)
    assert counted(value) == ValueCounts(elements=9, overflow=3, underflow=2, largest=3.0)


def test_of_a_cast_what_became_zero_is_counted_too() -> None:
    source = torch.tensor([[0.0, 1e-9, -1e-30], [1e-6, 2.0**-14, 1e6]])
    assert counted(source.half(), source) == ValueCounts(elements=6, overflow=1, underflow=3, largest=2.0**-14)
    assert counted(source.t().half(), source.t()) == counted(source.half(), source)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_limits_are_those_of_the_dtype(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    value = torch.tensor([info.max, info.tiny, info.tiny / 2, -INF], dtype=dtype)
    assert counted(value) == ValueCounts(elements=4, overflow=1, underflow=1, largest=info.max)
    assert counted(torch.full((2,), NAN, dtype=dtype)) == ValueCounts(elements=2, overflow=2, underflow=0, largest=0.0)


def test_what_has_no_such_elements_is_not_counted() -> None:
    for value in (torch.ones(2, dtype=torch.int64), torch.ones(0), torch.ones(2, dtype=torch.float64)):
        assert count_values(value) is None
    assert count_values(torch.eye(2).to_sparse()) is None


def test_all_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [count_values(torch.full((n,), float(n))) for n in (1, 2, 3)]
    seen: list[torch.Size] = []
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (seen.append(tensor.shape), to_host(tensor))[1])
    assert [one.largest for one in read_counts([one for one in found if one is not None])] == [1.0, 2.0, 3.0]
    assert seen == [torch.Size([3, 4])]
    assert read_counts([]) == []
    assert ValueCounts(1, 0, 1, 2.0) + ValueCounts(2, 1, 0, 1.0) == ValueCounts(3, 1, 1, 2.0)
