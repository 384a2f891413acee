"""Choose value by value how backward gets what it reads: by the bytes that a form spares and the error that it adds."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from autocastfx.capture.call import arguments_of
from autocastfx.capture.leave_intact import isolated
from autocastfx.conversion import convert_again
from autocastfx.errors import ArgumentError, SensitivityError
from autocastfx.numerics.choice import Candidate, Choice
from autocastfx.numerics.compare import TargetDistance
from autocastfx.numerics.logprob_gap import Inputs, LossFunction, loss_of
from autocastfx.numerics.plan_search import Budget
from autocastfx.plan.plan import PlannedSaved
from autocastfx.policy.op_list import OpList
from autocastfx.policy.saved import Keep
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.runtime.saved import FORMS, Form
from autocastfx.runtime.variant import Variant

_SCALE = 1024  # of a loss in float16, whose small gradients would else become zero
_ALL: Mapping[str, str] = {"keep": Keep.RECOMPUTE.value}
Group = tuple[str, str]  # a module path and an op: what one rule covers


@dataclass(frozen=True)
class SavedOption:
    """A form for the values of an op in a module, the bytes that it spares, and the error that it adds, squared."""

    group: Group
    keep: Keep
    spares: int
    error: float


@dataclass(frozen=True)
class SavedChoice:
    """What is kept for backward, as rules of an op list.

    Attributes:
        entries: the rules, as under ``saved`` of an op list.
        before: bytes that autograd keeps by itself.
        kept: bytes that are kept by the rules.
        start: the relative error of the gradient without them, measured.
        predicted, measured: with them.
        planned: the parts of the plan of the measured mode.
    """

    entries: tuple[Mapping[str, Any], ...]
    before: int
    kept: int
    start: float
    predicted: float
    measured: float
    planned: tuple[PlannedSaved, ...] = field(default=(), repr=False)

    def op_list(self) -> OpList:
        """The rules as a list."""
        return OpList.of({"saved": list(self.entries)}, name="saved")

    def __str__(self) -> str:
        return (
            f"kept for backward: {self.kept / 1e6:.2f} MB instead of {self.before / 1e6:.2f}; error {self.start:.2e} "
            f"without, predicted {self.predicted:.2e}, measured {self.measured:.2e}"
        )


@dataclass
class SavedSearch:
    """The search for one model.

    Attributes:
        amp_model: converted with the placement that stays.
        loss_fn, inputs: as for :func:`tune`.
        judge: measures the error on batches that were held out.
    """

    amp_model: AmpModule
    batches: Sequence[Any]
    loss_fn: LossFunction | None
    inputs: Inputs | None
    judge: TargetDistance
    low: torch.dtype
    _now: dict[Group, Keep] = field(default_factory=dict[Group, Keep])

    def result(
        self, *, ratio: float | None = None, error: float | None = None, share: float | None = None
    ) -> SavedChoice:
        """Find the rules that keep the fewest bytes within an error, or add the least error within bytes.

        ``ratio`` is the most that the error may be, by that without any rules, ``error`` the most that it may be, and
        ``share`` the most bytes, by what autograd keeps by itself.

        Raises:
            SensitivityError: no rules keep so few bytes.
        """
        start = self.judge(self.amp_model, self.low)
        base = self._converted((_ALL,))
        sizes = self._sizes(base)
        options = self._options(base)
        limit = error if error is not None else math.inf if ratio is None else ratio * start
        most = None if share is None else share * sizes[0]
        chosen = _within(options, limit**2 - start**2, None if most is None else sizes[1] - most)
        while True:
            entries = _entries(_groups(base), chosen)
            made = self._converted(entries)
            before, kept = self._sizes(made)
            predicted = math.sqrt(start**2 + sum(one.error for one in chosen))
            measured, planned = self.judge(made, self.low), self._variant(made).plan.saved
            found = SavedChoice(entries, before, kept, start, predicted, measured, planned)
            if found.measured <= limit or not chosen:
                break
            chosen = chosen[: len(chosen) * 3 // 4]  # without those that spare the fewest bytes for their error
        if most is not None and kept > most:
            raise SensitivityError(f"no rules keep less than {kept / before:.0%} of the bytes: ask for a larger share.")
        return found

    def _converted(self, entries: Sequence[Mapping[str, Any]]) -> AmpModule:
        made = convert_again(self.amp_model, OpList.of({"saved": list(entries)}, name="saved"))
        if made is None:
            raise SensitivityError("the captured graph is not at hand: convert the model again.")
        return made

    def _variant(self, amp_model: AmpModule) -> Variant:
        args, kwargs = arguments_of(self.batches[0] if self.inputs is None else self.inputs(self.batches[0]))
        return amp_model._variant_for(args, kwargs)

    def _sizes(self, amp_model: AmpModule) -> tuple[int, int]:
        saved = self._variant(amp_model).plan.saved
        return sum(one.bytes for one in saved), sum(one.kept for one in saved)

    def _options(self, base: AmpModule) -> list[SavedOption]:
        """Measure each form of each group of values, with one forward and one backward for each."""
        groups = _groups(base)
        errors: dict[tuple[Group, Keep], float] = {}
        for batch in self.batches:
            args, kwargs = arguments_of(batch if self.inputs is None else self.inputs(batch))
            variant = base._variant_for(args, kwargs)
            with isolated(base), self._on_trial(variant, groups), torch.enable_grad():
                wanted = [p for p in base.parameters() if p.requires_grad]
                loss = loss_of(base(*args, **kwargs), batch, self.loss_fn)
                loss = loss * (_SCALE if self.low == torch.float16 else 1)
                exact = _gradient(loss, wanted)
                size = sum(float(g.double().square().sum()) for g in exact)
                for group, parts in groups.items():
                    for keep in dict.fromkeys(size.keep for one in parts for size in one.smaller):
                        self._now[group] = keep
                        moved = _gradient(loss, wanted)
                        del self._now[group]
                        part = sum(float((a - b).double().square().sum()) for a, b in zip(moved, exact, strict=True))
                        errors[group, keep] = errors.get((group, keep), 0.0) + part / size / len(self.batches)
        options: list[SavedOption] = []
        for (group, keep), added in errors.items():
            sizes = ((one, next((s.bytes for s in one.smaller if s.keep is keep), one.kept)) for one in groups[group])
            spares = sum(one.kept - size for one, size in sizes)
            if spares > 0 and math.isfinite(added):
                options.append(SavedOption(group, keep, spares, added))
        return options

    @contextmanager
    def _on_trial(self, variant: Variant, groups: Mapping[Group, Sequence[PlannedSaved]]) -> Generator[None]:
        """While open, values are kept as computed, and backward reads those of a group in the form that is on trial."""
        of_group = {one.name: group for group, parts in groups.items() for one in parts}

        def pack(x: Tensor) -> tuple[Tensor, ...]:
            return (x,)

        def unpack(group: Group, dtype: torch.dtype, parts: tuple[Tensor, ...]) -> Tensor:
            keep = self._now.get(group)
            return parts[0] if keep is None else FORMS[keep].unpack(dtype, FORMS[keep].pack(parts[0]))

        def form(one: PlannedSaved) -> Form | None:
            return Form(pack, partial(unpack, of_group[one.name])) if one.name in of_group else None

        variant.compile_graph(form)
        try:
            yield
        finally:
            variant.compile_graph()


def _gradient(loss: Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    given = cast("Sequence[Tensor | None]", found)
    return [torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(given, wanted, strict=True)]


def _groups(base: AmpModule) -> dict[Group, list[PlannedSaved]]:
    """The values that are kept as computed and may be kept in other forms, by module and op.

    A rule covers all values of an op in a module, so a group is left out of which some are recomputed.
    """
    groups: dict[Group, list[PlannedSaved]] = {}
    mixed: set[Group] = set()
    for variant in base.variants:
        for one in variant.plan.saved:
            group = (one.module, one.op)
            if one.keep is not Keep.COMPUTED:
                mixed.add(group)
            elif one.smaller:
                groups.setdefault(group, []).append(one)
    return {group: parts for group, parts in groups.items() if group not in mixed}


def _within(options: Sequence[SavedOption], error: float, least: float | None) -> list[SavedOption]:
    """Choose a form for each group, or none: to spare the most within a squared error, or ``least`` with little error.

    They are in the order of the error added for the bytes spared.
    """
    choice = Choice([Candidate(one.spares, one.error, key=one.group) for one in options], {})
    chosen = choice.most_worth(max(0.0, error)) if least is None else choice.least_error(least)
    every = (options[i] for i in (choice.at(0.0) if chosen is None else chosen))
    return sorted(every, key=lambda one: one.error / one.spares)


def _entries(groups: Mapping[Group, object], chosen: Sequence[SavedOption]) -> tuple[Mapping[str, Any], ...]:
    """The rules of a choice, the outer modules' first."""
    keeps = {option.group: option.keep for option in chosen}
    ops = {op for _, op in keeps}
    entries: list[Mapping[str, Any]] = [_ALL]
    for module, op in sorted((group for group in groups if group[1] in ops), key=lambda g: (g[0].count("."), g)):
        keep = keeps.get((module, op), Keep.RECOMPUTE)
        entries.append({"keep": keep.value, "ops": [op], **({"path": module} if module else {})})
    return tuple(entries)


def check_saved(saved: object, of: str) -> dict[str, float]:
    """The limit that an argument ``saved`` of :func:`tune` sets, as arguments of :meth:`SavedSearch.result`.

    Raises:
        ValueError: it is none, or what is tuned has no backward.
    """
    if of != "gradient":
        raise ArgumentError(
            "saved is for training: what is kept for backward does not change the output. Leave it out."
        )
    if isinstance(saved, Budget):
        return {"error": saved.error} if saved.error is not None else {"share": cast("float", saved.bytes)}
    if saved is True:
        return {"ratio": 1.1}
    if isinstance(saved, (int, float)) and not isinstance(saved, bool) and 1 <= saved < math.inf:
        return {"ratio": float(saved)}
    raise ArgumentError(f"saved is True, a factor of the error from 1 on, or a Budget, not {saved!r}")
