"""Propose edits of a conversion: try each on the plan, and return those that move the fewest bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autocastfx.capture.progress import stage
from autocastfx.errors import OpListError
from autocastfx.plan.plan import Plan, PlannedNode, Precision, Traffic
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.runtime.variant import Variant

_SHOWN = 3
_OPS = 3  # that are tried, of those that a list keeps in float32
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_WORTH = 0.99  # of the bytes moved before


@dataclass(frozen=True)
class Edit:
    """An edit and what it changes.

    Attributes:
        write: to be copied.
        where: where that goes.
        says: what it does to numbers and memory.
        before, after: bytes that a call moves, by the plan.
        errors: the predicted error before and after, if a sensitivity was given.
    """

    write: str
    where: str
    says: str
    before: int
    after: int
    errors: tuple[float, float] | None = None

    @property
    def effect(self) -> str:
        """The bytes, and the predicted error, in words."""
        share = 100 * (self.before - self.after) / self.before
        errors = "" if self.errors is None else f"; predicted error {self.errors[0]:.1e} → {self.errors[1]:.1e}"
        return (
            f"{share:.0f} % fewer bytes moved, {_in_units(self.before, self.before)} → "
            f"{_in_units(self.after, self.before)}{errors}"
        )


def best_edits(amp_model: AmpModule, variant: Variant) -> tuple[Edit, ...]:
    """Return the edits that move the fewest bytes, the best first; none where a plan counts no bytes."""
    before = variant.plan
    converter: Any = amp_model._original.converter
    is_source_here = any(variant is one for one in amp_model._made.values())
    if before.traffic == Traffic() or converter.plan is not None or converter.weights == "low" or not is_source_here:
        return ()
    edits: list[Edit] = []
    for (write, where, says), other in _candidates(before, converter):
        try:
            with stage(f"trying {write}", is_logged=False):
                after: Plan = amp_model._plan_by(other, variant)
        except OpListError:  # a rule of the list in use contradicts it
            continue
        errors = None if before.error is None or after.error is None else (before.error, after.error)
        edits.append(Edit(write, where, says, before.traffic.moved, after.traffic.moved, errors))
    worth = [edit for edit in edits if edit.after < _WORTH * edit.before]
    return tuple(sorted(worth, key=lambda edit: edit.after)[:_SHOWN])


def _candidates(plan: Plan, converter: Any) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Yield what to write, where, and what that does, with the converter that has it."""
    if converter.weights == "cast" and not converter.is_low_model:
        said = ('weights="cached"', "convert", "the same bits; 2 more bytes a parameter")
        yield said, replace(converter, weights="cached")
    if converter.fold == "exact" and not converter.is_low_model:
        said = ('fold="kernel"', "convert", "norms and softmax round what they store")
        yield said, replace(converter, fold="kernel")
    in_float32 = Counter(node.op for node in plan.nodes if _is_kept(node))
    for op, count in in_float32.most_common(_OPS):
        lists = converter.op_list.merged(OpList.of({"allow": [op]}, name="edit"))
        name = "default" if converter.op_list.name == plan.low else converter.op_list.name
        where = f'mine.yaml, and op_list=["{name}", "mine.yaml"]'
        says = f"{count} {'node runs' if count == 1 else 'nodes run'} in 16 bits; compare before you keep it"
        yield (f"allow: [{op}]", where, says), replace(converter, op_list=lists)


def _is_kept(node: PlannedNode) -> bool:
    return node.decision.category is Category.DENY and node.placement.run is Precision.FLOAT32


def _in_units(count: int, beside: int) -> str:
    """Write a count of bytes, in the unit of another one."""
    size, unit = next(((size, unit) for size, unit in _UNITS if beside >= size), (1, "B"))
    return f"{count / size:,.3g} {unit}"
