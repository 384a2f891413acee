"""``find_overflow``: the first node of a converted model at which Inf or NaN begins, and what helps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from autocastfx.dtypes import dtype_name
from autocastfx.graph.names import op_name
from autocastfx.graph.node import is_cast, module_path, stack_trace
from autocastfx.numerics.paired_run import Step, floating, run_side_by_side
from autocastfx.plan.plan import PlannedNode, Precision, Why, because_of, op_list_for
from autocastfx.report.view import source_line
from autocastfx.runtime.amp_module import AmpModule

# The node at which Inf or NaN begins, with what it read and what helps, as a value.


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
        counts = " and ".join(f"{n} {what}" for n, what in ((self.infinite, "Inf"), (self.nans, "NaN")) if n)
        return f"{self.name} ({self.op}) in module {self.module or '(root)'} gives {counts} in {self.dtype}."

    def __str__(self) -> str:
        lines = [self.headline if self.is_fault else f"no fault: {self.headline}"]
        lines += [f"  line: {self.line}"] if self.line else []
        lines += [f"  reads {one}" for one in self.inputs]
        runs = f"runs {Precision(self.precision).in_words}" if self.precision else "why"
        lines += [f"  {runs}: {self.because}"]
        lines += [f"  what to do: {self.advice}"]
        lines += [f"    {line}" for line in self.fix.splitlines()]
        return "\n".join(lines)


def find_overflow(amp_model: AmpModule, *inputs: Any, **kwargs: Any) -> Overflow | None:
    """Run one call node by node and name the first node at which Inf or NaN begins.

    Where the float32 graph is at hand (not after unpickling, nor with ``weights="low"``) it runs alongside, with the
    same random numbers. The first node that is not finite where float32 is, and reads no such value, is the fault. If
    there is none, a node counts that makes Inf or NaN of finite values in float32 too: the first from which it reaches
    an output of the model is a fault of the model; if none reaches an output, the first is returned as a note, which is
    false. Inputs that hold Inf are no fault of the node that reads them, nor are masks that are filled with -inf, whose
    number is written in the model.

    ::

        if found := autocastfx.find_overflow(amp_model, x):
            print(found)

    Buffers, inputs and the state of torch's random numbers are afterwards as before. Regions without gradients
    and of ``torch.autocast`` are looked into; what ``torch.cond`` and loops run is one node.

    Args:
        amp_model: what ``convert`` returned.
        *inputs: of the call, by position; or one dict, of its keyword inputs.
        **kwargs: of the call, by keyword.

    Returns:
        The node, which prints as a report, and is true if it is a fault; None if there is none.

    Raises:
        TypeError: the arguments do not fit the forward, or ``amp_model`` is no converted model.
        VariantError: no variant fits the call, and none can be captured.
        NodeError: a node raises; with its line, and the list by which it runs in float32.
    """
    run = run_side_by_side(None, amp_model, inputs, kwargs, ask=_reads)
    known = _Known({entry.name: entry for entry in run.variant.plan.nodes}, run.names)
    trail, overflows = _Trail(has_float32=run.full is not None), list[Overflow]()
    with closing(run.steps()) as steps:
        for step in steps:
            if trail.is_finite(step):
                known.note_vanished(step)
                continue
            begins, in_float32 = trail.judge(step)
            if begins and (in_float32 is False or (in_float32 is None and trail.has_float32)):
                return _overflow(step, in_float32, known)
            trail.add(step.node, len(overflows) if begins else None)
            if begins:
                overflows.append(_overflow(step, in_float32, known))
            known.note_vanished(step)
    reached = trail.causes_of(run.low.flat.graph.output_node())
    if reached:
        return overflows[min(reached)]
    return _note(overflows[0]) if overflows else None


def _note(overflow: Overflow) -> Overflow:
    """``overflow`` as what is no fault."""
    too = "precision is not the cause: float32 gives it here too, and" if overflow.in_float32 else "nothing:"
    return replace(overflow, is_fault=False, fix="", advice=f"{too} it reaches no output of the model.")


@dataclass(frozen=True)
class _Trail:
    """Follows Inf and NaN through the converted graph.

    Attributes:
        has_float32: whether the float32 graph runs alongside.
        causes: by node that is not finite, the numbers of the nodes at which that began.
        astray: nodes that are not finite where float32 is, or of which that is not known.
    """

    has_float32: bool
    causes: dict[fx.Node, frozenset[int]] = field(default_factory=dict[fx.Node, frozenset[int]])
    astray: set[fx.Node] = field(default_factory=set[fx.Node])

    @staticmethod
    def is_finite(step: Step) -> bool:
        return not any(map(_lost, floating(step.value)))

    def judge(self, step: Step) -> tuple[bool, bool | None]:
        """Return whether Inf or NaN begins at a node that is not finite, and whether float32 has it there too."""
        node, in_float32 = step.node, _in_float32(step, self.has_float32)
        carries = not self.astray.isdisjoint(node.all_input_nodes)
        if step.twin is not None and not in_float32:
            self.astray.add(node)
            return not carries, in_float32
        if step.twin is None and is_cast(node):  # element by element what it reads, but for the dtype
            begins = sum(map(_lost, floating(step.value))) > sum(one.lost for read in step.before for one in read)
            if carries:
                self.astray.add(node)
            return begins, in_float32
        begins = _reads_finite(step) and not _is_written(node)
        if step.twin is None and not begins:
            self.astray.add(node)
        return begins, in_float32

    def add(self, node: fx.Node, number: int | None) -> None:
        """Note the causes of a node that is not finite: ``number``, or those of what it reads."""
        self.causes[node] = frozenset((number,)) if number is not None else self.causes_of(node)

    def causes_of(self, reader: fx.Node) -> frozenset[int]:
        """The causes of what ``reader`` reads."""
        return frozenset().union(*(self.causes.get(read, frozenset()) for read in reader.all_input_nodes))


@dataclass(frozen=True)
class _Known:
    """The plan of what runs, the names of its nodes, and through which nodes values became zero."""

    planned: Mapping[str, PlannedNode]
    names: Mapping[fx.Node, str]
    vanished: dict[fx.Node, tuple[PlannedNode, ...]] = field(default_factory=dict[fx.Node, tuple[PlannedNode, ...]])

    def entry(self, node: fx.Node) -> PlannedNode | None:
        return self.planned.get(self.names.get(node, ""))

    def readers(self, cast: fx.Node) -> list[PlannedNode]:
        return [entry for user in cast.users if (entry := self.entry(user)) is not None]

    def note_vanished(self, step: Step) -> None:
        """Note of a node whose value became zero, where it is not in float32, all the nodes through which it did."""
        entry, pairs = self.entry(step.node), zip(floating(step.value), floating(step.reference), strict=False)
        if entry is not None and any(bool(((ours == 0) & (theirs != 0)).any()) for ours, theirs in pairs):
            self.vanished[step.node] = (entry, *self.lost(step.node))

    def lost(self, node: fx.Node) -> Iterator[PlannedNode]:
        """The nodes in which what ``node`` reads became zero."""
        for read in node.all_input_nodes:
            yield from self.vanished.get(_uncast(read), ())


class _Read(NamedTuple):
    """A floating-point value that a node reads: its dtype, its ends, and how many elements are Inf or NaN."""

    dtype: str
    lowest: float
    highest: float
    lost: int


def _reads(value: Any) -> tuple[_Read, ...]:
    return tuple(_read(tensor) for tensor in floating(value) if tensor.numel())


def _read(tensor: torch.Tensor) -> _Read:
    lowest, highest = torch.aminmax(tensor)
    return _Read(dtype_name(tensor.dtype), float(lowest), float(highest), _lost(tensor))


def _lost(tensor: torch.Tensor) -> int:
    """How many elements are Inf or NaN."""
    return tensor.numel() - int(torch.count_nonzero(tensor.isfinite()))


def _reads_finite(step: Step) -> bool:
    """True if the node reads floating-point values, and all are finite."""
    reads: list[_Read] = [one for read in step.before for one in read]
    return bool(reads) and not any(one.lost for one in reads)


def _is_written(node: fx.Node) -> bool:
    """True if Inf or NaN is written into the node itself, as by ``masked_fill(mask, -inf)``."""
    return any(
        isinstance(arg, float) and not math.isfinite(arg) for arg in pytree.tree_leaves((node.args, node.kwargs))
    )


def _in_float32(step: Step, at_hand: bool) -> bool | None:
    """True if float32 is not finite either, in every element where the conversion is not; None if it is not known."""
    if step.twin is not None:
        pairs = zip(floating(step.value), floating(step.reference), strict=True)
        return not any(bool((~ours.isfinite() & theirs.isfinite()).any()) for ours, theirs in pairs)
    return False if at_hand and is_cast(step.node) else None


def _overflow(step: Step, in_float32: bool | None, known: _Known) -> Overflow:
    node, values = step.node, floating(step.value)
    entry = known.entry(node)
    cast, dtype = is_cast(node), dtype_name(values[0].dtype)
    guilty = known.readers(node) if cast else [entry] if entry is not None else []
    because = because_of(entry)
    if cast:
        readers = ", ".join(known.names.get(user, user.name) for user in node.users)
        because = f"the conversion casts {known.names[_uncast(node)]} for {readers}"
    fix = "" if in_float32 else op_list_for([*guilty, *known.lost(node)])
    names = [known.names[read] for read in node.all_input_nodes]
    return Overflow(
        name=step.name,
        op=f"cast to {dtype}" if cast else op_name(node),
        module=entry.module if entry is not None else module_path(node),
        dtype=dtype,
        precision=str(entry.placement.run) if entry is not None else "",
        infinite=sum(int(t.isinf().sum()) for t in values),
        nans=sum(int(t.isnan().sum()) for t in values),
        inputs=tuple(
            InputRange(name, *one[:3]) for name, reads in zip(names, step.before, strict=True) for one in reads
        ),
        line=str(source_line(stack_trace(node.all_input_nodes[0] if cast else node)) or ""),
        because=because,
        in_float32=in_float32,
        fix=fix,
        advice=_advice(in_float32, fix, guilty, node),
    )


def _advice(in_float32: bool | None, fix: str, guilty: list[PlannedNode], node: fx.Node) -> str:
    if isinstance(node.target, HigherOrderOperator):
        return "it holds sub-graphs, which are not looked into: call what they compute by itself, and look there."
    if in_float32:
        return "precision is not the cause: float32 gives Inf or NaN here too. Unless it is meant to, change the model."
    if any(entry.placement.because.why is Why.FOLDED for entry in guilty):
        return 'its float32 result is stored in 16 bits: convert(fold="none"), or scale it in the model.'
    if fix:
        return "add this to your op list:"
    return "scale the values in the model, or convert to torch.bfloat16."


def _uncast(node: fx.Node) -> fx.Node:
    """The value behind the casts of the conversion."""
    while is_cast(node):
        node = node.all_input_nodes[-1]
    return node
