"""Render the generated code of a converted graph, with each node's dtypes and precision in a comment."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autocastfx.plan.plan import Precision
from autocastfx.report.row import Row
from autocastfx.report.summary import summary
from autocastfx.report.view import View

__all__ = ["render_python"]

_LEGEND = "comments: precision: dtype as captured → now (category); + made by the conversion, * the model's own cast"
_ASSIGNMENT = re.compile(r"^ {4}(\w+)\b[^=;]*=(?!=)")


def render_python(view: View) -> str:
    """Render Python source: the header as comments, ``forward`` as torch.fx generates it, then the sub-graphs'."""
    rows = {row.name: row for row in view.rows}
    parts = [[f"# {line}" for line in (*summary(view), _LEGEND)]]
    for prefix, code in view.codes.items():
        title = [f"# sub-graph {prefix.removesuffix('/')}"] if prefix else []
        parts.append([*title, *_commented(code, rows, prefix)])
    return "\n\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _commented(code: str, rows: Mapping[str, Row], prefix: str) -> list[str]:
    lines: list[str] = []
    for line in code.strip().splitlines():
        assigned = _ASSIGNMENT.match(line)
        row = rows.get(prefix + assigned[1]) if assigned else None
        comment = _comment(row) if row is not None else ""
        lines.append(f"{line}  # {comment}" if comment else line.rstrip())
    return lines


def _comment(row: Row) -> str:
    if row.cast is not None:
        saturates = ", saturating" if row.cast.saturates else ""
        return f"+ cast of {row.cast.value}: {row.dtype}{saturates}"
    if row.copy is not None:
        return f"+ working copy of {row.copy.parameter}: {row.dtype}"
    if row.mark is not None:
        return f"+ for {row.mark.value}, by {row.mark.made_by} ({row.mark.rule})"
    if row.kind != "op":
        return f"{row.kind} {row.dtype}".rstrip()
    if row.planned is None:
        return "not in the plan"
    own = "* " if row.is_own_cast else ""
    category = "" if row.precision is Precision.CAPTURED else f" ({row.planned.decision.category})"
    return f"{own}{row.precisions}: {row.dtype or 'no tensor'}{category}"
