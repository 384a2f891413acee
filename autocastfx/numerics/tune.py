"""``tune``: choose the precision of each op by measured errors and bytes, within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from autocastfx.capture.call import arguments_of, batches_of
from autocastfx.capture.progress import Progress, counted, stage
from autocastfx.conversion import convert, refuse_unpredicted
from autocastfx.dtypes import low_dtype
from autocastfx.errors import SensitivityError
from autocastfx.numerics.budget import Budget, Limit, Point
from autocastfx.numerics.loss import Inputs, LossFunction
from autocastfx.numerics.plan_search import PlanSearch
from autocastfx.numerics.sensitivity import Measuring, check_choices, check_fits
from autocastfx.numerics.target_error import TargetError
from autocastfx.numerics.tuned import Tuned
from autocastfx.passes.variant_maker import VariantMaker
from autocastfx.plan.plan import Prices
from autocastfx.plan.sensitivity import Sensitivity
from autocastfx.policy.op_list import OpList, OpListLike
from autocastfx.report.conversion_warnings import warn_of_unmatched_effects
from autocastfx.report.lint.roofline import Gpu, find_gpu
from autocastfx.runtime.amp_module import AmpModule

__all__ = ["tune"]


def tune(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    budget: str | Budget = "default",
    of: str = "gradient",
    probes: int = 8,
    held_out: int = 1,
    sensitivity: Sensitivity | None = None,
    dtype: torch.dtype | str | None = None,
    op_list: OpListLike = "default",
    fold: str = "exact",
    inputs: Inputs | None = None,
    gpu: Gpu | str = "A100",
    progress: Progress = None,
) -> Tuned:
    """Find the op list that moves the fewest bytes within an error budget, for this model and these batches.

    Errors are measured as by :func:`sensitivity`. Their squares, at a price, are terms of the same minimum cut that
    counts bytes; raising the price traces the front of bytes against error. Up to five plans near the budget are then
    measured on batches that were held out, and the cheapest that keeps the budget is returned as rules of a list.

    What no measurement may change stays as the list has it: forced rules, ``keep``, ``ban`` and ``promote`` ops, shared
    storage, ops that were not measured, and rules of your own.

    Args:
        model: a float32 model. Errors are those of its weights, so give one that has trained for a while: what 16 bits
            cost changes in training.
        batches: as for :func:`sensitivity`; at least ``held_out`` + 1.
        loss_fn: as for :func:`sensitivity`.
        budget: ``"default"``: no more error than ``op_list`` has; the name of another list: than that list has; or a
            :class:`Budget`.
        of: ``"gradient"`` for training, ``"output"`` for inference.
        probes: as for :func:`sensitivity`.
        held_out: the number of batches, the last ones, that are not measured on but judged on.
        sensitivity: one measured before, instead of measuring it on the other batches.
        dtype: as for :func:`convert`.
        op_list: the list to start from.
        fold: as for :func:`convert`.
        inputs: as for :func:`sensitivity`.
        gpu: whose rates say what a float32 product costs beside bytes.
        progress: as for :func:`calibrate`.

    Raises:
        SensitivityError: as for :func:`sensitivity`; there are too few batches; or no plan keeps the budget.
        OpListError, CaptureError, UnsupportedError: as for :func:`convert`; before anything is measured.
        GpuError: no GPU has this name.
        ValueError: ``of`` is no target, or ``probes`` is less than 1.
    """
    check_choices(of, probes)
    given = list(batches_of(batches))
    if held_out < 1 or len(given) < held_out + (sensitivity is None):
        raise SensitivityError(
            f"there are {len(given)} batches, of which {held_out} are held out to judge on: give at least one of each."
        )
    prices_of = _prices(find_gpu(gpu) if isinstance(gpu, str) else gpu)
    args, kwargs = arguments_of(given[0] if inputs is None else inputs(given[0]))
    check_fits(model, args, kwargs)

    def converted(lists: OpListLike) -> AmpModule:
        return convert(model, args, kwargs or None, dtype=dtype, op_list=lists, fold=fold)

    base = converted(op_list)
    other = converted(budget) if isinstance(budget, str) and budget != "default" else base
    low = low_dtype(base.plan.low)
    if sensitivity is None:
        measuring = Measuring(base, loss_fn, of, probes, inputs)
        with counted(progress, "measuring sensitivity") as show:
            for done, batch in enumerate(given[:-held_out], 1):
                measuring.add(batch)
                show(done)
        sensitivity = cast("Sensitivity", measuring.found)
    elif (sensitivity.of, sensitivity.dtype) != (of, base.plan.low):
        raise SensitivityError(
            f"the sensitivity is of the {sensitivity.of} to {sensitivity.dtype}, and this tunes the {of} in "
            f"{base.plan.low}: measure it alike."
        )
    else:
        refuse_unpredicted(cast("VariantMaker", base._maker).converter)
        warn_of_unmatched_effects(base, sensitivity, stacklevel=2)
    judge = TargetError(model, given[-held_out:], loss_fn, of, inputs)
    with stage("choosing plans"):
        search = PlanSearch(base, base._variant_for(args, kwargs), prices_of(sensitivity), low)
        moved, predicted = search.start.traffic.moved, search.start.error or 0.0
        started = Point("start", moved, predicted, judge(base, low))
        if isinstance(budget, Budget):
            limit = Limit(budget.error, None if budget.bytes is None else budget.bytes * moved)
        else:
            limit = Limit(error=started.error if other is base else judge(other, low))
        if limit.error == math.inf:
            raise SensitivityError(
                f"the budget {budget!r} has no end: a value of that list overflows in {base.plan.low} on a batch held "
                'out. Give a Budget(error=...), or dtype="bfloat16".'
            )
        best, front = search.result(judge, limit, started)
    rules = best.rules or OpList(name="tuned")
    return Tuned(
        rules=rules,
        op_list=replace(search.converter.op_list.merged(rules), name="tuned"),
        base=op_list,
        plan=best.plan,
        point=best.point,
        start=started,
        front=tuple(sorted(front, key=lambda point: (point.bytes, point.predicted))),
        sensitivity=sensitivity,
        budget=limit,
        options={"dtype": low, "fold": fold},
    )


def _prices(gpu: Gpu) -> Callable[[Sensitivity], Prices]:
    per_flop = gpu.bandwidth / gpu.peak(tensor_cores=False) - gpu.bandwidth / gpu.peak(tensor_cores=True)
    return lambda sensitivity: Prices(sensitivity, bytes_per_flop=per_flop)
