"""``check``: find out by running whether a conversion does what the model does, and as exactly as torch.autocast."""

from __future__ import annotations

import itertools
import json
import math
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import arguments_of, batches_of, device_of
from autocastfx.capture.leave_intact import modes_after
from autocastfx.capture.progress import Progress, counted
from autocastfx.conversion import convert, without_casts
from autocastfx.dtypes import dtype_name
from autocastfx.errors import CalibrationError, UncapturedGraphWarning, UnsupportedError
from autocastfx.files import NON_FINITE_AS_TEXT, plain_data
from autocastfx.numerics.logprob_gap import Inputs, LossFunction, loss_of
from autocastfx.numerics.sensitivity import check_fits
from autocastfx.numerics.time import in_autocast
from autocastfx.options import DType
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.plan import Plan
from autocastfx.plan.sensitivity import Sensitivity, added, rms
from autocastfx.policy.float8 import RECIPES, Product
from autocastfx.policy.op_list import OpListLike
from autocastfx.runtime import behaviour
from autocastfx.runtime.amp_module import AmpModule

_TIMES = 1.2  # torch.autocast's error that a converted model may have, as in the zoo
_FLOAT8_TIMES = 2.0  # the errors that are predicted for a plan with float8, or that its number of digits make likely
_SCALE = 2.0**10  # of a float16 loss, lest small gradients vanish on any side
_ALL, _EACH = "all gradients", "gradient of"
_MATTERS = 0.1  # of the error that all gradients may have: what one of them may have whatever it is beside others
_FAR = 0.3  # a relative distance of a gradient that leads nowhere
_NOISE = 8 * torch.finfo(torch.float32).eps  # of all gradients: what rounding leaves in float32 of terms that cancel
_NOISE_TIMES = 10  # torch.autocast's noise that a converted model may have: each rounds other terms
_MOST = 5  # differences and values that the text names


@dataclass(frozen=True)
class CheckedValue:
    """How far an output or a gradient is from float32's: the root mean square over all calls.

    Attributes:
        name: of the output, or of the parameter or argument whose gradient it is.
        error: the relative L2 distance of the converted model's; infinite where it is not finite.
        autocast: torch.autocast's; None where torch.autocast fails.
        share: of a gradient's norm in that of all of them.
        elements: how many numbers it has.
    """

    name: str
    error: float
    autocast: float | None
    share: float = 1.0
    elements: int = 1

    @property
    def ratio(self) -> float:
        """The error to torch.autocast's; NaN where that fails."""
        if self.autocast is None:
            return math.nan
        return self.error / self.autocast if self.autocast else (1.0 if self.error == 0 else math.inf)


@dataclass(frozen=True)
class Float8Allowance:
    """The times of torch.autocast's error that a plan with products in float8 may have.

    Attributes:
        outputs, gradients: of the outputs, and of all gradients as one.
        source: whence, in words.
    """

    outputs: float
    gradients: float
    source: str


@dataclass(frozen=True)
class Check:
    """What :func:`check` found.

    Attributes:
        model: the class of the model.
        dtype: the 16-bit dtype.
        differences: what the captured graph does otherwise than the model, without any cast.
        calls: the calls that were compared.
        dropped: the calls that were not, with why.
        values: errors of the converted model: of outputs, of all gradients as one, and of each gradient.
        float8: what products in float8 let outputs and gradients be inexact by, beside torch.autocast's error; None
            without any.
    """

    model: str
    dtype: str
    differences: tuple[behaviour.Difference, ...]
    calls: tuple[str, ...]
    dropped: tuple[str, ...]
    values: tuple[CheckedValue, ...]
    float8: Float8Allowance | None = None

    @property
    def inexact(self) -> tuple[CheckedValue, ...]:
        """What is farther from float32 than 1.2 times torch.autocast's distance, plus epsilon: gradients first.

        With products in float8, than the times of ``float8``. Of a gradient the error must also be a tenth of what all
        gradients may have, and few numbers may differ by chance: of n, by another 2/√n of it. What is not finite, where
        float32 is, always belongs to them.
        """
        return tuple(one for one in self._too_far() if not self._is_noise(one))

    @property
    def noise(self) -> tuple[CheckedValue, ...]:
        """The gradients that are noise in float32, too: terms that cancel, as of a bias before a batch norm.

        In float32 they are less than 8 of its epsilons of all gradients; torch.autocast's lead nowhere either, and the
        converted model's are at most ten times as far off. As part of all gradients they are judged nevertheless.
        """
        return tuple(one for one in self.values if self._is_noise(one))

    def _too_far(self) -> list[CheckedValue]:
        matters = _MATTERS * next((self._allowed(one) for one in self.values if one.name == _ALL), 0.0)
        far = [one for one in self.values if not one.error <= self._allowed(one)]
        return sorted((o for o in far if _is_whole(o) or not o.share * o.error <= matters), key=_is_whole)

    def _is_noise(self, one: CheckedValue) -> bool:
        if _is_whole(one) or one.autocast is None or not one.share <= _NOISE:
            return False
        return one.autocast >= 1 and one.error <= min(_NOISE_TIMES * one.autocast, sys.float_info.max)

    def _allowed(self, one: CheckedValue) -> float:
        eps, of_gradients = torch.finfo(getattr(torch, self.dtype)).eps, one.name.startswith((_ALL, _EACH))
        times = _TIMES if self.float8 is None else self.float8.gradients if of_gradients else self.float8.outputs
        chance = 1.0 if _is_whole(one) else 1 + 2 / math.sqrt(one.elements or 1)
        return min(times * chance * (2 * eps if one.autocast is None else one.autocast) + eps, sys.float_info.max)

    @property
    def far(self) -> tuple[CheckedValue, ...]:
        """The outputs, and all gradients as one, that are no use as such, though torch.autocast's may be no better."""
        return tuple(one for one in self.values if _is_whole(one) and not one.error < _FAR)

    @property
    def ok(self) -> bool:
        """True if something was compared, nothing differs, and nothing is inexact."""
        return bool(self.calls) and not self.differences and not self.inexact

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        word = "right" if self.ok else "WRONG" if self.differences else "INEXACT" if self.inexact else "NOT COMPARED"
        named = f": {', '.join(one.name for one in self.inexact[:3])}" if word == "INEXACT" else ""
        yield f"check of {self.model} in {self.dtype}: {word}{named}"
        yield f"  as captured, without a cast: {len(self.calls)} calls, {len(self.differences)} differences"
        yield from _few(self.differences)
        if self.dropped:
            yield f"  not compared: {len(self.dropped)}"
            yield from _few(self.dropped)
        if self.values:
            yield "  converted, relative distance from float32 (torch.autocast's):"
            yield from (f"    {one.name}: {_error(one)}" for one in self._shown())
        if self.noise:
            named = ", ".join(one.name for one in self.noise[:_MOST])
            more = f", and {len(self.noise) - _MOST} more" if len(self.noise) > _MOST else ""
            yield f"  zero but for rounding, in float32 too, as of a bias before a batch norm: {named}{more}"
        if self.float8 is not None:
            times = (
                f"{self.float8.outputs:.3g} times torch.autocast's of outputs, {self.float8.gradients:.3g} of gradients"
            )
            yield f"  with products in float8 they may be {times}: {self.float8.source}"
        if self.far:
            yield f"  far from float32: {', '.join(one.name for one in self.far)}: see sensitivity() for the nodes"

    def _shown(self) -> list[CheckedValue]:
        """Return outputs and all gradients, and the gradients that are inexact, or worst beside torch.autocast's."""
        each = [one for one in self.values if not _is_whole(one) and not self._is_noise(one)]
        each.sort(key=lambda one: (one not in self.inexact, -(one.ratio if one.ratio == one.ratio else one.error)))
        return [*filter(_is_whole, self.values), *each[:3]]

    def to_json(self) -> str:
        """Write the check as JSON text; Infinity and NaN as the strings "inf" and "nan"."""
        data = {**plain_data(self, NON_FINITE_AS_TEXT), "ok": self.ok}
        if self.float8 is None:  # as before float8
            del data["float8"]
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)


def _is_whole(value: CheckedValue) -> bool:
    return not value.name.startswith(_EACH)


def _few(entries: Sequence[object]) -> Iterator[str]:
    yield from (f"    {one}" for one in entries[:_MOST])
    if len(entries) > _MOST:
        yield f"    and {len(entries) - _MOST} more"


def _error(value: CheckedValue) -> str:
    theirs = "fails" if value.autocast is None else f"{value.autocast:.2g}"
    return f"{value.error:.2g} ({theirs})"


def check(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    dtype: DType | None = None,
    op_list: OpListLike = "default",
    inputs: Inputs | None = None,
    progress: Progress = None,
    **options: Any,
) -> Check:
    """Run a model and its conversion on ``batches``, and on changed ones, and compare all that they do.

    First what was captured, without any cast, beside the model: outputs, gradients of parameters and arguments,
    buffers, arguments that are written into, the structure of the output, random numbers, and the modes after
    ``train()`` and ``eval()``. All are the same, or it is a difference: to the bit, or within what another order of
    sums makes. Then the converted model beside torch.autocast, by their distances from float32, in training and in
    evaluation.

    Changed batches have other values of the same sizes; one tensor for two arguments that are alike; arguments that
    require gradients; one row less; and a second call after a first one. What the model itself refuses, what makes it
    give Inf or NaN, and what it does not repeat, is dropped and told. The model, its buffers, gradients, modes and the
    random states are as before.

    Args:
        model: a float32 model, a converted one whose original is at hand, or an enabled one, which is checked on copies
            that share its parameters.
        batches: as for :func:`calibrate`; read once.
        loss_fn: of the output and the batch, one number, whose gradients are compared; by default gradients begin at
            all outputs, with random numbers.
        dtype: the 16-bit dtype, as for :func:`convert`.
        op_list: as for :func:`convert`.
        inputs: gives the part of a batch that the model takes, where a batch holds targets too.
        progress: as for :func:`calibrate`.
        **options: further arguments of :func:`convert`.

    Raises:
        CaptureError: the model cannot be captured.
        CalibrationError: there are no batches.
        SensitivityError: a batch does not fit the model, or its loss is no single number.
        TypeError: an option is none of :func:`convert`'s.
        UnsupportedError: a converted model was given with options of a conversion, or without its original; an option
            leaves no original to compare with, or nothing to choose; or an enabled one cannot be copied.
    """
    rest = batches_of(batches)
    first = next(rest, None)
    if first is None:
        raise CalibrationError("there are no batches to check with. An iterator can be read only once.")
    chosen = {**options, **({"dtype": dtype} if dtype is not None else {})}
    given = arguments_of(first if inputs is None else inputs(first))
    check_fits(model, *given)
    with _checking(model, given, op_list, chosen) as checking:
        with counted(progress, "checking") as show:
            for done, batch in enumerate(itertools.chain([first], rest), 1):
                checking.add(arguments_of(batch if inputs is None else inputs(batch)), batch, loss_fn)
                show(done)
        return checking.found()


@contextmanager
def _checking(model: nn.Module, given: Any, op_list: OpListLike, options: Mapping[str, Any]) -> Generator[_Checking]:
    if (call := model.__dict__.get("_compiled_call_impl")) is not None and hasattr(call, "copies"):  # an enabled model
        _refuse_options(op_list, options)
        with call.copies() as (original, ours, bare, backend):
            modes = [modes_after(original, training=training) for training in (True, False)]
            yield _Checking(
                *(original, ours, bare, call.backend.low, modes),
                plans=lambda: [graph.plan for graph in backend.graphs if graph.plan is not None],
            )
        return
    amp_model = _converted(model, given, op_list, options)
    original = amp_model._original.model
    bare = without_casts(amp_model)
    if original is None or bare is None:
        raise UnsupportedError("the original of the converted model is not at hand: check the original.")
    switched = [modes_after(original, training=training) for training in (True, False)]
    modes = list(dict.fromkeys((*(variant.modes for variant in bare.variants), *switched)))
    low = getattr(torch, amp_model.plan.low)
    yield _Checking(original, amp_model, bare, low, modes, lambda: [variant.plan for variant in amp_model.variants])


def _refuse_options(op_list: OpListLike, options: Mapping[str, Any]) -> None:
    if options or op_list != "default":
        raise UnsupportedError("the model is converted already: leave the options of a conversion out.")


def _converted(model: nn.Module, given: Any, op_list: OpListLike, options: Mapping[str, Any]) -> AmpModule:
    if "check" in options:
        raise UnsupportedError("check compares anyway: leave check= out, which is an option of convert.")
    if options.get("weights") == "low":
        raise UnsupportedError("weights='low' keeps no original to compare with: check weights='cached'.")
    if not isinstance(model, AmpModule):
        args, kwargs = given
        return convert(model, args, kwargs or None, op_list=op_list, check=False, **options)
    _refuse_options(op_list, options)
    if not model.variants:
        model._variant_for(*given)
    return model


@dataclass
class _Checking:
    """The differences and errors found so far."""

    model: nn.Module
    ours: nn.Module
    bare: nn.Module
    low: torch.dtype
    modes: Sequence[tuple[bool, ...]]
    plans: Callable[[], Sequence[Plan]]
    compared: list[behaviour.Compared] = field(default_factory=list[behaviour.Compared])
    errors: dict[str, list[_Errors]] = field(default_factory=dict[str, Any])
    raised: list[behaviour.Difference] = field(default_factory=list[behaviour.Difference])
    unmeasured: list[str] = field(default_factory=list[str])

    def add(self, arguments: Any, batch: Any, loss_fn: LossFunction | None) -> None:
        """Compare the calls of a batch."""
        trials = [*behaviour.trials_of(arguments, self.modes), *_further(arguments, self.modes[0])]

        def loss(output: Any) -> torch.Tensor:
            return loss_of(output, batch, loss_fn) * (_SCALE if self.low is torch.float16 else 1.0)

        self.compared.append(behaviour.compare_calls(self.model, self.bare, trials))
        for trial in trials[: 2 * len(self.modes)]:
            measured = replace(trial, loss=loss if loss_fn is not None and trial.learns else None)
            self._measure(measured, is_given=trial.arguments is arguments)

    def _measure(self, trial: behaviour.Trial, *, is_given: bool) -> None:
        """Note how far the converted model and torch.autocast are from float32.

        A loss that raises for a batch as it is given is the caller's error.
        """
        device = device_of(self.model, *trial.arguments)
        try:
            exact = behaviour.behaviour_of(self.model, self.model, trial)
        except behaviour.CallError as error:
            if trial.loss is not None and is_given:
                raise error.error from None
            self.unmeasured.append(f"{trial.name}, for exactness: {error}".splitlines()[0])
            return
        if not exact.is_comparable:
            self.unmeasured.append(f"{trial.name}, for exactness: the model gives Inf or NaN")
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UncapturedGraphWarning)  # of a copy: the enabled model itself tells
                ours = behaviour.behaviour_of(self.model, self.ours, trial)
        except behaviour.CallError as error:  # what the original did without
            self.raised.append(behaviour.Difference("the converted model", f"raises {error}", trial.name))
            return
        try:
            theirs = behaviour.behaviour_of(self.model, in_autocast(self.model, device.type, self.low), trial)
        except behaviour.CallError:  # torch.autocast's own, which is told as a failure
            theirs = None
        for name, errors in _errors(exact, ours, theirs):
            self.errors.setdefault(name if trial.learns else f"{name}, in evaluation", []).append(errors)

    def found(self) -> Check:
        """Return the result."""
        parts = self.compared
        converter = cast("Converter", self.ours._original.converter) if isinstance(self.ours, AmpModule) else None
        prices = converter.prices if converter is not None else None
        return Check(
            model=type(self.model).__name__,
            dtype=dtype_name(self.low),
            differences=(*(one for part in parts for one in part.differences), *self.raised),
            calls=tuple(one for part in parts for one in part.calls),
            dropped=(*(one for part in parts for one in part.dropped), *self.unmeasured),
            values=tuple(_value(name, pairs) for name, pairs in self.errors.items()),
            float8=allowance(self.plans(), prices.sensitivity if prices is not None else None),
        )


def allowance(plans: Sequence[Plan], sensitivity: Sensitivity | None) -> Float8Allowance | None:
    """Return by how much products in float8 let a model be inexact; None if no plan has any.

    Where their errors are predicted, by twice the ratio of the plan's error to that of its 16 bits alone. Else by twice
    the ratio of the epsilons: rounding to float8 is that much coarser in all products.
    """
    planned = [node.float8 for plan in plans for node in plan.nodes if node.float8 is not None and node.float8.products]
    if not planned:
        return None
    low = torch.finfo(getattr(torch, plans[0].low)).eps
    forward = max(torch.finfo(RECIPES[one.recipe].numbers).eps for one in planned)
    backward = max(torch.finfo(RECIPES[one.recipe].gradient).eps for one in planned)
    in_forward = any(Product.OUTPUT in one.products for one in planned)
    coarse = {
        "output": _FLOAT8_TIMES * forward / low if in_forward else _TIMES,
        "gradient": _FLOAT8_TIMES * backward / low,
    }
    ratios = [ratio for plan in plans if sensitivity is not None and (ratio := _ratio(plan, sensitivity))]
    if ratios and sensitivity is not None and len(ratios) == len(plans):
        coarse[sensitivity.of] = max(_TIMES, _FLOAT8_TIMES * max(ratios))
    told = f", as predicted of the {sensitivity.of}" if ratios and sensitivity is not None else ""
    return Float8Allowance(coarse["output"], coarse["gradient"], f"float8 has fewer digits{told}")


def _ratio(plan: Plan, sensitivity: Sensitivity) -> float:
    """The predicted error of a plan to that of its 16 bits alone; 0 if it is not known."""
    known = {effect.key: effect.products for effect in sensitivity.effects}
    products = [
        known[node.name, node.op, node.module][error.product.value]
        for node in plan.nodes
        if node.float8 is not None
        for error in node.float8.errors
        if error.product in node.float8.products
    ]
    whole = added(node.effect for node in plan.nodes if node.effect)
    if not products or plan.float8_unmeasured:
        return 0.0
    alone = rms(all_of - in_float8 for all_of, in_float8 in zip(whole, added(products), strict=True))
    return rms(whole) / alone if alone else 0.0


def _further(arguments: Any, modes: tuple[bool, ...]) -> Iterator[behaviour.Trial]:
    """Yield calls beyond those by which a conversion is checked."""
    yield behaviour.Trial("a second call", behaviour.changed(arguments), modes, times=2)
    leaves, spec = pytree.tree_flatten(arguments)
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    first_of = {(one.shape, one.dtype): one for one in reversed(tensors)}
    if len(first_of) < len(tensors):
        same = [first_of[one.shape, one.dtype] if isinstance(one, torch.Tensor) else one for one in leaves]
        yield behaviour.Trial("one tensor for arguments that are alike", pytree.tree_unflatten(same, spec), modes)
    if any(one.is_floating_point() and not one.requires_grad for one in tensors):
        floats = [isinstance(one, torch.Tensor) and one.is_floating_point() for one in leaves]
        pairs = zip(leaves, floats, strict=True)
        learning = [one.detach().clone().requires_grad_() if is_float else one for one, is_float in pairs]
        yield behaviour.Trial("gradients of the arguments", pytree.tree_unflatten(learning, spec), modes)
    sizes = {one.shape[0] for one in tensors if one.ndim}
    if len(sizes) == 1 and min(sizes) > 2:
        less = [one[:-1] if isinstance(one, torch.Tensor) and one.ndim else one for one in leaves]
        yield behaviour.Trial("one row less", pytree.tree_unflatten(less, spec), modes)


_Errors = tuple[float, float | None, float, int]  # ours, torch.autocast's, the share of a gradient, and elements


def _errors(
    exact: behaviour.Behaviour, ours: behaviour.Behaviour, theirs: behaviour.Behaviour | None
) -> Iterator[tuple[str, _Errors]]:
    """Yield them for each floating output and gradient, and for all gradients as one."""
    floating = {name: t for name, t in exact.tensors.items() if t is not None and t.is_floating_point()}
    gradients = {name: t for name, t in floating.items() if name.startswith(_EACH)}
    norm = math.hypot(*(float(t.double().norm()) for t in gradients.values())) or 1.0
    outputs = [name for name in floating if name.startswith("output")]
    for name in (*outputs, *([_ALL] if gradients else []), *gradients):
        distance = partial(_whole, gradients) if name == _ALL else partial(_relative_distance, floating[name], name)
        one = gradients.get(name, torch.ones(1, device="cpu") * norm)
        share, elements = float(one.double().norm()) / norm, one.numel()
        yield name, (distance(ours), None if theirs is None else distance(theirs), share, elements)


def _relative_distance(reference: torch.Tensor, name: str, other: behaviour.Behaviour) -> float:
    tensor = other.tensors.get(name)
    return math.inf if tensor is None else behaviour.relative_distance(reference, tensor)


def _whole(references: Mapping[str, torch.Tensor], other: behaviour.Behaviour) -> float:
    far, norm = 0.0, 0.0
    for name, reference in references.items():
        size = float(reference.double().norm())
        far, norm = math.hypot(far, _relative_distance(reference, name, other) * (size or 1.0)), math.hypot(norm, size)
    return far / (norm or 1.0)


def _value(name: str, calls: Sequence[_Errors]) -> CheckedValue:
    ours, theirs, shares, elements = zip(*calls, strict=True)
    return CheckedValue(name, rms(ours), None if None in theirs else rms(theirs), rms(shares), max(elements))
