"""``find_overflow``: the first node of a converted model at which Inf or NaN begins, and the op list that mends all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import yaml
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from autocastfx.dtypes import dtype_name
from autocastfx.errors import NodeError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import is_cast, module_path, stack_trace, uncast
from autocastfx.numerics.mended_run import MendedRun
from autocastfx.numerics.paired_run import Step, floating, run_side_by_side
from autocastfx.plan.plan import PlannedNode, Precision, Why, because_of
from autocastfx.plan.proposed_list import line_of, op_list_for
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category
from autocastfx.report.view import source_line
from autocastfx.runtime.amp_module import AmpModule


def find_overflow(amp_model: AmpModule, *inputs: Any, **kwargs: Any) -> Overflow | None:
    """Run one call node by node, name the first node at which Inf or NaN begins, and propose what makes all finite.

    Where the float32 graph is at hand (not after unpickling, nor with ``weights="low"``) it runs alongside, with the
    same random numbers. The first node that is not finite where float32 is, and reads no such value, is the fault. If
    there is none, a node counts that makes Inf or NaN of finite values in float32 too: the first from which it reaches
    an output of the model is a fault of the model; if none reaches an output, the first is returned as a note, which is
    false. Inputs that hold Inf are no fault of the node that reads them, nor are masks that are filled with -inf, whose
    number is written in the model.

    From the fault on, the run goes on with the float32 values of what overflowed, as if that ran in float32 already. So
    nodes that overflow only then are found as well, and those that give finite numbers only because of an Inf, such as
    ``rsqrt``. One op list is proposed for all of them. Without the float32 graph it is for the first alone.

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
    search = _Search(known, _Trail(has_float32=run.full is not None), MendedRun(run))
    with closing(run.steps()) as steps:
        try:
            for step in steps:
                search.take(step)
        except NodeError as error:
            if search.first is None:
                raise
            return search.proposal(search.first, str(error))
    return search.proposal(search.first) if search.first is not None else search.other(run.low.flat.graph.output_node())


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
        fix: an op list that lets it run in float32, and all of ``more`` that a list helps, in YAML; empty where no list
            helps any.
        advice: what to do, in words.
        is_fault: False for a note: no output of the model holds Inf or NaN that begins here, and no conversion is known
            to make it, as for a mask with -inf that softmax takes.
        more: names of the nodes that would overflow next, once this one is mended, and so on to the output.
        no_list_helps: those of ``more`` that ``fix`` does not mend.
        stopped: the error at which the search for more ended; empty if it reached the output.
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
    more: tuple[str, ...] = ()
    no_list_helps: tuple[str, ...] = ()
    stopped: str = ""

    def __bool__(self) -> bool:
        return self.is_fault

    @property
    def op_list(self) -> OpList | None:
        """``fix`` as ``convert`` takes it, ``op_list=["default", found.op_list]``, with a reason; or None."""
        if not self.fix:
            return None
        reason = f"find_overflow: {self.headline.removesuffix('.')}"
        lists = OpList.of(yaml.safe_load(self.fix), name=f"the fix of {self.name}")
        return replace(lists, lines={key: replace(rule, reason=reason) for key, rule in lists.lines.items()})

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
        lines += [f"  and {len(self.more)} more, once that is mended: {_few(self.more)}"] if self.more else []
        lines += [f"  no list helps {_few(self.no_list_helps)}: {_NO_LIST}"] if self.no_list_helps else []
        lines += [f"  the search for more ended: {self.stopped}"] if self.stopped else []
        lines += [f"  what to do: {self.advice}"]
        lines += [f"    {line}" for line in self.fix.splitlines()]
        return "\n".join(lines)


_MOST = 5  # names in a line
_NO_LIST = 'convert(fold="none"), scale the values in the model, or convert to torch.bfloat16.'


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST]) + (", …" if len(names) > _MOST else "")


@dataclass(frozen=True)
class _Fault:
    """A node that is not finite in 16 bits, and the nodes of the plan that have to run in float32 so that it is."""

    name: str
    guilty: tuple[PlannedNode, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes of the plan that run in 16 bits; without any, the node itself."""
        return tuple(e.name for e in self.guilty if e.placement.run is Precision.LOW) or (self.name,)


@dataclass
class _Search:
    """Looks for Inf and NaN step by step, and goes on behind each with the values that it has once it is mended.

    Attributes:
        first: the first fault of precision.
        faults: all of them, in graph order.
        overflows: the nodes at which Inf or NaN begins, though no conversion is known to make it.
        widened: nodes that run in float32 by the list that is proposed.
    """

    known: _Known
    trail: _Trail
    mended: MendedRun
    first: Overflow | None = None
    faults: list[_Fault] = field(default_factory=list[_Fault])
    overflows: list[Overflow] = field(default_factory=list[Overflow])
    widened: set[fx.Node] = field(default_factory=set[fx.Node])

    def take(self, step: Step) -> None:
        """Judge a node that has just run, and mend its value if that is not what the mended model has."""
        node = step.node
        if self.mended.reads_beyond(node):
            self._follow(step)
            return
        if self.trail.is_finite(step):
            self.known.note_vanished(step)
            return
        begins, in_float32 = self.trail.judge(step)
        if begins and (in_float32 is False or (in_float32 is None and self.trail.has_float32)):
            self.first = self.first or _overflow(step, in_float32, self.known)
            self.faults.append(_Fault(step.name, self.known.guilty(node)))
            self.widened.add(node)
            self._mend(step)
            return
        if self.first is not None and step.twin is not None and not in_float32:  # behind what could not be mended
            self._mend(step)
            return
        self.trail.add(node, len(self.overflows) if begins else None)
        if begins:
            self.overflows.append(_overflow(step, in_float32, self.known))
        self.known.note_vanished(step)

    def _follow(self, step: Step) -> None:
        """Take a node that reads a value beyond the range of 16 bits, which will be in float32 there."""
        node, entry = step.node, self.known.entry(step.node)
        self._mend(step)
        if entry is None or entry.placement.run is not Precision.LOW or op_name(node) == "getitem":
            return
        # A folded node takes 16 bits only between others in 16 bits, and an infer op runs in float32 after a deny op.
        comes_along = entry.placement.because.why is Why.FOLDED or (
            entry.decision.category in (Category.INFER, Category.CLEAR)
            and entry.placement.because.why is Why.FEWEST_BYTES
            and not self.widened.isdisjoint(node.all_input_nodes)
        )
        if not comes_along:
            self.faults.append(_Fault(step.name, (entry,)))
        self.widened.add(node)

    def _mend(self, step: Step) -> None:
        value = self.mended.mend(step)
        if value is None:
            self.trail.astray.add(step.node)
            return
        self.trail.astray.discard(step.node)
        self.known.note_vanished(replace(step, value=value))

    def proposal(self, first: Overflow, stopped: str = "") -> Overflow:
        """The ``first`` fault of precision, with one op list for all, and the error at which the run ``stopped``, if it
        did.
        """
        helped = [fault for fault in self.faults if op_list_for(fault.guilty)]
        fix = op_list_for(list({entry.name: entry for fault in helped for entry in fault.guilty}.values()))
        told = set(self.faults[0].names)
        more = dict.fromkeys(name for fault in self.faults for name in fault.names if name not in told)
        lines = _in_plan([entry for fault in self.faults for entry in fault.guilty])
        left = {name for fault in self.faults if fault not in helped for name in fault.names} if not lines else set()
        advice = lines or first.advice
        if fix and (lines or not first.fix):
            advice = f"{advice} For the others, add this to your op list:"
        return replace(
            first,
            fix=fix,
            advice=advice,
            more=tuple(more),
            no_list_helps=tuple(name for name in more if name in left),
            stopped=stopped,
        )

    def other(self, output: fx.Node) -> Overflow | None:
        """What reaches the output of a model without a fault of precision, else what does not, as a note."""
        reached = self.trail.causes_of(output)
        if reached:
            return self.overflows[min(reached)]
        if not self.overflows:
            return None
        first = self.overflows[0]
        too = "precision is not the cause: float32 gives it here too, and" if first.in_float32 else "nothing:"
        return replace(first, is_fault=False, fix="", advice=f"{too} it reaches no output of the model.")


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

    def own(self, node: fx.Node) -> list[PlannedNode]:
        """The node of the plan that decides the dtype of ``node``: of a cast, those that read it."""
        return [entry for one in (node.users if is_cast(node) else (node,)) if (entry := self.entry(one)) is not None]

    def guilty(self, node: fx.Node) -> tuple[PlannedNode, ...]:
        """What has to run in float32 so that ``node`` is finite: it or its readers, and where inputs vanished."""
        return (*self.own(node), *self.lost(node))

    def note_vanished(self, step: Step) -> None:
        """Note of a node whose value became zero, where it is not in float32, all the nodes through which it did."""
        entry, pairs = self.entry(step.node), zip(floating(step.value), floating(step.reference), strict=False)
        if entry is not None and any(bool(((ours == 0) & (theirs != 0)).any()) for ours, theirs in pairs):
            self.vanished[step.node] = (entry, *self.lost(step.node))

    def lost(self, node: fx.Node) -> Iterator[PlannedNode]:
        """The nodes in which what ``node`` reads became zero."""
        for read in node.all_input_nodes:
            yield from self.vanished.get(uncast(read), ())


class _Read(NamedTuple):
    """A floating-point value that a node reads: its dtype, its ends, and how many elements are Inf or NaN."""

    dtype: str
    lowest: float
    highest: float
    lost: int


def _reads(value: Any) -> tuple[_Read, ...]:
    ends = ((t, torch.aminmax(t)) for t in floating(value) if t.numel())
    return tuple(_Read(dtype_name(t.dtype), float(low), float(high), _lost(t)) for t, (low, high) in ends)


def _lost(tensor: torch.Tensor) -> int:
    """How many elements are Inf or NaN."""
    return tensor.numel() - int(torch.count_nonzero(tensor.isfinite()))


def _reads_finite(step: Step) -> bool:
    """True if the node reads floating-point values, and all are finite."""
    reads: list[_Read] = [one for read in step.before for one in read]
    return bool(reads) and not any(one.lost for one in reads)


def _is_written(node: fx.Node) -> bool:
    """True if Inf or NaN is written into the node itself, as by ``masked_fill(mask, -inf)``."""
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    return any(isinstance(one, float) and not math.isfinite(one) for one in arguments)


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
    because = because_of(entry)
    if cast:
        readers = ", ".join(known.names.get(user, user.name) for user in node.users)
        because = f"the conversion casts {known.names[uncast(node)]} for {readers}"
    fix = "" if in_float32 else op_list_for(known.guilty(node))
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
        advice=_advice(in_float32, fix, known.own(node), node),
    )


def _in_plan(entries: Sequence[PlannedNode]) -> str:
    """Say which lines of the plan given to ``convert`` to edit; empty if it decides none of the nodes."""
    lines = {entry.name: line for entry in entries if (line := line_of(entry)) is not None}
    said = ", ".join(f"{line} ({name})" for name, line in lines.items())
    return f"set run to float32 in the plan given to convert, at {said}." if lines else ""


def _advice(in_float32: bool | None, fix: str, guilty: list[PlannedNode], node: fx.Node) -> str:
    if isinstance(node.target, HigherOrderOperator):
        return "it holds sub-graphs, which are not looked into: call what they compute by itself, and look there."
    if in_float32:
        return "precision is not the cause: float32 gives Inf or NaN here too. Unless it is meant to, change the model."
    if any(entry.placement.because.why is Why.FOLDED for entry in guilty):
        return 'its float32 result is stored in 16 bits: convert(fold="none"), or scale it in the model.'
    if fix:
        return "add this to your op list:"
    return _in_plan(guilty) or "scale the values in the model, or convert to torch.bfloat16."
