"""Write an op list that changes how nodes run."""

from __future__ import annotations

from collections.abc import Sequence

from autocastfx.plan.plan import PlannedNode

__all__ = ["proposed_list"]


def proposed_list(nodes: Sequence[PlannedNode], category: str) -> str:
    """Write YAML that gives nodes the category ``"float32"`` or ``"low"``: by module, at the root by op.

    Returns:
        The text of an op list, which ends with a newline; empty for no nodes.
    """
    if not nodes:
        return ""
    ops = list(dict.fromkeys(node.op for node in nodes if not node.module))
    modules: dict[str, dict[str, None]] = {}
    for node in (n for n in nodes if n.module):
        modules.setdefault(node.module, {})[node.op] = None
    lines = [f"{'deny' if category == 'float32' else 'allow'}: [{', '.join(ops)}]"] if ops else []
    lines += ["modules:"] if modules else []
    lines += [
        f'  - {{path: "{path}", category: {category}, ops: [{", ".join(found)}]}}' for path, found in modules.items()
    ]
    return "\n".join(lines) + "\n"
