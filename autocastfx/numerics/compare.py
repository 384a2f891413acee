"""``compare``: how far the values of a converted model are from those of the float32 graph, node by node."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from autocastfx.amp_module import AmpModule
from autocastfx.errors import VariantError
from autocastfx.graph import module_path
from autocastfx.numerics.paired_run import floating, run_side_by_side
from autocastfx.op_name import op_name
from autocastfx.plan import PlannedNode

__all__ = ["ComparedNode", "Comparison", "compare"]


@dataclass(frozen=True)
class ComparedNode:
    """One node, by the floating-point values that it gave in both graphs.

    Attributes:
        name, op, module: of the node.
        precision: what it ran in, by the plan.
        dtype: of its values after the conversion.
        error: distance from float32 in the 2-norm, relative to the norm of float32, over what is finite in both.
        overflow: share of elements that are Inf or NaN where float32 is finite.
        underflow: share that are zero or denormal in ``dtype`` where float32 is neither.
        nan: share that are NaN where float32 is not.
    """

    name: str
    op: str
    module: str
    precision: str
    dtype: str
    error: float
    overflow: float
    underflow: float
    nan: float

    @property
    def severity(self) -> float:
        """By what nodes are ranked: the error; infinite where values overflowed."""
        return math.inf if self.overflow or self.nan else self.error


@dataclass(frozen=True)
class Comparison:
    """All nodes that both graphs have, in graph order.

    Attributes:
        nodes: those with floating-point values.
        skipped: how many computing nodes only one of the two graphs has, casts of the conversion left out: those that
            were recomposed or taken apart, and what they became.
    """

    nodes: tuple[ComparedNode, ...]
    skipped: int

    def __getitem__(self, name: str) -> ComparedNode:
        """The node called ``name``.

        Raises:
            KeyError: it was not compared.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"no node {name!r} was compared")

    @property
    def worst(self) -> ComparedNode | None:
        """The first node that overflowed, else the one with the largest error; None if nothing was compared."""
        return max(self.nodes, key=lambda node: node.severity, default=None)

    @property
    def first_non_finite(self) -> ComparedNode | None:
        """The first node with Inf or NaN where float32 is finite; None if there is none."""
        return next((node for node in self.nodes if node.overflow), None)

    def table(self, most: int = 20, *, in_order: bool = False) -> str:
        """The nodes as text, the worst first.

        Args:
            most: as many are shown.
            in_order: the first ones in graph order instead.
        """
        ranked = self.nodes if in_order else sorted(self.nodes, key=lambda node: -node.severity)
        cells = [("node", "op", "module", "runs", "dtype", "error", "overflow", "underflow", "nan")]
        cells += [_cells(node) for node in ranked[:most]]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        rest = len(self.nodes) - len(cells) + 1
        more = f"{rest} more nodes; " if rest else ""
        return "\n".join([*lines, f"{more}{self.skipped} nodes that only one of the graphs has"])

    def to_json(self) -> str:
        """Everything as JSON text, in graph order; NaN and Infinity are written so, as Python's ``json`` reads them."""
        return json.dumps(asdict(self), indent=1)


def compare(model: nn.Module | None, amp_model: AmpModule, *inputs: Any, **kwargs: Any) -> Comparison:
    """Run a converted model and the float32 graph on one call, with the same random numbers, and compare each value.

    Both graphs run node by node, and only values that are still to be read are kept. Buffers, inputs and the state of
    torch's random numbers are afterwards as before, in training mode too. The call's modes are those of ``amp_model``.
    A sub-graph (a region without gradients) is one node.

    Args:
        model: the float32 original, for its parameters and buffers; None: the float32 graph runs on those of
            ``amp_model``, as it does on the original's as long as they are shared.
        amp_model: what ``convert`` returned.
        *inputs: of the call, by position.
        **kwargs: of the call, by keyword.

    Raises:
        TypeError: the arguments do not fit the forward, or ``amp_model`` is no converted model.
        VariantError: no variant fits; or ``model`` is None where the float32 graph is not at hand, as after unpickling
            and with ``weights="low"``.
        CaptureError: ``model`` cannot be captured.
    """
    run = run_side_by_side(model, amp_model, inputs, kwargs)
    if model is None and run.variant.captured is None:
        raise VariantError(
            "the float32 graph is not at hand: the model was unpickled, or its weights are stored in 16 bits. Give "
            "compare the float32 model as its first argument."
        )
    planned = {node.name: node for node in run.variant.plan.nodes}
    nodes: list[ComparedNode] = []
    for step in run.steps:
        if step.twin is None:
            continue
        ours, theirs = floating(step.value), floating(step.reference)
        if ours and [t.shape for t in ours] == [t.shape for t in theirs]:
            numbers = _Numbers.of(ours, theirs)
            plan = planned.get(step.node.name)
            where = module_path(step.twin)
            nodes.append(_compared(step.node.name, op_name(step.twin), where, plan, ours, numbers))
    return Comparison(tuple(nodes), run.unmatched)


@dataclass(frozen=True)
class _Numbers:
    error: float
    overflow: float
    underflow: float
    nan: float

    @classmethod
    def of(cls, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> _Numbers:
        sums = sum(_sums(a, b) for a, b in zip(ours, theirs, strict=True))
        far, norm, overflow, underflow, nan = torch.as_tensor(sums).tolist()
        count = max(sum(t.numel() for t in ours), 1)
        error = math.sqrt(far / norm) if norm else (math.inf if far else 0.0)
        return cls(error, overflow / count, underflow / count, nan / count)


def _sums(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Squares of the distance and of the reference, and numbers of overflows, underflows and NaN."""
    ours, theirs = ours.detach().to(theirs.device), theirs.detach()
    finite, expected = ours.isfinite(), theirs.isfinite()
    both, zero = finite & expected, torch.zeros((), dtype=torch.float64, device=theirs.device)
    wide = torch.where(both, theirs.double(), zero)
    distance = torch.where(both, ours.double(), zero) - wide
    small = (ours.abs() < torch.finfo(ours.dtype).tiny) & (theirs.abs() >= torch.finfo(theirs.dtype).tiny)
    counts = (expected & ~finite, small, ours.isnan() & ~theirs.isnan())
    return torch.stack([distance.square().sum(), wide.square().sum(), *(c.sum().double() for c in counts)])


def _compared(
    name: str, op: str, module: str, plan: PlannedNode | None, ours: list[torch.Tensor], numbers: _Numbers
) -> ComparedNode:
    precision = str(plan.placement.run) if plan is not None else ""
    dtype = ",".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in ours))
    return ComparedNode(name, op, module, precision, dtype, **vars(numbers))


def _cells(node: ComparedNode) -> tuple[str, ...]:
    shares = [f"{share:.2%}" if share else "-" for share in (node.overflow, node.underflow, node.nan)]
    return (node.name, node.op, node.module or "(root)", node.precision, node.dtype, f"{node.error:.2e}", *shares)
