"""A converted graph and the captured one, run side by side on the same call: values of both, node by node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.capture.call import INPUTS_ALONE, Call, CallSignature, batch_of, sized
from autocastfx.capture.captured import Captured
from autocastfx.capture.kept_whole import functions_at
from autocastfx.capture.leave_intact import random_numbers_kept, random_state, set_modes, set_random_state
from autocastfx.capture.measure import copies_of_written, written_outside
from autocastfx.dtypes import LOW_DTYPES, one_low_dtype
from autocastfx.errors import ArgumentError, ArgumentTypeError, CalibrationError, CaptureError, NodeError
from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import NodeRun, attribute, is_cast, module_path, origin, stack_trace
from autocastfx.numerics.flat_graph import FlatGraph, flatten
from autocastfx.plan.plan import because_of
from autocastfx.plan.proposed_list import op_list_for
from autocastfx.policy.float8 import OPERANDS
from autocastfx.report.view import source_line
from autocastfx.runtime.amp_module import AmpModule, view
from autocastfx.runtime.captures import Captures
from autocastfx.runtime.operators.float8 import float8_linear
from autocastfx.runtime.variant import Variant


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
    def tapes(self) -> tuple[Tape, ...]:
        """Of the converted graph and of the captured one; none of a run without gradients."""
        return tuple(side.tape for side in (self.low, self.full) if side is not None and side.tape is not None)

    def steps(self) -> Generator[Step]:
        """Run both graphs, once; outputs are kept. Random numbers are left as they were."""
        with random_numbers_kept():
            for node in self.low.ahead:
                if node.op == "output":
                    break
                yield self._step(node)
                self.low.release(node)
                if node in self.twins and self.full is not None:
                    self.full.release(self.twins[node])

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
            with random_numbers_kept(), self.modes():
                given = side.outputs()
            yield self.variant.output(given, side.call.tensors)

    @contextmanager
    def modes(self) -> Generator[None]:
        """In which the graphs run."""
        gradients = self.low.tape is not None
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), torch._C._DisableAutocast():
            yield


# Record what a backward pass needs to hand out the gradients of a graph's values.

_now: Any = cast("Any", torch.autograd)._get_sequence_nr


@dataclass
class Tape:
    """Records autograd's functions for the values of a graph's nodes.

    Attributes:
        made: by node, an edge for each of its floating-point values; None for values that require no gradient or that
            it did not make itself.
        leaves: edges of the parameters and inputs that require gradients, by name.
    """

    made: dict[fx.Node, list[GradientEdge | None]] = field(default_factory=dict[fx.Node, "list[GradientEdge | None]"])
    leaves: dict[str, GradientEdge] = field(default_factory=dict[str, GradientEdge])

    def end(self, node: fx.Node, value: Any, start: int) -> None:
        """Record the ``value`` of ``node``, of functions made from ``start`` on, by their sequence numbers.

        Values passed on belong to the node that made them.
        """
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]
        own = [edge if edge is not None and _is_made(edge.node, start) else None for edge in edges]
        if any(edge is not None for edge in own):
            self.made[node] = own


def _is_made(function: Any, start: int) -> bool:
    return not hasattr(function, "variable") and function._sequence_nr() >= start  # a leaf has a variable


# Run one of two graphs side by side, node by node, without changing the caller's tensors and random numbers.


class Side(NodeRun):
    """Runs a graph node by node, with its own random numbers, and frees values after their last use.

    Attributes:
        ahead: its nodes that have not run yet.
        tape: records autograd's functions by node, to run backwards; None without gradients.
    """

    @torch.inference_mode(False)  # backward cannot use tensors made in inference mode
    def __init__(self, flat: FlatGraph, call: Call, gradients: bool) -> None:
        super().__init__(flat.graph, lambda node: self._held[str(node.target)])
        self.flat, self.call, self.ahead = flat, call, iter(list(flat.graph.nodes))
        self.tape = Tape() if gradients else None
        tensors = {name: one for name, one in flat.held.items() if isinstance(one, torch.Tensor)}
        written = written_outside(flat.graph, flat.held)
        buffers = {name for name, one in tensors.items() if not isinstance(one, nn.Parameter)}
        names = [n.name for n in flat.graph.nodes if n.op == "placeholder"]
        given = dict(zip(names, call.tensors, strict=True))
        inputs = {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}  # others are numbers
        own = copies_of_written(tensors, written | buffers)  # batch_norm writes, but its schema does not say so
        self._held: Mapping[str, Any] = {**flat.held, **self._leaves(tensors, own, frozenset())}
        self.args_iter = iter({**given, **self._leaves(inputs, copies_of_written(inputs, written), written)}.values())
        self._random = random_state()

    def _leaves(
        self, tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], written: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        """Return ``own``; with gradients, also leaves in place of the caller's tensors, which must not get any."""
        if self.tape is None:
            return dict(own)
        stand_ins, leaves = dict(own), dict[int, torch.Tensor]()
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                leaf = leaves.setdefault(id(tensor), own.get(name, tensor).detach().requires_grad_())
                self.tape.leaves[name] = get_gradient_edge(leaf)
                stand_ins[name] = leaf.clone() if name in written else leaf  # a leaf cannot be written into
        return stand_ins

    def run_one(self, node: fx.Node) -> Any:
        """Run ``node`` in the modes of its regions, and return its value."""
        with ExitStack() as modes:
            for region in self.flat.regions.get(node, ()):
                modes.enter_context(region())
            start = _now()
            self.env[node] = self.run_node(node)
            if self.tape is not None:
                self.tape.end(node, self.env[node], start)
        return self.env[node]

    def release(self, node: fx.Node) -> None:
        """Free the values that ``node`` was the last to read, and its own value if no node reads it."""
        for read in (*self.user_to_last_uses.get(node, ()), *(() if node.users else (node,))):
            self.env.pop(read, None)

    def run_up_to(self, last: fx.Node) -> None:
        """Run the nodes up to ``last``; the values that ``last`` reads are kept for now."""
        with self.random():
            for node in self.ahead:
                self.run_one(node)
                if node is last:
                    return
                self.release(node)

    def outputs(self) -> Any:
        """Run the remaining nodes, free all values, and return the graph's output."""
        self.run_up_to(self.flat.graph.output_node())
        output = map_arg(self.flat.graph.output_node().args[0], self.env.__getitem__)
        self.env.clear()
        return output

    @contextmanager
    def random(self) -> Generator[None]:
        """While open, random numbers continue from this graph's last state."""
        set_random_state(self._random)
        yield
        self._random = random_state()


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

    Each graph starts from the present random state. Of both, only the values that are still to be read are kept, and
    with ``gradients`` what a backward pass needs. Neither the call's tensors nor parameters and buffers are written
    into: what would be is copied first.

    ``model`` is the float32 original, which gives the float32 values; None: the captured graph, if it is at hand, on
    the parameters of ``amp_model``. ``ask`` is asked of each input of a node of the converted graph, before that runs;
    see ``Step.before``.

    Raises:
        TypeError: the arguments do not fit the forward, or ``amp_model`` is no converted model.
        VariantError: no variant fits, and none can be captured.
        CaptureError: ``model`` cannot be captured.
        ValueError: ``model`` has other parameters or buffers than ``amp_model``.

    The steps raise a NodeError where a node of the converted graph raises.
    """
    if not isinstance(amp_model, AmpModule):
        raise ArgumentTypeError(
            f"this needs what convert() returned, not {type(amp_model).__name__}: convert the model first"
        )
    # the graph that the call would run
    signature = CallSignature.of(amp_model.forward)
    args, kwargs = batch_of(signature, tuple(args), kwargs)
    try:
        variant, call, outside = amp_model._given_to(args, kwargs)
    except (TypeError, CaptureError) as error:
        is_batch = len(args) == 1 and isinstance(args[0], (tuple, list))
        if not is_batch and not isinstance(error, TypeError):
            raise
        hint = "The inputs of one call go one by one: compare(None, amp_model, *batch)." if is_batch else INPUTS_ALONE
        raise type(error)(f"{str(error).removesuffix('.')}. {hint}") from None
    ours: dict[str, torch.Tensor] = {**outside, **amp_model._held()}
    low = flatten(
        variant.keeping if gradients else variant.graph,
        lambda name: ours[name] if name in ours else attribute(amp_model, name),
    )
    # the float32 graph: as captured, or of the original that was given
    captured, theirs, same_call = variant.captured, ours, call
    if model is not None:
        theirs = {
            n: t for named in (model.named_parameters, model.named_buffers) for n, t in named(remove_duplicate=False)
        }
        _check_fits(theirs, amp_model._held())
        if captured is None or (_is_low(ours) and not _is_low(theirs)):  # else it has the casts of the 16-bit model
            leaves = amp_model._original.leaves
            captured, same_call, outside = _captured_call(model, leaves, variant.modes, args, kwargs)
        theirs |= outside
    if captured is None:
        return PairedRun(variant, Side(low, call, gradients), None, {}, 0, ask)
    # which nodes of both are the same, and how many only one has
    given = {**captured.attributes, **theirs}
    full = flatten(captured.graph, given.__getitem__)
    twins = _twins(low, full)
    keeps = {node.name for node in variant.keeping.nodes} - {node.name for node in variant.graph.nodes}
    ours_alone = (node for node in low.graph.nodes if _computes(node) and not is_cast(node) and node not in twins)
    made = sum(low.names[node] not in keeps for node in ours_alone)
    gone = sum(map(_computes, full.graph.nodes)) - len(twins)
    run, beside = Side(low, call, gradients), Side(full, same_call, gradients)
    return PairedRun(variant, run, beside, twins, made + gone, ask)


def _captured_call(
    model: nn.Module, leaves: tuple[str, ...], modes: Sequence[bool], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Captured, Call, dict[str, Any]]:
    """Return the graph of one call of a model, in these modes of its modules, and what it is given, as by
    :meth:`CapturedGraph.given`. The call does nothing else; functions at the paths ``leaves`` stay whole.
    """
    amp_model = view(Captures(model, CallSignature.of(model.forward), functions_at(leaves)), None, None, leaves)
    modules = list(model.modules())
    before = [module.training for module in modules]
    try:
        set_modes(modules, modes)
        graph, inputs = amp_model._probe(args, kwargs, converts=False)
    finally:
        set_modes(modules, before)
    return graph.captured, *graph.given(amp_model._signature.bind(args, kwargs), inputs, amp_model._held())


def _is_low(tensors: Mapping[str, torch.Tensor]) -> bool:
    return one_low_dtype(t.dtype for t in tensors.values() if isinstance(t, nn.Parameter)) is not None


def _check_fits(theirs: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose tensors do not have the names, sizes and dtypes of the float32 original's."""
    for name, tensor in ours.items():
        given = theirs.get(name)
        if given is None:
            raise ArgumentError(
                f"the first argument is another model than was converted: it has no {name!r}. Give the "
                "float32 original."
            )
        narrowed = given.dtype in LOW_DTYPES and given.dtype != tensor.dtype
        if given.shape != tensor.shape or narrowed:
            raise ArgumentError(
                f"the first argument is not the float32 original: its {name!r} is {sized(given)}, and that of the "
                f"converted model {sized(tensor)}."
            )


def floating(value: Any) -> list[torch.Tensor]:
    """The tensors of floating-point numbers in a value; not those in float8, of which torch can ask next to nothing."""
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [t for t in leaves if t.is_floating_point() and t.itemsize > 1]


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
        if place > last and origin(node) is None:
            op = of_function(getattr(node.target, "saved_call", node.target))  # see runtime.saved.keep_chosen
            is_float8 = node.target is float8_linear
            if op == op_name(twin) or (is_float8 and op_name(twin) in OPERANDS):
                twins[node], last = twin, place
    return twins


# Run both graphs of a paired run backwards, and hand out each gradient of both as soon as it is complete.

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Gradients:
    """The gradients of a node, parameter or input in both graphs.

    Attributes:
        name: the node's name in the plan, or the name of a parameter or an input of the call.
        is_leaf: True for a parameter or an input.
        low, full: the gradients in the converted graph, and in the captured one.
    """

    name: str
    is_leaf: bool
    low: tuple[torch.Tensor, ...]
    full: tuple[torch.Tensor, ...]


def run_backwards(run: PairedRun, loss: Loss | None, scale: float, take: Callable[[Gradients], None]) -> None:
    """Run both graphs backwards, after all steps of ``run``, which is one with gradients.

    torch's engine runs the latest functions first. As both graphs ran side by side, they run so backwards, too, and
    gradients of one graph do not wait long for those of the other. Of leaves that are not the graphs' own, as of a loss
    with parameters, no gradients are kept.

    ``loss`` turns the model's output into one number, before ``scale`` multiplies it; None: the sum of its
    floating-point tensors, in float32. ``take`` gets the gradients of each node, parameter and input that has some in
    both graphs.

    Raises:
        CalibrationError: the loss does not depend on anything that requires a gradient.
        ValueError: ``loss`` does not return a single number.
    """
    starts, (low, full) = _starts(run, loss or _sum), run.tapes
    leaves: dict[Any, str] = {}  # the first name of each, for tied parameters have several
    for name, edge in low.leaves.items():
        if name in full.leaves:
            leaves.setdefault(edge.node, name)
    waiting = [_Waiting(name, True, [(low.leaves[name], full.leaves[name])], take) for name in leaves.values()]
    for node, twin in run.twins.items():
        edges = zip(low.made.get(node, ()), full.made.get(twin, ()), strict=False)
        waiting.append(_Waiting(run.names[node], False, [(a, b) for a, b in edges if a and b], take))
    ends = list(dict.fromkeys(cast("Any", edge.node).variable for tape in run.tapes for edge in tape.leaves.values()))
    for end in ends:
        end.register_post_accumulate_grad_hook(_drop_gradient)
    low.made.clear()
    full.made.clear()
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
        if ends:
            torch.autograd.backward(starts, [torch.full_like(start, scale) for start in starts], inputs=ends)
    for one in waiting:
        one.give()


@dataclass
class _Waiting:
    """The gradients of a node or a leaf, until all of them are known in both graphs."""

    name: str
    is_leaf: bool
    edges: Sequence[tuple[GradientEdge, GradientEdge]]
    take: Callable[[Gradients], None]
    found: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict[tuple[int, int], Any])

    def __post_init__(self) -> None:
        for i, pair in enumerate(self.edges):
            for side, edge in enumerate(pair):
                edge.node.register_prehook(partial(self.see, (i, side), edge.output_nr))

    def see(self, place: tuple[int, int], output: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self.found[place] = gradients[output]
        if len(self.found) == 2 * len(self.edges):
            self.give()

    def give(self) -> None:
        both = [(self.found.pop((i, 0), None), self.found.pop((i, 1), None)) for i in range(len(self.edges))]
        known = [(a, b) for a, b in both if a is not None and b is not None]
        if known:
            self.take(Gradients(self.name, self.is_leaf, tuple(a for a, _ in known), tuple(b for _, b in known)))


def _drop_gradient(leaf: torch.Tensor) -> None:
    leaf.grad = None


def _starts(run: PairedRun, loss: Loss) -> list[torch.Tensor]:
    starts: list[torch.Tensor] = []
    for output in run.outputs():
        with run.modes():
            value: Any = _loss_of(loss, output)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                kind = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ArgumentError(f"loss gave {kind}: it must turn the model's output into one number, as a tensor.")
            value = value.float()
        if not value.requires_grad:
            raise CalibrationError(
                "the loss does not depend on anything that requires a gradient: unfreeze a parameter, or call "
                "requires_grad_() on an input of the call."
            )
        starts.append(value)
    return starts


def _loss_of(loss: Loss, output: Any) -> Any:
    """Call ``loss``, which may want what it is not given."""
    try:
        inspect.signature(loss).bind(output)
    except ValueError:  # some functions written in C have no signature
        pass
    except TypeError as error:
        raise ArgumentTypeError(
            f"loss takes the model's output alone, and this one does not: {error}. It may read targets from around it: "
            "loss=lambda output: cross_entropy(output, targets)."
        ) from None
    return loss(output)


def _sum(output: Any) -> torch.Tensor:
    return sum((tensor.float().sum() for tensor in floating(output)), torch.zeros((), device="cpu"))
