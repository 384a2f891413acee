"""Check the rules of an op list against a model: list the nodes that each decides, and rules that match none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autocastfx.conversion import convert
from autocastfx.errors import Source, UnmatchedRuleWarning
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import ModuleRule, Rule

__all__ = ["RuleUse", "rule_uses"]

_MOST = 6


@dataclass(frozen=True)
class RuleUse:
    """A rule and the nodes that it decides.

    Attributes:
        source: the rule's place.
        subject: the ops or modules that it covers.
        category: its category.
        nodes: names of the nodes that it decides, in all captured variants.
        unmatched: a sentence that it matches no node; empty if it matches some, decided by it or by other rules.
    """

    source: str
    subject: str
    category: str
    nodes: tuple[str, ...]
    unmatched: str = ""

    def __str__(self) -> str:
        if self.unmatched:
            return self.unmatched
        names = ", ".join(self.nodes[:_MOST]) + (f" and {len(self.nodes) - _MOST} more" if self.nodes[_MOST:] else "")
        what = f"decides {len(self.nodes)}: {names}" if self.nodes else "matches only nodes that something else decides"
        return f"{self.source}: {self.subject} ({self.category}) {what}"


def rule_uses(
    op_list: OpList, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[RuleUse, ...]:
    """Convert ``model`` and report on each of the list's own rules, without shipped rules and other device types.

    Raises:
        AutocastFXError: the model cannot be converted with this list.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnmatchedRuleWarning)
        plans = [v.plan for v in convert(model, args, kwargs, dtype=dtype, op_list=op_list).variants]
    for other in (w for w in caught if not issubclass(w.category, UnmatchedRuleWarning)):
        warnings.warn(other.message, other.category, stacklevel=2)
    said = [str(w.message) for w in caught if issubclass(w.category, UnmatchedRuleWarning)]
    own = [r for r in op_list.every_rule() if not r.shipped and r.device in ("", plans[0].device)]
    decided = {
        source: tuple(dict.fromkeys(n.name for p in plans for n in p.nodes if n.decision.source == source))
        for source in dict.fromkeys(rule.source for rule in own)
    }
    return tuple(_use(rule, decided[rule.source], said) for rule in sorted(own, key=_order))


def _use(rule: Rule | ModuleRule, nodes: tuple[str, ...], said: list[str]) -> RuleUse:
    category = rule.wanted if isinstance(rule, ModuleRule) else str(rule.category)
    unmatched = "" if nodes else next((text for text in said if text.startswith(f"{rule.source}: ")), "")
    return RuleUse(str(rule.source), rule.subject, category, nodes, unmatched)


def _order(rule: Rule | ModuleRule) -> tuple[str, int, int]:
    place = rule.source
    return (place.file, place.line, place.column) if isinstance(place, Source) else (str(place), 0, 0)
