"""Tensors whose elements depend on their place alone: positions, and the masks that models make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Affine", "Chosen", "Known", "all_of", "broadcast", "constant", "everywhere", "mapped"]

Shape = Sequence[Any]  # sizes, which may be symbolic


@dataclass(frozen=True)
class Affine:
    """A tensor with ``start + slopes[0]·i + slopes[1]·j + …`` at the place ``[i, j, …]``.

    Attributes:
        start: a number, or a symbolic size.
        slopes: one for each dimension.
    """

    start: Any
    slopes: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.slopes)

    def at(self, change: Callable[[Affine], Affine]) -> Affine:
        """The same elements at other places."""
        return change(self)

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """The sum with ``times`` another tensor of as many dimensions."""
        slopes = tuple(a + times * b for a, b in zip(self.slopes, other.slopes, strict=True))
        return Affine(self.start + times * other.start, slopes)

    def negative(self) -> Affine:
        """A tensor of whole numbers that is 0 or more where this one is below 0, and nowhere else."""
        return Affine(-1 - self.start, tuple(-slope for slope in self.slopes))

    def lowest(self, shape: Shape) -> Any:
        """The smallest element of a tensor of this shape."""
        return self.start + sum(slope * (size - 1) for slope, size in zip(self.slopes, shape, strict=True) if slope < 0)

    def is_at_least(self, bound: int, shape: Shape) -> bool:
        """True if no element of a tensor of this shape is below ``bound``, whatever the sizes are."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(self.lowest(shape) >= bound)

    def simplified(self, shape: Shape) -> Affine:
        """The same tensor, of this shape, without slopes along single elements."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        found = (
            0 if statically_known_true(size == 1) else slope for slope, size in zip(self.slopes, shape, strict=True)
        )
        return Affine(self.start, tuple(found))


@dataclass(frozen=True)
class Chosen:
    """A tensor of two numbers: ``yes`` where each of ``conditions`` is 0 or more, and ``no`` elsewhere."""

    conditions: tuple[Affine, ...]
    yes: float
    no: float

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.conditions[0].ndim

    def at(self, change: Callable[[Affine], Affine]) -> Chosen:
        """The same elements at other places."""
        return replace(self, conditions=tuple(map(change, self.conditions)))

    def where(self, holds: Callable[[float], bool]) -> tuple[Affine, ...] | None:
        """Conditions that are met where ``holds`` is true of the element, and nowhere else; None for no such."""
        if holds(self.yes) and not holds(self.no):
            return self.conditions
        if holds(self.no) and not holds(self.yes) and len(self.conditions) == 1:
            return (self.conditions[0].negative(),)
        return None

    def simplified(self, shape: Shape) -> Known:
        """The same tensor, of this shape, without conditions that are always met."""
        conditions = [condition.simplified(shape) for condition in self.conditions]
        conditions = [condition for condition in conditions if not condition.is_at_least(0, shape)]
        if not conditions:
            return everywhere(self.yes, len(shape))
        if any(condition.negative().is_at_least(0, shape) for condition in conditions):
            return everywhere(self.no, len(shape))
        return replace(self, conditions=tuple(conditions))


Known = Affine | Chosen


def broadcast(known: Known, ndim: int) -> Known:
    """The same tensor, broadcast to ``ndim`` dimensions."""
    return known.at(lambda affine: Affine(affine.start, (0,) * (ndim - affine.ndim) + affine.slopes))


def everywhere(number: Any, ndim: int) -> Affine:
    """A tensor of one number."""
    return Affine(number, (0,) * ndim)


def constant(known: Known | None) -> float | None:
    """The number that the tensor holds everywhere; None if it holds several, or is not known."""
    if isinstance(known, Affine) and not any(known.slopes) and isinstance(known.start, (int, float)):
        return known.start
    return None


def mapped(change: Callable[[float, float], float], a: Known, b: Known) -> Known | None:
    """``change`` of each element of ``a`` and of ``b``, of which one at least is a constant; None for others."""
    left, right = constant(a), constant(b)
    if left is not None and right is not None:
        return everywhere(change(left, right), a.ndim)
    if isinstance(a, Chosen) and right is not None:
        return replace(a, yes=change(a.yes, right), no=change(a.no, right))
    if isinstance(b, Chosen) and left is not None:
        return replace(b, yes=change(left, b.yes), no=change(left, b.no))
    return None


def all_of(a: Known, b: Known) -> Known | None:
    """1 where both are, 0 elsewhere, of tensors of 0 and 1 that are not 0 everywhere; None if that is not known."""
    one, other = (() if constant(k) == 1 else k.where(bool) if isinstance(k, Chosen) else None for k in (a, b))
    if one is None or other is None:
        return None
    return Chosen((*one, *other), 1, 0) if one or other else everywhere(1, a.ndim)
