"""Run a captured graph on real values and measure their magnitudes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch._ops import OpOverload

from autocastfx.capture.captured import Captured
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.magnitude import Magnitude, Measured, magnitude, read_magnitudes
from autocastfx.graph.node import NodeRun, attribute, recomputed
from autocastfx.graph.walk import Key, is_converted_inside, key_of

_Seen = list[tuple[Key, Measured]]


def measured_run(
    captured: Captured, values: Mapping[str, Any]
) -> tuple[tuple[Any, ...], list[tuple[Key, Magnitude, int]]]:
    """Run a graph on ``values``, by the names of its inputs and of what it reads of the model; it may write into them.

    Returns:
        What it gives; and each float32 value's key, magnitude and number of non-finite elements.
    """
    attributes, seen = {**captured.attributes, **values}, list[tuple[Key, Measured]]()
    inputs = [values[str(node.target)] for node in captured.graph.find_nodes(op="placeholder")]
    outputs = _measure(captured.graph, attributes.__getitem__, seen, "", *inputs)
    read = read_magnitudes([measured for _, measured in seen])
    return outputs, [(key, *reading) for (key, _), reading in zip(seen, read, strict=True)]


class _MeasuredRun(NodeRun):
    """Runs what runs again in backward once, and measures inside."""

    def __init__(self, graph: fx.Graph, given: Any, observe: Any, seen: _Seen, prefix: str) -> None:
        super().__init__(graph, given, observe)
        self._seen, self._prefix = seen, prefix

    def run_node(self, n: fx.Node) -> Any:
        for name, module in recomputed(n).items():
            args, _ = self.fetch_args_kwargs_from_env(n)
            passed = cast("Any", n.target).passed(args)
            return _measure(module.graph, partial(attribute, module), self._seen, f"{self._prefix}{name}/", *passed)
        return super().run_node(n)


def _measure(graph: fx.Graph, lookup: Callable[[str], Any], seen: _Seen, prefix: str, *inputs: Any) -> Any:
    """Run ``graph``, and add each float32 value to ``seen``, those in sub-graphs that are converted inside too."""

    def observe(node: fx.Node, value: Any, _read: Sequence[Any]) -> None:
        if node.op not in ("get_attr", "output") and (measured := magnitude(value)) is not None:
            seen.append((key_of(node, prefix), measured))

    def read(node: fx.Node) -> Any:
        value = lookup(str(node.target))
        if not isinstance(value, fx.GraphModule) or not all(map(is_converted_inside, node.users)):
            return value
        return partial(_measure, value.graph, partial(attribute, value), seen, f"{prefix}{node.target}/")

    return _MeasuredRun(graph, read, observe, seen, prefix).run(*inputs, enable_io_processing=False)


def written_outside(graph: fx.Graph, attributes: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tensors that a run of ``graph`` may write into: inputs by node, others by target.

    Args:
        graph: captured or converted.
        attributes: values of its ``get_attr`` nodes, sub-graphs among them.
    """
    outside = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    if not any(_writes(value) for value in attributes.values()):
        shared = alias_sets(graph)
        outside = [n for n in outside if n in shared]
    return frozenset(n.name if n.op == "placeholder" else str(n.target) for n in outside)


def _writes(value: Any) -> bool:
    """True if a sub-graph writes into any tensor."""
    graphs = [m for m in value.modules() if isinstance(m, fx.GraphModule)] if isinstance(value, nn.Module) else []
    ops = (n.target for m in graphs for n in m.graph.nodes)
    return any(isinstance(op, OpOverload) and op._schema.is_mutable for op in ops)


def copies_of_written(tensors: Mapping[str, torch.Tensor], written: frozenset[str]) -> dict[str, torch.Tensor]:
    """Copy the tensors named in ``written``, and all that share their storage. The copies share it likewise."""

    def storage(name: str) -> int:
        return tensors[name].untyped_storage()._cdata

    stores = {storage(n) for n in written if n in tensors}
    return copy.deepcopy({n: t.detach() for n, t in tensors.items() if storage(n) in stores})
