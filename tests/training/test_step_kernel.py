"""The Triton step of an optimizer gives the numbers that torch's fused CUDA kernels compute, to the bit.

torch's arithmetic is written out here. On a GPU the kernel's own trial compares it with torch's kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

KINDS = ("adam", "adamw", "sgd")
CPU = torch.device("cpu")
FOUND = importlib.util.find_spec("autocastfx.training.step_kernel")
assert FOUND is not None
assert FOUND.origin is not None
# Of NumPy, in the interpreter: infinities in float16 are meant.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
SOURCE = Path(FOUND.origin).read_text(encoding="utf-8")


def fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """``x * y + z``, rounded once: float64 holds the product."""
    return (x.double() * y.double() + z.double()).float()


def cuda_step(kind: str, *lists: Sequence[Tensor], **given: Any) -> None:
    """What torch 2.13's ``adam_math`` and ``sgd_math`` compute, with the contractions of their machine code (sm_90)."""
    if given["found_inf"] == 1:
        return
    wide = {key: torch.tensor(value, dtype=torch.float32) for key, value in given.items() if type(value) is float}
    lr, decay = wide["lr"], wide["weight_decay"]
    for index, (parameter, gradient) in enumerate(zip(lists[0], lists[1], strict=True)):
        if given["maximize"]:
            gradient = gradient.neg()
        if decay != 0 and kind == "adamw":
            parameter.copy_(fused(-(lr * decay), parameter, parameter))
        elif decay != 0:
            gradient = fused(parameter, decay, gradient)
        if kind == "sgd":
            momentum, dampening = wide["momentum"], wide["dampening"]
            if momentum != 0:
                average = lists[2][index]
                average.copy_(fused(1 - dampening, gradient, momentum * average))
                gradient = fused(momentum, average, gradient) if given["nesterov"] else average
            parameter.copy_(fused(-lr, gradient, parameter))
            continue
        average, square, beta1, beta2 = lists[2][index], lists[3][index], wide["beta1"], wide["beta2"]
        average.copy_(fused(beta1, average, fused(-beta1, gradient, gradient)))
        squared = gradient * gradient
        square.copy_(fused(beta2, square, fused(-beta2, squared, squared)))
        counts = torch.stack(list(lists[5]))
        correction1, correction2 = (1 - torch.pow(given[beta], counts)[index] for beta in ("beta1", "beta2"))
        root = square.double().sqrt().float() / correction2.double().sqrt().float().expand(len(square)).contiguous()
        parameter.sub_(lr / correction1 * average / (root + wide["eps"]))


def edited(tmp_path: Path, before: str = "", after: str = "") -> ModuleType:
    """The module, with an error planted in it."""
    assert SOURCE.count(before) == 1 or not before
    path = tmp_path / "edited_step_kernel.py"
    path.write_text(SOURCE.replace(before, after) if before else SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("edited_step_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LOW_DTYPES = (torch.float16,) * 2  # type: ignore[attr-defined]  # the interpreter does not round to bfloat16
    return module


@pytest.fixture
def _cuda_arithmetic(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds a product before its sum, where a GPU does not."""
    from triton.runtime import interpreter as of_triton

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        arrays = (torch.from_numpy(a.data) if a.data.shape else torch.tensor(a.data) for a in (x, y, z))
        return of_triton.TensorHandle(fused(*arrays).numpy(), z.dtype.scalar)

    monkeypatch.setattr(of_triton.InterpreterBuilder, "create_fma", fma)
    for kind in KINDS:
        monkeypatch.setattr(
            torch, f"_fused_{kind}_", lambda *lists, kind=kind, **given: cuda_step(kind, *lists, **given)
        )


@pytest.mark.usefixtures("_cuda_arithmetic")
@pytest.mark.parametrize("kind", KINDS)
def test_the_trial_succeeds_on_torchs_arithmetic(kind: str, tmp_path: Path) -> None:
    assert edited(tmp_path).gives_torchs_bits(kind, CPU)


@pytest.mark.usefixtures("_cuda_arithmetic")
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("adam", "tl.fma(parameter, weight_decay, gradient)", "parameter * weight_decay + gradient"),
        ("adamw", "tl.fma(lr * weight_decay * -1.0, parameter, parameter)", "parameter * (1.0 - lr * weight_decay)"),
        ("adamw", "other=0.0) * sign", "other=0.0)"),
        ("adam", "tl.fma(first * -1.0, gradient, gradient)", "(1.0 - first) * gradient"),
        ("adam", "tl.fma(second * -1.0, squared, squared)", "(1.0 - second) * squared"),
        ("adamw", "powers + 2 * row + 1", "powers + 1"),  # one step for all
        ("adamw", "tl.div_rn(step_size * average, ", "step_size * tl.div_rn(average, "),
        ("adamw", "root) + eps)", "root))"),
        ("adamw", "length = tl.where(tl.load(found_inf) == 1.0, 0, length)", "length = length"),
        ("adam", "tl.store(copies + place, parameter.to(LOW), mask=inside)", "pass"),
        ("sgd", "tl.fma(1.0 - second, gradient, first * average)", "tl.fma(first, average, (1.0 - second) * gradient)"),
        ("sgd", "tl.fma(first, average, gradient) if NESTEROV else average", "average"),
        ("sgd", "tl.fma(lr * -1.0, gradient, parameter)", "parameter - lr * gradient"),
        ("sgd", "4 if STATES else 3", "3"),
        ("sgd", "for chunk in range(triton.cdiv(size, _CHUNK))", "for chunk in range(size // _CHUNK)"),
    ],
)  # fmt: skip
def test_the_trial_fails_for_other_arithmetic(kind: str, before: str, after: str, tmp_path: Path) -> None:
    assert not edited(tmp_path, before, after).gives_torchs_bits(kind, CPU)


@pytest.mark.usefixtures("_cuda_arithmetic")
def test_the_trial_fails_on_the_arithmetic_of_an_older_torch(tmp_path: Path) -> None:
    """Which computed the moments in float64."""

    def older(*lists: Sequence[Tensor], **given: Any) -> None:
        kept = [average.double() for average in lists[2]]
        cuda_step("adam", *lists, **given)
        if given["found_inf"] != 1:
            for average, before, gradient in zip(lists[2], kept, lists[1], strict=True):
                sign = -1 if given["maximize"] else 1
                average.copy_(given["beta1"] * before + (1 - given["beta1"]) * sign * gradient.double())

    with mock.patch.object(torch, "_fused_adam_", older):
        assert not edited(tmp_path).gives_torchs_bits("adam", CPU)


@pytest.mark.usefixtures("_cuda_arithmetic")
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_sizes_chunks_and_strides(low: torch.dtype, tmp_path: Path) -> None:
    """One number, a chunk, a number more, three chunks; transposed tensors; neighbours are left as they are."""
    kernel = edited(tmp_path)
    for size in (1, kernel._CHUNK, kernel._CHUNK + 1, 2 * kernel._CHUNK + 5):
        storage = [torch.randn(size + 2) for _ in range(4)] + [torch.zeros(size + 2).to(low)]
        parameter, gradient, average, square, copied = (tensor[1:-1] for tensor in storage)
        square.abs_()
        shaped = [t.view(-1, 1).t() for t in (parameter, gradient, average, square)]
        kept = [tensor.clone() for tensor in storage]
        lists = [[tensor] for tensor in shaped] + [[], [torch.tensor(3.0)]]
        given: dict[str, Any] = {
            "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "maximize": False,
        }  # fmt: skip
        kernel.step("adamw", lists, given, [copied.view(-1, 1).t()])
        apart = [[kept[i][1:-1]] for i in range(4)] + [[], [torch.tensor(3.0)]]
        cuda_step("adamw", *apart, **given, found_inf=torch.zeros(()))
        for one, other in zip(storage[:4], kept[:4], strict=True):
            assert torch.equal(one, other)
        info = torch.finfo(low)  # the interpreter cuts off what bfloat16 has not, a unit; CUDA rounds
        assert (copied - parameter).abs().le(info.eps * parameter.abs().clamp(min=info.smallest_normal)).all()
        assert storage[4][0] == storage[4][-1] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_torchs_bits(kind: str) -> None:
    from autocastfx.training import step_kernel

    assert step_kernel.gives_torchs_bits(kind, torch.device("cuda", 0))
