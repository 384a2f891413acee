"""A converted graph and the captured one, run side by side on the same call: values of both, node by node."""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx, nn
from torch.autograd.graph import get_gradient_edge
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

# Run a backward pass that stops between the nodes of a graph, so that gradients of its values can be read.

_now: Any = cast("Any", torch.autograd)._get_sequence_nr

Edge = tuple[Any, int]  # a function of torch's autograd, and the number of its output


@dataclass
class Tape:
    """Records autograd's functions for the values of a graph's nodes, by sequence numbers, which only grow.

    Attributes:
        starts, ends: the sequence numbers before and after a node ran.
        made: by node, an edge for each of its floating-point values; None for values that require no gradient or that
            it did not make itself.
        leaves: edges of the parameters and inputs that require gradients, by name.
        uses: the sequence number before the first node that reads a leaf; 0 for inputs.
    """

    starts: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    ends: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    made: dict[fx.Node, list[Edge | None]] = field(default_factory=dict[fx.Node, list["Edge | None"]])
    leaves: dict[str, Edge] = field(default_factory=dict[str, "Edge"])
    uses: dict[str, int] = field(default_factory=dict[str, int])

    def leaf(self, name: str, leaf: torch.Tensor) -> None:
        """Record a leaf under the name of a ``get_attr`` target or an input."""
        self.leaves[name] = edge_of(leaf)
        self.uses.setdefault(name, 0)

    def start(self, node: fx.Node) -> None:
        """Record the start of ``node``."""
        self.starts[node] = now = _now()
        name = str(node.target)
        if node.op == "get_attr" and name in self.leaves and not self.uses[name]:
            self.uses[name] = now

    def end(self, node: fx.Node, value: Any) -> None:
        """Record the end of ``node`` and its ``value``. Values passed on belong to the node that made them."""
        edges: list[Edge | None] = []
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                edge = edge_of(tensor) if tensor.requires_grad else None
                is_own = edge is not None and not _is_leaf(edge[0]) and edge[0]._sequence_nr() >= self.starts[node]
                edges.append(edge if is_own else None)
        if any(edge is not None for edge in edges):
            self.made[node] = edges
        self.ends[node] = _now()

    def keep(self, nodes: Iterable[fx.Node]) -> None:
        """Forget the values of other nodes, whose edges would keep tensors saved for backward alive."""
        self.made = {node: self.made[node] for node in nodes if node in self.made}


def edge_of(tensor: torch.Tensor) -> Edge:
    """Return a tensor's edge in the present autograd graph."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


class Backward:
    """Runs backwards from one number with a given gradient, step by step.

    Functions run in the order of torch's own engine, latest first, and gradients are added up in the same order. Only
    gradients that functions still need are kept, and those of leaves.
    """

    def __init__(self, output: torch.Tensor, gradient: torch.Tensor) -> None:
        self._waiting: dict[Any, list[torch.Tensor | None]] = {}
        self._order: list[tuple[int, int, Any]] = []
        self._owners: dict[Any, list[Any]] = {}  # owners that keep functions written in Python alive
        self._given = 0
        self.at: float = float("inf")
        self._add(edge_of(output), gradient, get_gradient_edge(output).ownership_token)

    @property
    def pending(self) -> int:
        """The number of gradients kept now."""
        return sum(gradient is not None for gradients in self._waiting.values() for gradient in gradients)

    def run_to(self, mark: int) -> None:
        """Run all functions with sequence numbers from ``mark`` on."""
        self.at = min(self.at, mark)
        while self._order and -self._order[0][0] >= mark:
            function = heapq.heappop(self._order)[2]
            owner = function, self._owners.pop(function, None)
            for edge, gradient in _apply(function, self._waiting.pop(function)):
                self._add(edge, gradient, owner)

    def gradient(self, edge: Edge) -> torch.Tensor | None:
        """Return the gradient of a value, or None. It is complete once the functions of all its readers have run."""
        gradients = self._waiting.get(edge[0])
        return gradients[edge[1]] if gradients is not None else None

    def forget(self, edge: Edge) -> None:
        """Drop the gradient of a leaf."""
        self._waiting.pop(edge[0], None)

    def _add(self, edge: Edge, gradient: torch.Tensor, owner: Any) -> None:
        function, output = edge
        kinds = function._input_metadata
        if isinstance(function, torch._C._FunctionBase):
            self._owners.setdefault(function, []).append(owner)
        if function not in self._waiting:
            self._waiting[function] = [None] * len(kinds)
            if not _is_leaf(function):
                self._given += 1
                heapq.heappush(self._order, (-function._sequence_nr(), self._given, function))
        gradients = self._waiting[function]
        fitting, before = _fitting(gradient, kinds[output]), gradients[output]
        gradients[output] = fitting if before is None else before + fitting


def _is_leaf(function: Any) -> bool:
    return hasattr(function, "variable")


def _fitting(gradient: torch.Tensor, kind: Any) -> torch.Tensor:
    """Convert ``gradient`` to the shape and dtype of its value, as torch's own engine does."""
    if gradient.shape != kind.shape:
        gradient = gradient.sum_to_size(kind.shape)
    if gradient.is_complex() and not kind.dtype.is_complex:
        gradient = torch.real(gradient)
    return gradient.to(device=kind.device, dtype=kind.dtype)


def _apply(function: Any, gradients: Sequence[torch.Tensor | None]) -> list[tuple[Edge, torch.Tensor]]:
    """Run ``function`` and return its results with the edges of its inputs."""
    edges: list[Edge] = list(function.next_functions)
    if callable(function):
        results = function(*gradients)
        results = results if isinstance(results, tuple) else (results,)
    else:  # of a torch.autograd.Function, in Python: one result for each argument, tensor or not
        kinds = function._input_metadata
        full = [
            torch.zeros(kind.shape, dtype=kind.dtype, device=kind.device) if given is None else given
            for given, kind in zip(gradients, kinds, strict=True)
        ]
        given = function.apply(*full)
        given = given if isinstance(given, tuple) else (given,)
        results = [result for result, needed in zip(given, function.needs_input_grad, strict=False) if needed]
        edges = [edge for edge in edges if edge[0] is not None]
    pairs = zip(edges, results, strict=True)
    return [(edge, result) for edge, result in pairs if edge[0] is not None and result is not None]


# Run one of two graphs side by side, node by node, without changing the caller's tensors and random numbers.


class Side(NodeRun):
    """Runs a graph node by node, with its own random numbers, and frees values after their last use.

    Attributes:
        flat: the graph.
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
                self.tape.leaf(name, leaf)
                stand_ins[name] = leaf.clone() if name in written else leaf  # a leaf cannot be written into
        return stand_ins

    def run_one(self, node: fx.Node) -> Any:
        """Run ``node`` in the modes of its regions, and return its value."""
        with ExitStack() as modes:
            for region in self.flat.regions.get(node, ()):
                modes.enter_context(region())
            if self.tape is not None:
                self.tape.start(node)
            self.env[node] = self.run_node(node)
            if self.tape is not None:
                self.tape.end(node, self.env[node])
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
        raise ArgumentTypeError(
            f"this needs what convert() returned, not {type(amp_model).__name__}: convert the model first"
        )
    signature = CallSignature.of(amp_model.forward)
    args, kwargs = batch_of(signature, tuple(args), kwargs)
    try:
        variant, call, outside = amp_model._given_to(args, kwargs)
    except (TypeError, CaptureError) as error:
        is_batch = len(args) == 1 and isinstance(args[0], (tuple, list))
        if not is_batch and not isinstance(error, TypeError):
            raise
        hint = "The inputs of one call go one by one: compare(None, amp_model, *batch)." if is_batch else INPUTS_ALONE
        raise type(error)(f"{error}. {hint}") from None
    ours: dict[str, torch.Tensor] = {**outside, **amp_model._held()}
    low = flatten(
        variant.keeping if gradients else variant.graph,
        lambda name: ours[name] if name in ours else attribute(amp_model, name),
    )
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
    """Capture one call of a model, in these modes of its modules; the call does nothing else.

    Args:
        model: stays as it is.
        leaves: paths of functions that stay whole.
        modes: of the modules.
        args: of the call, by position.
        kwargs: of the call, by keyword.

    Returns:
        The graph, and what it is given, as by :meth:`CapturedGraph.given`.
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


# Run both graphs of a paired run backwards, and yield each gradient of both as soon as it is complete.

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Gradients:
    """The gradients of a node, parameter or input in both graphs; empty if one graph has none.

    Attributes:
        name: the node's name in the plan, or the name of a parameter or an input of the call.
        is_leaf: True for a parameter or an input.
        low, full: the gradients in the converted graph, and in the captured one.
    """

    name: str
    is_leaf: bool
    low: tuple[torch.Tensor, ...]
    full: tuple[torch.Tensor, ...]


def run_backwards(run: PairedRun, loss: Loss | None, scale: float) -> Generator[Gradients]:
    """Run both graphs backwards side by side, after all steps of ``run``.

    Args:
        run: a run of both graphs, with gradients.
        loss: a function from the model's output to one number; None: the sum of its floating-point tensors, in float32.
        scale: the loss scale.

    Raises:
        CalibrationError: the loss does not depend on anything that requires a gradient.
        ValueError: ``loss`` does not return a single number.
    """
    low, full = (_Half(tape, start) for tape, start in zip(run.tapes, _starts(run, loss or _sum, scale), strict=True))
    leaves = _leaves(low.tape, full.tape)
    low.tape.keep(run.twins)
    full.tape.keep(run.twins.values())
    for node, twin in reversed(list(run.twins.items())):
        low.run_to(low.tape.ends[node])
        full.run_to(full.tape.ends[twin])
        yield from _complete(leaves, low, full)
        made = (half.tape.made.pop(here, ()) for half, here in ((low, node), (full, twin)))
        yield _pair(run.names[node], list(zip(*made, strict=False)), low, full)
    low.run_to(0)
    full.run_to(0)
    yield from _complete(leaves, low, full)


def _starts(run: PairedRun, loss: Loss, scale: float) -> list[Backward]:
    starts: list[Backward] = []
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
        starts.append(Backward(value, torch.full_like(value, scale)))
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


@dataclass
class _Half:
    """The backward pass of one graph."""

    tape: Tape
    backward: Backward

    def run_to(self, mark: int) -> None:
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
            self.backward.run_to(mark)

    def has_passed(self, names: Sequence[str]) -> bool:
        """True if backward has passed every reader of the leaf with these names."""
        return self.backward.at <= min((self.tape.uses[name] for name in names if name in self.tape.uses), default=0)


def _leaves(low: Tape, full: Tape) -> dict[Edge, list[str]]:
    """Return the names of the leaves that both graphs have, by their edge in ``low``; tied parameters have several."""
    leaves: dict[Edge, list[str]] = {}
    for name, edge in low.leaves.items():
        if name in full.leaves:
            leaves.setdefault(edge, []).append(name)
    return leaves


def _complete(leaves: dict[Edge, list[str]], low: _Half, full: _Half) -> Iterator[Gradients]:
    """Yield the gradients of leaves that are complete, and free them."""
    for edge, names in list(leaves.items()):
        if low.has_passed(names) and full.has_passed(names):
            other = full.tape.leaves[names[0]]
            pair = _pair(names[0], [(edge, other)], low, full, is_leaf=True)
            low.backward.forget(edge)
            full.backward.forget(other)
            del leaves[edge]
            yield pair


def _pair(
    name: str, edges: list[tuple[Edge | None, Edge | None]], low: _Half, full: _Half, *, is_leaf: bool = False
) -> Gradients:
    both = [(low.backward.gradient(a), full.backward.gradient(b)) for a, b in edges if a and b]
    known = [(a, b) for a, b in both if a is not None and b is not None]
    return Gradients(name, is_leaf, tuple(a for a, _ in known), tuple(b for _, b in known))
