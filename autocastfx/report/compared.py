"""Protocols of a comparison, for the page of ``dump``, and a search for the variant that was compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from autocastfx.report.view import View

__all__ = ["Compared", "compared_variant"]


class Deviation(Protocol):
    """Relative error and shares of elements, for a value or a gradient."""

    @property
    def error(self) -> float: ...

    @property
    def overflow(self) -> float: ...

    @property
    def underflow(self) -> float: ...

    @property
    def zeros(self) -> float: ...

    @property
    def nan(self) -> float: ...


class ComparedParameter(Deviation, Protocol):
    """The deviation of a parameter's gradient."""

    @property
    def name(self) -> str: ...


class ComparedValue(ComparedParameter, Protocol):
    """The deviations of a node's value and of the gradient with respect to it."""

    @property
    def gradient(self) -> Deviation | None: ...


class Beginning(Protocol):
    """Where the error begins.

    ``says`` tells it in words; ``node`` is the node's name, empty where it begins at none; ``is_failure`` is true if
    something is Inf or NaN that is finite in float32.
    """

    @property
    def says(self) -> str: ...

    @property
    def node(self) -> str: ...

    @property
    def is_failure(self) -> bool: ...


class ComparedVariant(Protocol):
    """The key of the variant that was compared."""

    @property
    def mode(self) -> str: ...

    @property
    def call(self) -> str: ...

    @property
    def sizes(self) -> str: ...

    @property
    def low(self) -> str: ...


@runtime_checkable
class Compared(Protocol):
    """A comparison with the float32 graph."""

    @property
    def variant(self) -> ComparedVariant:
        """The variant that was compared."""
        ...

    @property
    def nodes(self) -> Sequence[ComparedValue]:
        """The nodes that were compared."""
        ...

    @property
    def parameters(self) -> Sequence[ComparedParameter]:
        """The gradients of parameters; empty if gradients were not compared."""
        ...

    @property
    def begins(self) -> Beginning:
        """Where the error begins."""
        ...


def compared_variant(views: Sequence[View], comparison: Compared) -> int:
    """Return the position of the variant that was compared.

    Raises:
        ValueError: the model lacks this variant, or the variant lacks a compared node.
    """
    of = comparison.variant
    key = (of.low, of.mode, of.call, of.sizes)
    found = next((i for i, v in enumerate(views) if (v.plan.low, v.mode, v.call, v.sizes) == key), None)
    if found is None:
        raise ValueError(
            f"the comparison is of a variant that this model lacks: {of.low}, {of.mode} mode, called with {of.call}, "
            f"sizes {of.sizes or 'any'}. Give what compare() returned for this model."
        )
    names = {row.name for row in views[found].rows}
    missing = next((node.name for node in comparison.nodes if node.name not in names), None)
    if missing is not None:
        raise ValueError(
            f"the comparison is of another model: this one has no node {missing!r}. Give what compare() returned for "
            "this model."
        )
    return found
