"""Find plans between those of a minimum cut: run one op more in float32, and cut the rest anew at a lower price."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autocastfx.numerics.fill_plan import by_share, raised
from autocastfx.plan.plan import Plan
from autocastfx.policy.op_list import OpList

__all__ = ["cut_between"]

_MOST_TRIED = 16  # ops a round
_LOWER = (1.0, 0.5, 0.25)  # prices over that of the plan before
_MOST_FURTHER_CUTS = 96


def cut_between(plan: Plan, price: float, most: float, cut: Callable[[OpList, float], Plan]) -> Iterator[Plan]:
    """Yield plans within a limit of bytes, each of less error than the one before.

    A minimum cut finds the plans on the convex hull of bytes and squared error alone, and may leave much of a limit
    unused. With one op more in float32, the cuts of all other ops lie on another hull, and one may be nearer the limit.

    Args:
        plan: a cut within the limit.
        price: the price of an error at which it was cut.
        most: the most bytes that a plan may move.
        cut: gives the plan of fewest bytes, by rules laid over the base list and a price of an error.
    """
    rules, cuts = OpList(), 0
    while True:
        found: list[tuple[float, OpList, float, Plan]] = []
        for group in by_share(plan)[:_MOST_TRIED]:
            further = rules.merged(raised(group))
            for lower in _LOWER:
                if cuts == _MOST_FURTHER_CUTS:
                    break
                cuts += 1
                one = cut(further, lower * price)
                if one.traffic.moved <= most:
                    found.append((one.error or 0.0, further, lower * price, one))
                    break
        best = min(found, key=lambda each: each[0], default=None)
        if best is None or best[0] >= (plan.error or 0.0):
            return
        _, rules, price, plan = best
        yield plan
