"""What was captured of a model: its graph for one mode and one call structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autocastfx.capture.call import CallStructure
from autocastfx.capture.shape_guard import ShapeGuard


@dataclass(frozen=True)
class Captured:
    """A model's graph for one mode and one call structure.

    Attributes:
        graph: takes the call's tensors as placeholders and returns a flat tuple; ``get_attr`` nodes read parameters and
            buffers by their names in the model.
        attributes: other values of ``get_attr`` nodes, by target: constants, and graphs of higher-order operators.
        structure: the call structure that it was captured for.
        guard: the conditions on sizes under which it holds.
        training: mode of each module, in the order of ``model.modules()``.
        device: the model's device at capture.
    """

    graph: fx.Graph
    attributes: Mapping[str, Any]
    structure: CallStructure
    guard: ShapeGuard
    training: tuple[bool, ...]
    device: torch.device
