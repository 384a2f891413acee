"""Run the rewritten graph on abstract values and refuse it unless every dtype is what the plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autocastfx.dtypes import dtype_name
from autocastfx.errors import VerifyError
from autocastfx.graph.alias import mutated_inputs, storage_of
from autocastfx.graph.names import op_name
from autocastfx.graph.node import Use, argument, captured_behind, dtypes, origin, set_value, subgraphs, uses, value
from autocastfx.graph.sizes import abstract_call, abstract_copy, concrete_sizes, dtypes_of
from autocastfx.passes.analysis.kept_args import check_kept_args
from autocastfx.passes.casts import PlannedDtypes
from autocastfx.passes.state import Pass, State
from autocastfx.plan.plan import PlannedFloat8
from autocastfx.policy.float8 import PREPARED, RECIPES
from autocastfx.runtime.operators.float8 import float8_linear, quantize
from autocastfx.runtime.working_copies import quantized_copy


def verify(
    graph: fx.Graph,
    planned: PlannedDtypes,
    captured: Mapping[fx.Node, tuple[torch.dtype, ...]],
    attributes: Mapping[str, Any],
    try_kernel: Callable[[fx.Node], None] = lambda _: None,
) -> None:
    """Check ``graph`` and give its new nodes abstract values.

    Nodes whose inputs are as captured are not run again: their captured values stand. Symbolic sizes become those of
    the example inputs, for dtypes do not depend on them and reasoning about symbols is slow; unless some size depends
    on data.

    Args:
        graph: rewritten.
        planned: the dtypes of its values.
        captured: output dtypes before rewriting, of every node.
        attributes: what the graph's ``get_attr`` nodes read, parameters and buffers apart.
        try_kernel: refuses a node whose kernel does not take what the list makes it read. Called before it is run.

    Raises:
        OpListError: a kernel does not take an argument that the list leaves in float32.
        VerifyError: naming the first wrong node; the printed graph is attached, with the node marked.
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"the rewritten graph is malformed: {error}") from error
    sizes = concrete_sizes(graph)
    changed: set[fx.Node] = set()
    results: dict[Any, Any] = {}  # of equal layers, which run once
    for node in graph.nodes:
        computes = node.op in ("call_function", "call_method") and not subgraphs(node, attributes)
        gives_tensors = dtypes(node) != ()
        reads_changed = gives_tensors and any(read in changed for read in node.all_input_nodes)
        is_to_change = node in captured and planned.gives(node) != dtypes(node)
        if computes and (value(node) is None or reads_changed or is_to_change):
            before = value(node)
            try_kernel(node)
            set_value(node, _run(node, graph, results))
            if before is None or dtypes_of(before) != dtypes(node):
                changed.add(node)
        else:
            set_value(node, sizes(value(node)))
            if node.op == "get_attr" and dtypes(node) != captured.get(node, dtypes(node)):  # it is stored low
                changed.add(node)
        if problem := _problem(node, planned, captured):
            raise VerifyError(_report(graph, node, problem))


def _callable(node: fx.Node) -> Callable[..., Any]:
    return node.target if callable(node.target) else getattr(torch.Tensor, node.target)


def _run(node: fx.Node, graph: fx.Graph, results: dict[Any, Any]) -> Any:
    """Run a node on abstract values, or copy the result of one like it."""
    args, kwargs = map_arg((node.args, node.kwargs), value)
    key = _key(node, args, kwargs)
    if key in results:
        return abstract_copy(results[key])
    try:
        result = abstract_call(_callable(node), args, kwargs)
        if key is not None and _storages(result).isdisjoint(_storages((args, kwargs))):
            results[key] = result
        return result
    except Exception as error:  # whatever a kernel raises on wrong dtypes is the finding
        shown = ", ".join(f"{u.argument}: {_names(dtypes(u.node))}" for u in uses(node))
        raise VerifyError(_report(graph, node, f"{op_name(node)}({shown}) fails: {error}")) from error


_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


def _key(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return what the abstract result of an operator follows from; None if that is not known, or it writes."""
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return None
    leaves, spec = pytree.tree_flatten((args, kwargs))
    keys: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            keys += leaf.dtype, leaf.device, leaf.dim(), *leaf.shape, *leaf.stride()
        else:
            keys += type(leaf), leaf
    return (target, spec, *keys) if all(isinstance(key, (type, *_PLAIN)) for key in keys) else None


def _storages(abstract: Any) -> set[int]:
    return {storage_of(leaf) for leaf in pytree.tree_leaves(abstract) if isinstance(leaf, torch.Tensor)}


def _problem(node: fx.Node, planned: PlannedDtypes, captured: Mapping[fx.Node, tuple[torch.dtype, ...]]) -> str | None:
    if node not in captured or node.op in ("placeholder", "get_attr"):
        return None
    for target in mutated_inputs(node):
        mark = origin(target)
        if mark is not None and mark.rule != "storage":
            return f"writes into {target.name}, a cast that nobody else reads"
    for use in uses(node):
        if use.node.target in (quantize, quantized_copy):
            if problem := _problem_of_quantized(node, use):
                return problem
            continue
        source = captured_behind(use.node)
        if source not in captured:
            return f"reads {use.node.name}, which is not in the plan"
        to = planned.read(node, use, source)
        wanted = planned.stores(source) if to is None else (to,)
        what = f"output {use.node.name}" if node.op == "output" else f"argument {use.argument!r} ({use.node.name})"
        mark = origin(use.node)
        if to is None and mark is not None and mark.rule != "storage":
            return f"{what} is a cast, planned as it comes"
        if dtypes(use.node) != wanted:
            return f"{what} is {_names(dtypes(use.node))}, planned {_names(wanted)}"
    if node.op != "output" and dtypes(node) != planned.gives(node):
        return f"gives {_names(dtypes(node))}, planned {_names(planned.gives(node))}"
    return None


def _problem_of_quantized(node: fx.Node, use: Use) -> str | None:
    """A product reads an operand in float8 beside the operand itself: of the same value, and as its recipe says."""
    name, of = use.argument.partition("_")[0], use.node.all_input_nodes[-1]
    if node.target is not float8_linear or argument(node, name) is not of:
        return f"argument {use.argument!r} ({use.node.name}) is {of.name} in float8, which it does not read as {name!r}"
    recipe, (product, side) = RECIPES[argument(node, "recipe")], PREPARED[use.argument]
    layouts, found = recipe.layouts.get(product), use.node.args[-3:]
    if layouts is None or found != recipe.quantizing(layouts[side]):
        return f"argument {use.argument!r} ({use.node.name}) is quantised as {found}, not as {recipe.name} reads it"
    if dtypes(use.node) != (recipe.numbers, layouts[side].scales):
        return f"argument {use.argument!r} ({use.node.name}) is {_names(dtypes(use.node))}, no float8 value and scale"
    return None


def verify_float8(graph: fx.Graph, planned: Mapping[fx.Node, PlannedFloat8]) -> None:
    """Check that the products of ``graph`` that run in float8 are those that are planned.

    Raises:
        VerifyError: naming the first that is not.
    """
    for node in graph.nodes:
        products = planned[node].products if node in planned else ()
        found = argument(node, "products").split() if node.target is float8_linear else []
        if found != [product.value for product in products]:
            said = (", ".join(names) or "none" for names in (found, products))
            raise VerifyError(_report(graph, node, "runs in float8: {}, planned: {}".format(*said)))


def _names(value_dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(dtype_name(d) for d in value_dtypes) or "nothing"


def _report(graph: fx.Graph, node: fx.Node, problem: str) -> str:
    lines = [f"{'>>> ' if n is node else '    '}{n.format_node()}" for n in graph.nodes]
    return (
        f"node {node.name!r} ({op_name(node)}): {problem}. The graph is refused; this is a defect of a pass or of an "
        "edited graph.\n" + "\n".join(lines)
    )


class Verify(Pass):
    """Refuses a graph whose dtypes are not those of the plan. One made without inputs holds none to verify."""

    name = "verify"

    def __call__(self, state: State) -> State:
        """The state, the new nodes of its graph with abstract values.

        Raises:
            OpListError: a kernel does not take an argument that the list leaves in float32.
            VerifyError: the graph is not what was planned.
        """
        if state.planned is not None:
            planned = state.planned(state)

            def try_kernel(node: fx.Node) -> None:
                kept = self.settings.op_list.keeps(op_name(node))
                if kept.names and not kept.shipped:
                    check_kept_args(node, kept, _callable(node), planned.gives(node), self.settings.device)

            verify(state.graph, planned, state.dtypes, state.attributes, try_kernel)
            verify_float8(state.graph, state.float8)
        return state
