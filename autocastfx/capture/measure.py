"""Run a captured graph on real values and measure their magnitudes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from autocastfx.capture.call import Call
from autocastfx.capture.export import Captured
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.magnitude import Magnitude, Measured, magnitude
from autocastfx.graph.node import attribute
from autocastfx.graph.walk import is_converted_inside
from autocastfx.plan.ranges import Key, key_of

__all__ = ["MeasuredGraph", "Seen", "apart", "read_all", "written_outside"]

Seen = tuple[Key, Measured]
_Record = Callable[[Seen], None]


@dataclass(frozen=True)
class MeasuredGraph:
    """A captured graph, the names of the inputs, parameters and constants that it writes into, and its constants."""

    captured: Captured
    written: frozenset[str]
    constants: Mapping[str, Any]

    @classmethod
    def of(cls, captured: Captured) -> MeasuredGraph:
        """Prepare a captured graph, with copies of the constants that it writes into."""
        written = written_outside(captured.graph, captured.attributes)
        tensors = {n: a for n, a in captured.attributes.items() if isinstance(a, torch.Tensor)}
        return cls(captured, written, {**captured.attributes, **apart(tensors, written)})

    def run(self, call: Call, tensors: Mapping[str, torch.Tensor], record: _Record) -> None:
        """Run ``call`` and record each float32 value. May write into ``tensors``, but not into the call's tensors."""
        names = [n.name for n in self.captured.graph.nodes if n.op == "placeholder"]
        inputs = [t.detach() for t in call.tensors]
        inputs = [t.clone() if n in self.written else t for n, t in zip(names, inputs, strict=True)]
        held = {**self.constants, **tensors}
        _Watcher(self.captured.graph, held.__getitem__, record).run(*inputs, enable_io_processing=False)


class _Watcher(fx.Interpreter):
    """Runs a graph, frees each value after its last use, and records the magnitudes of each float32 value."""

    def __init__(self, graph: fx.Graph, held: Callable[[str], Any], record: _Record, prefix: str = "") -> None:
        super().__init__(nn.Module(), graph=graph)
        self.extra_traceback = False
        self._held, self._record, self._prefix = held, record, prefix

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr":
            return self._read(n)
        result = super().run_node(n)
        if n.op != "output" and (measured := magnitude(result)) is not None:
            self._record((key_of(n, self._prefix), measured))
        return result

    def _read(self, n: fx.Node) -> Any:
        held = self._held(str(n.target))
        if not isinstance(held, fx.GraphModule) or not all(map(is_converted_inside, n.users)):
            return held
        graph, prefix = held.graph, f"{self._prefix}{n.target}/"

        def run(*args: Any) -> Any:
            inside = _Watcher(graph, partial(attribute, held), self._record, prefix)
            return inside.run(*args, enable_io_processing=False)

        return run


def read_all(seen: list[Seen]) -> Iterator[tuple[Key, Magnitude, int]]:
    """Yield each value's key, magnitude and number of non-finite elements. Reads each device three times."""
    for device in dict.fromkeys(measured.largest.device for _, measured in seen):
        keys, here = zip(*((k, m) for k, m in seen if m.largest.device == device), strict=True)
        largest, rms, counts = (torch.stack(numbers).tolist() for numbers in zip(*here, strict=True))
        yield from zip(keys, map(Magnitude, largest, rms), counts, strict=True)


def written_outside(graph: fx.Graph, attributes: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tensors that a run of ``graph`` may write into: inputs by node, others by target.

    Args:
        graph: captured or converted.
        attributes: values of its ``get_attr`` nodes, sub-graphs among them.
    """
    outside = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    if not any(_writes(held) for held in attributes.values()):
        shared = alias_sets(graph)
        outside = [n for n in outside if n in shared]
    return frozenset(n.name if n.op == "placeholder" else str(n.target) for n in outside)


def _writes(held: Any) -> bool:
    """True if a sub-graph writes into any tensor."""
    graphs = [m for m in held.modules() if isinstance(m, fx.GraphModule)] if isinstance(held, nn.Module) else []
    ops = (n.target for m in graphs for n in m.graph.nodes)
    return any(isinstance(op, OpOverload) and op._schema.is_mutable for op in ops)


def apart(tensors: Mapping[str, torch.Tensor], written: frozenset[str]) -> dict[str, torch.Tensor]:
    """Copy the tensors named in ``written``, and all that share their storage. The copies share it likewise."""

    def storage(name: str) -> int:
        return tensors[name].untyped_storage()._cdata

    stores = {storage(n) for n in written if n in tensors}
    return copy.deepcopy({n: t.detach() for n, t in tensors.items() if storage(n) in stores})
