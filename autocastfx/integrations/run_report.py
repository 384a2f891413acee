"""The report of a script that ran with its models converted, as text and as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import nn

from autocastfx.integrations.compile_backend import CompileBackend
from autocastfx.report.compiled_graph import CompiledGraph

__all__ = ["LeftAlone", "RanGraph", "RanModel", "RunReport", "ran_model"]


@dataclass(frozen=True)
class RanGraph:
    """A graph of a model: how many of its nodes run in 16 bits and in float32, and its casts.

    Attributes:
        failure: why it could not be converted, else empty.
    """

    low: int
    float32: int
    casts: int
    failure: str = ""

    @staticmethod
    def of(graph: CompiledGraph) -> RanGraph:
        """Count the nodes of a compiled graph."""
        if graph.plan is None:
            return RanGraph(0, 0, 0, graph.failure)
        runs = [str(node.placement.run) for node in graph.plan.nodes]
        return RanGraph(runs.count("low"), runs.count("float32"), len(graph.plan.casts))


@dataclass(frozen=True)
class RanModel:
    """A model that was enabled.

    Attributes:
        name: its class.
        where: file and line of its first call.
        graphs: in the order in which they were captured.
        skipped: code that was not captured, with file, line and reason.
    """

    name: str
    where: str
    graphs: tuple[RanGraph, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        count = len(self.graphs)
        text = f"{self.name}, called at {self.where}: {count} graph{'' if count == 1 else 's'}"
        if self.graphs:
            most = max(self.graphs, key=lambda graph: graph.low + graph.float32)
            text += f"; the largest has {most.low} low nodes, {most.float32} float32, {most.casts} casts"
        unlike = [f"not converted: {graph.failure}" for graph in self.graphs if graph.failure]
        unlike += [f"not captured: {one}" for one in self.skipped]
        return "\n".join([text, *(f"  {one}" for one in unlike)])


@dataclass(frozen=True)
class LeftAlone:
    """A call or a model that the script runs as before.

    Attributes:
        name: a module's class, or a function.
        where: file and line of the call.
        reason: why.
        calls: how often it was called there.
    """

    name: str
    where: str
    reason: str
    calls: int

    def __str__(self) -> str:
        times = f", {self.calls} call{'' if self.calls == 1 else 's'}" if self.calls else ""
        return f"left as it is: {self.name} at {self.where}{times}: {self.reason}"


@dataclass(frozen=True)
class RunReport:
    """The models that a script called, and its steps.

    Attributes:
        dtype: the 16-bit dtype.
        models: what was enabled.
        left: what was not.
        steps: steps of optimizers.
        unscaled_steps: those by gradients of a float16 loss that was not scaled.
        skipped_steps: those that a scaler skipped for an overflow.
    """

    dtype: str
    models: Sequence[RanModel]
    left: Sequence[LeftAlone]
    steps: int
    unscaled_steps: int
    skipped_steps: int

    def __str__(self) -> str:
        if not (self.models or self.left):
            return "no model was called in this process: nothing is converted"
        lines = [*(f"{self.dtype}: {model}" for model in self.models), *map(str, self.left)]
        if self.skipped_steps or self.unscaled_steps:
            lines.append(
                f"{self.steps} steps, {self.skipped_steps} more skipped for an overflow, {self.unscaled_steps} by "
                "gradients of an unscaled loss"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def ran_model(model: nn.Module, backend: CompileBackend, where: str) -> RanModel:
    """Tell what became of a model that ``backend`` compiled."""
    graphs = tuple(map(RanGraph.of, backend.graphs))
    return RanModel(type(model).__name__, where, graphs, tuple(map(str, backend.skipped)))
