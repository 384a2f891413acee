"""The options of a conversion, for ``convert``, ``enable``, the command line and ``tune`` alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from autocastfx.calibration import ranges_of
from autocastfx.capture.call import check_arguments, named_device, refuse_for_low_model
from autocastfx.dtypes import chosen_dtype, dtype_name, one_low_dtype
from autocastfx.errors import ArgumentError, ArgumentTypeError, SensitivityError, UnsupportedError, shown
from autocastfx.passes.patterns.patterns import chosen
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.edited_plan import read_plan
from autocastfx.plan.plan import Plan, Prices
from autocastfx.plan.ranges import Ranges
from autocastfx.plan.sensitivity import Sensitivity
from autocastfx.policy.kernel_facts import kept_in_float32, load_kernel_facts
from autocastfx.policy.op_list import OpList, OpListLike, load_op_list
from autocastfx.policy.saved import rules_of
from autocastfx.runtime.regions import check_compiler

_Path = str | os.PathLike[str]
DType = torch.dtype | Literal["float16", "bfloat16", "fp16", "half", "bf16"]
Fold = Literal["none", "exact", "kernel"]
Fuse = Literal["none", "inductor"]
Weights = Literal["cast", "cached", "low"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """All that decides a conversion but the model and its graphs, as it was given: the arguments of ``convert``.

    Raises:
        ValueError: one has no such value.
    """

    dtype: torch.dtype | str | None = None
    op_list: OpListLike = "default"
    weights: str = "cast"
    fold: str = "exact"
    calibrate: Ranges | _Path | Iterable[Any] | None = None
    headroom: float = 2.0
    device: torch.device | str | None = None
    keep_output_dtype: bool = True
    plan: Plan | str | Path | None = None
    recompose: bool | Sequence[str] = True
    sensitivity: Sensitivity | _Path | None = None
    saved: str | Sequence[Mapping[str, Any]] = "as computed"
    fuse: str = "none"

    def __post_init__(self) -> None:
        check_arguments(self.fold, self.weights, self.headroom, fuse=self.fuse)
        if not isinstance(self.keep_output_dtype, bool):
            raise ArgumentError(f"keep_output_dtype is True or False, not {shown(self.keep_output_dtype)}")
        _ = self.target

    @property
    def target(self) -> torch.device | None:
        """The device to decide for, if it was named."""
        return named_device(self.device)

    @property
    def has_batches(self) -> bool:
        """True if ranges are still to be measured."""
        return self.calibrate is not None and not isinstance(self.calibrate, (Ranges, str, os.PathLike))

    def turned_off(self) -> Options:
        """Return those of a conversion that leaves all in float32."""
        return replace(self, op_list="float32", calibrate=None, plan=None, recompose=False, saved="as computed")

    def converter(
        self, model: nn.Module | None, device: torch.device, measure: Callable[[Any, OpListLike], Ranges]
    ) -> Converter:
        """Read the lists, the plan and the measurements. Rules of models are not among them (:func:`for_models`).

        The model is None if it is not known yet, and will run on ``device``. ``measure`` measures ranges of batches,
        for a list.

        Raises:
            OpListError, CalibrationError, SensitivityError, PlanError: what was given cannot be read.
            UnsupportedError: the model is 16-bit, and an argument means nothing for it; or a sensitivity was given with
                a list for which it says nothing.
            ValueError: there is no such dtype or pattern.
        """
        own = one_low_dtype(p.dtype for p in model.parameters()) if model is not None else None
        low = chosen_dtype(own if self.dtype is None else self.dtype, device)
        lists = load_op_list(self.op_list, default=dtype_name(low))
        if lists.placement == "follow":  # torch.autocast's dispatch casts 16-bit values, too
            own, low = None, chosen_dtype(self.dtype, device)
        if own is not None and model is not None:
            names = ("weights", "fold", "recompose", "calibrate", "sensitivity")
            refuse_for_low_model(model, own, dtype=low, **{name: getattr(self, name) for name in names})
        if self.saved != "as computed" and (entries := rules_of(self.saved)):
            lists = replace(lists.merged(OpList.of({"saved": entries}, name="saved")), name=lists.name)
        converter = Converter(
            *(lists, load_kernel_facts(), low, self.keep_output_dtype, self.fold),
            headroom=self.headroom,
            plan=None if self.plan is None else read_plan(self.plan),
            recompose=chosen(self.recompose),
            weights=self.weights,
            is_low_model=own is not None,
            fuse=self.fuse,
        )
        if self.fuse == "inductor":
            check_compiler(device.type)
            if lists.saved:
                raise UnsupportedError(
                    "with fuse='inductor' the compiler chooses what is kept for backward, and rules under 'saved' have "
                    "no effect: leave one of the two out."
                )
        if self.calibrate is not None:
            converter = replace(converter, ranges=ranges_of(self.calibrate, measure, lists))
        if self.sensitivity is not None:
            prices = Prices(_read_sensitivity(self.sensitivity, dtype_name(low)))
            refuse_unpredicted(converter, prices.sensitivity.float8)
            converter = replace(converter, prices=prices)
        return converter


def for_models(converter: Converter, models: Iterable[nn.Module], parameters: Iterable[nn.Parameter] = ()) -> Converter:
    """Return the converter of a graph that is of these models, and reads these parameters besides.

    A list that follows torch.autocast's dispatch knows neither models that are 16-bit nor rules of models.
    """
    lists, models = converter.op_list, list(models)
    if lists.placement == "follow":
        return converter
    dtypes = [p.dtype for group in (parameters, *(model.parameters() for model in models)) for p in group]
    for model in models:
        lists = replace(kept_in_float32(model, converter.low).merged(lists), name=lists.name)
    return replace(converter, op_list=lists, is_low_model=one_low_dtype(dtypes) == converter.low)


def refuse_unpredicted(converter: Converter, float8: str) -> None:
    """Refuse to measure or to predict errors of conversions for which a sensitivity says nothing.

    ``float8`` is the recipe by which the sensitivity measures products; empty: it does not.

    Raises:
        UnsupportedError: the model is 16-bit already, the list follows torch.autocast's dispatch, or asks for float8.
    """
    if converter.is_low_model:
        raise UnsupportedError(
            "the model is 16-bit already, and a sensitivity compares float32 with 16 bits: measure the float32 model, "
            "and give its list to convert."
        )
    if converter.op_list.placement == "follow":
        raise UnsupportedError(
            f"the op list {converter.op_list.name} follows torch.autocast's dispatch, op by op inside of what a "
            "sensitivity measures whole: give another op_list. tune takes the name of such a list as its budget."
        )
    if not float8 and any(rule.effect.products != () for rule in converter.op_list.float8):
        raise UnsupportedError(
            f"the op list {converter.op_list.name} asks for float8, and a sensitivity measures 16 bits alone: what it "
            "predicts would be too small. Measure it with float8=…, in the list's recipe, or give another list."
        )


def _read_sensitivity(given: Sensitivity | str | os.PathLike[str], dtype: str) -> Sensitivity:
    if not isinstance(given, (Sensitivity, str, os.PathLike)):
        raise ArgumentTypeError(f"sensitivity is a Sensitivity or the path of its file, not a {type(given).__name__}")
    sensitivity = given if isinstance(given, Sensitivity) else Sensitivity.load(given)
    if sensitivity.dtype != dtype:
        raise SensitivityError(f"the sensitivity was measured for {sensitivity.dtype}, and this converts to {dtype}.")
    return sensitivity
