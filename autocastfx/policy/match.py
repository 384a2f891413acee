"""Find the rules of an op list that decide a node, and those that match no node.

One precedence holds for all kinds of rules: the most specific wins, then the one of higher rank, which is that of a
later list. More specific is, in this order: a pattern that matches a more inner module, a rule that names ops, more
conditions on arguments, a better name (the class of an enclosing module, the innermost first; then the op's own name,
then an alias), and a rule that names the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torch._ops import OpOverload

from autocastfx.errors import KeyPath, OpListError, Source
from autocastfx.graph.names import op_name, overload_name
from autocastfx.graph.node import enclosing_modules, module_classes
from autocastfx.policy.float8 import Float8Choice, Float8Settings
from autocastfx.policy.op_list import OpList
from autocastfx.policy.rule import Call, Category, Demand, Effect, Fit, Rule, Runs
from autocastfx.policy.saved import Keep
from autocastfx.policy.yaml_tree import nearest

_Fitting = Sequence[tuple[tuple[Fit, int], Rule[Effect]]]  # rules, each with how well it fits, and its rank


@dataclass(frozen=True)
class Matcher:
    """The rules of a list that apply on one device type."""

    op_list: OpList
    device: str

    def __call__(self, node: fx.Node) -> Rule[Runs] | None:
        """Return the rule that decides the precision of ``node``; None if no rule does.

        A module rule that lets ops run in 16 bits skips ops that are unlisted, ``keep`` or ``ban``, unless it names
        them: these ops do not follow the precision of their neighbours.

        Raises:
            OpListError: two rules fit equally well and contradict each other.
        """
        fitting = self._fitting(self._call(node), Runs)
        own = _best([(fit, rule) for fit, rule in fitting if not rule.path], f"node {node.name!r} ")
        is_fixed = own is None or own.category in (Category.KEEP, Category.BAN)
        inside = [(fit, r) for fit, r in fitting if r.path and (r.ops or not (is_fixed and r.category.may_be_low))]
        return _best(inside, f"node {node.name!r} ") or own

    def own(self, node: fx.Node) -> Rule[Runs] | None:
        """Return the rule that decides ``node`` where no rule for its module does; None if there is none.

        Raises:
            OpListError: two rules fit equally well and contradict each other.
        """
        outside = [(fit, rule) for fit, rule in self._fitting(self._call(node), Runs) if not rule.path]
        return _best(outside, f"node {node.name!r} ")

    def float8_of(self, node: fx.Node) -> Float8Choice | None:
        """Return what the list says of the float8 products of ``node``: each setting by the rule that fits best.

        Returns:
            None if no rule covers it.

        Raises:
            OpListError: two rules fit equally well and contradict each other.
        """
        fitting = self._fitting(self._call(node), Float8Settings) if self.op_list.float8 else ()
        if not fitting:
            return None
        settings: dict[str, Any] = {}
        speaks = max(fitting, key=lambda one: one[0])[1]
        for name in dict.fromkeys(name for _, rule in fitting for name in rule.effect.given):
            giving = [(fit, rule) for fit, rule in fitting if name in rule.effect.given]
            if (best := _best(giving, says=lambda rule, name=name: rule.effect.given[name])) is not None:
                settings[name] = best.effect.given[name]
                speaks = best if name == "products" else speaks
        return replace(Float8Choice(source=speaks.source, reason=speaks.reason), **settings)

    def saved_of(self, node: fx.Node) -> Rule[Keep] | None:
        """Return the rule on how what ``node`` gives is kept for backward; None if there is none."""
        return _best(self._fitting(self._call(node), Keep)) if self.op_list.saved else None

    def matching(self, node: fx.Node, *kinds: type[Any]) -> Iterator[Rule[Any]]:
        """Yield every rule of these kinds that applies to ``node``, also those that lose to another."""
        call = self._call(node)
        yield from (rule for kind in kinds for _, rule in self._fitting(call, kind))

    def _call(self, node: fx.Node) -> Call:
        names = [listed for name in self._names(node) for listed in self.op_list.names_of(name)]
        return Call(node, {name: place for place, name in reversed([*enumerate(names)])}, self.device)

    def _fitting(self, call: Call, kind: type[Effect]) -> _Fitting[Effect]:
        """Return the rules with an effect of this kind that fit a node."""
        table = self.op_list.by_op
        rules = {id(rule): rule for name in (*call.names, "") for rule in table.get((kind, name), ())}
        fits = ((rule.fit(call), rule) for rule in rules.values())
        return [((fit, rule.rank), rule) for fit, rule in fits if fit is not None]

    def _names(self, node: fx.Node) -> tuple[str, ...]:
        """Return the names that a rule for ``node`` may have: enclosing module classes, its overload, its op.

        Under ``placement: follow`` rules for an op do not apply to its overloads that write into an argument
        (``addmm.out``).
        """
        name = op_name(node)
        writes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable and not name.endswith("_")
        own = () if writes and self.op_list.placement == "follow" else (name,)
        return tuple(n for n in (*module_classes(node), overload_name(node), *own) if n)


def _best(
    fitting: _Fitting[Effect], where: str = "", says: Callable[[Rule[Effect]], object] = lambda rule: rule.wanted
) -> Rule[Effect] | None:
    """Return the rule that fits best, whatever the order of the list; None if there is none.

    ``where`` is the node in a message, and ``says`` gives what rules that fit equally well must agree on.

    Raises:
        OpListError: two fit equally well and contradict each other.
    """
    most = max((fit for fit, _ in fitting), default=None)
    first, *others = sorted((rule for fit, rule in fitting if fit == most), key=by_place) or [None]
    for other in others:
        if first is not None and other is not None and says(other) != says(first):
            way_out = "a narrower path, or a higher 'rank'" if first.path else "a further condition"
            raise OpListError(
                f"{first.subject!r} is {first.wanted} here, and {other.subject!r} is {other.wanted} at "
                f"{other.source}: both fit {where}equally well. Give one of the two {way_out}.",
                first.source,
            )
    return first


def by_place(rule: Rule[Any]) -> tuple[str, int, int, str, str]:
    """Sort key: by file, then by line."""
    match rule.source:
        case Source(file, line, column):
            return (file, line, column, "", rule.subject)
        case KeyPath(name, path):
            return (name, 0, 0, path, rule.subject)
        case _:
            return ("", 0, 0, "", rule.subject)


class MatchedRules:
    """Which of a list's own rules match nodes, of any number of graphs."""

    def __init__(self, op_list: OpList) -> None:
        self.op_list = op_list
        self._own = [rule for rule in op_list.lines.values() if not rule.shipped]
        self._matched: set[int] = set()
        self._decided: set[object] = set()
        self._devices: set[str] = {""}
        self._ops: set[str] = set()
        self._classes: set[str] = set()
        self._paths: set[str] = set()

    def add(self, device: str, nodes: Iterable[fx.Node], decided: Set[object] = frozenset()) -> None:
        """Look at the nodes of a graph on a type of device.

        ``decided`` has the places of rules that decided an op of another name, as the rule of ``square`` decides ``x *
        x``.
        """
        matcher = Matcher(self.op_list, device)
        self._devices.add(device)
        self._decided |= decided
        for node in nodes if self._own else ():
            self._matched |= {id(rule) for rule in matcher.matching(node, Runs, Float8Settings, Demand)}
            self._ops.add(op_name(node))
            self._classes.update(module_classes(node))
            self._paths.update(enclosing_modules(node))

    def add_saved(self, device: str, nodes: Iterable[fx.Node]) -> None:
        """Look at the nodes of a converted graph, whose values rules under ``saved`` are on."""
        matcher = Matcher(self.op_list, device)
        for node in nodes if self._own and self.op_list.saved else ():
            self._matched |= {id(rule) for rule in matcher.matching(node, Keep)}

    def unmatched(self) -> tuple[str, ...]:
        """Write a sentence on each of the user's own rules that matches no node, sorted by place.

        Shipped rules and rules for other device types are left out.
        """
        own = [rule for rule in self._own if rule.device in self._devices]
        left = [rule for rule in own if id(rule) not in self._matched and rule.source not in self._decided]
        return tuple(map(self._said, sorted(left, key=by_place)))

    def _said(self, rule: Rule[Any]) -> str:
        place = f"{rule.source}: " if rule.source else ""
        if rule.path and not any(map(rule.covers, self._paths)):
            return f"{place}no module of the model matches {rule.path!r}{nearest(rule.path, self._paths)}."
        if rule.path:
            return f"{place}none of {', '.join(rule.ops)} runs in the modules {rule.path!r}."
        ops = self._ops | self._classes
        (op,) = rule.ops or ("",)
        if any(op in self.op_list.names_of(one) for one in ops):
            on = f" runs on {rule.device}" if rule.device else ""
            has = f" has {' and '.join(map(str, rule.when))}" if rule.when else ""
            return f"{place}no {op} of the model{' and'.join(filter(None, (on, has)))}."
        return f"{place}no node of the model is {op!r}{nearest(op, ops)}."
