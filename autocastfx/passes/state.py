"""What the passes hand on. Each may import this module; no pass imports another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autocastfx.graph.magnitude import Magnitude
from autocastfx.passes.analysis.held_values import HeldValues
from autocastfx.passes.analysis.masks import Fill
from autocastfx.passes.torch_autocast.dispatch import Followed
from autocastfx.plan.plan import Decision, Placement, Recomposed, Traffic

__all__ = ["Classification", "State"]


@dataclass(frozen=True)
class Classification:
    """A decision per computing node.

    ``wide`` are the values known to hold finite numbers beyond the low dtype's range, in float32. ``unable`` holds the
    nodes that cannot run low whoever asks for it, and why; ``fills`` those that can, with another number.
    """

    decisions: Mapping[fx.Node, Decision]
    wide: frozenset[fx.Node]
    unable: Mapping[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    fills: Mapping[fx.Node, Fill] = field(default_factory=dict[fx.Node, Fill])


@dataclass(frozen=True)
class State:
    """What the passes hand on: a graph on its way, and all that is known of it so far."""

    graph: fx.Graph
    attributes: Mapping[str, Any]
    parameters: frozenset[str]
    values: HeldValues
    dtypes: Mapping[fx.Node, tuple[torch.dtype, ...]]  # before rewriting, as the op names are
    ops: Mapping[fx.Node, str]
    guesses: frozenset[str] | None = None
    measured: Mapping[fx.Node, Magnitude] = field(default_factory=dict)
    classification: Classification = field(default_factory=lambda: Classification({}, frozenset()))
    placements: Mapping[fx.Node, Placement] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    cached: Mapping[str, int] = field(default_factory=dict)  # parameters that are cast once, by a number of each tensor
    numbers: Mapping[str, int] = field(default_factory=dict)  # of all parameters, by name; tied ones share one
    followed: Followed | None = None
    prefix: str = ""
    recomposed: tuple[Recomposed, ...] = ()
