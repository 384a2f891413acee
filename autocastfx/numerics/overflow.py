"""The node at which Inf or NaN begins, with what it read and what helps, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from autocastfx.plan.plan import Precision

__all__ = ["InputRange", "Overflow"]


@dataclass(frozen=True)
class InputRange:
    """A floating-point input of a node: its name, dtype, and smallest and largest value."""

    name: str
    dtype: str
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}, {self.lowest:.4g} to {self.highest:.4g}"


@dataclass(frozen=True)
class Overflow:
    """A node at which Inf or NaN begins, not one that only passes it on. Its truth is whether it is a fault.

    Attributes:
        name, op, module: of the node. A cast that the conversion inserted is an ``op`` of ``cast to`` its dtype.
        dtype: of what it gave.
        precision: what it ran in, by the plan; empty for casts.
        infinite, nans: how many elements are so.
        inputs: what it read.
        line: ``file:line: code`` of the model's own source; empty where it is not known.
        because: why it ran so.
        in_float32: whether the float32 graph gives Inf or NaN here too, so that precision is not the cause; None where
            the float32 graph is not at hand.
        fix: an op list that lets it run in float32, in YAML; empty where no list helps.
        advice: what to do, in words.
        is_fault: False for a note: no output of the model holds Inf or NaN that begins here, and no conversion is known
            to make it, as for a mask with -inf that softmax takes.
    """

    name: str
    op: str
    module: str
    dtype: str
    precision: str
    infinite: int
    nans: int
    inputs: tuple[InputRange, ...]
    line: str
    because: str
    in_float32: bool | None
    fix: str
    advice: str
    is_fault: bool = True

    def __bool__(self) -> bool:
        return self.is_fault

    @property
    def headline(self) -> str:
        """The node and what it gives, as a sentence."""
        found = " and ".join(f"{n} {what}" for n, what in ((self.infinite, "Inf"), (self.nans, "NaN")) if n)
        return f"{self.name} ({self.op}) in module {self.module or '(root)'} gives {found} in {self.dtype}."

    def __str__(self) -> str:
        lines = [self.headline if self.is_fault else f"no fault: {self.headline}"]
        lines += [f"  line: {self.line}"] if self.line else []
        lines += [f"  reads {one}" for one in self.inputs]
        runs = f"runs {Precision(self.precision).in_words}" if self.precision else "why"
        lines += [f"  {runs}: {self.because}"]
        lines += [f"  what to do: {self.advice}"]
        lines += [f"    {line}" for line in self.fix.splitlines()]
        return "\n".join(lines)
