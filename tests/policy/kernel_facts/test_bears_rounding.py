"""The ops whose backward may read rounded numbers: found by running each on numbers with and without an offset."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from autocastfx.policy.saved import Keep
from autocastfx.runtime.operators.cross_entropy_loss import cross_entropy_loss
from autocastfx.runtime.operators.norms import layer_norm, rms_norm
from autocastfx.runtime.operators.quick_gelu import quick_gelu
from autocastfx.runtime.saved import FORMS
from benchmarks.kernel_calls import KernelCall, kernel_calls
from benchmarks.kernel_facts import FACTS
from tests.helpers import with_pinned_torch

BEARS = FACTS.bears_rounding
# Some that do not: they subtract or compare inside, or become flat.
BEARS_NOT = ["batch_norm", "clamp", "huber_loss", "minimum", "mse_loss", "sigmoid", "std", "tanh", "var"]
DECIDES = {"softmax", "_softmax", "_safe_softmax", "scaled_dot_product_attention"}  # flat where all but decided
# Not on a CPU, or not in torch's samples; or without a float64 kernel.
UNTRIED = {"cudnn_batch_norm", "_native_batch_norm_legit", "_fused_rms_norm", "autocastfx::float8_linear"}
MOST = 0.03  # a rounding is 2**-9, and a gradient may read a number, and a power of it, of several operands
Drawn = tuple[float, float, int | None]
ALL = [(scale, offset, dim) for scale in (0.1, 1.0, 5.0) for offset in (0, 1, -3, 6, 30) for dim in (None, 0, 1)]
# One of these gives three quarters of the largest error of an op, and more than MOST where it does not bear rounding.
FEW: list[Drawn] = [
    *((0.1, 1, 1), (0.1, -3, None), (0.1, -3, 0), (0.1, 6, None), (0.1, 30, None), (1.0, 0, None), (1.0, 0, 0)),
    *((1.0, 0, 1), (1.0, 1, None), (1.0, 30, 1), (5.0, 0, 1), (5.0, -3, 1), (5.0, 6, None), (5.0, 6, 0)),
]


@pytest.fixture
def numbers(request: pytest.FixtureRequest) -> list[Drawn]:
    """`make test` tries few, `make test-all` all."""
    return ALL if request.config.getoption("--hypothesis-profile") == "new" else FEW


@functools.cache
def calls() -> dict[str, list[KernelCall]]:
    return kernel_calls({*BEARS, *BEARS_NOT}, "cpu", samples=3)


def alone(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def by_rows(x: Tensor) -> Tensor:
    return FORMS[Keep.BFLOAT16].unpack(x.dtype, FORMS[Keep.BFLOAT16].pack(x))


def drawn(call: KernelCall, scale: float, offset: float, dim: int | None) -> KernelCall:
    """The call with other numbers: offsets for all of an operand, or of each index of a dimension."""
    generator = torch.Generator().manual_seed(0)

    def other(x: object) -> object:
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            return x
        sizes = [n if dim is None or d == min(dim, x.dim() - 1) else 1 for d, n in enumerate(x.shape)]
        shift = torch.ones(()) if dim is None else torch.randn(sizes, generator=generator)
        made = torch.randn(x.shape, generator=generator, dtype=torch.float64) * scale + offset * shift
        return made.requires_grad_()

    def argument(name: str, given: object) -> object:
        if name.startswith("running_"):
            return pytree.tree_map_only(Tensor, Tensor.double, given)
        return pytree.tree_map(other, given)

    return call.with_arguments(argument)


def gradients(
    run: Callable[[], object], operands: list[Tensor], form: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """The gradients of the operands, where backward reads what ``form`` gives of each value but single numbers."""

    def pack(x: Tensor) -> Tensor:
        return form(x.detach()) if x.is_floating_point() and x.dim() else x.detach()

    torch.manual_seed(0)
    with saved_tensors_hooks(pack, lambda x: x):
        made = [x for x in pytree.tree_leaves(run()) if isinstance(x, Tensor) and x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in made]
    return list(torch.autograd.grad(made, operands, given, allow_unused=True)) if made else [None] * len(operands)


def moved(
    run: Callable[[], object], operands: list[Tensor], form: Callable[[Tensor], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """By operand, the squares of the error and of the gradient."""
    pairs = zip(gradients(run, operands, Tensor.clone), gradients(run, operands, form), strict=True)
    for i, (exact, rounded) in enumerate(pairs):
        if exact is not None and rounded is not None and exact.is_floating_point() and not exact.is_sparse:
            sizes = torch.stack([(rounded - exact).square().sum(), exact.square().sum()])
            if sizes[1].isfinite():
                yield i, sizes


def error(
    tried: Iterable[KernelCall], form: Callable[[Tensor], Tensor], numbers: list[Drawn], *, decides: bool = False
) -> float | None:
    """The largest relative error of an operand's gradient, over the calls of an overload, for any of the numbers."""
    found: dict[object, Tensor] = {}
    for call in tried:
        for setting in numbers:
            if call.function._schema.is_mutable or (decides and setting[:2] != (1.0, 0)):
                continue
            other = drawn(call, *setting)
            leaves = (x for x in pytree.tree_leaves(other.named()) if isinstance(x, Tensor) and x.requires_grad)
            try:
                for i, sizes in moved(other, list(leaves), form):
                    key = call.function, i, setting
                    found[key] = found.get(key, torch.zeros(2, dtype=torch.float64)) + sizes
            except (RuntimeError, ValueError, NotImplementedError):  # no kernel, or numbers that it does not take
                continue
    errors = [float((a / b).nan_to_num(1.0) ** 0.5) for a, b in found.values() if b > 1e-16]
    return max(errors, default=None)


def of_channels(tried: Iterable[KernelCall]) -> list[KernelCall]:
    return [call for call in tried if call.args[0].dim() > 2]


@with_pinned_torch
@pytest.mark.filterwarnings("ignore")  # of samples that are meant to be odd
@pytest.mark.parametrize("op", sorted(op for op in BEARS.keys() - UNTRIED if "::" not in op))
def test_backward_is_about_as_exact_as_what_it_reads(op: str, numbers: list[Drawn]) -> None:
    tried = of_channels(calls()[op]) if BEARS[op] == "channels" else calls()[op]
    found = error(tried, alone if BEARS[op] == "numbers" else by_rows, numbers, decides=op in DECIDES)
    assert found is not None
    assert found < MOST


@with_pinned_torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", BEARS_NOT)
def test_where_it_is_not_that_is_seen(op: str, numbers: list[Drawn]) -> None:
    assert op not in BEARS or BEARS[op] == "channels"
    assert (error(calls()[op], alone, numbers) or 0) > MOST


@pytest.mark.parametrize("offset", [0, 30])
@pytest.mark.parametrize("op", sorted(op for op in BEARS.keys() - UNTRIED if "::" in op))
def test_so_is_that_of_operators_of_this_package(op: str, offset: int) -> None:
    x = (torch.randn(64, 32) + offset).requires_grad_()
    weight, bias = (torch.randn(32, requires_grad=True) for _ in range(2))
    runs: dict[str, Callable[[], Tensor]] = {
        "autocastfx::cross_entropy_loss": lambda: cross_entropy_loss(x, torch.arange(64) % 32),
        "autocastfx::layer_norm": lambda: layer_norm(x, [32], weight, bias, 1e-5),
        "autocastfx::rms_norm": lambda: rms_norm(x, [32], weight, 1e-5),
        "autocastfx::quick_gelu": lambda: quick_gelu(x),
    }
    for _, (wrong, size) in moved(runs[op], [x, weight, bias], alone if BEARS[op] == "numbers" else by_rows):
        assert wrong < MOST**2 * size
