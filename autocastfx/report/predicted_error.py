"""Say what a measured sensitivity predicts for a node of a plan, and for the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autocastfx.plan.plan import PlannedNode, Precision
from autocastfx.plan.ranges import Key
from autocastfx.plan.sensitivity import Effect, Sensitivity

__all__ = ["PredictedError", "error_cell"]


@dataclass(frozen=True)
class PredictedError:
    """What was measured for a graph.

    Attributes:
        of: what changes, ``"gradient"`` or ``"output"``; a word for both where the measurement is not at hand.
        effects: of the nodes of graphs in the mode of this one; empty likewise.
    """

    of: str = "result"
    effects: Mapping[Key, Effect] = field(default_factory=dict[Key, Effect])

    @classmethod
    def by(cls, sensitivity: Sensitivity, mode: str) -> PredictedError:
        """Take what was measured for a graph in ``mode``; that of a graph in mixed modes counts as training."""
        return cls(sensitivity.of, sensitivity.effects_in("eval" if mode == "eval" else "train"))

    def sentences(self, node: PlannedNode) -> Iterator[str]:
        """Yield what the node's precision does, and for one in float32 what 16 bits would do."""
        is_low = node.placement.run is Precision.LOW
        if node.error is not None:
            subject = "16 bits here change" if is_low else "16 bits around it, which round what it passes back, change"
            yield f"{subject} the {self.of} by {node.error:.1e}."
        effect = self.effects.get((node.name, node.op, node.module))
        if not is_low and effect is not None and effect.overflows:
            yield "In 16 bits a value would overflow."
        elif not is_low and effect is not None and effect.error:
            yield f"In 16 bits it would change the {self.of} by {effect.error:.1e}."


def error_cell(error: float | None) -> str:
    """Return a predicted error for a table; empty if there is none."""
    return "" if error is None else f"{error:.1e}"
