"""Select the rows that ``only=`` and ``module=`` of ``dump`` name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from autocastfx.plan.plan import Precision
from autocastfx.policy.rule import Category, ModuleRule, module_pattern
from autocastfx.policy.yaml_tree import nearest
from autocastfx.report.row import Row

__all__ = ["check_names", "selected"]

_CASTS = "casts"
_PRECISIONS = tuple(map(str, Precision))
_CATEGORIES = tuple(map(str, Category))


def check_names(rows: Iterable[Row], only: str | None, module: str | None) -> None:
    """Check that arguments of :func:`selected` name something.

    Args:
        rows: of all graphs of a model.
        only: as for :func:`selected`.
        module: as for :func:`selected`.

    Raises:
        ValueError: one names nothing; the message suggests the nearest.
    """
    planned = [row for row in rows if row.planned is not None]
    if only is not None:
        words = (*_PRECISIONS, _CASTS, *_CATEGORIES)
        ops = {row.op for row in planned}
        if only not in words and only not in ops:
            hint = nearest(only, {*words, *ops})
            raise ValueError(f"only is {', '.join(words)} or an op of the model, not {only!r}{hint}")
    if module is not None:
        paths = {path for row in planned for path in _around(row)}
        try:
            module_pattern(module)
        except ValueError as error:
            raise ValueError(f"module is a path of modules or a pattern of it, not {module!r}: {error}") from error
        if not any(ModuleRule(module, "keep").covers(path) for path in paths):
            raise ValueError(f"no module of the model matches {module!r}{nearest(module, paths)}")


def selected(rows: Sequence[Row], only: str | None = None, module: str | None = None) -> tuple[Row, ...]:
    """Return the rows that fit both arguments, in order; all rows without arguments, else those of planned nodes.

    Args:
        rows: of one graph.
        only: a precision (``low``, ``float32``), ``casts`` (what reads casts, the output too), a category or an op.
        module: the path of a module with all inside it, or a pattern as in op lists (``layers.*.attn``, ``re:…``).
    """
    if only is None and module is None:
        return tuple(rows)
    casts = {row.name for row in rows if row.cast is not None or row.copy is not None}
    rule = ModuleRule(module, "keep") if module is not None else None
    return tuple(
        row
        for row in rows
        if (rule is None or (row.planned is not None and any(map(rule.covers, _around(row)))))
        and (not casts.isdisjoint(row.reads) if only == _CASTS else only in (None, *_words(row)))
    )


def _words(row: Row) -> Iterator[str]:
    if row.planned is not None:
        yield row.op
        yield str(row.precision)
        if row.precision is not Precision.CAPTURED:  # where nothing is at stake, nothing was decided
            yield str(row.planned.decision.category)


def _around(row: Row) -> Iterator[str]:
    """The path of the root, of the modules around a node, and of its own."""
    yield ""
    if row.planned is not None and row.planned.module:
        yield from accumulate(row.planned.module.split("."), "{}.{}".format)
