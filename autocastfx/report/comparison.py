"""The result of ``compare``: deviations of nodes, their gradients and parameters' gradients, as text and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autocastfx.dtypes import dtype_name
from autocastfx.errors import ArgumentError, UnknownNameError, listed
from autocastfx.files import NON_FINITE_AS_TEXT, parsed_json, plain_data, typed_data
from autocastfx.graph.cell import aligned, preformatted
from autocastfx.plan.plan import Recomposed
from autocastfx.report.view import View, error_cell
from autocastfx.runtime.variant import Variant


@dataclass(frozen=True, repr=False)
class Comparison:
    """A comparison of a converted graph with the float32 graph, node by node in graph order. ``str`` gives the table.

    Attributes:
        nodes: the nodes that both graphs have and that have floating-point values.
        skipped: the number of computing nodes that only one graph has, not counting casts: recomposed nodes, and those
            that they became.
        whole: names of nodes whose sub-graphs were not looked into: ``cond`` and loops.
        parameters: the gradients of parameters and of inputs that require one; empty if gradients were not compared.
        scale: the loss scale of the gradients; None if gradients were not compared.
        variant: the variant that ran.
        recomposed: the nodes of the converted graph that stand for others of the float32 graph, which are not compared.
        cancellations: the sums and differences of nearly equal values that made a rounding large.
    """

    nodes: tuple[ComparedNode, ...]
    skipped: int
    whole: tuple[str, ...]
    parameters: tuple[ComparedParameter, ...]
    scale: float | None
    variant: ComparedVariant
    recomposed: tuple[Recomposed, ...] = ()
    cancellations: tuple[Cancellation, ...] = ()

    def __getitem__(self, name: str) -> ComparedNode:
        """Return the node called ``name``.

        Raises:
            KeyError: no compared node has this name.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise UnknownNameError(f"no node {name!r} was compared")

    @property
    def worst(self) -> ComparedNode | None:
        """The first node that overflowed, else the one with the largest error; None if nothing was compared."""
        return max(self.nodes, key=lambda node: node.severity, default=None)

    @property
    def source(self) -> ComparedNode | None:
        """The origin of the error: the first node that overflowed, else the one that adds most to what it inherits."""
        return max(self.nodes, key=lambda node: node.added, default=None)

    @property
    def first_non_finite(self) -> ComparedNode | None:
        """The first node with Inf or NaN where float32 is finite; None if there is no such node."""
        return next((node for node in self.nodes if node.overflow), None)

    @property
    def worst_gradient(self) -> ComparedNode | None:
        """The first gradient to overflow in backward order, else the one with the largest error; None if none."""
        return max(self._backwards(), key=lambda node: node.gradient.severity if node.gradient else 0.0, default=None)

    @property
    def first_non_finite_gradient(self) -> ComparedNode | None:
        """The first node in backward order with a gradient of Inf or NaN where float32's is finite; None if none."""
        return next((node for node in self._backwards() if node.gradient and node.gradient.overflow), None)

    @property
    def is_finite(self) -> bool:
        """True if all values and gradients are finite where float32's are."""
        gradients = (*(node.gradient for node in self._backwards()), *self.parameters)
        return not any(deviation is not None and deviation.overflow for deviation in (*self.nodes, *gradients))

    def _backwards(self) -> list[ComparedNode]:
        return [node for node in reversed(self.nodes) if node.gradient is not None]

    def table(self, most: int = 20, *, in_order: bool = False, gradients: bool = False) -> str:
        """Write the nodes as a table, the worst first: those that overflow, then by predicted errors if there are any.

        Args:
            most: the number of rows to show.
            in_order: show the first nodes in graph order instead.
            gradients: show gradients instead of values, and parameters after nodes; ``in_order`` then means backward
                order.
        """
        nodes = self._backwards() if gradients else list(self.nodes)
        if not in_order:
            nodes.sort(key=lambda node: _rank(node, node.gradient if gradients else node))
        is_predicted = any(node.predicted is not None for node in nodes)
        rows = [(_names(node, is_predicted), node.gradient if gradients else node) for node in nodes]
        deviations = [(names, deviation) for names, deviation in rows if deviation is not None]
        titles = ("node", "op", "module", "runs", *(["predicted"] if is_predicted else []))
        lines = [*_lines(titles, deviations, most, "nodes"), *([_PREDICTED] if is_predicted else [])]
        if gradients:
            ranked = sorted(self.parameters, key=lambda parameter: -parameter.severity)
            lines += ["", *_lines(("parameter",), [((p.name,), p) for p in ranked], most, "parameters")]
        begins = self._gradients_begin() if gradients else self._values_begin()
        return "\n".join([*lines, *([begins.report] if begins.says else []), self._rest()])

    @property
    def begins(self) -> Beginning:
        """Where the error begins: Inf and NaN of values, else of gradients, else the largest error that a node adds."""
        values, gradients = self._values_begin(), self._gradients_begin()
        return gradients if gradients.is_failure and not values.is_failure else values

    def _values_begin(self) -> Beginning:
        source = self.source
        if source is not None and source.overflow:
            behind = next((one for one in self.cancellations if one.node == source.cancels), None)
            says = f"Inf and NaN begin at {_place(source)}" + (f"; before it, {behind.node} {behind}" if behind else "")
            return Beginning(says, source.name, is_failure=True, fix=behind.fix if behind else "")
        if source is not None and source.added:
            behind = self._cancellation_behind(source)
            node = self[behind.node] if behind is not None else source
            says = f"the error begins at {_place(node)}: {node.error:.2e}, {node.inherited:.2e} in what it reads"
            return Beginning(f"{says}; {behind}" if behind else says, node.name, fix=behind.fix if behind else "")
        return Beginning()

    def _cancellation_behind(self, source: ComparedNode) -> Cancellation | None:
        """The cancellation by which ``source`` has its error, and not by rounding."""
        is_inherited = source.precision == "float32" or source.inherited > source.error / 10
        if source.cancels != source.name and not is_inherited:
            return None
        return next((one for one in self.cancellations if one.node == source.cancels), None)

    def _gradients_begin(self) -> Beginning:
        first, lost = self.first_non_finite_gradient, [one.name for one in self.parameters if one.overflow]
        if first is not None:
            says = f"on the way back, Inf and NaN begin with the gradient of {_place(first)}"
            return Beginning(says, first.name, is_failure=True)
        if not lost:
            return Beginning()
        says = f"Inf and NaN are in gradients of parameters alone: {listed(lost, 1)}; a smaller scale avoids them"
        return Beginning(says, is_failure=True)

    def _rest(self) -> str:
        whole = f"; not looked into: {', '.join(self.whole)}" if self.whole else ""
        named = [f"{one.node} (the {one.pattern} of {len(one.replaced)} nodes)" for one in self.recomposed]
        recomposed = f"; recomposed: {listed(named, _MOST)}" if named else ""
        return f"{self.skipped} nodes that only one of the graphs has{recomposed}{whole}"

    def __repr__(self) -> str:
        return f"Comparison({'; '.join(self._summary())})"

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        rest = f"\n\n{self.table(_MOST_IN_A_CELL)}" if self.nodes else ""
        return preformatted("\n".join(self._summary()) + rest)

    def _summary(self) -> list[str]:
        """What ran, how many nodes were compared, and whether and where it goes wrong, in short lines."""
        worst, variant = self.worst, self.variant
        error = f", the largest error {worst.error:.2e} at {_place(worst)}" if worst is not None else ""
        gradients = f" and {len(self.parameters)} gradients of parameters" if self.scale is not None else ""
        finite = "finite" if self.is_finite else "not finite"
        begins = [self.begins.says] if self.begins.says else []
        return [
            f"{variant.low} on {variant.device}, {variant.mode} mode, op list {variant.op_list}",
            f"{len(self.nodes)} nodes{gradients} compared with float32: {finite}{error}",
            *begins,
        ]

    def to_json(self) -> str:
        """Write the comparison as JSON text; :meth:`from_json` reads it back.

        Infinity and NaN become the strings ``"inf"`` and ``"nan"``, because JSON has no such numbers.
        """
        data = {"format": _FORMAT, **plain_data(self, NON_FINITE_AS_TEXT)}
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """Read the comparison that :meth:`to_json` wrote.

        Raises:
            ValueError: the text is not such JSON.
        """
        try:
            data: dict[str, Any] = parsed_json(text)
            if (version := data.pop("format")) != _FORMAT:
                raise ArgumentError(f"this comparison has format {version!r}, and this version reads {_FORMAT}")
            return typed_data(cls, data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(f"this is not a comparison written by to_json: {error!r}") from error


# Measure the deviation of 16-bit values from float32 values.

_PIECE = 1 << 20  # elements


@dataclass(frozen=True)
class Deviation:
    """The deviation of values from float32 values.

    Attributes:
        dtype: the values' dtypes, joined by commas.
        error: the distance in the 2-norm, relative to the norm of the float32 values, over the elements that are finite
            in both; infinite if float32 has finite elements and all of them are Inf or NaN. Masks are left out:
            elements of half ``dtype``'s largest number, for float32 values beyond its range.
        overflow: share of elements that are Inf or NaN where float32 is finite.
        underflow: share of elements that are zero or denormal in ``dtype`` where float32 is neither.
        zeros: share of elements that are zero where float32 is not.
        nan: share of elements that are NaN where float32 is not.
    """

    dtype: str
    error: float
    overflow: float
    underflow: float
    zeros: float
    nan: float

    @property
    def severity(self) -> float:
        """The rank of the values: the error, or infinite if they overflowed."""
        return math.inf if self.overflow or self.nan else self.error

    @classmethod
    def of(cls, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> Deviation:
        """Measure the deviation of ``ours`` from ``theirs``, tensors of the same number and shapes."""
        sums = sum(_sums(a, b) for pair in zip(ours, theirs, strict=True) for a, b in _parts(*pair))
        far, norm, finite, overflow, underflow, zeros, nan = torch.as_tensor(sums, device="cpu").tolist()
        count = max(sum(t.numel() for t in ours), 1)
        is_lost = overflow and overflow == finite
        error = math.inf if is_lost or (far and not norm) else math.sqrt(far / norm) if norm else 0.0
        dtype = ",".join(dict.fromkeys(dtype_name(t.dtype) for t in ours))
        return cls(dtype, error, overflow / count, underflow / count, zeros / count, nan / count)


def _parts(ours: torch.Tensor, theirs: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split both into pieces, because the computation takes several times their memory."""
    pieces = (_strided(tensor).reshape(-1).split(_PIECE) for tensor in (ours, theirs))
    return zip(*pieces, strict=True)


def _sums(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the squared norms of distance and reference, and how many finite values the reference has.

    Then come the counts of overflows, underflows, zeros and NaN.
    """
    ours = ours.to(theirs.device)
    finite, expected = ours.isfinite(), theirs.isfinite()
    largest, zero = torch.finfo(ours.dtype).max, torch.zeros((), dtype=torch.float64, device=theirs.device)
    both = finite & expected & ~((theirs.abs() > largest) & (ours * theirs.sign() == largest / 2))
    wide = torch.where(both, theirs.double(), zero)
    distance = torch.where(both, ours.double(), zero) - wide
    small = (ours.abs() < torch.finfo(ours.dtype).tiny) & (theirs.abs() >= torch.finfo(theirs.dtype).tiny)
    counts = (expected, expected & ~finite, small, (ours == 0) & (theirs != 0), ours.isnan() & ~theirs.isnan())
    return torch.stack([distance.square().sum(), wide.square().sum(), *(c.sum().double() for c in counts)])


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


_FORMAT = 2
_MOST_IN_A_CELL = 10  # nodes
_MOST = 5  # recomposed nodes that the text names
_PREDICTED = "predicted: what the 16 bits at this node change in the gradient, or the output, of the whole model"


@dataclass(frozen=True)
class ComparedNode(Deviation):
    """The deviation of a node's floating-point values between both graphs.

    Attributes:
        name, op, module: the node's; in a sub-graph the name is ``subgraph/name``, as in the plan.
        precision: the precision that it ran in, by the plan.
        inherited: the largest error of the values that it reads; infinite if one overflowed.
        gradient: the deviation of the gradient with respect to its value; None if there is none, or if the node only
            passes another node's value on, as a cast that changes nothing.
        predicted: the relative error of the model's gradient, or of its output, that the plan predicts for the node;
            None if none was measured.
        cancels: the node at which nearly equal values cancelled, from which most of the error comes that it inherits:
            its own name if it does so itself; empty if there is none.
    """

    name: str
    op: str
    module: str
    precision: str
    inherited: float = 0.0
    gradient: Deviation | None = None
    predicted: float | None = None
    cancels: str = ""

    @property
    def added(self) -> float:
        """The error beyond the inherited one; 0 if the error is smaller."""
        return max(self.severity - self.inherited, 0.0) if math.isfinite(self.inherited) else 0.0


@dataclass(frozen=True)
class ComparedParameter(Deviation):
    """The deviation of the gradient of a parameter, or of an input of the call."""

    name: str


@dataclass(frozen=True)
class Cancellation:
    """A sum or difference of nearly equal values. It keeps their rounding, which is large beside what is left.

    Attributes:
        node, op: of the sum or difference.
        operands: the names of the rounded values that it is of.
        rounded_in: the names of the nodes that rounded them: their own, or of nodes before them.
        dtype: what they are rounded to.
        ratio: their size relative to the result's, in root mean squares.
        fix: an op list, in YAML, by which what computes them, and it itself, runs in float32; empty where none does.
    """

    node: str
    op: str
    operands: tuple[str, ...]
    rounded_in: tuple[str, ...]
    dtype: str
    ratio: float
    fix: str = ""

    def __str__(self) -> str:
        are = "are" if len(self.operands) > 1 else "is"
        before = [name for name in self.rounded_in if name not in self.operands]
        more = f", … ({len(before)} nodes)" if len(before) > _MOST else ""
        where = f" in {', '.join(before[:_MOST])}{more}" if before else ""
        return f"cancels: {self.op} of {' and '.join(self.operands)}, which {are} rounded to {self.dtype}{where}"


@dataclass(frozen=True)
class Beginning:
    """The beginning of the error.

    Attributes:
        says: in words; empty if there is no error.
        node: the node's name; empty if the error begins at none.
        is_failure: true if a value or a gradient is Inf or NaN there, and finite in float32.
        fix: an op list that makes the error less, in YAML; empty where none is known.
    """

    says: str = ""
    node: str = ""
    is_failure: bool = False
    fix: str = ""

    @property
    def report(self) -> str:
        """What it says, and the list."""
        lines = [self.says, *(["  what to do: add this to your op list:"] if self.fix else [])]
        return "\n".join([*lines, *(f"    {line}" for line in self.fix.splitlines())])


@dataclass(frozen=True)
class ComparedVariant:
    """The key of the variant that ran.

    Attributes:
        mode: ``"train"``, ``"eval"`` or ``"mixed"``.
        call: the arguments of the call, with their dtypes and numbers of dimensions.
        sizes: the conditions on sizes under which its graph holds.
        low, device, op_list: as in its plan.
    """

    mode: str
    call: str
    sizes: str
    low: str
    device: str
    op_list: str

    @classmethod
    def of(cls, variant: Variant) -> ComparedVariant:
        """Make the key of ``variant``."""
        plan, sizes = variant.plan, str(variant.guard)
        return cls(variant.mode, str(variant.structure), sizes, plan.low, plan.device, plan.op_list)


def _rank(node: ComparedNode, deviation: Deviation | None) -> tuple[bool, float, float]:
    """The place of a node in a table: of a value or a gradient that overflowed, of a large predicted error, first."""
    severity = deviation.severity if deviation is not None else 0.0
    return severity < math.inf, -(node.predicted or 0.0), -severity


def _names(node: ComparedNode, is_predicted: bool) -> tuple[str, ...]:
    names = (node.name, node.op, node.module or "(root)", node.precision)
    return (*names, error_cell(node.predicted) or "-") if is_predicted else names


def _place(node: ComparedNode) -> str:
    return f"{node.name} ({node.op}) in module {node.module or '(root)'}"


def _lines(
    titles: tuple[str, ...], deviations: Sequence[tuple[tuple[str, ...], Deviation]], most: int, what: str
) -> Iterator[str]:
    rows = [(*titles, "dtype", "error", "overflow", "underflow", "zeros", "nan")]
    rows += [(*names, *_cells(deviation)) for names, deviation in deviations[:most]]
    yield from aligned(rows)
    if len(deviations) > most:
        yield f"{len(deviations) - most} more {what}"


def _cells(deviation: Deviation) -> tuple[str, ...]:
    shares = (deviation.overflow, deviation.underflow, deviation.zeros, deviation.nan)
    return (deviation.dtype, f"{deviation.error:.2e}", *(f"{share:.2%}" if share else "-" for share in shares))


def compared_variant(views: Sequence[View], comparison: Comparison) -> int:
    """Return the position of the variant that was compared.

    Raises:
        ValueError: the model lacks this variant, or the variant lacks a compared node.
    """
    of = comparison.variant
    key = (of.low, of.mode, of.call, of.sizes)
    position = next((i for i, v in enumerate(views) if (v.plan.low, v.mode, v.call, v.sizes) == key), None)
    if position is None:
        raise ArgumentError(
            f"the comparison is of a variant that this model lacks: {of.low}, {of.mode} mode, called with {of.call}, "
            f"sizes {of.sizes or 'any'}. Give what compare() returned for this model."
        )
    names = {row.name for row in views[position].rows}
    missing = next((node.name for node in comparison.nodes if node.name not in names), None)
    if missing is not None:
        raise ArgumentError(
            f"the comparison is of another model: this one has no node {missing!r}. Give what compare() returned for "
            "this model."
        )
    return position
