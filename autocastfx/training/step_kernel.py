"""The step of Adam, AdamW and SGD in Triton, as torch's fused CUDA kernels compute it, with a 16-bit copy beside.

One launch updates many tensors. All is computed in float32; the sums that torch's compiler contracts with a product are
``fma`` here, and no others are.
"""

# Kernels are written in Triton's language, which type checkers do not know.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autocastfx.dtypes import LOW_DTYPES

_BLOCK, _CHUNK = 1024, 16384  # numbers that a program has at one time, and in all


@triton.jit
def _pointer(table, column: tl.constexpr, dtype: tl.constexpr, ALIGN: tl.constexpr):
    return tl.multiple_of(tl.load(table + column).to(tl.pointer_type(dtype)), ALIGN)


@triton.jit
def _step(
    table, chunks, powers, found_inf, lr, first, second, weight_decay, eps, sign,
    SKIPS: tl.constexpr, KIND: tl.constexpr, STATES: tl.constexpr, NESTEROV: tl.constexpr,
    ALIGN: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    row, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1) * CHUNK
    table += row * (STATES + 4)
    length = tl.load(table)
    if SKIPS:
        length = tl.where(tl.load(found_inf) == 1.0, 0, length)
    length = tl.multiple_of(length, ALIGN // 4)
    copies, parameters = _pointer(table, 1, LOW, ALIGN), _pointer(table, 2, tl.float32, ALIGN)
    gradients, squares = _pointer(table, 3, tl.float32, ALIGN), _pointer(table, STATES + 3, tl.float32, ALIGN)
    averages = _pointer(table, 4 if STATES else 3, tl.float32, ALIGN)
    if KIND != "sgd":
        step_size = tl.div_rn(lr, 1.0 - tl.load(powers + 2 * row))
        root = tl.sqrt_rn(1.0 - tl.load(powers + 2 * row + 1))
    for begin in range(0, CHUNK, BLOCK):
        place = start + begin + tl.arange(0, BLOCK)
        inside = place < length
        parameter = tl.load(parameters + place, mask=inside, other=0.0)
        gradient = tl.load(gradients + place, mask=inside, other=0.0) * sign
        if KIND == "adamw":
            decayed = tl.fma(lr * weight_decay * -1.0, parameter, parameter)
            parameter = tl.where(weight_decay != 0.0, decayed, parameter)
        else:
            gradient = tl.where(weight_decay != 0.0, tl.fma(parameter, weight_decay, gradient), gradient)
        if STATES:
            average = tl.load(averages + place, mask=inside, other=0.0)
            if KIND == "sgd":
                average = tl.fma(1.0 - second, gradient, first * average)
                gradient = tl.fma(first, average, gradient) if NESTEROV else average
            else:
                average = tl.fma(first, average, tl.fma(first * -1.0, gradient, gradient))
            tl.store(averages + place, average, mask=inside)
        if KIND == "sgd":
            parameter = tl.fma(lr * -1.0, gradient, parameter)
        else:
            squared, square = gradient * gradient, tl.load(squares + place, mask=inside, other=0.0)
            square = tl.fma(second, square, tl.fma(second * -1.0, squared, squared))
            tl.store(squares + place, square, mask=inside)
            parameter -= tl.div_rn(step_size * average, tl.div_rn(tl.sqrt_rn(square), root) + eps)
        tl.store(parameters + place, parameter, mask=inside)
        tl.store(copies + place, parameter.to(LOW), mask=inside)


def step(kind: str, lists: Sequence[Sequence[Tensor]], numbers: Mapping[str, Any], copies: Sequence[Tensor]) -> None:
    """Do what torch's fused operator does with these arguments, and write the parameters to ``copies``, rounded.

    Args:
        kind: ``"adam"``, ``"adamw"`` or ``"sgd"``.
        lists: parameters, gradients, states, for Adam the step counts: float32, those of a parameter with its strides.
        numbers: by keyword; no ``amsgrad``, ``grad_scale`` or first step, and no tensor as ``lr``.
        copies: 16-bit, of one dtype, with their parameters' strides.
    """
    device, names = copies[0].device, ("momentum", "dampening") if kind == "sgd" else ("beta1", "beta2")
    rows = [copies, *filter(None, lists[: 3 if kind == "sgd" else 4])]
    sizes, addresses = tuple(t.numel() for t in copies), tuple(tuple(t.data_ptr() for t in some) for some in rows)
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    is_aligned = not any(a % 16 for some in addresses for a in some) and not any(size % 4 for size in sizes)
    chunks, powers, found_inf = _table(device, stream, sizes), copies[0], numbers.get("found_inf")
    if kind != "sgd":
        counts = torch.stack(list(lists[-1]))
        powers = torch.stack([torch.pow(numbers[name], counts) for name in names], 1)
    with torch.cuda.device_of(chunks):  # Triton launches on the current device
        _step[(len(chunks),)](
            _table(device, stream, sizes, addresses), chunks, powers, powers if found_inf is None else found_inf,
            *(numbers[name] for name in ("lr", *names, "weight_decay")), numbers.get("eps", 0.0),
            -1.0 if numbers["maximize"] else 1.0, SKIPS=found_inf is not None, KIND=kind, STATES=len(rows) - 3,
            NESTEROV=numbers.get("nesterov", False), ALIGN=16 if is_aligned else 4,
            LOW=tl.bfloat16 if copies[0].dtype == torch.bfloat16 else tl.float16,
            BLOCK=_BLOCK, CHUNK=_CHUNK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


@lru_cache(maxsize=16)  # gradients come back to where they were
def _table(device: torch.device, stream: object, sizes: Sequence[int], addresses: Sequence[Any] = ()) -> Tensor:
    """Where tensors lie; without addresses, the tensor that each program works on, and which chunk of it."""
    chunks = [(row, chunk) for row, size in enumerate(sizes) for chunk in range(triton.cdiv(size, _CHUNK))]
    table = torch.tensor(list(zip(sizes, *addresses, strict=True)) if addresses else chunks, device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def gives_torchs_bits(kind: str, device: torch.device) -> bool:
    """Try the kernel on ``device``: True if it has given the bits of torch's fused operator. Waits for the device."""
    generator, counts = torch.Generator().manual_seed(0), [torch.tensor(n, device=device) for n in (1.0, 2.0, 1e3, 1e6)]
    for index in range(8):  # with sizes that fit loads of four, or not; the last call is skipped
        lists, low = list[list[Tensor]](), LOW_DTYPES[index // 2 % 2]
        for smallest, largest in ((-6, 3), (-42, 12), (-9, 3), (-42, 24)):  # of numbers; also zeros of both signs
            how: dict[str, Any] = {"size": (len(counts), 4096 + index % 2), "generator": generator, "device": "cpu"}
            drawn = torch.randn(**how) * 10 ** (smallest + (largest - smallest) * torch.rand(**how))
            drawn[:, ::7] *= 0.0
            lists.append([row[4 * i :].to(device) for i, row in enumerate(drawn)])
        own: dict[str, Any] = {"lr": 1e-3 * 3**index, "weight_decay": 0.1 * (index % 2), "maximize": index % 3 == 1}
        own["found_inf"] = torch.full((), float(index == 7), device=device)
        if kind == "sgd":
            lists[2:] = [lists[2] if index > 3 else []]
            own |= {"momentum": 0.9 * (index > 3), "dampening": 0.1 * (index % 3), "nesterov": index > 5}
            own |= {"is_first_step": False}
        else:
            lists[3:] = [square.abs() for square in lists[3]], [], [count.clone() for count in counts]
            own |= {"beta1": 0.9, "beta2": 0.999 - 0.05 * index, "eps": 1e-8, "amsgrad": False}
        apart, copies = [[tensor.clone() for tensor in some] for some in lists], [t.to(low) for t in lists[0]]
        getattr(torch, f"_fused_{kind}_")(*lists, **own)
        step(kind, apart, own, copies)
        lists.append([parameter.to(low) for parameter in lists[0]])
        bits = {2: torch.int16, 4: torch.int32}
        for pair in zip(chain(*lists), chain(*apart, copies), strict=True):
            if not torch.equal(*(tensor.view(bits[tensor.itemsize]) for tensor in pair)):
                return False
    return True
