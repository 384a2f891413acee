"""Run the rewritten graph on abstract values and refuse it unless every dtype is what the plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autocastfx.dtypes import dtype_name
from autocastfx.errors import VerifyError
from autocastfx.graph.alias import mutated_inputs
from autocastfx.graph.names import op_name
from autocastfx.graph.node import argument, dtypes, origin, set_value, subgraphs, tensors, uses, value
from autocastfx.graph.sizes import abstract_call, concrete_sizes, dtypes_of
from autocastfx.passes.analysis.units import Ports
from autocastfx.passes.state import Pass, State
from autocastfx.passes.torch_autocast.dispatch import Followed
from autocastfx.plan.plan import Placement, Precision

__all__ = ["Verify", "verify"]


def verify(
    graph: fx.Graph,
    placements: Mapping[fx.Node, Placement],
    captured: Mapping[fx.Node, tuple[torch.dtype, ...]],
    *,
    low: torch.dtype,
    ports: Ports,
    keep_output_dtype: bool,
    attributes: Mapping[str, Any],
    followed: Followed | None = None,
    raised: Mapping[fx.Node, tuple[torch.dtype, ...]] | None = None,
) -> None:
    """Check ``graph`` and give its new nodes abstract values.

    Nodes whose inputs are as captured are not run again: their captured values stand. Symbolic sizes become those of
    the example inputs, for dtypes do not depend on them and reasoning about symbols is slow; unless some size depends
    on data.

    Args:
        graph: rewritten.
        placements: of the captured nodes.
        captured: output dtypes before rewriting, of every node.
        low: the 16-bit dtype.
        ports: which inputs of a low node are not cast.
        keep_output_dtype: whether the outputs must have their captured dtype.
        attributes: what the graph's ``get_attr`` nodes read, parameters and buffers apart.
        followed: how torch.autocast runs the graph, where that is the plan.
        raised: the planned dtypes of the captured nodes, for a model that is 16-bit already.

    Raises:
        VerifyError: naming the first wrong node; the printed graph is attached, with the node marked.
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"the rewritten graph is malformed: {error}") from error
    sizes = concrete_sizes(graph)
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        computes = node.op in ("call_function", "call_method") and not subgraphs(node, attributes)
        gives_number = isinstance(value(node), (torch.SymInt, torch.SymFloat, torch.SymBool))  # of whatever dtypes
        again = value(node) is None or (not gives_number and any(read in changed for read in node.all_input_nodes))
        if followed is not None:  # expanded parts have values of their own, and what gives no tensor has no dtype
            known = followed.dtypes.get(node, ())
            again = value(node) is None or (known != () and (again or known != dtypes(node)))
        elif raised is not None:
            again = again or raised.get(node, dtypes(node)) != dtypes(node)
        if computes and again:
            before = value(node)
            set_value(node, _run(node, graph))
            if before is None or dtypes_of(before) != dtypes(node):
                changed.add(node)
        else:
            set_value(node, sizes(value(node)))
            if node.op == "get_attr" and dtypes(node) != captured.get(node, dtypes(node)):  # it is stored low
                changed.add(node)
        if raised is not None:
            problem = _raised_problem(node, placements, captured, raised, low=low, keeps=keep_output_dtype)
        elif followed is None:
            problem = _problem(node, placements, captured, low=low, ports=ports, keeps=keep_output_dtype)
        else:
            problem = _followed_problem(node, followed, captured, keeps=keep_output_dtype)
        if problem:
            raise VerifyError(_report(graph, node, problem))


def _run(node: fx.Node, graph: fx.Graph) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), value)
    target = node.target
    call: Callable[..., Any] = target if callable(target) else getattr(torch.Tensor, str(target))
    try:
        return abstract_call(call, args, kwargs)
    except Exception as error:  # whatever a kernel raises on wrong dtypes is the finding
        shown = ", ".join(f"{u.argument}: {_names(dtypes(u.node))}" for u in uses(node))
        raise VerifyError(_report(graph, node, f"{op_name(node)}({shown}) fails: {error}")) from error


def _problem(
    node: fx.Node,
    placements: Mapping[fx.Node, Placement],
    captured: Mapping[fx.Node, tuple[torch.dtype, ...]],
    *,
    low: torch.dtype,
    ports: Ports,
    keeps: bool,
) -> str | None:
    placement = placements.get(node)
    if node.op == "output" and keeps:
        return _as_captured(node, captured)
    if placement is None:
        return None
    for target in mutated_inputs(node):
        mark = origin(target)
        if mark is not None and mark.rule != "storage":
            return f"writes into {target.name}, a cast that nobody else reads"
    runs_low = placement.run is Precision.LOW
    for use in uses(node):
        source = _captured_of(use.node, captured)
        if captured.get(source, ()) != (torch.float32,):
            continue
        wants_low = runs_low and not ports.stays_float32(node, use)
        if use.argument in placement.as_stored:
            wants_low = source in placements and placements[source].store is Precision.LOW
        wanted = low if wants_low else torch.float32
        if dtypes(use.node) != (wanted,):
            found = f"argument {use.argument!r} ({use.node.name}) is {_names(dtypes(use.node))}"
            return f"{found}, planned {_names((wanted,))}"
    planned = tuple(low if runs_low and d == torch.float32 else d for d in captured[node])
    if dtypes(node) != planned:
        return f"gives {_names(dtypes(node))}, planned {_names(planned)}"
    return None


def _as_captured(node: fx.Node, captured: Mapping[fx.Node, tuple[torch.dtype, ...]]) -> str | None:
    for use in uses(node):
        was = captured.get(_captured_of(use.node, captured), ())
        if was != dtypes(use.node):
            what = "output" if node.op == "output" else f"argument {use.argument!r},"
            return f"{what} {use.node.name} is {_names(dtypes(use.node))}, captured as {_names(was)}"
    return None


def _followed_problem(
    node: fx.Node, followed: Followed, captured: Mapping[fx.Node, tuple[torch.dtype, ...]], *, keeps: bool
) -> str | None:
    dispatch, placement = followed.dispatch, followed.placements.get(node)
    if node.op == "output":
        return _as_captured(node, captured) if keeps else None
    if placement is None:
        return None
    if dispatch.takes_captured(node, placement.run):
        return _as_captured(node, captured)
    to, asks = dispatch.dtype(placement.run), dispatch.asks(node, placement.run)
    for use in uses(node):
        found = f"argument {use.argument!r} ({use.node.name}) is"
        if (to is None or asks) and origin(use.node) is not None:
            return f"{found} a cast, planned as it comes"
        if to is not None and not asks and any(dispatch.eligible(t) and t.dtype != to for t in tensors(use.node)):
            return f"{found} {_names(dtypes(use.node))}, planned {_names((to,))}"
    if asks and argument(node, "dtype") != to:
        return f"names dtype={argument(node, 'dtype')}, planned {to}"
    if dtypes(node) != followed.dtypes[node]:
        return f"gives {_names(dtypes(node))}, planned {_names(followed.dtypes[node])}"
    return None


def _raised_problem(
    node: fx.Node,
    placements: Mapping[fx.Node, Placement],
    captured: Mapping[fx.Node, tuple[torch.dtype, ...]],
    raised: Mapping[fx.Node, tuple[torch.dtype, ...]],
    *,
    low: torch.dtype,
    keeps: bool,
) -> str | None:
    placement = placements.get(node)
    if placement is None and node.op != "output":
        return None
    for target in mutated_inputs(node):
        if origin(target) is not None:
            return f"writes into {target.name}, a cast that nobody else reads"
    for use in uses(node):
        source = _captured_of(use.node, captured)
        wanted = captured.get(source, ())
        is_read_as_stored = use.argument in placement.as_stored if placement is not None else not keeps
        if is_read_as_stored or isinstance(value(use.node), (tuple, list)):  # results of several are never cast
            wanted = raised.get(source, ())
        elif placement is not None and placement.run is Precision.FLOAT32:
            wanted = tuple(torch.float32 if dtype == low else dtype for dtype in wanted)
        if dtypes(use.node) != wanted:
            found = f"argument {use.argument!r} ({use.node.name}) is {_names(dtypes(use.node))}"
            return f"{found}, planned {_names(wanted)}"
    if placement is not None and dtypes(node) != raised[node]:
        return f"gives {_names(dtypes(node))}, planned {_names(raised[node])}"
    return None


def _captured_of(node: fx.Node, captured: Mapping[fx.Node, Any]) -> fx.Node:
    """The captured node whose value ``node`` holds: itself, or what a chain of inserted casts started from."""
    while node not in captured and origin(node) is not None:
        node = node.all_input_nodes[-1]
    return node


def _names(found: tuple[torch.dtype, ...]) -> str:
    return ", ".join(dtype_name(d) for d in found) or "nothing"


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
            VerifyError: the graph is not what was planned.
        """
        if state.guesses is None:
            verify(
                *(state.graph, state.placements, state.dtypes),
                low=self.policy.low,
                ports=self.policy.ports,
                keep_output_dtype=self.policy.keep_output_dtype,
                attributes=state.attributes,
                followed=state.followed,
                raised=state.raised,
            )
        return state
