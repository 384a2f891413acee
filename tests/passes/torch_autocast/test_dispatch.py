"""What cannot run as torch.autocast's list for another device has it is refused by name, with what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import autocastfx
from autocastfx import OpList
from autocastfx.errors import UnsupportedError
from tests.helpers import Function

X = torch.linspace(-1, 1, 64).reshape(8, 8)


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.rfft(x @ x).abs()


def inverse(x: Tensor) -> Tensor:
    return torch.linalg.inv(x @ x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_transform_that_a_cpu_has_in_float32_alone(dtype: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        autocastfx.convert(Function(spectrum), (X,), dtype=dtype, op_list="torch_autocast_cuda", check=False)
    said = str(refused.value)
    assert f"'fft_rfft' (fft_rfft) cannot run in {dtype} on cpu, as torch_autocast_cuda has it (no rule names" in said
    assert "): Unsupported dtype " in said
    assert said.endswith(
        "Put a list of your own after it that has fft_rfft under deny, or take the list for this device."
    )
    mine = OpList.of({"deny": ["fft_rfft"]}, name="mine")
    for lists in (["torch_autocast_cuda", mine], "torch_autocast_cpu"):  # what it says helps
        made = autocastfx.convert(Function(spectrum), (X,), dtype=dtype, op_list=lists, check=False)
        torch.testing.assert_close(made(X), spectrum(X), rtol=0.05, atol=0.2)  # one product in 16 bits


def test_an_op_that_a_list_runs_in_16_bits_has_the_line_of_its_rule() -> None:
    lists = ["torch_autocast_cuda", OpList.of({"allow": ["linalg_inv_ex"]}, name="mine")]
    words = r"\(linalg_inv_ex\) cannot run in bfloat16 on cpu, as .*mine has it \(the rule at mine:allow\[0\]\): "
    with pytest.raises(UnsupportedError, match=words):
        autocastfx.convert(Function(inverse), (X,), dtype="bfloat16", op_list=lists, check=False)
