"""What an enabled model runs in the place of one of Dynamo's graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from autocastfx.calibration import Measuring
from autocastfx.errors import UncapturedGraphWarning
from autocastfx.passes.pipeline import Converter
from autocastfx.report.compiled_graph import CompiledGraph
from autocastfx.runtime.around import outside_of_modes
from autocastfx.runtime.captures import CapturedGraph
from autocastfx.runtime.quick_graph import lift
from autocastfx.runtime.variant import Variant, converted_variant
from autocastfx.runtime.working_copies import ATTRIBUTE, WorkingCopies

_TABLE = "_variants"


class GraphRun:
    """A graph of Dynamo's as it was converted, and as it is converted again when numbers change that decided it.

    Attributes:
        variant: the present conversion.
        shown: it, as a module that takes Dynamo's inputs.
        compiled: what a compiler has made of that; None: the graph runs op by op.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        converter: Converter,
        device: torch.device | None,
        copies: WorkingCopies | None,
        measuring: Measuring | None,
    ) -> None:
        self.graph, self._measuring = graph, measuring
        self._converter, self._device, self._copies = converter, device, copies
        self.compiled: Callable[..., Any] | None = None
        self.variant, module = self._converted()
        graph.settle()
        self.shown = CompiledGraph(module, self.variant.plan)

    def _converted(self) -> tuple[Variant, fx.GraphModule]:
        variant = converted_variant(self._converter, self.graph, self.graph.read({}), self._device)
        attributes = {target: getattr(variant, name) for target, name in variant._held.items()}
        shown = fx.GraphModule({**attributes, ATTRIBUTE: None}, lift(variant.graph, self.graph.places))
        self._owner = nn.Module()
        self._owner.add_module(_TABLE, nn.ModuleList([variant]))
        variant.mount(f"{_TABLE}.0")
        return variant, shown

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        if self._measuring is not None:
            return self._measuring._run_graph(self.graph, inputs)
        variant = self.variant
        if variant.has_changed(inputs) and not variant.still_holds(self.graph, self._converter, inputs):
            self._convert_again(inputs)
        self.variant.refuse_other_sizes(inputs)
        if self.compiled is not None:
            return outside_of_modes(self.compiled, *inputs)
        copies = self._copies.fresh() if self._copies is not None else None
        return outside_of_modes(self.variant.function, self._owner, copies, *inputs)

    def _convert_again(self, inputs: Sequence[Any]) -> None:
        self.graph.note(inputs)
        self.variant, self.shown.module = self._converted()
        self.shown.plan = self.variant.plan
        if self.compiled is not None:
            self.compiled = None
            warnings.warn(
                "a buffer has got other numbers, on which rested what runs in 16 bits: the graph is converted again "
                "and runs op by op from now on, not compiled.",
                UncapturedGraphWarning,
                stacklevel=2,
            )
