"""A converted graph and the captured one, run side by side on the same call: values of both, node by node."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature, batch_of
from autocastfx.capture.export import capture
from autocastfx.dtypes import LOW_DTYPES, one_low_dtype
from autocastfx.errors import NodeError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import attribute, is_cast, module_path, origin, stack_trace
from autocastfx.numerics.flat_graph import FlatGraph, flatten
from autocastfx.numerics.one_graph import Side, random_state, set_random_state
from autocastfx.numerics.tape import Tape
from autocastfx.plan.plan import because_of, op_list_for
from autocastfx.report.view import source_line
from autocastfx.runtime.amp_module import AmpModule, Variant

__all__ = ["PairedRun", "Step", "floating", "run_side_by_side"]


@dataclass(frozen=True)
class Step:
    """A node of the converted graph that has just run.

    Attributes:
        name: as in the plan.
        node: of the converted graph, sub-graphs written out.
        value: what it gave.
        before: what was asked of its inputs before it ran, for it may write into them.
        twin: the node of the captured graph that it stands for; None if there is none, or no captured graph.
        reference: what ``twin`` gave.
    """

    name: str
    node: fx.Node
    value: Any
    before: tuple[Any, ...]
    twin: fx.Node | None
    reference: Any


@dataclass(frozen=True)
class PairedRun:
    """One call.

    Attributes:
        variant: what runs.
        low: the converted graph.
        full: the captured one; None where it is not at hand.
        twins: node of the captured graph by node of the converted one, in the order of both.
        unmatched: how many computing nodes have no counterpart in the other graph.
        ask: see ``Step.before``.
    """

    variant: Variant
    low: Side
    full: Side | None
    twins: Mapping[fx.Node, fx.Node]
    unmatched: int
    ask: Callable[[Any], Any]

    @property
    def names(self) -> Mapping[fx.Node, str]:
        """Names of the nodes of the converted graph, as in the plan."""
        return self.low.flat.names

    @property
    def whole(self) -> tuple[str, ...]:
        """Names of the nodes of the converted graph that hold sub-graphs."""
        return self.low.flat.whole

    @property
    def tapes(self) -> tuple[Tape, ...]:
        """Of the converted graph and of the captured one; none of a run without gradients."""
        return tuple(side.tape for side in (self.low, self.full) if side is not None and side.tape is not None)

    def steps(self) -> Generator[Step]:
        """Run both graphs, once; outputs are kept. Random numbers are left as they were."""
        before_all = random_state()
        try:
            for node in self.low.ahead:
                if node.op == "output":
                    break
                yield self._step(node)
                self.low.release(node)
                if node in self.twins and self.full is not None:
                    self.full.release(self.twins[node])
        finally:
            set_random_state(before_all)

    def _step(self, node: fx.Node) -> Step:
        twin = self.twins.get(node)
        with self.modes():
            asked = tuple(self.ask(self.low.env[read]) for read in node.all_input_nodes)
            with self.low.random():
                value = self._run(node)
            if self.full is not None and twin is not None:
                self.full.run_up_to(twin)
        reference = self.full.env[twin] if self.full is not None and twin is not None else None
        return Step(self.names[node], node, value, asked, twin, reference)

    def _run(self, node: fx.Node) -> Any:
        try:
            return self.low.run_one(node)
        except Exception as error:  # whatever a kernel raises
            raise NodeError(self._raised(node, error)) from error

    def _raised(self, node: fx.Node, error: Exception) -> str:
        name, line = self.names[node], source_line(stack_trace(node))
        entry = next((entry for entry in self.variant.plan.nodes if entry.name == name), None)
        where = f"in module {module_path(node) or '(root)'}"
        runs = f"It runs {entry.placement.run.in_words}: {because_of(entry)}. " if entry is not None else ""
        fix = op_list_for([entry]) if entry is not None else ""
        advice = f"If it does not take 16 bits, add this to your op list:\n{fix}" if fix else ""
        words = next(iter(str(error).splitlines()), "")
        said = f"{name} ({op_name(node)}) {where} raised {type(error).__name__}: {words}".rstrip(".: ")
        return f"{said}. {f'Its line is {line}. ' if line else ''}{runs}{advice}".rstrip()

    def outputs(self) -> Iterator[Any]:
        """Both graphs' outputs, nested as the model's, after all steps; the graphs forget them."""
        for side in (self.low, self.full):
            if side is None:
                continue
            before_all = random_state()
            try:
                with self.modes():
                    given = side.outputs()
            finally:
                set_random_state(before_all)
            yield pytree.tree_unflatten(given, self.variant.out_spec)

    @contextmanager
    def modes(self) -> Generator[None]:
        """In which the graphs run."""
        gradients = self.low.tape is not None
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), torch._C._DisableAutocast():
            yield


def run_side_by_side(
    model: nn.Module | None,
    amp_model: AmpModule,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ask: Callable[[Any], Any] = lambda value: None,
    *,
    gradients: bool = False,
) -> PairedRun:
    """Make ready to run the variant that fits the call, one node a step, and with it the graph that it was made from.

    Each graph starts from the present random state. Of both, only the values that are still to be read are kept.
    Neither the call's tensors nor parameters and buffers are written into: what would be is copied first.

    Args:
        model: the float32 original, which gives the float32 values; None: the captured graph, if it is at hand, on the
            parameters of ``amp_model``.
        amp_model: what ``convert`` returned.
        args: of the call, by position.
        kwargs: of the call, by keyword.
        ask: of each input of a node of the converted graph, before that runs; see ``Step.before``.
        gradients: keep what a backward pass needs.

    Raises:
        TypeError: the arguments do not fit the forward, or ``amp_model`` is no converted model.
        VariantError: no variant fits, and none can be captured.
        CaptureError: ``model`` cannot be captured.
        ValueError: ``model`` has other parameters or buffers than ``amp_model``.

    The steps raise a NodeError where a node of the converted graph raises.
    """
    if not isinstance(amp_model, AmpModule):
        raise TypeError(f"this needs what convert() returned, not {type(amp_model).__name__}: convert the model first")
    signature = CallSignature.of(amp_model.forward)
    args, kwargs = batch_of(signature, tuple(args), kwargs)
    call = signature.bind(args, kwargs)
    variant = amp_model._variant_for(args, kwargs)
    ours: dict[str, torch.Tensor] = amp_model._held()
    low = flatten(variant.graph, lambda name: ours[name] if name in ours else attribute(amp_model, name))
    captured, theirs = variant.captured, ours
    if model is not None:
        theirs = {
            n: t for named in (model.named_parameters, model.named_buffers) for n, t in named(remove_duplicate=False)
        }
        _check_fits(theirs, ours)
        signature, kept = CallSignature.of(model.forward), amp_model._maker.leaves
        if _is_low(ours) and not _is_low(theirs):  # what was captured has the casts of the 16-bit model
            captured = None
        captured = captured or capture(model, signature, call, training=variant.modes, held=theirs, leaves=kept)
    if captured is None:
        return PairedRun(variant, Side.of(low, call, gradients), None, {}, 0, ask)
    given = {**captured.attributes, **theirs}
    full = flatten(captured.graph, given.__getitem__)
    twins = _twins(low, full)
    made = sum(node not in twins for node in low.graph.nodes if _computes(node) and not is_cast(node))
    gone = sum(map(_computes, full.graph.nodes)) - len(twins)
    run, beside = (Side.of(flat, call, gradients) for flat in (low, full))
    return PairedRun(variant, run, beside, twins, made + gone, ask)


def _is_low(held: Mapping[str, torch.Tensor]) -> bool:
    return one_low_dtype(t.dtype for t in held.values() if isinstance(t, nn.Parameter)) is not None


def _check_fits(theirs: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]) -> None:
    """True if a model's tensors have the names, sizes and dtypes of the float32 original's."""
    for name, tensor in ours.items():
        found = theirs.get(name)
        if found is None:
            raise ValueError(
                f"the first argument is another model than was converted: it has no {name!r}. Give the "
                "float32 original."
            )
        narrowed = found.dtype in LOW_DTYPES and found.dtype != tensor.dtype
        if found.shape != tensor.shape or narrowed:
            raise ValueError(
                f"the first argument is not the float32 original: its {name!r} is {_kind(found)}, and that of the "
                f"converted model {_kind(tensor)}."
            )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def floating(value: Any) -> list[torch.Tensor]:
    """The tensors of floating-point numbers in a value."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _computes(node: fx.Node) -> bool:
    return node.op.startswith("call_")


def _twins(converted: FlatGraph, captured: FlatGraph) -> dict[fx.Node, fx.Node]:
    """Node of the captured graph by node of the converted one, in the order of both."""
    nodes = [node for node in captured.graph.nodes if _computes(node)]
    places = {captured.names[node]: (i, node) for i, node in enumerate(nodes)}
    twins: dict[fx.Node, fx.Node] = {}
    last = -1
    for node in converted.graph.nodes:
        place, twin = places.get(converted.names.get(node, ""), (-1, node))
        if place > last and origin(node) is None and op_name(node) == op_name(twin):
            twins[node], last = twin, place
    return twins
