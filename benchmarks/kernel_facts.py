"""Check op_lists/kernel_facts.yaml against this device's kernels.

    python -m benchmarks.kernel_facts [--device cuda] [--samples 12]

Every listed op is called in float32 and again with 16-bit tensors, forward and backward: an op that runs only in
float32 has no 16-bit kernel. The exit status is 1 if the table differs, and each difference is printed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autocastfx.graph.names import base_name, of_function
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import load_op_list
from autocastfx.policy.rule import Category
from benchmarks.command import DTYPES, Command, verdict
from benchmarks.kernel_calls import KernelCall, kernel_calls

LIST, FACTS = load_op_list("float16"), load_kernel_facts()
LISTED = frozenset(base_name(op) for op, rule in LIST.rules.items() if rule.category is not Category.KEEP)


def in_dtype(call: KernelCall, dtype: torch.dtype) -> KernelCall:
    """Return the call with copies of its float32 tensors in ``dtype``, except arguments that a list keeps float32.

    The copies require gradients, except running statistics, and unless the op writes into one of its arguments.
    """
    kept, mutable = LIST.kept(of_function(call.function)), call.function._schema.is_mutable

    def converted(name: str, argument: Any) -> Any:
        runs, fixed = torch.float32 if name in kept else dtype, mutable or name.startswith("running_")
        return pytree.tree_map(lambda leaf: _converted(leaf, runs, not fixed), argument)

    return call.with_arguments(converted)


def _converted(leaf: Any, dtype: torch.dtype, learns: bool) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.float32:
        return leaf
    return leaf.detach().clone().to(dtype).requires_grad_(learns)


def failure(call: KernelCall) -> str:
    """Return the error of the call, forward or backward; empty if it runs."""
    try:
        made = [t for t in pytree.tree_leaves(call()) if isinstance(t, torch.Tensor) and t.requires_grad]
        if made:
            torch.stack([t.abs().sum().float() for t in made]).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def without_kernel(calls: Mapping[str, Iterable[KernelCall]], dtype: torch.dtype) -> dict[str, str]:
    """Return the ops that run in float32 but not in ``dtype``, each with its first error."""
    found: dict[str, str] = {}
    for op, tried in calls.items():
        for call in tried:
            if op in found or failure(in_dtype(call, torch.float32)):
                continue
            if why := failure(in_dtype(call, dtype)):
                found[op] = why
    return found


def rounds_once(call: KernelCall, dtype: torch.dtype) -> float:
    """Return the largest error, in ulp, of the 16-bit result against the rounded float32 result of the same values.

    The ulp is that of the larger of the two numbers, but at least that of a thousandth of the largest result.
    """
    low = in_dtype(call, dtype)
    exact = in_dtype(low.with_arguments(lambda _, argument: pytree.tree_map(_widened, argument)), torch.float32)
    torch.manual_seed(0)
    got = [t.detach() for t in pytree.tree_leaves(low()) if isinstance(t, torch.Tensor) and t.dtype == dtype]
    torch.manual_seed(0)
    wanted = [t.detach() for t in pytree.tree_leaves(exact()) if isinstance(t, torch.Tensor)]
    errors = [ulps(a, b) for a, b in zip(got, wanted, strict=False) if a.numel()]
    return max(errors, default=0.0)


HUGE = 256.0  # 256 + 1 is 256 in bfloat16


def adds_up_in_16_bits(call: KernelCall, *, backward: bool, deep: bool = False) -> bool:
    """True if the kernel adds numbers up in bfloat16: its result forwards, or the gradients of what it reads.

    It is given 256, 1 and -256 at random, in the place of its first input or of the gradient of its result. Where the
    float64 result is whole numbers, no rounding but that of a sum in between loses a 1. A ``deep`` call, in which
    hundreds of numbers meet, is given ones as well, of which such a sum forgets all beyond 256.
    """
    for pattern in ("signed", "ones") if deep else ("signed",):
        got, wanted = (_given(call, dtype, backward, pattern) for dtype in (torch.bfloat16, torch.float64))
        for low, exact in zip(got, wanted, strict=True):
            if low is None or exact is None or low.dtype != torch.bfloat16 or not exact.isfinite().all():
                continue
            far = (low.double() - exact).abs()
            if pattern == "ones" and bool((far > 0.05 * exact.abs()).any()):
                return True
            if (
                pattern == "signed"
                and bool((exact == exact.round()).all())
                and bool((far > 0.05 * exact.abs() + 0.5).any())
            ):
                return True
    return False


def _given(call: KernelCall, dtype: torch.dtype, backward: bool, pattern: str) -> list[torch.Tensor | None]:
    """The results of the call in ``dtype``, or the gradients of its operands; those of a pattern of numbers."""
    generator = torch.Generator().manual_seed(0)

    def numbers(like: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(like.shape, generator=generator).to(like.device)
        signed = torch.where(drawn < 0.3, HUGE, torch.where(drawn < 0.6, -HUGE, 1.0))
        return (torch.ones_like(drawn) if pattern == "ones" else signed).to(dtype)

    first = next((t for t in pytree.tree_leaves(call.named()) if isinstance(t, torch.Tensor)), None)

    def leaf(argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor) or argument.dtype != torch.float32:
            return argument
        takes_pattern = argument is first and not backward
        given = numbers(argument) if takes_pattern else argument.detach().abs().bfloat16().to(dtype)
        return given.requires_grad_(backward)

    arguments = call.with_arguments(lambda _, argument: pytree.tree_map(leaf, argument))
    made = [t for t in pytree.tree_leaves(arguments()) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not backward:
        return list(made)
    results = [t for t in made if t.requires_grad]
    operands = [t for t in pytree.tree_leaves(arguments.named()) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not results:
        return []
    gradients = torch.autograd.grad(results, operands, [numbers(t) for t in results], allow_unused=True)
    return [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]


def _widened(leaf: Any) -> Any:
    is_low = isinstance(leaf, torch.Tensor) and leaf.dtype in DTYPES.values()
    return leaf.detach().float() if is_low else leaf


def ulps(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest distance of ``got`` from the rounded ``wanted``, in ulp.

    The ulp is that of the larger of the two numbers, but at least that of a thousandth of the largest number.
    """
    rounded, info = wanted.to(got.dtype), torch.finfo(got.dtype)
    same = (rounded == got) | (rounded.isnan() & got.isnan())
    if same.all():
        return 0.0
    a, b = got.double(), rounded.double()
    size = torch.maximum(a.abs(), b.abs())
    size = size.clamp_min(max(1e-3 * float(size[size.isfinite()].max()), info.tiny))
    return float(((a - b).abs() / (size.log2().floor().exp2() * info.eps)).masked_fill(same, 0).nan_to_num(1e9).max())


def differences(missing: Mapping[str, str], tried: Collection[str], device: str, dtype: str) -> list[str]:
    """Return a line for each op where the table differs from the measurement.

    Args:
        missing: the ops without a kernel, as :func:`without_kernel` found them among the ops ``tried``.
        tried: base names of the ops that were called.
        device: device type of the calls.
        dtype: a key of ``DTYPES``.
    """
    table = FACTS.no_kernel.get((device, dtype), frozenset[str]())
    lines = [f"+ {op} has no kernel: {missing[op]}" for op in sorted(missing.keys() - table)]
    lines += [f"- {op} has a kernel" for op in sorted((table & set(tried)) - missing.keys())]
    lines += [f"? {op} was not tried" for op in sorted(table - set(tried))]
    return [f"{device} {dtype}: {line}" for line in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the table with this machine."""
    command = Command("kernel_facts", __doc__, stores=False)
    command.add_argument("--device", default="cpu")
    command.number("--samples", 12)  # of each of torch's test operators
    options = command.parse_args(arguments)
    warnings.simplefilter("ignore")
    calls = kernel_calls(LISTED, options.device, options.samples)
    untried = sorted(LISTED - calls.keys())
    print(f"{len(calls)} of {len(LISTED)} listed ops tried on {options.device}; not tried: {' '.join(untried)}")
    lines: list[str] = []
    for name, dtype in DTYPES.items():
        missing = without_kernel(calls, dtype)
        print(f"{name}: no kernel of {', '.join(sorted(missing))}")
        lines += differences(missing, calls, torch.device(options.device).type, name)
    return verdict("the table differs" if lines else "the table agrees", lines)


if __name__ == "__main__":
    sys.exit(main())
