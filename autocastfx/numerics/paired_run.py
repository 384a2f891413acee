"""A converted graph and the captured one, run side by side on the same call: values of both, node by node."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autocastfx.amp_module import AmpModule, Variant
from autocastfx.call import Call, CallSignature
from autocastfx.capture.export import Captured, capture
from autocastfx.graph import attribute, origin
from autocastfx.measured_graph import apart, written_outside
from autocastfx.op_name import op_name

__all__ = ["PairedRun", "Step", "floating", "is_cast", "run_side_by_side"]


@dataclass(frozen=True)
class Step:
    """A node of the converted graph that has just run.

    Attributes:
        node: of the converted graph.
        value: what it gave.
        before: what was asked of its inputs before it ran, for it may write into them.
        twin: the node of the captured graph that it stands for; None if there is none, or no captured graph.
        reference: what ``twin`` gave.
        values, references: the values of each graph that are alive now.
    """

    node: fx.Node
    value: Any
    before: tuple[Any, ...]
    twin: fx.Node | None
    reference: Any
    values: Mapping[fx.Node, Any]
    references: Mapping[fx.Node, Any]


@dataclass(frozen=True)
class PairedRun:
    """The steps of one call, and how many computing nodes have no counterpart in the other graph."""

    variant: Variant
    steps: Generator[Step]
    unmatched: int


def run_side_by_side(
    model: nn.Module | None,
    amp_model: AmpModule,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ask: Callable[[Any], Any] = lambda value: None,
) -> PairedRun:
    """Run the variant that fits the call, one node a step, and with it the graph that it was made from.

    Each graph starts from the present random state. Of both, only the values that are still to be read are kept.
    Neither the call's tensors nor parameters and buffers are written into: what would be is copied first.

    Args:
        model: the float32 original, which gives the float32 values; None: the captured graph, if it is at hand, on the
            parameters of ``amp_model``.
        amp_model: what ``convert`` returned.
        args: of the call, by position.
        kwargs: of the call, by keyword.
        ask: of each input of a node of the converted graph, before that runs; see ``Step.before``.

    Raises:
        TypeError: the arguments do not fit the forward, or ``amp_model`` is no converted model.
        VariantError: no variant fits, and none can be captured.
        CaptureError: ``model`` cannot be captured.
    """
    if not isinstance(amp_model, AmpModule):
        raise TypeError(f"this needs what convert() returned, not {type(amp_model).__name__}: convert the model first")
    call = CallSignature.of(amp_model.forward).bind(tuple(args), dict(kwargs))
    variant = amp_model.variant_for(tuple(args), kwargs)
    held: dict[str, torch.Tensor] = amp_model.held()
    low = _Side(variant.graph, lambda name: held[name] if name in held else attribute(amp_model, name), call)
    captured = variant.captured
    if model is not None:
        held = {
            n: t for named in (model.named_parameters, model.named_buffers) for n, t in named(remove_duplicate=False)
        }
        captured = captured or _capture(model, variant, call, held)
    if captured is None:
        return PairedRun(variant, _steps(low, None, {}, ask), 0)
    attributes, own = captured.attributes, held
    full = _Side(captured.graph, lambda name: own[name] if name in own else attributes[name], call)
    twins = _twins(variant.graph, captured.graph)
    made = sum(node not in twins for node in variant.graph.nodes if _computes(node) and not is_cast(node))
    gone = sum(map(_computes, captured.graph.nodes)) - len(twins)
    return PairedRun(variant, _steps(low, full, twins, ask), made + gone)


def _capture(model: nn.Module, variant: Variant, call: Call, held: Mapping[str, torch.Tensor]) -> Captured:
    return capture(model, CallSignature.of(model.forward), call, training=variant.modes, held=held)


def floating(value: Any) -> list[torch.Tensor]:
    """The tensors of floating-point numbers in a value."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def is_cast(node: fx.Node) -> bool:
    """Whether the conversion inserted ``node`` to bring a value to another precision."""
    mark = origin(node)
    return mark is not None and mark.made_by in ("rewrite", "recast", "store_weights")


def _computes(node: fx.Node) -> bool:
    return node.op.startswith("call_")


def _twins(converted: fx.Graph, captured: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Node of the captured graph by node of the converted one, in the order of both."""
    places = {node.name: (i, node) for i, node in enumerate(captured.nodes) if _computes(node)}
    twins: dict[fx.Node, fx.Node] = {}
    last = -1
    for node in converted.nodes:
        place, twin = places.get(node.name, (-1, node))
        if place > last and origin(node) is None and op_name(node) == op_name(twin):
            twins[node], last = twin, place
    return twins


class _Side(fx.Interpreter):
    """One graph: runs a node at a time, with random numbers of its own, and forgets values after their last use."""

    def __init__(self, graph: fx.Graph, read: Callable[[str], Any], call: Call) -> None:
        super().__init__(nn.Module(), graph=graph)
        self.extra_traceback = False
        held = {str(n.target): read(str(n.target)) for n in graph.nodes if n.op == "get_attr"}
        tensors = {name: one for name, one in held.items() if isinstance(one, torch.Tensor)}
        written = written_outside(graph, held)
        buffers = {name for name, one in tensors.items() if not isinstance(one, nn.Parameter)}
        self._held = {**held, **apart(tensors, written | buffers)}  # batch_norm's schema hides that it writes
        names = [n.name for n in graph.nodes if n.op == "placeholder"]
        inputs = dict(zip(names, call.tensors, strict=True))
        self.args_iter = iter({**inputs, **apart(inputs, written)}.values())
        self.ahead = iter(list(graph.nodes))
        self._random = _random_state()

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._held[str(target)]

    def run_one(self, node: fx.Node) -> Any:
        self.env[node] = self.run_node(node)
        return self.env[node]

    def release(self, node: fx.Node) -> None:
        """Forget what ``node`` was the last to read, and its own value if none reads it."""
        for read in (*self.user_to_last_uses.get(node, ()), *(() if node.users else (node,))):
            self.env.pop(read, None)

    @contextmanager
    def random(self) -> Generator[None]:
        """While open, random numbers go on from where this graph's were."""
        _set_random_state(self._random)
        yield
        self._random = _random_state()


def _random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _set_random_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def _steps(
    low: _Side, full: _Side | None, twins: Mapping[fx.Node, fx.Node], ask: Callable[[Any], Any]
) -> Generator[Step]:
    before_all = _random_state()
    try:
        for node in low.ahead:
            if node.op == "output":
                return
            with torch.no_grad(), torch._C._DisableAutocast():
                asked = tuple(ask(low.env[read]) for read in node.all_input_nodes)
                with low.random():
                    value = low.run_one(node)
                twin = twins.get(node)
                if full is not None and twin is not None:
                    _run_up_to(full, twin)
            reference, references = (full.env[twin], full.env) if full is not None and twin is not None else (None, {})
            yield Step(node, value, asked, twin, reference, low.env, references)
            del value, reference
            low.release(node)
            if full is not None and twin is not None:
                full.release(twin)
    finally:
        _set_random_state(before_all)


def _run_up_to(full: _Side, last: fx.Node) -> None:
    """Run the nodes up to ``last``; what ``last`` reads is kept for now."""
    with full.random():
        for node in full.ahead:
            full.run_one(node)
            if node is last:
                return
            full.release(node)
