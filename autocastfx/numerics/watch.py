"""``watch``: count overflow and underflow in a converted model while it trains, and explain skipped steps."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autocastfx.capture.leave_intact import random_numbers_kept, random_state, set_random_state
from autocastfx.dtypes import LOW_DTYPES, dtype_name
from autocastfx.errors import ArgumentError, ArgumentTypeError, LossScaleError, SkippedStepWarning
from autocastfx.graph.alias import moves
from autocastfx.graph.cell import aligned
from autocastfx.graph.magnitude import DeviceCounts, ValueCounts, count_values, read_counts
from autocastfx.graph.node import is_cast, is_member
from autocastfx.numerics.compare import compare_call
from autocastfx.numerics.find_overflow import Overflow, find_overflow
from autocastfx.numerics.paired_run import floating
from autocastfx.plan.plan import Plan, Precision
from autocastfx.policy.yaml_tree import nearest
from autocastfx.report.comparison import Beginning
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.training.grad_scaler import GradScaler
from autocastfx.training.optimizer import LossScalingOptimizer


class Watch:
    """Counts of the values of a converted model while it trains; :func:`watch` makes one."""

    def __init__(self, amp_model: AmpModule, every: int, nodes: Sequence[str] | None) -> None:
        self.every = every
        self._model = amp_model
        self._calls: deque[_Call] = deque(maxlen=_MOST_CALLS)  # of the present step
        self._finished, self._counted = 0, 0  # steps, as step() tells; calls
        self._is_told = False
        self._keeps_gradients = False  # from the first skipped step on that no value of the forward pass explains
        self._observed: dict[int, None] = {}  # steps
        self._counts = NodeCounts(amp_model, nodes)
        self._skipped: list[SkippedStep] = []
        self._warned: set[str] = set()
        self._open = ExitStack()  # while an observed call runs
        self._hooks = ExitStack()
        before = amp_model.register_forward_pre_hook(_Hook(self, True), with_kwargs=True)
        self._hooks.callback(before.remove)
        after = amp_model.register_forward_hook(_Hook(self, False), always_call=True)
        self._hooks.callback(after.remove)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        calls = tuple(self._calls)
        self.stop()
        if isinstance(error, LossScaleError) and calls:  # at the scale's floor
            skipped = self._search(self._present, calls)
            if skipped.found is not None or skipped.gradient.says:
                self._finished += self._is_told
                self._note(skipped)

    def stop(self) -> None:
        """Watch no more, and drop the inputs of the last call. What was seen can still be read."""
        self._hooks.close()
        self._open.close()
        self._calls.clear()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, scaler: LossScalingOptimizer | GradScaler | None = None) -> None:
        """End a step. Call it after each step of the optimizer, from the first one on, or never.

        If the step was skipped, its calls run again, node by node, with the random numbers that they had. If a node
        overflows, a warning names it, once for each node, and :meth:`report` has the rule that mends it. If none does,
        :meth:`report` names the node with whose gradient Inf and NaN begin, from the second such step on: the gradients
        that reach the model's outputs are kept until a step ends, once that may be needed. A ``LossScaleError`` that
        leaves the ``with`` block is explained so too.

        Args:
            scaler: what has decided whether to skip: the ``LossScalingOptimizer``, or the ``autocastfx.GradScaler``.
                Asking it waits for the device. None: nothing scales losses, and no step is skipped.

        Raises:
            TypeError: ``scaler`` is another object, of which it is not known whether it skipped.
            LossScaleError: the optimizer has not stepped yet.
            NodeError: a node raised while the step's batch ran again.
        """
        if isinstance(scaler, LossScalingOptimizer):
            is_skipped = bool(scaler.last_step.skipped)
        elif isinstance(scaler, GradScaler):
            is_skipped = scaler.step_was_skipped
        elif scaler is None:
            is_skipped = False
        else:
            raise ArgumentTypeError(
                f"step takes the LossScalingOptimizer or the autocastfx.GradScaler, which know whether a step was "
                f"skipped, not {type(scaler).__module__}.{type(scaler).__name__}. Without loss scaling, call step()."
            )
        if not self._is_told:  # steps are not calls, then: all calls up to now were of the first one
            self._counts.join_steps()
            self._is_told = True
            self._observed = dict.fromkeys(self._observed and (1,))
        self._finished += 1
        calls = tuple(self._calls)
        self._calls.clear()
        if is_skipped:
            self._note(self._search(self._finished, calls))

    def _note(self, skipped: SkippedStep) -> None:
        """Note a skipped step, and warn of the node that overflowed."""
        self._skipped.append(skipped)
        overflow = skipped.found
        if overflow is None:
            self._keeps_gradients = True
            return
        self._counts.note_overflow(overflow.name, skipped.step)
        if overflow.name not in self._warned:
            self._warned.add(overflow.name)
            says = "print the watch for the rule that mends it" if overflow.fix else overflow.advice
            warnings.warn(
                f"step {skipped.step} was skipped: {overflow.headline} {says[0].upper()}{says[1:]}".rstrip(".") + ".",
                SkippedStepWarning,
                stacklevel=3,
            )

    def _search(self, step: int, calls: Sequence[_Call]) -> SkippedStep:
        """Run the calls of a skipped step again, forward, and then backward if all values are finite."""
        with random_numbers_kept():
            for call in calls:
                set_random_state(call.random)
                if overflow := find_overflow(self._model, *call.args, **call.kwargs):
                    return SkippedStep(step, overflow)
            for call in calls:
                set_random_state(call.random)
                if (beginning := _on_the_way_back(self._model, call)).says:
                    return SkippedStep(step, None, beginning)
        return SkippedStep(step, None)

    @property
    def _present(self) -> int:
        """The number of the present step, from 1."""
        return self._finished + 1 if self._is_told else self._counted

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return
        self._counted += 1
        if not self._is_told:
            self._calls.clear()
        args, kwargs = pytree.tree_map_only(torch.Tensor, _alone, (args, dict(kwargs)))
        self._calls.append(_Call(args, kwargs, random_state()))
        now = self._present
        if (now - 1) % self.every:
            return
        self._counts.read(before=now)
        self._observed[now] = None
        self._open.enter_context(self._model._observed_by(partial(self._counts.see, now)))

    def _after(self, output: Any) -> None:
        self._open.close()
        if self._keeps_gradients and self._calls and torch.is_grad_enabled():
            for i, tensor in enumerate(pytree.tree_leaves(output)):
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(partial(self._calls[-1].add_gradient, i))

    # ---- what was seen ----------------------------------------------------------------------------------------------

    @property
    def rows(self) -> tuple[WatchedNode, ...]:
        """The nodes, in graph order. Reading it waits for the device."""
        return self._counts.rows()

    @property
    def skipped(self) -> tuple[SkippedStep, ...]:
        """The skipped steps that :meth:`step` was told of, in order."""
        return tuple(self._skipped)

    def report(self, most: int = 20) -> str:
        """Write the nodes as a table, those that overflowed first, and the causes of skipped steps with their rules.

        Args:
            most: the number of nodes to show. Next come those of which the largest share underflowed.
        """
        steps = self._finished if self._is_told else self._counted
        return report(self.rows, self._skipped, steps, len(self._observed), self.every, most)

    def __str__(self) -> str:
        return self.report()


# The rows of a watch, and its report as text.

_NOWHERE = Beginning()


@dataclass(frozen=True)
class WatchedNode:
    """The values of a node in all observed calls.

    Attributes:
        name, op, module: the node's, as in the plan. The op of a cast that the conversion inserted is ``cast``, and its
            module that of its first reader.
        dtype: of its values.
        elements: the number of elements that were counted.
        overflow: the number that were Inf or NaN.
        underflow: of a cast, the number that became subnormal or zero in ``dtype`` and were not zero before; of any
            other node, the number that were subnormal, because a zero may be meant.
        largest: the largest finite magnitude.
        first_overflow: the first step at which the node was seen to overflow, in an observed call or when a skipped
            step was searched; None if it was not.
    """

    name: str
    op: str
    module: str
    dtype: str
    elements: int
    overflow: int
    underflow: int
    largest: float
    first_overflow: int | None


@dataclass(frozen=True)
class SkippedStep:
    """A step that the optimizer skipped.

    Attributes:
        step: its number, from 1.
        found: the node that overflowed when its batch ran again, with a rule that mends it; None if every value of the
            forward pass was finite, so that the loss or a gradient overflowed.
        gradient: where Inf and NaN begin on the way back, with that step's loss scale; empty where that is not known,
            as of the first such step.
    """

    step: int
    found: Overflow | None
    gradient: Beginning = _NOWHERE


def report(
    rows: Sequence[WatchedNode], skipped: Sequence[SkippedStep], steps: int, observed: int, every: int, most: int
) -> str:
    """Write what a watch has seen in ``observed`` of ``steps`` steps, one in ``every``; at most ``most`` nodes."""
    lines = [f"{steps} steps, {observed} of them observed (1 in {every}), {len(skipped)} skipped"]
    ranked = sorted(rows, key=lambda row: (row.first_overflow or steps + 1, -row.underflow / row.elements))
    cells = [("node", "op", "module", "dtype", "elements", "overflow", "underflow", "largest", "first overflow")]
    cells += [_cells(row) for row in ranked[:most]]
    lines += aligned(cells) if len(cells) > 1 else []
    if len(ranked) > most:
        lines.append(f"{len(ranked) - most} more nodes")
    return "\n".join([*lines, *_of_skipped(skipped)])


def _cells(row: WatchedNode) -> tuple[str, ...]:
    counts = [f"{count:,}" if count else "-" for count in (row.elements, row.overflow, row.underflow)]
    first = f"step {row.first_overflow}" if row.first_overflow is not None else "-"
    return row.name, row.op, row.module or "(root)", row.dtype, *counts, f"{row.largest:.4g}", first


def _of_skipped(skipped: Sequence[SkippedStep]) -> Iterator[str]:
    causes: dict[str, list[SkippedStep]] = {}
    for one in skipped:
        causes.setdefault(one.found.name if one.found is not None else "", []).append(one)
    for alike in causes.values():
        numbers = ", ".join(str(one.step) for one in alike[:5]) + (", ..." if len(alike) > 5 else "")
        steps = f"step {numbers} was" if len(alike) == 1 else f"{len(alike)} steps ({numbers}) were"
        yield ""
        if alike[0].found is None:
            yield f"{steps} skipped though every value of the forward pass is finite: the loss or a gradient overflowed"
            for says, times in Counter(one.gradient.says for one in alike if one.gradient.says).items():
                yield f"  {says} ({times} of them)"
        else:
            yield f"{steps} skipped, because"
            yield str(alike[0].found)


# Counts of the values of chosen nodes of a converted model: kept on their device until they are read.

_LOW = {dtype_name(dtype) for dtype in LOW_DTYPES}
_CAST = "cast"


@dataclass(frozen=True)
class _Key:
    """A row: the name, op and module of a node."""

    name: str
    op: str
    module: str


@dataclass
class _Tally:
    """The counts of a row so far."""

    dtypes: dict[str, None] = field(default_factory=dict[str, None])
    counts: ValueCounts = field(default_factory=ValueCounts)
    first_overflow: int | None = None


class NodeCounts:
    """Counts the values of nodes, by step."""

    def __init__(self, amp_model: AmpModule, nodes: Sequence[str] | None) -> None:
        """Count nothing yet, of ``nodes`` by the names of nodes or ops. None: nodes that run in 16 bits, without views,
        and casts to 16 bits.
        """
        self._model = amp_model
        self._nodes = None if nodes is None else frozenset(nodes)
        self._chosen: WeakKeyDictionary[fx.Graph, Mapping[str, _Key]] = WeakKeyDictionary()
        self._pending: list[tuple[int, _Key, str, DeviceCounts]] = []  # the step, the node, its dtype and its counts
        self._tallies: dict[_Key, _Tally] = {}

    def see(self, step: int, node: fx.Node, value: Any, read: Sequence[Any]) -> None:
        """Count the value of a node of a variant's graph, if it is one of the chosen. Nothing waits for the device."""
        if node.graph not in self._chosen:
            variant = next(variant for variant in self._model.variants if variant.graph is node.graph)
            self._chosen[node.graph] = self._choose(variant.plan, node.graph)
        key = self._chosen[node.graph].get(node.name)
        if key is None:
            return
        source = read[-1] if key.op == _CAST else None  # a working copy is made of the last value that it reads
        for tensor in floating(value):
            if (counts := count_values(tensor, source)) is not None:
                self._pending.append((step, key, dtype_name(tensor.dtype), counts))

    def _choose(self, plan: Plan, graph: fx.Graph) -> dict[str, _Key]:
        """The rows of the nodes to count, by name."""
        keys = {node.name: _Key(node.name, node.op, node.module) for node in plan.nodes}
        made = (*plan.casts, *plan.copies)
        homes = {one.name: [keys[name].module for name in one.readers if name in keys] for one in made}
        keys |= {name: _Key(name, _CAST, (*modules, "")[0]) for name, modules in homes.items()}
        if self._nodes is not None:
            return {name: key for name, key in keys.items() if not self._nodes.isdisjoint((name, key.op))}
        low = {node.name for node in plan.nodes if node.placement.run is Precision.LOW}
        low |= {one.name for one in made if one.dtype in _LOW}
        nodes = [node for node in graph.nodes if node.name in low and not is_member(node)]
        return {node.name: keys[node.name] for node in nodes if is_cast(node) or moves(node)}

    def read(self, before: int | None = None) -> None:
        """Read the counts from their devices; with ``before`` only if there are counts of steps before this one."""
        if before is not None and (not self._pending or self._pending[-1][0] >= before):
            return
        pending, self._pending = self._pending, []
        for (step, key, dtype, _), counts in zip(pending, read_counts([one[3] for one in pending]), strict=True):
            tally = self._tallies.setdefault(key, _Tally())
            tally.dtypes[dtype] = None
            tally.counts = tally.counts + counts
            if counts.overflow and tally.first_overflow is None:
                tally.first_overflow = step

    def note_overflow(self, name: str, step: int) -> None:
        """Note that the node called ``name`` overflowed at ``step``, the latest, though it was not counted there."""
        self.read()
        for tally in (tally for key, tally in self._tallies.items() if key.name == name):
            tally.first_overflow = tally.first_overflow or step

    def join_steps(self) -> None:
        """Take all steps up to now for the first."""
        self.read()
        for tally in self._tallies.values():
            tally.first_overflow = tally.first_overflow and 1

    def rows(self) -> tuple[WatchedNode, ...]:
        """Read the counts, and return those of each node, in graph order."""
        self.read()
        return tuple(
            WatchedNode(
                **vars(key), dtype=",".join(tally.dtypes), **vars(tally.counts), first_overflow=tally.first_overflow
            )
            for key, tally in self._tallies.items()
        )


_MOST_CALLS = 64  # whose inputs are kept, in a step of more


@dataclass(frozen=True)
class _Call:
    """A call of the present step, to be run again if the step is skipped."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    random: tuple[torch.Tensor, list[torch.Tensor]]
    gradients: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])  # of tensors of the output

    def add_gradient(self, i: int, gradient: torch.Tensor) -> None:
        """Add the gradient that a backward pass gives the output's tensor number ``i``."""
        self.gradients[i] = self.gradients[i] + gradient if i in self.gradients else gradient

    def loss(self, output: Any) -> torch.Tensor:
        """Return a number whose gradients of the output are those that it had."""
        leaves = pytree.tree_leaves(output)
        return torch.stack([(leaves[i].float() * given.float()).sum() for i, given in self.gradients.items()]).sum()


def _on_the_way_back(amp_model: AmpModule, call: _Call) -> Beginning:
    """Find where gradients of a call become Inf or NaN; empty where they do not, or it is not known."""
    if not all(bool(given.isfinite().all()) for given in call.gradients.values()):
        return Beginning("on the way back, Inf and NaN begin in the loss, behind the model's output", is_failure=True)
    if not call.gradients:
        return _NOWHERE
    beginning = compare_call(amp_model, call.args, call.kwargs, call.loss).begins
    return beginning if beginning.is_failure else _NOWHERE


@dataclass(frozen=True)
class _Hook:
    """A hook on the watched model. Copies of the model carry one that does nothing."""

    watch: Watch
    is_before: bool

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if torch.compiler.is_compiling() or module is not self.watch._model:
            return
        if self.is_before:
            self.watch._before(args, rest[0])
        else:
            self.watch._after(rest[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_not_watched,)


def _not_watched(*_: Any) -> None: ...


def watch(amp_model: AmpModule, every: int = 100, nodes: Sequence[str] | None = None) -> Watch:
    """Watch a converted model while it trains.

    ::

        with autocastfx.watch(amp_model) as watch:
            for x, y in batches:
                optimizer.zero_grad()
                optimizer.backward(loss_of(amp_model(x), y))
                optimizer.step()
                watch.step(optimizer)
        print(watch)

    One step in ``every`` is observed, beginning with the first: its calls run node by node, and the values of nodes are
    counted on their device. The counts are read at the next observed step, or when somebody asks, with one transfer.
    An observed call gives the same result to the bit. In between, an overflow is seen only if it persists until the
    next observed step, or if it makes the optimizer skip a step that :meth:`Watch.step` is told of: references to the
    inputs of the step's calls (the last 64) are kept, and searched with :func:`find_overflow`. Leave these tensors as
    they are until the step has ended.

    A step ends with ``watch.step(...)``. If that is never called, each call is a step, and skipped steps are not
    explained. Calls without gradients, as in evaluation, are neither counted nor observed; neither is what
    ``torch.compile`` compiles or a CUDA graph captures. Sub-graphs (``no_grad`` regions, ``cond``, loops) are not
    observed inside, but :func:`find_overflow` looks into regions. Copies of the model are not watched.

    Args:
        amp_model: what ``convert`` returned; under DistributedDataParallel, its ``module``.
        every: the distance of observed steps.
        nodes: names of nodes or of ops to observe (``"cast"``: the casts that the conversion inserted). None: the
            results of the nodes that run in 16 bits, views left out, and of casts to 16 bits.

    Returns:
        The watch: a context manager that stops it, with ``stop()``, ``step()``, ``rows``, ``skipped`` and ``report()``.

    Raises:
        TypeError: ``amp_model`` is not a converted model, or ``nodes`` is a single text.
        ValueError: ``every`` is not a whole number above 0, or the captured graphs have none of a name in ``nodes``.
    """
    if not isinstance(amp_model, AmpModule):
        raise ArgumentTypeError(
            f"watch takes what convert() returned, not a {type(amp_model).__name__}: convert the model first"
        )
    if isinstance(nodes, str):
        raise ArgumentTypeError(f"nodes is a sequence of names: write [{nodes!r}]")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ArgumentError(f"every is a whole number of steps above 0, not {every!r}")
    if plans := [variant.plan for variant in amp_model.variants]:
        known = {_CAST, *(name for plan in plans for node in plan.nodes for name in (node.name, node.op))}
        known |= {one.name for plan in plans for one in (*plan.casts, *plan.copies)}
        for name in nodes or ():
            if name not in known:
                raise ArgumentError(
                    f"the model has no node and no op called {name!r}{nearest(name, known)}. amp_model.plan.nodes has "
                    "the names of nodes and ops."
                )
    return Watch(amp_model, every, nodes)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return an input without its autograd graph, which would keep what is saved for backward alive."""
    return tensor.detach() if tensor.grad_fn is not None else tensor
