"""Makes the variants of a converted model, by capture and conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autocastfx.capture.call import Call, CallSignature
from autocastfx.capture.draft.draft import capture_symbolically
from autocastfx.capture.export import Captured, capture
from autocastfx.capture.progress import stage
from autocastfx.capture.thread_state import own_thread_state
from autocastfx.errors import CaptureError
from autocastfx.passes.pipeline import Converter
from autocastfx.plan.ranges import mode_of
from autocastfx.plan.sensitivity import Sensitivity
from autocastfx.runtime.module_tree import foreseen
from autocastfx.runtime.variant import Variant

__all__ = ["VariantMaker"]

_WITHOUT_MODEL = {
    False: "the original model is not at hand",
    True: 'weights="low" keeps no original: convert it again, in evaluation, with the inputs of this call',
}


def _tell_nothing(_: Any) -> None:
    """Leave what matches nothing unsaid: whoever makes variants tells it."""


@dataclass(frozen=True)
class VariantMaker:
    """Makes variants: from a call, while the caller's model is at hand; or from what was captured, for a device."""

    converter: Converter
    model: nn.Module | None
    signature: CallSignature
    leaves: tuple[str, ...]
    device: torch.device | None
    baked: bool
    tell_unmatched: Callable[[Any], None] = _tell_nothing  # called with the converted model, if its first call captures
    kept_name: str = ""  # of the model's class, once the model is gone
    switched: tuple[tuple[bool, ...], tuple[bool, ...]] | None = None  # what eval() and train() of the model gave, then

    @property
    def class_name(self) -> str:
        """The name of the model's class."""
        return type(self.model).__name__ if self.model is not None else self.kept_name

    @property
    def weights(self) -> str:
        """The conversion's choice of where 16-bit weights come from."""
        return self.converter.weights

    @property
    def fold(self) -> str:
        """The conversion's level of folding."""
        return self.converter.fold

    @property
    def sensitivity(self) -> Sensitivity | None:
        """The measurement by which plans predict their errors."""
        return self.converter.prices.sensitivity if self.converter.prices is not None else None

    def capture(self, call: Call, modes: tuple[bool, ...], held: Mapping[str, torch.Tensor], sizes: str) -> Variant:
        """Capture the model as it runs ``call`` in ``modes``, and convert the graph.

        Raises:
            CaptureError: the model is not at hand, or cannot be captured.
        """
        if self.model is None:
            raise CaptureError(_WITHOUT_MODEL[self.weights == "low"])
        with own_thread_state():
            with stage(f"capturing {type(self.model).__name__} in {mode_of(modes)} mode"):
                found = capture(
                    self.model,
                    self.signature,
                    call,
                    training=modes,
                    held=held,
                    leaves=self.leaves,
                    sizes=sizes,
                    follows=self.converter.op_list.placement == "follow",
                )
            return self.rebuild(found, held, self.device or found.device)

    def draft(self, modes: tuple[bool, ...], held: Mapping[str, torch.Tensor]) -> Variant:
        """Capture the model without inputs, and convert the graph.

        Raises:
            CaptureError: the model is not at hand, or its code cannot be traced.
        """
        if self.model is None:
            raise CaptureError("the original model is not at hand")
        if self.converter.op_list.placement == "follow":
            raise CaptureError("an op list that follows torch.autocast's dispatch needs the inputs' dtypes and sizes")
        if self.converter.raises:
            raise CaptureError("what a 16-bit model has in float32 shows in the dtypes of a call's values")
        found = capture_symbolically(self.model, self.signature, training=modes, held=held, leaves=self.leaves)
        return self.rebuild(found, held, self.device or found.device)

    def rebuild(self, captured: Captured, held: Mapping[str, torch.Tensor], device: torch.device) -> Variant:
        """Convert what was captured, for ``device``."""
        with stage(f"converting {len(captured.graph.nodes)} nodes for {device.type}"):
            return self.converter(captured, held, device)

    def without_model(self) -> VariantMaker:
        """A maker that can convert what was captured, but capture nothing more."""
        if self.model is None:
            return self
        modes = (foreseen(self.model, training=False).modes, foreseen(self.model, training=True).modes)
        return replace(self, model=None, kept_name=self.class_name, switched=modes)
