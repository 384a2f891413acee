"""Write an op list that changes how nodes run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autocastfx.errors import TextPlace
from autocastfx.plan.plan import PlannedNode, Precision, Why
from autocastfx.policy.rule import Rule


def proposed_list(nodes: Sequence[PlannedNode], category: str) -> str:
    """Write YAML that gives nodes the category ``"float32"`` or ``"low"``: by module, at the root by op.

    Returns:
        The text of an op list, which ends with a newline; empty for no nodes.
    """
    ops, modules = rules_over(nodes)
    lines = [f"{'deny' if category == 'float32' else 'allow'}: [{', '.join(ops)}]"] if ops else []
    lines += ["modules:"] if modules else []
    for (path, device), names in modules.items():
        on = f", devices: {device}" if device else ""
        lines.append(f'  - {{path: "{path}", category: {category}, ops: [{", ".join(names)}]{on}}}')
    return "".join(f"{line}\n" for line in lines)


def rules_over(nodes: Iterable[PlannedNode]) -> tuple[tuple[str, ...], Mapping[tuple[str, str], tuple[str, ...]]]:
    """Find the rules that win over those which decide ``nodes``.

    Returns:
        The ops of nodes at the root for which rules for the op alone do; and by the path and the device of a rule for
        modules, the ops of the others. The path of the root is ``re:^$``.
    """
    ops: dict[str, None] = {}
    modules: dict[tuple[str, str], dict[str, None]] = {}
    for node in nodes:
        if node.module or is_narrow(node):
            rule = node.decision.rule
            key = node.module or "re:^$", rule.device if isinstance(rule, Rule) and rule.path else ""
            modules.setdefault(key, {})[node.op] = None
        else:
            ops[node.op] = None
    alone = (op for op in ops if op not in modules.get(("re:^$", ""), ()))
    return tuple(alone), {key: tuple(names) for key, names in modules.items()}


def is_narrow(node: PlannedNode) -> bool:
    """True if the rule that decides ``node`` wins over one for its op alone.

    It is one for modules, for the class of a module or an overload, or has conditions or a device.
    """
    rule = node.decision.rule
    if not isinstance(rule, Rule):
        return False
    return bool(rule.path or rule.when or rule.device or any(op != node.op and "." in op for op in rule.ops))


def op_list_for(entries: Sequence[PlannedNode]) -> str:
    """An op list, in YAML, by which nodes run in float32; empty where one is made by what no list overrides."""
    low = [e for e in entries if e.placement.run is Precision.LOW and e.placement.because.why is not Why.FOLDED]
    if not low or len(low) < sum(e.placement.run is not Precision.FLOAT32 for e in entries):
        return ""
    if any(line_of(entry) is not None for entry in entries):
        return ""
    return proposed_list(low, "float32")


def line_of(node: PlannedNode) -> TextPlace | None:
    """The place of the line of ``node`` in the plan given to ``convert``, if that decides."""
    rule = node.decision.rule
    return None if isinstance(rule, Rule) else rule
