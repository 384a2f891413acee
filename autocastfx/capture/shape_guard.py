"""A picklable check that a captured graph holds for the sizes of a call.

Without it a graph with an unrolled loop over a length, or an ``if`` on a shape, would silently return wrong numbers for
other sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autocastfx.graph.node import example, place

if TYPE_CHECKING:
    import sympy

_OURS = str(Path(__file__).parents[1])  # an abstract result of ours asks for the sizes that the operator does
Sizes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ShapeGuard:
    """Conditions on the sizes of a graph's inputs.

    Attributes:
        symbols: (name, input, dimension) for each symbol of the conditions.
        conditions: Python expressions over the symbols and ``sizes[input][dimension]``.
        lines: the line of code that made a condition, where it is known, by condition.
    """

    symbols: tuple[tuple[str, int, int], ...] = ()
    conditions: tuple[str, ...] = ()
    lines: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_holds", _compile(self.symbols, self.conditions))

    def holds(self, sizes: Sizes) -> bool:
        """True if the graph holds for inputs of these sizes."""
        return bool(self._holds(sizes))  # pyright: ignore[reportAttributeAccessIssue]

    def broken(self, sizes: Sizes, names: Sequence[str]) -> str | None:
        """Return the first condition that does not hold, with the sizes in it and the line of code that made it.

        Args:
            sizes: those of each input.
            names: the inputs' names.

        Returns:
            None if all conditions hold.
        """
        places = {name: f"{names[i]}.shape[{d}]" for name, i, d in self.symbols}
        for condition in self.conditions:
            if not _compile(self.symbols, (condition,))(sizes):
                named = re.sub(r"\w+", lambda word: places.get(word[0], word[0]), condition)
                named = re.sub(r"sizes\[(\d+)\]\[(\d+)\]", lambda at: f"{names[int(at[1])]}.shape[{at[2]}]", named)
                numbers = ((names[i], i, d) for i, shape in enumerate(sizes) for d in range(len(shape)))
                read = [f"{name}.shape[{d}]={sizes[i][d]}" for name, i, d in numbers if f"{name}.shape[{d}]" in named]
                line = f" ({self.lines[condition]})" if condition in self.lines else ""
                if one := re.fullmatch(r"(\S+\.shape\[\d+\]) == (\d+)", named):
                    return f"{read[0].replace('=', ' is ')}, and the graph takes {one[2]}{line}"
                return f"{named} does not hold with {', '.join(read)}{line}"
        return None

    def __str__(self) -> str:
        return " and ".join(self.conditions)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ShapeGuard, (self.symbols, self.conditions, self.lines))


def _compile(symbols: Sequence[tuple[str, int, int]], conditions: Sequence[str]) -> Callable[[Sizes], bool]:
    reads = [f"    {name} = sizes[{i}][{d}]" for name, i, d in symbols]
    check = " and ".join(f"({c})" for c in conditions) or "True"
    tried = ["    try:", f"        return {check}", "    except (ArithmeticError, ValueError):", "        return False"]
    source = "\n".join(["def holds(sizes):", *reads, *tried])  # a size of 0 may be a divisor
    namespace: dict[str, Any] = {"math": math, "torch": torch}
    exec(compile(source, "<autocastfx shape guard>", "exec"), namespace)
    return namespace["holds"]


def shape_guard(inputs: Sequence[fx.Node]) -> ShapeGuard:
    """Make the guard of a graph captured with symbolic sizes.

    Args:
        inputs: the graph's placeholders, with abstract tensors.
    """
    import sympy

    inputs = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
    captured = [[example(size) for size in node.meta["val"].shape] for node in inputs]
    symbols: dict[str, tuple[str, int, int]] = {}
    conditions: dict[str, None] = {}
    equal: list[tuple[int, int, sympy.Basic]] = []
    environments: list[Any] = []
    lines: dict[str, str] = {}
    for i, node in enumerate(inputs):
        for d, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, torch.SymInt):
                conditions[f"sizes[{i}][{d}] == {size}"] = None
                continue
            environments = [size.node.shape_env]  # the same for all
            expression: Any = size.node.shape_env.replace(size.node.expr)
            if isinstance(expression, sympy.Symbol) and expression.name not in symbols:
                symbols[expression.name] = (expression.name, i, d)
                # torch assumes symbols to be positive, so it folds ``size == 0`` to False without a guard
                conditions[f"{expression.name} > 0" if captured[i][d] else f"{expression.name} == 0"] = None
            else:
                equal.append((i, d, expression))

    def holds_when_captured(condition: str) -> bool:
        try:
            return ShapeGuard(tuple(symbols.values()), (condition,)).holds(captured)
        except (NameError, SyntaxError):  # a function or symbol that is not defined by the sizes
            return False

    for i, d, expression in equal:
        condition = f"sizes[{i}][{d}] == {_python(expression)}"
        pinned = f"sizes[{i}][{d}] == {captured[i][d]}"
        conditions[condition if holds_when_captured(condition) else pinned] = None
    for environment, guard in ((e, guard) for e in environments for guard in e.guards):
        expression = environment.replace(guard.expr)
        names = {symbol.name for symbol in expression.free_symbols}
        if expression != sympy.true and names & symbols.keys():  # others may be sizes of an input that no node reads
            condition = _python(expression)
            pinned = {f"{name} == {captured[i][d]}": None for name, i, d in symbols.values() if name in names}
            made = {condition: None} if holds_when_captured(condition) else pinned
            conditions.update(made)
            lines.update(dict.fromkeys(made, _line(guard)))
    for i, d, line in _fixed_by_code(captured, symbols.values(), environments):
        lines[f"sizes[{i}][{d}] == {captured[i][d]}"] = line
    known = {condition: lines[condition] for condition in conditions if lines.get(condition)}
    return ShapeGuard(tuple(symbols.values()), tuple(conditions), known)


def _fixed_by_code(
    captured: Sizes, symbols: Collection[tuple[str, int, int]], environments: Sequence[Any]
) -> Iterator[tuple[int, int, str]]:
    """Yield each size that the model's code made a plain number, with the line, where it is the only one so large."""
    lines: dict[int, set[str]] = {}
    for guard in (guard for environment in environments for guard in environment.guards):
        if guard.expr.is_Equality and guard.expr.rhs.is_Integer and guard.expr.lhs.is_Symbol:
            lines.setdefault(int(guard.expr.rhs), set()).add(_line(guard))
    dynamic = {(i, d) for _, i, d in symbols}
    fixed = [(i, d, size) for i, sizes in enumerate(captured) for d, size in enumerate(sizes) if (i, d) not in dynamic]
    for i, d, size in fixed:
        if len(size_lines := lines.get(size, set[str]())) == 1:
            yield i, d, next(iter(size_lines))


def _line(guard: Any) -> str:
    """Return the line of code, the model's or a library's, that made a guard of torch's; empty if torch knows none."""
    frame = guard.sloc.framework_loc
    is_known = isinstance(frame, FrameSummary) and not frame.filename.startswith(_OURS)
    return place(frame.filename, frame.lineno or 0) if is_known else ""


def _python(expression: sympy.Basic) -> str:
    """Write ``expression`` in Python; empty, which never holds, if torch's printer cannot write it."""
    from torch.utils._sympy.printers import PythonPrinter

    try:
        return PythonPrinter().doprint(expression)
    except (AssertionError, NotImplementedError, TypeError):
        return ""
