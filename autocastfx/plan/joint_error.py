"""The predicted error that several nodes of a plan make together."""

from __future__ import annotations

from collections.abc import Iterable

from autocastfx.plan.plan import PlannedNode
from autocastfx.plan.sensitivity import added, rms

__all__ = ["joint_error"]


def joint_error(nodes: Iterable[PlannedNode]) -> float | None:
    """Return the relative error that ``nodes`` make together, as ``Plan.error`` is that of all.

    Their effects are added up, so that they may cancel: it can be less than the error of one of them.

    Returns:
        None if no node has an effect: nothing was measured, or the plan was read from a text.
    """
    effects = [node.effect for node in nodes if node.effect]
    return rms(added(effects)) if effects else None
