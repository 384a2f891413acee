"""A graph that the backend of ``torch.compile`` has converted, and the graphs of an enabled model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from autocastfx.errors import VariantError
from autocastfx.plan.plan import Plan
from autocastfx.report.formats import render
from autocastfx.report.view import SourceLine, View, titled, view_of_graph


@dataclass(eq=False)
class CompiledGraph:
    """One of Dynamo's graphs, converted or not; as it is now, if it has been converted again.

    Attributes:
        module: what the next backend got.
        plan: the decisions and casts; None if the graph could not be converted.
        failure: why the graph could not be converted, else empty.
    """

    module: fx.GraphModule
    plan: Plan | None
    failure: str = ""

    def dump(self, format: str = "text") -> str:
        """Show every node with its precision and the reason, and every cast, as :func:`dump` does.

        Args:
            format: as in :func:`dump`, but for the page.

        Raises:
            ValueError: the format is unknown.
            VariantError: the graph could not be converted.
        """
        if self.plan is None:
            raise VariantError(f"there is no plan of a graph that could not be converted: {self.failure}")
        return render(view_of_graph(self.module, self.plan, "a graph of torch.compile"), format)


def fold_of(model: object) -> str:
    """Return the level of folding that a model was enabled with; an empty text if it is not enabled."""
    return str(getattr(_backend_of(model), "fold", ""))


def _backend_of(model: object) -> Any:
    call = model.__dict__.get("_compiled_call_impl") if isinstance(model, nn.Module) else None
    return getattr(call, "backend", None)


def views_of_enabled(model: nn.Module) -> list[View] | None:
    """Return a view of each graph that could be converted; the first tells of what is in none. None if not enabled.

    Raises:
        VariantError: there is no such graph.
    """
    backend = _backend_of(model)
    if not isinstance(getattr(backend, "graphs", None), list):
        return None
    graphs: Sequence[CompiledGraph] = backend.graphs
    # what runs outside of converted graphs, told with the first of them
    outside = [
        f"not captured: {one.name} at {SourceLine(one.file, one.line, '').file}:{one.line} ({one.reason}). {one.runs}"
        for one in backend.skipped
    ]
    outside += [f"not converted: graph {i}: {one.failure}" for i, one in enumerate(graphs, 1) if one.plan is None]
    if not graphs and not outside:
        raise VariantError("nothing is captured yet: call the enabled model once.")
    call: Any = model.__dict__["_compiled_call_impl"]
    views = [
        view_of_graph(
            graph.module,
            graph.plan,
            f"graph {number} of {len(graphs)}, captured by torch.compile"
            + (", which runs no longer: its code has moved to torch.autocast" if call.has_left(graph) else ""),
        )
        for number, graph in enumerate(graphs, 1)
        if graph.plan is not None
    ]
    if not views:
        raise VariantError(f"no graph of the enabled model could be converted: {outside[0]}")
    held = {name.replace(".", "_") for name, _ in (*model.named_parameters(), *model.named_buffers())}
    views = [titled(one, _which(one), _held(one, held)) for one in views]
    views[0] = replace(views[0], outside=(*outside, *backend.unmatched))
    return [replace(one, model=type(model).__name__) for one in views]


_MODES = {
    (name, said): mode
    for name in ("train", "training")  # the argument of dropout, and of batch norm
    for said, mode in (("True", "train mode"), ("False", "eval mode"))
}


def _which(view: View) -> str:
    """Return the number of a graph, and its mode where an op of it, such as dropout, has one."""
    number = view.variant.replace(", captured by torch.compile", "")
    modes = dict.fromkeys(_MODES[pair] for row in view.rows for pair in row.attributes if pair in _MODES)
    return ", ".join([number, *(modes if len(modes) == 1 else ["mixed modes"] if modes else [])])


def _held(view: View, held: set[str]) -> list[str]:
    """Return the inputs that are parameters or buffers: Dynamo names them by their paths inside the frame's module."""
    inputs = [row.name for row in view.rows if row.kind == "input"]
    return [name for name in inputs if name in held or any(path.endswith(f"_{name}") for path in held)]
