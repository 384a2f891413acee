"""The names of 16-bit dtypes: what a user may say, and what is chosen where nothing is said."""

from __future__ import annotations

import pytest
import torch

from autocastfx.dtypes import chosen_dtype, is_dtype, low_dtype, one_low_dtype, widened

HALF, BFLOAT = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("said", "meant"), [("fp16", HALF), ("HALF", HALF), ("torch.bfloat16", BFLOAT), ("bf16", BFLOAT), (HALF, HALF)]
)
def test_a_name_means_a_dtype(said: str | torch.dtype, meant: torch.dtype) -> None:
    assert low_dtype(said) is chosen_dtype(said, torch.device("cpu")) is meant


@pytest.mark.parametrize("said", ["float32", "bf", torch.float32])
def test_other_dtypes_are_refused(said: str | torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"dtype is torch.float16 or torch.bfloat16, not {said!r}"):
        low_dtype(said)
    assert is_dtype(said) == isinstance(said, torch.dtype)


def test_each_device_has_its_default() -> None:
    assert [chosen_dtype(None, torch.device(name)) for name in ("cpu", "cuda")] == [BFLOAT, HALF]


def test_one_low_dtype_is_that_of_all_floating_values() -> None:
    assert one_low_dtype([HALF, torch.int64, HALF]) is HALF
    assert [one_low_dtype(d) for d in ([HALF, BFLOAT], [torch.float32], [HALF, torch.float64], [])] == [None] * 4


def test_16_bits_alone_are_widened() -> None:
    for dtype, wide in ((HALF, torch.float32), (BFLOAT, torch.float32), (torch.float64, torch.float64)):
        assert widened(torch.ones(1, dtype=dtype)).dtype is wide
