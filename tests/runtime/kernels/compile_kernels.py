"""Compile the Triton kernels as calls launch them, for a generation of GPUs and some dtypes, which needs no GPU.

Prints a line for each kernel: its module and name, the length and dtype of a row, the registers and the bytes of stack
of a thread, and the number of multiplications in 32 bits.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from autocastfx.policy.float8 import E4M3, E5M2
from autocastfx.runtime.kernels import cross_entropy, quantize, rms_norm
from autocastfx.runtime.operators.norms import _WIDEST
from autocastfx.training import step_kernel

# One for each number of warps, and one whose rows do not lie at multiples of 16 bytes.
WIDTHS = (256, 512, 1024, 2048, 4096, _WIDEST - 1, _WIDEST)
VOCABULARIES = (1024, 50_257)
MATRICES = (4096, 16_384, 50_257)  # a row in one block, in the largest, and in several
STEPS = (30_000, 30_001)
FLOAT8 = 89  # the first capability with it
ROWS = 50_000  # times 50,257 they are more than 32 bits count
# What is approximate, or may be contracted: the step must have torch's bits.
INEXACT = r"\S+\.(approx|full|ftz)\S*|(mul|add|sub)\.f32|cvt\.rz\S*"
_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Device:
    """What Triton asks of a GPU before it launches a kernel."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled(capability: int) -> Iterator[list[Any]]:
    """Compile kernels where they would be launched, and collect them."""
    made: list[Any] = []

    def launcher(kernel: JITFunction[Any], grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **named: made.append(kernel.run(*given, grid=grid, warmup=True, **named))

    driver.set_active(Device(capability))  # type: ignore[arg-type]
    with mock.patch.object(JITFunction, "__getitem__", launcher):
        yield made


def norm(width: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = torch.empty(ROWS, width, dtype=dtype), torch.empty(width, dtype=weight_dtype)
    for given in (weight, None):
        _, rstds = rms_norm.normalize(x, given, 1e-6)
        rms_norm.differentiate(torch.empty_like(x), x, given, rstds, of_weight=given is not None)
    rms_norm.differentiate(torch.empty_like(x), x, weight, rstds, of_weight=False)


def loss(classes: int, dtype: torch.dtype) -> None:
    scores, target = torch.empty(ROWS, classes, dtype=dtype), torch.empty(ROWS, dtype=torch.long)
    losses, logarithms, _ = cross_entropy.row_losses(scores, target, -100)
    of_mean = torch.empty(()).expand(ROWS)
    for gradient in (losses, of_mean):
        cross_entropy.differentiate(gradient, scores, target, logarithms, -100)
    apart = torch.empty(classes, ROWS, dtype=dtype).t()
    cross_entropy.differentiate(losses, apart, target, cross_entropy.row_losses(apart, target, -100)[1], -100)


def quantized(width: int, dtype: torch.dtype) -> None:
    x = torch.empty(ROWS, width, dtype=dtype)
    quantize.quantize_rows(x, E4M3, True)
    quantize.quantize_columns(x, E4M3, True)
    quantize.quantize_both(x, E5M2, False)


def step(kind: str, size: int, low: torch.dtype) -> None:
    """A step of two tensors, with a skip or without: of addresses and sizes that fit loads of 16 bytes, or not."""
    lists = [[torch.empty(size) for _ in range(2)] for _ in range(3 if kind == "sgd" else 4)]
    given: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "maximize": False}
    if kind == "sgd":
        given |= {"momentum": 0.9, "dampening": 0.0, "nesterov": True}
    else:
        lists += [[], [torch.empty(()) for _ in range(2)]]
        given |= {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    for found_inf in (torch.empty(()), None):
        step_kernel.step(kind, lists, {**given, "found_inf": found_inf}, [t.to(low) for t in lists[0]])


def usage(kernel: Any, folder: Path) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread."""
    path = folder / f"{kernel.hash}.cubin"
    path.write_bytes(kernel.asm["cubin"])
    told = subprocess.run([_TOOL, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:0 ", told)
    return int(found[0]), int(found[1])


def main(capability: int, folder: Path, dtypes: Sequence[torch.dtype]) -> None:
    runs: list[tuple[int, torch.dtype, Callable[[], None]]] = []
    for dtype in dtypes:
        runs += [(width, dtype, lambda w=width, d=dtype: norm(w, d, torch.float32)) for width in WIDTHS]
        runs += [(classes, dtype, lambda c=classes, d=dtype: loss(c, d)) for classes in VOCABULARIES]
        runs.append((4096, dtype, lambda d=dtype: norm(4096, d, d)))
        if capability >= FLOAT8:
            widths = MATRICES if dtype == torch.bfloat16 else MATRICES[:1]
            runs += [(width, dtype, lambda w=width, d=dtype: quantized(w, d)) for width in widths]
        if dtype != torch.float32:
            kinds = ("adam", "adamw", "sgd")
            runs += [(size, dtype, lambda k=kind, s=size, d=dtype: step(k, s, d)) for kind in kinds for size in STEPS]
    for size, dtype, run in runs:
        with torch.device("meta"), compiled(capability) as made:
            run()
        for kernel in made:
            narrow = len(re.findall(r"arith\.muli [^:]*: (?:tensor<[0-9x]*)?i32", kernel.asm["ttir"]))
            module = Path(kernel.src.fn.fn.__code__.co_filename).stem
            if module == "step_kernel" and (found := re.search(INEXACT, kernel.asm["ptx"])):
                raise SystemExit(f"{module}: {found[0]} does not round as torch's step does")
            print(module, kernel.metadata.name, size, dtype, *usage(kernel, folder), narrow)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), [getattr(torch, name) for name in sys.argv[3:]])
