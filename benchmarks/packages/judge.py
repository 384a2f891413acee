"""Train a model of a package, converted by each way, and judge its numbers beside float32's and torch.autocast's."""

from __future__ import annotations

import math
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx.errors import AutocastFXError
from benchmarks.judge import ASSUMED_EPS, Distance, distance, gradient_distances, worst
from benchmarks.packages.case import Case, Given, is_floating
from benchmarks.packages.row import Row

WAYS = ("convert", "enable", "train", "checkpointed convert", "checkpointed enable", "check")
STEPS = 3
DRAWS = 5
BATCHES = 2  # of check
_RATE = 1e-3
_SCALE = 2.0**10  # of a float16 loss, on all sides
_TIMES, _EPSILONS = 1.2, 2  # allowed: so many times torch.autocast's distance, and so many epsilons
_EACH_TIMES, _EACH_EPSILONS = 10, 8  # of the gradient of one parameter, which few numbers decide
_LONG = 300
# bfloat16 has the range of float32, so it is no overflow where float32 is finite.
_KERNEL = "torch's own kernel fails in bfloat16: torch.autocast gives Inf or NaN"
# What a path on this machine begins with.
_PLACE = re.compile(rf"\S*/site-packages/|{re.escape(str(Path(__file__).resolve().parents[2]))}/")


@dataclass(frozen=True)
class _Ran:
    """Outputs, and gradients by step and parameter; or how training changed each parameter."""

    outputs: Tensor
    gradients: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are."""
        return all(bool(value.isfinite().all()) for value in (self.outputs, *self.gradients.values()))


class _NoReference(Exception):
    """float32 does not run the case, or gives no finite result."""


def ways_of(case: Case) -> tuple[str, ...]:
    """Return the ways that this case can be run by."""
    is_there = {
        "train": case.train,
        "checkpointed convert": case.checkpointed,
        "checkpointed enable": case.checkpointed,
    }
    return tuple(way for way in WAYS if is_there.get(way, case.inputs) is not None)


def judge(package: str, version: str, case: Case, dtype: torch.dtype, way: str) -> Row:
    """Run a case by one way, and say how it went."""
    start = time.perf_counter()
    torch._dynamo.reset()
    found: Distance | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, verdict, reason = _check(case, dtype) if way == "check" else _beside(case, dtype, way)
        except _NoReference as error:
            verdict, reason = "not run", f"float32: {error}"
        except AutocastFXError as error:
            verdict, reason = "refused", _said(error)
        except Exception as error:
            verdict, reason = "foreign", f"{_said(error)} {_last_lines(error)}"
    said = dict.fromkeys(str(one.message) for one in caught if one.category.__module__.startswith("autocastfx"))
    if said and not verdict:
        verdict, reason = "warned", _short("; ".join(said))
    ours, autocast = (found.ours, found.autocast) if found is not None else (0.0, 0.0)
    seconds = time.perf_counter() - start
    name = str(dtype).removeprefix("torch.")
    return Row(package, version, case.name, name, way, verdict or "ok", ours, autocast, seconds, reason)


def _check(case: Case, dtype: torch.dtype) -> tuple[Distance | None, str, str]:
    batches = [_inputs(case, step) for step in range(BATCHES)]
    found = autocastfx.check(_built(case.build), batches, case.loss, dtype=dtype, inputs=lambda batch: batch)
    eps = torch.finfo(dtype).eps
    judged = [one for one in found.values if not one.name.startswith("gradient of")]
    values = [
        Distance(one.name, one.error, ASSUMED_EPS * eps if one.autocast is None else one.autocast) for one in judged
    ]
    nearest = worst(values, _TIMES, eps) if values else None
    if found.ok:
        return nearest, "", ""
    if not found.differences and all(one.autocast is None for one in found.inexact):
        return nearest, "warned", _short(str(found))
    is_torchs = any(one.autocast == math.inf for one in found.inexact)
    if is_torchs and dtype is torch.bfloat16 and not found.differences:
        return nearest, "foreign", _short(f"{_KERNEL}: {found}")
    return nearest, "silent", _short(str(found))


@dataclass(frozen=True)
class _Sides:
    """One draw of the inputs: this package, torch.autocast (None where it fails), and float32."""

    ours: _Ran
    theirs: _Ran | None
    exact: _Ran


@dataclass(frozen=True)
class _Compared:
    """The distance that is nearest to its bound, or farthest beyond, its ratio to the bound, and what is wrong."""

    nearest: Distance
    ratio: float
    reason: str


def _beside(case: Case, dtype: torch.dtype, way: str) -> tuple[Distance, str, str]:
    """Judge by the first draw of the inputs, or where that is too far, by five.

    Of outputs, and gradients as one, it is the median draw, for choices may flip; of each parameter all draws are one
    vector, for the gradient of a single number may nearly cancel in one.
    """
    draws = [_drawn(case, dtype, way, 0)]
    found = _whole(draws[0], dtype), _each(draws, dtype)
    if any(one.reason for one in found):
        draws += [_drawn(case, dtype, way, draw) for draw in range(1, DRAWS)]
        by_ratio = sorted((_whole(draw, dtype) for draw in draws), key=lambda one: one.ratio)
        found = by_ratio[DRAWS // 2], _each(draws, dtype)
    wrong = next((one for one in found if one.reason), None)
    if wrong is None:
        return found[0].nearest, "", ""
    if dtype is torch.bfloat16 and any(one.theirs is not None and not one.theirs.is_finite for one in draws):
        return wrong.nearest, "foreign", f"{_KERNEL}: {wrong.reason}"
    return wrong.nearest, "silent", wrong.reason


def _drawn(case: Case, dtype: torch.dtype, way: str, draw: int) -> _Sides:
    build = case.build
    if way.startswith("checkpointed") and case.checkpointed is not None:
        build = case.checkpointed
    run = _by_package if way == "train" else partial(_by_hand, draw=draw)
    try:
        exact = run(case, _built(build), None)
    except Exception as error:
        raise _NoReference(f"{_said(error)} {_last_lines(error)}") from error
    if not exact.is_finite:
        raise _NoReference("its numbers are not finite")
    try:
        theirs = run(case, _built(build), dtype, within=lambda: torch.autocast("cpu", dtype))
    except Exception:
        theirs = None
    model = _built(build)
    if way.endswith("convert"):
        args, kwargs = _inputs(case, 0)
        ours = run(case, model, dtype, autocastfx.convert(model, args, kwargs, dtype=dtype))
    else:
        try:
            ours = run(case, autocastfx.enable(model, dtype=dtype), dtype)
        finally:
            autocastfx.disable(model)  # packages share modules among models
    return _Sides(ours, theirs, exact)


def _by_hand(
    case: Case,
    model: nn.Module,
    low: torch.dtype | None,
    called: Callable[..., Any] | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    draw: int = 0,
) -> _Ran:
    """Train with SGD, and a loss scale where the dtype is float16. The loss is float32 on all sides."""
    sgd = torch.optim.SGD(model.parameters(), _RATE)
    rule = autocastfx.StaticLossScale(_SCALE) if low is torch.float16 else autocastfx.NoLossScale()
    optimizer = autocastfx.LossScalingOptimizer(sgd, rule)
    outputs, gradients = list[Tensor](), dict[str, Tensor]()
    for step in range(STEPS):
        args, kwargs = _inputs(case, step + STEPS * draw)
        optimizer.zero_grad()
        torch.manual_seed(step)
        with within():
            output = (model if called is None else called)(*args, **kwargs)
        output = pytree.tree_map_only(Tensor, lambda value: value.float() if is_floating(value) else value, output)
        loss = case.loss(output, (args, kwargs))
        optimizer.backward(loss)
        optimizer.unscale_()
        gradients |= {f"{step}.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        outputs += [leaf for leaf in pytree.tree_leaves(output) if is_floating(leaf)] or [loss]
        optimizer.step()
    return _Ran(torch.cat([value.detach().double().flatten() for value in outputs]), gradients)


def _by_package(
    case: Case,
    model: nn.Module,
    low: torch.dtype | None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> _Ran:
    """Train as the package does; the result is how each parameter changed."""
    if case.train is None:
        raise TypeError(f"{case.name} has no trainer")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    torch.manual_seed(0)
    with within():
        case.train(model, low)
    return _Ran(torch.zeros(0), {name: value.detach() - before[name] for name, value in model.named_parameters()})


def _whole(sides: _Sides, dtype: torch.dtype) -> _Compared:
    """Compare the outputs, and all gradients as one."""
    ours, exact, eps = sides.ours, sides.exact, torch.finfo(dtype).eps
    if reason := _one_sided(sides):
        return _Compared(Distance("gradients", math.inf, 0.0), math.inf, reason)
    names = exact.gradients.keys()
    theirs, note = _comparable(sides)
    assumed, most = ASSUMED_EPS * eps, _EPSILONS * eps
    found = [
        Distance(name, distance(mine, right), assumed if theirs is None else distance(other, right))
        for name, mine, other, right in (
            ("outputs", ours.outputs, (theirs or exact).outputs, exact.outputs),
            ("gradients", *(_vector(ran, names) for ran in (ours, theirs or exact, exact))),
        )
    ]
    nearest = worst(found, _TIMES, most)
    reason = nearest.said(_TIMES, most) + note if nearest.fails(_TIMES, most) else ""
    if not reason and all(one.ours == 0 for one in found) and any(one.autocast > 0 for one in found) and theirs:
        return _Compared(nearest, math.inf, "nothing ran in 16 bits, and nobody said so")
    return _Compared(nearest, nearest.ours / nearest.bound(_TIMES, most), reason)


def _each(draws: Sequence[_Sides], dtype: torch.dtype) -> _Compared:
    """Compare the gradient of each parameter, in all steps of all draws."""
    if reason := next(filter(None, map(_one_sided, draws)), ""):
        return _Compared(Distance("gradients", math.inf, 0.0), math.inf, reason)
    eps, notes = torch.finfo(dtype).eps, [_comparable(draw) for draw in draws]
    ours, exact = (_by_parameter(runs) for runs in ([d.ours for d in draws], [d.exact for d in draws]))
    compared = [theirs for theirs, _ in notes if theirs is not None]
    others = dict.fromkeys(exact, ASSUMED_EPS * eps)
    if len(compared) == len(draws):
        others = gradient_distances(_by_parameter(compared), exact)
    mine, most = gradient_distances(ours, exact), _EACH_EPSILONS * eps
    nearest = worst([Distance(f"gradient {n}", mine[n], others[n]) for n in exact], _EACH_TIMES, most)
    note = next((note for _, note in notes if note), "")
    reason = nearest.said(_EACH_TIMES, most) + note if nearest.fails(_EACH_TIMES, most) else ""
    return _Compared(nearest, nearest.ours / nearest.bound(_EACH_TIMES, most), reason)


def _one_sided(sides: _Sides) -> str:
    """Say which gradients only float32 or only this package has; empty if none."""
    differ = sorted(sides.exact.gradients.keys() ^ sides.ours.gradients.keys())
    return f"only one side has a gradient of {', '.join(differ[:3])}" if differ else ""


def _comparable(sides: _Sides) -> tuple[_Ran | None, str]:
    """Return torch.autocast's side, or None and why there is none to compare with."""
    if sides.theirs is None:
        return None, "; torch.autocast fails"
    if sides.theirs.gradients.keys() != sides.exact.gradients.keys():
        return None, "; torch.autocast gives other gradients"
    if not sides.theirs.is_finite:
        return None, "; torch.autocast gives Inf or NaN"
    return sides.theirs, ""


def _by_parameter(runs: Sequence[_Ran]) -> dict[str, Tensor]:
    """Return for each parameter its gradients in all steps of all runs, as one vector."""
    found: dict[str, list[Tensor]] = {}
    for ran in runs:
        for name, gradient in ran.gradients.items():
            step, _, parameter = name.partition(".")
            found.setdefault(parameter if step.isdigit() else name, []).append(gradient.flatten())
    return {name: torch.cat(held) for name, held in found.items()}


def _vector(ran: _Ran, names: Iterable[str]) -> Tensor:
    return torch.cat([torch.zeros(0), *(ran.gradients[name].flatten() for name in names)])


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def _inputs(case: Case, step: int) -> Given:
    if case.inputs is None:
        raise TypeError(f"{case.name} has no inputs")
    torch.manual_seed(100 + step)
    return case.inputs()


def _said(error: BaseException) -> str:
    return _short(f"{type(error).__name__}: {error}")


def _short(text: str) -> str:
    return " ".join(_PLACE.sub("", text).split())[:_LONG]


def _last_lines(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return "at " + ", ".join(_PLACE.sub("", f"{frame.filename}:{frame.lineno}") for frame in frames)
