"""Hold kernels against torch in float64, over dtypes, sizes, strides and rows at the edge."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EPS = torch.finfo(torch.float32).eps


def drawn(*shape: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return scale * torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def assert_rounded_once(found: Tensor, exact: Tensor, noise: Tensor | float) -> None:
    """``found`` is ``exact``, float64, rounded to its dtype, within ``noise``, what float32 may be off by.

    The interpreter cuts the bits that bfloat16 has not off, where CUDA rounds: a unit instead of half of one.
    """
    assert found.shape == exact.shape
    assert torch.equal(found.isnan(), exact.isnan())
    info = torch.finfo(found.dtype)
    unit = info.eps if found.dtype == torch.bfloat16 and found.is_cpu else info.eps / 2
    allowed = unit * exact.abs() + info.smallest_normal * info.eps + noise
    assert ((found.double() - exact).abs() <= allowed)[~exact.isnan()].all()


def kernels(name: str) -> ModuleType:
    return importlib.import_module(f"autocastfx.runtime.kernels.{name}")


def with_error(name: str, before: str, after: str, folder: Path) -> ModuleType:
    """The module of kernels of this name with ``after`` in the place of ``before``."""
    source = Path(str(kernels(name).__file__)).read_text(encoding="utf-8")
    assert source.count(before) == 1
    planted = folder / f"{name}.py"
    planted.write_text(source.replace(before, after), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"planted_{folder.name}", planted)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def much_memory() -> Iterator[None]:
    """Skip the test where the GPU has less than 24 GiB free; what is open makes tensors there."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * 2**30:
        pytest.skip(f"needs 24 GiB of free memory, and the device has {free / 2**30:.1f}")
    with torch.device("cuda"):
        yield
    torch.cuda.empty_cache()


# ---- cross entropy --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Rows of scores with their targets."""

    scores: Tensor
    target: Tensor
    ignore_index: int = -100


def rows_of_scores(dtype: torch.dtype) -> Iterator[Rows]:
    # One score, few, exactly one block and a class more, and three blocks of which the last is not full.
    for rows, classes in ((1, 1), (5, 7), (2, 4096), (3, 4097), (4, 9000)):
        target = torch.arange(rows) * 2654435761 % classes
        target[-1] = classes - 1
        yield Rows(drawn(rows, classes).to(dtype), target)
    scores, target = drawn(6, 40).to(dtype), torch.tensor([3, -100, 39, 0, -100, 7])
    yield Rows(scores, target)
    yield Rows(scores, torch.tensor([3, 5, 39, 0, 5, 7]), ignore_index=5)  # a class that is not counted
    yield Rows(scores, torch.tensor([3, 1, 39, 0, 1, 7]), ignore_index=1)
    yield Rows(scores, torch.full((6,), -100))
    yield Rows(scores, target.to(torch.int32))
    yield Rows(scores[:, :32], torch.tensor([3, 31, 30, 0, 9, 7], dtype=torch.uint8))
    yield Rows(drawn(40, 6).to(dtype).t(), target)  # columns lie apart
    yield Rows(drawn(12, 40).to(dtype)[::2], target)  # rows lie apart
    yield Rows(drawn(6, 80).to(dtype)[:, 1::2], target)
    yield Rows(drawn(1, 40).to(dtype).expand(6, 40), target)  # all in one place
    yield Rows(scores[:0], target[:0])
    edge = drawn(5, 9000).to(dtype)
    edge[0, :5000] = -math.inf  # a first block without a finite score
    edge[1, 8999] = 60000.0  # all but one have no share
    edge[2] = 60000.0  # all as large
    edge[3] = -math.inf  # NaN, as by torch
    edge[4, 17] = math.nan
    yield Rows(edge, torch.tensor([8000, 8999, 4, 5, 6]))


def check_cross_entropy(kernels: Any, dtype: torch.dtype) -> None:
    for given in rows_of_scores(dtype):
        scores, target = given.scores, given.target.long()
        losses, logarithms, marks = kernels.row_losses(scores, given.target, given.ignore_index)
        exact = scores.double().requires_grad_()
        named: dict[str, Any] = {"ignore_index": given.ignore_index, "reduction": "none"}
        wanted = functional.cross_entropy(exact, target, **named)
        size = scores.double().abs().nan_to_num(0.0, 0.0, 0.0).amax(1) + math.log(scores.shape[1]) if len(scores) else 0
        assert_rounded_once(losses, wanted.detach(), 4 * EPS * size)
        assert torch.equal(marks, (target != given.ignore_index).float())
        each = drawn(len(scores), scale=1024.0)
        for gradient in (each, torch.tensor(0.37).expand(len(scores)), drawn(2 * len(scores))[::2]):
            found = kernels.differentiate(gradient, scores, given.target, logarithms, given.ignore_index)
            assert found.dtype == dtype
            assert found.is_contiguous()
            (of_exact,) = torch.autograd.grad(wanted, exact, gradient.double(), retain_graph=True)
            # An exponential is off by what its argument is off by, which float32 rounds.
            noise = (4 * EPS * size * gradient.double().abs())[:, None] if len(scores) else 0.0
            assert_rounded_once(found, of_exact, noise)


def check_many_scores(kernels: Any, rows: int = 45_000, classes: int = 50_257) -> None:
    """More scores than 32 bits count, as rows and, transposed, as columns that lie apart; looked at in a few rows."""
    some, target = [0, rows // 2, rows - 1], torch.arange(rows) * 2654435761 % classes
    for shape in ((rows, classes), (classes, rows)):
        scores = torch.randn(shape, dtype=torch.float16)
        scores = scores if shape[1] == classes else scores.t()
        losses, logarithms, marks = kernels.row_losses(scores, target, -100)
        assert marks.min() == 1
        exact = scores[some].double().requires_grad_()
        wanted = functional.cross_entropy(exact, target[some], reduction="none")
        size = exact.detach().abs().amax(1) + math.log(classes)
        assert_rounded_once(losses[some], wanted.detach(), 4 * EPS * size)
        gradient = torch.full((), 1024.0).expand(rows)
        found = kernels.differentiate(gradient, scores, target, logarithms, -100)[some]
        (of_exact,) = torch.autograd.grad(wanted, exact, gradient[some].double())
        assert_rounded_once(found, of_exact, (4 * EPS * size * 1024.0)[:, None])


# ---- norm -----------------------------------------------------------------------------------------------------------


def inputs_of_norm(dtype: torch.dtype, programs: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    for shape in ((1, 1), (3, 64), (2, 3, 100), (2, 4096), (2, 5000), (0, 8)):
        yield drawn(*shape).to(dtype), drawn(shape[-1])
    yield drawn(4, 64).to(dtype), None
    yield drawn(4, 64).to(dtype), drawn(64).to(dtype)
    yield drawn(64, 4).to(dtype).t(), drawn(128)[::2]
    edge = drawn(3, 64).to(dtype)
    edge[0] = 0.0  # epsilon alone
    edge[1] = 60000.0  # whose square only float32 holds
    edge[2] = 1e-7
    yield edge, drawn(64)
    yield drawn(programs + 3, 8).to(dtype), drawn(8)


def check_rms_norm(kernels: Any, dtype: torch.dtype) -> None:
    """The interpreter, which takes its time for each program, gets fewer of them."""
    programs = kernels._PROGRAMS if torch.get_default_device().type == "cuda" else 2 * kernels._ROWS
    with mock.patch.object(kernels, "_PROGRAMS", programs):
        for x, weight in inputs_of_norm(dtype, programs):
            _check_norm(kernels, x, weight)


def _check_norm(kernels: Any, x: Tensor, weight: Tensor | None) -> None:
    eps, dtype = 1e-6, x.dtype
    found, rstds = kernels.normalize(x, weight, eps)
    exact = x.double().requires_grad_()
    scale = (torch.ones(x.shape[-1]) if weight is None else weight).double().requires_grad_()
    wanted = functional.rms_norm(exact, x.shape[-1:], scale, eps)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert_rounded_once(found, wanted.detach(), 4 * EPS * wanted.detach().abs())
    gradient = drawn(*x.shape).to(dtype)
    of_x, of_weight = kernels.differentiate(gradient, x, weight, rstds, of_weight=weight is not None)
    of_exact, of_scale = torch.autograd.grad(wanted, (exact, scale), gradient.double())
    # Backward subtracts two terms of about this size.
    size = (gradient.double() * scale.detach()).abs().amax(-1, keepdim=True) if x.numel() else 0.0
    assert_rounded_once(of_x, of_exact, 8 * EPS * size * _rstd(x, eps))
    if weight is None:
        assert of_weight is None
        return
    assert of_weight.dtype == weight.dtype
    terms = (gradient.double() * exact.detach() * _rstd(x, eps)).abs().flatten(0, -2).sum(0)
    assert_rounded_once(of_weight, of_scale, 4 * EPS * terms)
    assert torch.equal(kernels.differentiate(gradient, x, weight, rstds, of_weight=False)[0], of_x)


def check_many_rows(kernels: Any, rows: int = 2**18 + 5, width: int = 8192) -> None:
    """More numbers than 32 bits count; looked at in a few rows, which alone have gradients."""
    some, eps = [0, rows // 2, rows - 1], 1e-6
    x, weight = torch.randn(rows, width, dtype=torch.float16), drawn(width)
    found, rstds = kernels.normalize(x, weight, eps)
    exact, scale = x[some].double().requires_grad_(), weight.double().requires_grad_()
    wanted = functional.rms_norm(exact, [width], scale, eps)
    assert_rounded_once(found[some], wanted.detach(), 4 * EPS * wanted.detach().abs())
    del found
    gradient = torch.zeros_like(x)
    gradient[some] = drawn(len(some), width).to(x.dtype)
    of_x, of_weight = kernels.differentiate(gradient, x, weight, rstds, of_weight=True)
    of_exact, of_scale = torch.autograd.grad(wanted, (exact, scale), gradient[some].double())
    size = (gradient[some].double() * scale.detach()).abs().amax(-1, keepdim=True)
    assert_rounded_once(of_x[some], of_exact, 8 * EPS * size * _rstd(x[some], eps))
    terms = (gradient[some].double() * exact.detach() * _rstd(x[some], eps)).abs().sum(0)
    assert_rounded_once(of_weight, of_scale, 4 * EPS * terms)


def _rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
