"""Find the ATen operators that meet floating values in a captured model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx
from torch._ops import OpOverload

import autocastfx
from autocastfx.errors import AutocastFXError
from autocastfx.graph.names import base_name, op_name
from autocastfx.graph.node import tensors, uses
from benchmarks.zoo_case import ZooModel
from benchmarks.zoo_measure import FIRST_SIZE

__all__ = ["floating_ops"]


def floating_ops(model: ZooModel) -> set[str]:
    """Return the base names of the ATen operators of ``model``, in both modes, that read or make floating tensors.

    Complex tensors count too. A model that cannot be captured has none.
    """
    try:
        amp = autocastfx.convert(model.build(), (), example_kwargs=model.inputs(*FIRST_SIZE), dtype=torch.bfloat16)
    except AutocastFXError:
        return set()
    captured = [variant.captured for variant in amp.variants if variant.captured is not None]
    graphs = [graph for c in captured for graph in (c.graph, *_inside(c.attributes.values()))]
    return {base_name(op_name(node)) for graph in graphs for node in graph.nodes if _is_floating(node)}


def _inside(attributes: Iterable[object]) -> Iterator[fx.Graph]:
    """Return the graphs that higher-order operators run, at any depth."""
    for held in attributes:
        if isinstance(held, fx.GraphModule):
            yield held.graph
            yield from _inside(held.children())


def _is_floating(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    seen = (*tensors(node), *(t for use in uses(node) for t in tensors(use.node)))
    return any(t.is_floating_point() or t.is_complex() for t in seen)
