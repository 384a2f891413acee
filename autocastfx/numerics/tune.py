"""``tune``: choose the precision of each op by measured errors and bytes, within a budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from autocastfx.capture.call import arguments_of, batches_of
from autocastfx.capture.progress import Progress, counted, stage
from autocastfx.conversion import convert
from autocastfx.dtypes import dtype_name, low_dtype
from autocastfx.errors import ArgumentError, ArgumentTypeError, SensitivityError, UnsupportedError
from autocastfx.files import write_whole
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.float8_search import Float8Search
from autocastfx.numerics.logprob_gap import Inputs, LossFunction
from autocastfx.numerics.plan_search import Budget, Limit, PlanSearch, Point
from autocastfx.numerics.saved_choice import SavedChoice, SavedSearch, check_saved
from autocastfx.numerics.sensitivity import Measuring, check_choices, check_fits
from autocastfx.options import DType, Fold, refuse_unpredicted
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.plan import Plan, Prices
from autocastfx.plan.sensitivity import Sensitivity, added, rms
from autocastfx.policy.float8 import RECIPES, recipe_of
from autocastfx.policy.op_list import OpList, OpListLike
from autocastfx.report.conversion_warnings import unmatched_in
from autocastfx.report.front_picture import front_picture
from autocastfx.report.lint.roofline import Gpu, find_gpu
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.runtime.operators.float8 import missing_products


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
    float8: str | bool | None = None,
    share: float | None = None,
    dtype: DType | None = None,
    op_list: OpListLike = "default",
    fold: Fold = "exact",
    inputs: Inputs | None = None,
    gpu: Gpu | str = "A100",
    progress: Progress = None,
    saved: bool | float | Budget = False,
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
        float8: a recipe of op lists, or True for ``"rowwise"``: also choose which matrix products run in float8, each
            of the three of an op by itself, among those that ``op_list`` would let. Of the plans within the budget, the
            one of the least time by the roofline is best.
        share: instead of a budget: at least this share of the operations of products that can run in float8 do, above
            0 and at most 1. Of these plans, the one of the least error is best. The placement in 16 bits is that of
            ``op_list``.
        dtype: as for :func:`convert`.
        op_list: the list to start from.
        fold: as for :func:`convert`.
        inputs: as for :func:`sensitivity`.
        gpu: whose rates say what a float32 product costs beside bytes, and a product in float8 saves: those of an H100
            if it has no float8 products.
        progress: as for :func:`calibrate`.
        saved: also choose how each value is kept for backward, after the placement: recomputed, in bfloat16, in float8
            or as computed, so that the fewest bytes are kept. The gradient's error may become so many times that of
            the placement alone (True: 1.1); or a :class:`Budget` of the whole error, or of the share of bytes kept.
            Each form of each value is measured by a backward of its own on the batches not held out.

    Raises:
        SensitivityError: as for :func:`sensitivity`; there are too few batches; or no plan keeps the budget.
        OpListError, CaptureError, UnsupportedError: as for :func:`convert`; before anything is measured.
        GpuError: no GPU has this name.
        ValueError: ``of`` is no target, ``probes`` is less than 1, ``float8`` is no recipe, or there is a ``share``, or
            a budget of bytes, that does not go with it.
    """
    # what the caller gave, before anything runs
    check_choices(of, probes)
    _check_types(budget=budget, sensitivity=sensitivity, gpu=gpu, inputs=inputs)
    if isinstance(held_out, bool) or not isinstance(held_out, int):
        raise ArgumentError(f"held_out is a count of batches, not {held_out!r}")
    recipe = recipe_of(float8)
    check_share(share, budget, recipe)
    saved_limit = check_saved(saved, of) if saved is not False else None
    given = list(batches_of(batches))
    if held_out < 1 or len(given) < held_out + (sensitivity is None):
        raise SensitivityError(
            f"there are {len(given)} batches, of which {held_out} are held out to judge on: give at least one of each."
        )
    rates = find_gpu(gpu) if isinstance(gpu, str) else gpu
    args, kwargs = arguments_of(given[0] if inputs is None else inputs(given[0]))
    check_fits(model, args, kwargs)

    def converted(lists: OpListLike) -> AmpModule:
        return convert(model, args, kwargs or None, dtype=dtype, op_list=lists, fold=fold)

    # the list to start from, and the one whose error is the budget
    base = converted(op_list)
    other = converted(budget) if isinstance(budget, str) and budget != "default" else base
    low, converter = low_dtype(base.plan.low), cast("Converter", base._original.converter)
    if recipe:
        _check_products(low, torch.device(base.plan.device), converter.op_list, recipe)
    # what 16 bits cost at each node: measured here, or checked to be of the same thing
    if sensitivity is None:
        measuring = Measuring(base, loss_fn, of, probes, inputs, float8=recipe)
        with counted(progress, "measuring sensitivity") as show:
            for done, batch in enumerate(given[:-held_out], 1):
                measuring.add(batch)
                show(done)
        sensitivity = cast("Sensitivity", measuring.found)
    elif (sensitivity.of, sensitivity.dtype) != (of, base.plan.low) or recipe not in ("", sensitivity.float8):
        theirs, ours = (f" and float8 {name}" if name else "" for name in (sensitivity.float8, recipe))
        raise SensitivityError(
            f"the sensitivity is of the {sensitivity.of} to {sensitivity.dtype}{theirs}, and this tunes the {of} in "
            f"{base.plan.low}{ours}: measure it alike."
        )
    else:
        refuse_unpredicted(converter, sensitivity.float8)
        for category, message in unmatched_in(base, sensitivity=sensitivity):
            warnings.warn(message, category, stacklevel=2)
    # the cheapest plan within the limit, each candidate judged on batches that were not measured
    judge = TargetDistance(model, given[-held_out:], loss_fn, of, inputs)
    with stage("choosing plans"):
        measured = base, base._variant_for(args, kwargs), prices_on(rates, sensitivity), low
        products = rates if rates.float8_tflops else find_gpu("H100")
        search = Float8Search(*measured, recipe=recipe, gpu=products) if recipe else PlanSearch(*measured)
        started = search.started(judge(base, low))
        if share is not None:
            limit = Limit(share=share)
        elif isinstance(budget, Budget):
            limit = Limit(budget.error, None if budget.bytes is None else budget.bytes * started.bytes)
        else:
            limit = Limit(error=started.error if other is base else judge(other, low))
        if limit.error == math.inf:
            raise SensitivityError(
                f"the budget {budget!r} has no end: a value of that list overflows in {base.plan.low} on a batch held "
                'out. Give a Budget(error=...), or dtype="bfloat16".'
            )
        best, front = search.result(judge, replace(limit, bandwidth=products.bandwidth if recipe else 0.0), started)
    # with these rules in force, what is kept for backward
    rules = best.rules or OpList(name="tuned")
    choice = None
    if saved_limit is not None:
        with stage("choosing what is kept for backward"):
            placed = (
                base if rules == OpList() else converted(replace(search.converter.op_list.merged(rules), name="tuned"))
            )
            choice = SavedSearch(placed, given[:-held_out], loss_fn, inputs, judge, low).result(**saved_limit)
        rules = replace(rules.merged(choice.op_list()), name="tuned")
    return Tuned(
        rules=rules,
        op_list=replace(search.converter.op_list.merged(rules), name="tuned"),
        base=op_list,
        plan=replace(best.plan, saved=choice.planned) if choice is not None else best.plan,
        point=best.point,
        start=started,
        front=tuple(sorted(front, key=lambda point: (point.bytes, point.predicted))),
        sensitivity=sensitivity,
        budget=limit,
        options={"dtype": low, "fold": fold},
        saved=choice,
    )


# The result of ``tune``: an op list, the plan that follows from it, and the front it was chosen from.

_DOUBTFUL = 2.0  # a factor between measured and predicted errors
_WORTH = 0.01  # a share of bytes, or of error, below which nothing was gained


@dataclass(frozen=True, repr=False)
class Tuned:
    """The result of :func:`tune`.

    Attributes:
        rules: by module path and op, each with its reason; to lay over the list that was started from.
        op_list: that list with the rules over it.
        base: the list that was started from, as it was given.
        plan: of the measured mode.
        point: the plan's bytes and errors.
        start: those of the list that was started from.
        front: all plans that were looked at, in the order of their bytes.
        sensitivity: what was measured.
        budget: the limit that was kept, as an error or in bytes.
        options: further arguments of the conversion.
        saved: what is kept for backward, if that was chosen, too.
    """

    rules: OpList
    op_list: OpList
    base: OpListLike
    plan: Plan
    point: Point
    start: Point
    front: tuple[Point, ...]
    sensitivity: Sensitivity
    budget: Limit
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    saved: SavedChoice | None = None

    @property
    def gains(self) -> bool:
        """False if the list that was started from is as good: nothing to gain."""
        fewer = self.point.bytes < (1 - _WORTH) * self.start.bytes
        nearer = (self.point.measured or 0.0) < (1 - _WORTH) * (self.start.measured or 0.0)
        placed = bool(self.rules.every_rule()) and (fewer or nearer or self.point.share > self.start.share)
        return placed or (self.saved is not None and self.saved.kept < (1 - _WORTH) * self.saved.before)

    def convert(self, model: nn.Module, *inputs: Any, **options: Any) -> AmpModule:
        """Convert ``model`` by the tuned list; arguments as for :func:`autocastfx.convert`."""
        given = {**self.options, "sensitivity": self.sensitivity, **options}
        return convert(model, *inputs, op_list=self.op_list, **given)

    def __repr__(self) -> str:
        return f"Tuned({self.point}; {self.budget})"

    def __str__(self) -> str:
        return self.report()

    def report(self) -> str:
        """Return the result in words, with the front as a table and the rules."""
        lines = [
            f"budget: {self.budget}",
            f"start:  {self.start}",
            f"tuned:  {self.point}",
        ]
        if not self.gains:
            lines.append("nothing to gain: the list that was started from is as good.")
        lines += [str(self.saved)] if self.saved is not None else []
        lines += [*self._bias(), *self._doubts()]
        in_float8 = any(p.share for p in self.front)
        titles = f"{'float8':>8}{'saves µs':>10}" if in_float8 else ""
        lines += ["", f"{'plan':8}{'MB':>10}{'predicted':>12}{'measured':>12}{titles}"]
        for p in self.front:
            measured = "" if p.measured is None else f"{p.measured:.2e}"
            saves = f"{p.share:>8.0%}{1e6 * p.saved:>10.2f}" if in_float8 else ""
            lines.append(f"{p.name:8}{p.bytes / 1e6:>10.2f}{p.predicted:>12.2e}{measured:>12}{saves}")
        return "\n".join([*lines, "", self.text().rstrip()])

    def _bias(self) -> Iterator[str]:
        """Yield how much of the predicted error is the same in all batches."""
        sensitivity, effects = self.sensitivity, [node.effect for node in self.plan.nodes if node.effect]
        if not effects or sensitivity.batches == 1:
            return
        signature = added(effects)
        bias, least = sensitivity.bias(signature), sensitivity.least_bias(rms(signature))
        shows = f"{bias:.1e} of the predicted error is" if bias > least else "none of the predicted error seems"
        yield f"bias:   {shows} the same in all batches, and adds up over steps; less than {least:.1e} does not show."

    def _doubts(self) -> Iterator[str]:
        """Yield what the predictions leave out. The plan is chosen by measured errors in any case."""
        if left_out := self.plan.low_unmeasured:
            yield f"predictions leave out {left_out} nodes in 16 bits, which were not measured."
        measured, predicted = self.start.measured or 0.0, self.start.predicted
        if predicted and not 1 / _DOUBTFUL <= measured / predicted <= _DOUBTFUL:
            yield (
                f"predictions are doubtful for this model: the start's measured error is {measured / predicted:.2g} "
                "times the predicted one. Rounding that switches a ReLU, a maximum or a choice is not predicted."
            )

    def plot(self, path: str | Path | None = None) -> str:
        """Draw the front: bytes against error. The axis of errors is of ratios, so plans without any are left out.

        If the tuned plan is one of them, it is drawn on the lower edge, with words that say so.

        Args:
            path: also write the picture to this file; an existing file is replaced when it is complete.

        Returns:
            The picture, as SVG.

        Raises:
            OSError: the file cannot be written.
        """
        points = dict.fromkeys(self.front)
        chosen = (float(self.point.bytes), self.point.error) if self.gains and math.isfinite(self.point.error) else None
        cuts = [(float(p.bytes), p.predicted) for p in points if p.name == "cut" and p.predicted > 0]
        measured = [_place(p) for p in points if p.measured is not None and p.name != "start"]
        title = f"{self.plan.low} on {self.plan.device}: error of the {self.sensitivity.of} against bytes"
        shown = [place for place in measured if place is not None and place != chosen]
        limits = self.budget.error, self.budget.bytes
        text = front_picture(title, cuts, shown, _place(self.start), chosen, *limits)
        if path is not None:
            write_whole(Path(path), text)
        return text

    def text(self) -> str:
        """Return the rules as YAML; they extend the preset that was started from, if it was one."""
        extends = f"extends: {self._preset}\n" if self._preset else ""
        return extends + (self.rules.text() if self.rules != OpList() else "")

    def save(self, path: str | Path) -> None:
        """Write an op list that :func:`convert` takes: the rules over the list that was started from.

        Raises:
            OSError: the file cannot be written.
        """
        if self._preset and self.rules != OpList():
            write_whole(Path(path), self.text())
        else:
            self.op_list.save(path)

    @property
    def _preset(self) -> str:
        if not isinstance(self.base, str) or self.base.endswith((".yaml", ".yml")) or "/" in self.base:
            return ""
        return self.plan.low if self.base == "default" else self.base


def _place(point: Point) -> tuple[float, float] | None:
    """Where a point is drawn: at the error that was measured; None if an axis of ratios does not hold it."""
    return (float(point.bytes), point.error) if 0 < point.error < math.inf else None


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "budget": ("'default', the name of a list, or a Budget", lambda one: isinstance(one, (str, Budget))),
    "sensitivity": ("what sensitivity() returned", lambda one: one is None or isinstance(one, Sensitivity)),
    "gpu": ("the name of a GPU, or a Gpu", lambda one: isinstance(one, (str, Gpu))),
    "inputs": ("a function from a batch to the model's inputs", lambda one: one is None or callable(one)),
}


def _check_types(**given: object) -> None:
    for name, value in given.items():
        kind, fits = _KINDS[name]
        if not fits(value):
            raise ArgumentTypeError(f"{name} is {kind}, not {value!r}")


def check_share(share: float | None, budget: str | Budget, recipe: str) -> None:
    """Check that a share, a budget and a recipe (empty: no float8) go together.

    Raises:
        ValueError: they do not.
    """
    if share is not None:
        if not recipe:
            raise ArgumentError("share is of products in float8: give float8 too, a recipe or True for 'rowwise'")
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ArgumentError(f"share is a fraction above 0 and at most 1, not {share!r}")
        if budget != "default":
            raise ArgumentError(f"share takes the place of a budget, which is {budget!r}: leave one of the two out")
    if recipe and isinstance(budget, Budget) and budget.bytes is not None:
        raise ArgumentError("a budget of bytes says nothing of float8, which only adds errors: give an error, or share")
    if recipe and share is None and RECIPES[recipe].capability is None:
        raise ArgumentError(f"no GPU's products are called by {recipe}, so it saves no time: give a share")


def _check_products(low: torch.dtype, device: torch.device, op_list: OpList, recipe: str) -> None:
    if low != torch.bfloat16:
        raise UnsupportedError(
            f"{dtype_name(low)} gradients are multiplied by a loss scale, which float8 does not take: tune with "
            "dtype='bfloat16', or without float8."
        )
    if (why := missing_products(device, recipe)) and not any(rule.effect.emulate for rule in op_list.float8):
        raise UnsupportedError(
            f"{device} has no float8 products: {why}. Tune without float8, or from a list that says emulate: true."
        )


def prices_on(gpu: Gpu, sensitivity: Sensitivity) -> Prices:
    """Return what errors cost, and the bytes that a GPU moves in the time that an operation saves in 16 bits."""
    per_flop = gpu.bandwidth / gpu.peak(tensor_cores=False) - gpu.bandwidth / gpu.peak(tensor_cores=True)
    return Prices(sensitivity, bytes_per_flop=per_flop)
