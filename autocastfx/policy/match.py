"""Find the rule of an op list that decides a node, and the rules that match no node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._ops import OpOverload

from autocastfx.errors import KeyPath, OpListError, Source
from autocastfx.graph.names import arguments, op_name, overload_name
from autocastfx.graph.node import enclosing_modules, module_classes
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Category, Demand, ModuleRule, Rule
from autocastfx.policy.yaml_tree import nearest

__all__ = ["MatchedRules", "Matcher"]


@dataclass(frozen=True)
class Matcher:
    """The rules of a list that apply on one device type.

    Rules for module paths win over rules with conditions, and these over rules for an op alone.
    Among module rules: the pattern that matches the innermost module wins, then a rule that names ops, then one that
    names the device, then the higher rank (a later list).
    Among conditional rules: more conditions win, then the op's own name over an alias, then a named device.
    Among rules for an op alone: the class of an enclosing module wins over the op, the innermost class first.
    """

    op_list: OpList
    device: str

    def __call__(self, node: fx.Node) -> Rule | ModuleRule | None:
        """Return the rule that decides ``node``; None if no rule does.

        A module rule that lets ops run in 16 bits skips ops that are unlisted, ``keep`` or ``ban``, unless it names
        them: these ops do not follow the precision of their neighbours.

        Raises:
            OpListError: two rules fit equally well and contradict each other.
        """
        own = self.own(node)
        is_fixed = own is None or own.category in (Category.KEEP, Category.BAN)
        return self._of_module(node, is_fixed) or own

    def own(self, node: fx.Node) -> Rule | None:
        """Return the rule that decides ``node`` where no rule for its module does; None if there is none.

        Raises:
            OpListError: two rules fit equally well and contradict each other.
        """
        return self._conditional(node) or self._plain(node)

    def matching(self, node: fx.Node) -> Iterator[Rule | ModuleRule]:
        """Yield every rule that applies to ``node``, also those that lose to another."""
        for name in self._names(node):
            for listed in self.op_list.names_of(name):
                found = (self.op_list.rules.get(listed), self.op_list.conditional.get((listed, (), self.device)))
                yield from (rule for rule in found if rule is not None)
        yield from (rule for _, rule in self._conditions(node))
        yield from (rule for _, rule in self._modules(node))

    def _plain(self, node: fx.Node) -> Rule | None:
        found = (self.op_list.rule(name, self.device) for name in self._names(node))
        return next((rule for rule in found if rule is not None), None)

    def _names(self, node: fx.Node) -> tuple[str, ...]:
        """Return the names that a rule for ``node`` may have: enclosing module classes, its overload, its op.

        Under ``placement: follow`` rules for an op do not apply to its overloads that write into an argument
        (``addmm.out``).
        """
        name = op_name(node)
        writes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable and not name.endswith("_")
        own = () if writes and self.op_list.placement == "follow" else (name,)
        return tuple(n for n in (*module_classes(node), overload_name(node), *own) if n)

    def _conditions(self, node: fx.Node) -> Iterator[tuple[tuple[int, ...], Rule]]:
        """Yield the conditional rules that hold for ``node``, each with its rank of fit."""
        names = list(self.op_list.names_of(op_name(node)))
        given: Mapping[str, Any] | None = None
        for rule in self.op_list.conditional.values():
            if rule.when and rule.op in names and rule.device in ("", self.device):
                given = arguments(node) if given is None else given
                if all(condition.holds(given) for condition in rule.when):
                    yield (len(rule.when), -names.index(rule.op), len(rule.device)), rule

    def _conditional(self, node: fx.Node) -> Rule | None:
        best = _best(list(self._conditions(node)))
        _refuse_ambiguity(node, [(rule, rule.category.value) for rule in best])
        return best[0] if best else None

    def _modules(self, node: fx.Node) -> Iterator[tuple[tuple[int, ...], ModuleRule]]:
        if not self.op_list.modules:
            return
        paths = enclosing_modules(node)
        names = set(self.op_list.names_of(op_name(node)))
        for rule in self.op_list.modules:
            if rule.device in ("", self.device) and (not rule.ops or names.intersection(rule.ops)):
                depth = max((i for i, path in enumerate(paths) if rule.covers(path)), default=None)
                if depth is not None:
                    yield (depth, bool(rule.ops), bool(rule.device), rule.rank), rule

    def _of_module(self, node: fx.Node, is_fixed: bool) -> ModuleRule | None:
        open_to = [(fit, r) for fit, r in self._modules(node) if r.ops or not (is_fixed and r.lowers)]
        best = _best(open_to)
        _refuse_ambiguity(node, [(rule, rule.wanted) for rule in best])
        return best[0] if best else None


def _best(found: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
    """Return the best fitting rules, in an order independent of the list's."""
    most = max((fit for fit, _ in found), default=None)
    return sorted((rule for fit, rule in found if fit == most), key=_place)


def _place(rule: Rule | ModuleRule | Demand) -> tuple[str, int, int, str, str]:
    """Sort key: by file, then by line."""
    subject = rule.op if isinstance(rule, Demand) else rule.subject
    match rule.source:
        case Source(file, line, column):
            return (file, line, column, "", subject)
        case KeyPath(name, path):
            return (name, 0, 0, path, subject)
        case _:
            return ("", 0, 0, "", subject)


def _refuse_ambiguity(node: fx.Node, rules: Sequence[tuple[Rule | ModuleRule, str]]) -> None:
    if len({word for _, word in rules}) < 2:
        return
    (first, word), (other, said) = rules[0], next(pair for pair in rules if pair[1] != rules[0][1])
    way_out = "a further condition" if isinstance(first, Rule) else "a narrower path, or a higher 'rank'"
    raise OpListError(
        f"{first.subject!r} is {word} here, and {other.subject!r} is {said} at {other.source}: both fit node "
        f"{node.name!r} equally well. Give one of the two {way_out}.",
        first.source,
    )


class MatchedRules:
    """Which of a list's own rules and demands match nodes, of any number of graphs."""

    def __init__(self, op_list: OpList) -> None:
        self.op_list = op_list
        self._matched: set[int] = set()
        self._decided: set[object] = set()
        self._devices: set[str] = {""}
        self._ops: set[str] = set()
        self._classes: set[str] = set()
        self._paths: set[str] = set()

    def add(self, device: str, nodes: Iterable[fx.Node], decided: Set[object] = frozenset()) -> None:
        """Look at the nodes of a graph.

        Args:
            device: the type that it runs on.
            nodes: its nodes.
            decided: places of rules that decided an op of another name, as the rule of ``square`` decides ``x * x``.
        """
        matcher = Matcher(self.op_list, device)
        self._devices.add(device)
        self._decided |= decided
        for node in nodes:
            self._matched |= {id(rule) for rule in matcher.matching(node)}
            self._ops.add(op_name(node))
            self._classes.update(module_classes(node))
            self._paths.update(enclosing_modules(node))

    def unmatched(self) -> tuple[str, ...]:
        """Write a sentence on each of the user's own rules and demands that matches no node, sorted by place.

        Shipped rules and rules for other device types are left out.
        """
        own = [r for r in self.op_list.every_rule() if not r.shipped and r.device in self._devices]
        left = [r for r in own if id(r) not in self._matched and r.source not in self._decided]
        names = {name for op in self._ops for name in self.op_list.names_of(op)}
        demands = [d for d in self.op_list.demands.values() if not d.shipped and d.op not in names]
        return tuple(self._said(rule) for rule in sorted((*left, *demands), key=_place))

    def _said(self, rule: Rule | ModuleRule | Demand) -> str:
        place = f"{rule.source}: " if rule.source else ""
        if isinstance(rule, ModuleRule):
            if any(rule.covers(path) for path in self._paths):
                return f"{place}none of {', '.join(rule.ops)} runs in the modules {rule.path!r}."
            return f"{place}no module of the model matches {rule.path!r}{nearest(rule.path, self._paths)}."
        ops = self._ops | self._classes
        if isinstance(rule, Rule) and any(rule.op in self.op_list.names_of(op) for op in ops):
            return f"{place}no {rule.op} of the model has {' and '.join(str(c) for c in rule.when)}."
        return f"{place}no node of the model is {rule.op!r}{nearest(rule.op, ops)}."
