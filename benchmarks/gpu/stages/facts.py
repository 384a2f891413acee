"""Check the facts of ``op_lists/kernel_facts.yaml`` on this device, all in one process.

An op whose kernel stops the device would spoil what follows; ``isolated`` measures each op apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.runtime.operators.norms import layer_norm, rms_norm
from benchmarks.gpu.measure import said
from benchmarks.gpu.sides import DTYPES
from benchmarks.gpu.stage import Given, Row
from benchmarks.gpu.stages.samples import is_there, stand_in
from benchmarks.judge import distance

aten = torch.ops.aten
WIDTH = 512
Op = Callable[[Tensor, Tensor, Tensor], Tensor]  # of an input, a weight and a bias
# Those that kernel_facts.yaml says fold, or take float32 parameters, on some device.
NORMS: dict[str, Op] = {
    "layer_norm": lambda x, w, b: aten.layer_norm(x, [WIDTH], w, b),
    "autocastfx::layer_norm": lambda x, w, b: layer_norm(x, [WIDTH], w, b),
    "group_norm": lambda x, w, b: aten.group_norm(x, 8, w, b),
    "rms_norm": lambda x, w, b: aten.rms_norm(x, [WIDTH], w),
    "autocastfx::rms_norm": lambda x, w, b: rms_norm(x, [WIDTH], w, 1e-6),
}
PLAIN: dict[str, Op] = {
    "softmax": lambda x, w, b: aten.softmax(x, -1),
    "_safe_softmax": lambda x, w, b: aten._safe_softmax(x, -1),
    "log_softmax": lambda x, w, b: aten.log_softmax(x, -1),
    "log_sigmoid": lambda x, w, b: aten.log_sigmoid(x),
    "softplus": lambda x, w, b: aten.softplus(x),
    "logsumexp": lambda x, w, b: aten.logsumexp(x, [-1]),
}
COMPARE = {"eq", "ne", "lt", "le", "gt", "ge"}


def facts(given: Given, rows: int = 4096, samples: int = 4) -> Iterator[Row]:
    """Yield a row for each kind of fact and each dtype.

    Args:
        given: what every stage is given.
        rows: of the input of norms and softmaxes.
        samples: of each of torch's test operators.
    """
    warnings.simplefilter("ignore")
    for name, dtype in DTYPES.items():
        for kind, measured in (("mixed_args", _mixed), ("takes_dtype", _takes_dtype)):
            if not given.has(kind, dtype=name):
                yield {"model": kind, "dtype": name, **measured(dtype, given.device)}
        for op, function in {**NORMS, **PLAIN}.items():
            if op in NORMS and not given.has("float32_parameters", op, name):
                found = _beside_float32(function, dtype, given.device)
                yield {"model": "float32_parameters", "side": op, "dtype": name, **found}
            if not given.has("folds", op, name):
                yield {"model": "folds", "side": op, "dtype": name, **_folded(function, dtype, given.device, rows)}
    with stand_in():
        yield from _of_samples(given, samples)


def _operands(device: str, *shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)).abs() + 0.5).to(device)


def _mixed(dtype: torch.dtype, device: str) -> Row:
    """Return the ops that differ from the same op on a cast operand, and those that do not read a 0-d one exactly."""
    wide, low, scalar = _operands(device, 64), _operands(device, 64, seed=1).to(dtype), torch.tensor(1 / 3).to(device)
    differ, rounding, errors = list[str](), list[str](), dict[str, str]()
    for op in sorted(load_kernel_facts().mixed_args):
        function = getattr(aten, op)
        first = (torch.arange(64, device=device) % 2 == 0,) if op == "where" else ()
        try:
            pairs = (((wide, low), (wide, low.float())), ((low, wide), (low.float(), wide)))
            if not all(function(*first, *a).equal(function(*first, *b)) for a, b in pairs):
                differ.append(op)
            exact = function(*first, low.float(), scalar.to(dtype) if op in COMPARE else scalar)
            got = function(*first, low, scalar)
            if got.dtype != (torch.bool if op in COMPARE else dtype) or not got.equal(exact.to(got.dtype)):
                rounding.append(op)
        except RuntimeError as error:
            errors[op] = said(error)
    return {"differ": differ, "round_a_0d_operand": rounding, "errors": errors}


def _takes_dtype(dtype: torch.dtype, device: str) -> Row:
    """Return the ops whose dtype argument gives another result or gradient than a cast."""
    differ, errors = list[str](), dict[str, str]()
    for op in sorted(load_kernel_facts().takes_dtype):
        given = (1,) if "softmax" in op else ()
        function, found = getattr(aten, op), list[tuple[Tensor, Tensor]]()
        try:
            for cast in (True, False):
                x = _operands(device, 16, 33).to(dtype).requires_grad_()
                result = function(x.float(), *given) if cast else function(x, *given, dtype=torch.float32)
                found.append((result, *torch.autograd.grad(result.square().sum(), x)))
            if not all(a.dtype == b.dtype and a.equal(b) for a, b in zip(*found, strict=True)):
                differ.append(op)
        except RuntimeError as error:
            errors[op] = said(error)
    return {"differ": differ, "errors": errors}


def _inputs(device: str, rows: int, dtype: torch.dtype, parameters: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=random) for shape in ((rows, WIDTH), (WIDTH,), (WIDTH,)))
    given = (x.to(dtype), (1 + w / 8).to(parameters), (b / 8).to(parameters))
    return [tensor.to(device).requires_grad_() for tensor in given]


def _beside_float32(op: Op, dtype: torch.dtype, device: str) -> Row:
    """Say whether the op takes a 16-bit input beside float32 parameters, and the dtypes that come out."""
    inputs = _inputs(device, 64, dtype, torch.float32)
    try:
        result = op(*inputs)
        gradients = torch.autograd.grad(result.float().square().sum(), inputs, allow_unused=True)
    except RuntimeError as error:
        return {"runs": False, "why": said(error)}
    return {"runs": True, "result": str(result.dtype), "gradients": [str(g.dtype) for g in gradients if g is not None]}


def _folded(op: Op, dtype: torch.dtype, device: str, rows: int) -> Row:
    """Compare the 16-bit op with the float32 op between casts: result in ulps, gradients by relative distance."""
    try:
        low, wide = _result(op, dtype, device, rows, widens=False), _result(op, dtype, device, rows, widens=True)
    except RuntimeError as error:
        return {"why": said(error)}
    a, b = low[0].double(), wide[0].double()
    size = torch.maximum(a.abs(), b.abs()).clamp_min(1e-3 * float(b.abs().max()))
    ulps = (a - b).abs() / (size.log2().floor().exp2() * torch.finfo(dtype).eps)
    return {"ulps": float(ulps.max()), "gradients": [distance(x, y) for x, y in zip(low[1:], wide[1:], strict=True)]}


def _result(op: Op, dtype: torch.dtype, device: str, rows: int, *, widens: bool) -> Sequence[Tensor]:
    inputs = _inputs(device, rows, dtype, dtype)
    result = op(*(tensor.float() if widens else tensor for tensor in inputs)).to(dtype)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result)
    found = torch.autograd.grad(result, inputs, gradient, allow_unused=True)
    return [result.detach(), *(one for one in found if one is not None)]


def _of_samples(given: Given, samples: int) -> Iterator[Row]:
    """Yield the ops without a kernel, as the table has them and not, and the ulps of ops that compute in float32."""
    from benchmarks.kernel_calls import kernel_calls  # needs expecttest, or what stands in
    from benchmarks.kernel_facts import FACTS, LISTED, differences, rounds_once, without_kernel

    calls: dict[str, Any] = kernel_calls(LISTED, given.device, samples)
    for name, dtype in DTYPES.items():
        if not given.has("no_kernel", dtype=name):
            missing = without_kernel(calls, dtype)
            row = {"tried": len(calls), "untried": sorted(LISTED - calls.keys()), "missing": missing}
            lines = differences(missing, calls, given.device, name)
            yield {"model": "no_kernel", "dtype": name, "expecttest": is_there(), "differences": lines, **row}
        if not given.has("computes_in_float32", dtype=name):
            ulps, errors = dict[str, float](), dict[str, str]()
            for op in sorted(FACTS.computes_in_float32 & calls.keys()):
                if any(call.is_random for call in calls[op]):
                    continue
                try:
                    ulps[op] = max(rounds_once(call, dtype) for call in calls[op])
                except (RuntimeError, TypeError) as error:
                    errors[op] = said(error)
            above = {op: most for op, most in ulps.items() if most > 1}
            yield {
                "model": "computes_in_float32",
                "dtype": name,
                "tried": len(ulps),
                "above_1": above,
                "errors": errors,
            }
