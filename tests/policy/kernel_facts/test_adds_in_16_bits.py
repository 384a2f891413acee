"""The kernels that add numbers up in 16 bits, forwards or backwards: found by running all that a list lets run low."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
import torch

from autocastfx.graph.names import base_name, of_function
from autocastfx.policy.op_list import load_op_list
from benchmarks.kernel_calls import KernelCall, deep_calls, kernel_calls
from benchmarks.kernel_facts import FACTS, adds_up_in_16_bits
from tests.helpers import with_pinned_torch

MAY_BE_LOW = frozenset(base_name(op) for op, rule in load_op_list("bfloat16").rules.items() if rule.category.may_be_low)
NOT_WRITTEN = {"empty_like", "new_empty"}  # their results are whatever the memory holds
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def adders(calls: Iterable[KernelCall], *, backward: bool, deep: bool = False) -> set[str]:
    found: set[str] = set()
    for call in calls:
        name = base_name(of_function(call.function))
        if name not in found and not call.function._schema.is_mutable and (deep or not call.is_random):
            try:
                adds = adds_up_in_16_bits(call, backward=backward, deep=deep)
            except (
                RuntimeError,
                NotImplementedError,
            ):  # it has no 16-bit kernel, or no float64 one, for these arguments
                continue
            found |= {name} if adds else set()
    return found


@functools.cache
def sampled(device: str) -> list[KernelCall]:
    return [call for calls in kernel_calls(MAY_BE_LOW - NOT_WRITTEN, device, samples=5).values() for call in calls]


@with_pinned_torch
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_table_names_the_kernels_that_add_up_in_16_bits(device: str, way: str) -> None:
    found = adders(deep_calls(device), backward=way == "backward", deep=True)
    assert found & MAY_BE_LOW == FACTS.adds_in_16_bits[device, way]


@with_pinned_torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of samples that are meant to be odd
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("device", DEVICES)
def test_no_other_op_of_torchs_samples_does(device: str, way: str) -> None:
    found = adders(sampled(device), backward=way == "backward")
    assert found <= FACTS.adds_in_16_bits[device, way]


def test_a_kernel_that_adds_up_in_16_bits_is_seen() -> None:
    """A planted one, beside the same that adds up in float32."""

    @torch.library.custom_op("planted::pick", mutates_args=())
    def pick(x: torch.Tensor, index: torch.Tensor, wide: bool) -> torch.Tensor:
        return x[index]

    def setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.x, ctx.index, ctx.wide = inputs

    def backward(ctx: torch.autograd.function.FunctionCtx, given: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = torch.zeros_like(ctx.x, dtype=torch.float32 if ctx.wide and ctx.x.dtype != torch.float64 else None)
        for row, place in zip(given, ctx.index.tolist(), strict=True):
            total[place] += row
        return total.to(given.dtype), None, None

    pick.register_autograd(backward, setup_context=setup)
    for index in (torch.zeros(400, dtype=torch.long), torch.arange(24) % 2):
        for wide in (False, True):
            call = KernelCall(torch.ops.planted.pick.default, (torch.ones(3, 5), index, wide), {})
            assert adders([call], backward=True, deep=len(index) > 256) == (set() if wide else {"planted::pick"})


def test_every_such_op_says_how_many_gradients_meet() -> None:
    for (_, way), ops in FACTS.adds_in_16_bits.items():
        assert way == "forward" or ops <= FACTS.contributions.keys()
