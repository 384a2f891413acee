"""Tables of a training step, eager and compiled: a row for each side of a model, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.training import AUTOCAST, DEFAULT, FASTEST, HALF


@dataclass(frozen=True)
class Row:
    """A side of a model: bytes, milliseconds, and quartiles of the ratios over rounds, or a note why they are missing.

    Times are None if not measured. ``peak``, the most bytes that a step adds, is None without a GPU.
    """

    model: str
    side: str
    parameters: int = 0
    ops: int = 0
    step_ops: int = 0
    weight_casts: int = 0
    weight_bytes: int = 0
    gradient_casts: int = 0
    gradient_bytes: int = 0
    activation_casts: int = 0
    activation_bytes: int = 0
    saved: int = 0
    peak: int | None = None
    backward_ms: float | None = None
    step_ms: float | None = None
    backward_to_autocast: Sequence[float] = ()
    backward_to_half: Sequence[float] = ()
    step_to_autocast: Sequence[float] = ()
    note: str = ""

    @property
    def cast_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.activation_bytes


def _pairs(rows: Sequence[Row], side: str, other: str) -> list[tuple[Row, Row]]:
    held = {(row.model, row.side): row for row in rows if not row.note}
    models = dict.fromkeys(row.model for row in rows)
    return [(held[m, side], held[m, other]) for m in models if {(m, side), (m, other)} <= held.keys()]


def targets(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """Return the targets that ``rows`` allow to check: a description, the figure, and True if it is met."""
    found: list[tuple[str, bool]] = []

    def mean(what: str, values: Sequence[float], limit: float) -> None:
        if values:
            got = geometric_mean(values)
            spread = f"{min(values):.3f} to {max(values):.3f}"
            found.append((f"{what}: {got:.3f} in the geometric mean ({spread}), at most {limit}", got <= limit))

    def each(what: str, pairs: Sequence[tuple[Row, Row]], excess: Callable[[Row, Row], float], limit: float) -> None:
        if pairs:
            worst, at = max((excess(a, b), a.model) for a, b in pairs)
            found.append((f"{what}: {worst:.5g} ({at}), at most {limit}", worst <= limit))

    def ops(row: Row) -> int:
        return row.ops - row.gradient_casts

    to_half, to_autocast = _pairs(rows, FASTEST, HALF), _pairs(rows, FASTEST, AUTOCAST)
    each(
        f"{FASTEST}: activation casts beyond {HALF}'s",
        to_half,
        lambda a, b: a.activation_casts - b.activation_casts,
        6,
    )
    each(f"{FASTEST}: gradient casts of a weight", to_half, lambda a, b: a.gradient_casts / a.parameters, 1)
    each(f"{FASTEST}: bytes saved to {HALF}'s", to_half, lambda a, b: a.saved / b.saved, 1.02)
    fewer = f"{FASTEST}: operators but gradient casts to {HALF}'s"
    mean(fewer, [ops(a) / ops(b) for a, b in to_half], 1.02)
    each(f"{fewer}, of each model", to_half, lambda a, b: ops(a) / ops(b), 1.02)
    timed = [a for a, _ in to_autocast if a.backward_to_autocast]
    mean(f"{FASTEST}: forward and backward to {AUTOCAST}", [a.backward_to_autocast[1] for a in timed], 0.95)
    mean(
        f"{FASTEST}: forward and backward to {HALF}", [a.backward_to_half[1] for a in timed if a.backward_to_half], 1.04
    )
    mean(f"{FASTEST}: whole step to {AUTOCAST}", [a.step_to_autocast[1] for a in timed], 0.97)
    default = _pairs(rows, DEFAULT, AUTOCAST)
    mean(f"{DEFAULT}: cast bytes to {AUTOCAST}'s", [a.cast_bytes / b.cast_bytes for a, b in default], 0.8)
    slow = [(a, b) for a, b in default if a.backward_to_autocast]
    each(f"{DEFAULT}: forward and backward to {AUTOCAST}", slow, lambda a, _: a.backward_to_autocast[1], 1.02)
    return found


_HEADER = (
    f"{'':<35}|{'weight casts':>13}|{'gradient casts':>14}|{'other casts':>13}|{'':>7}|{'fwd + bwd':^35}|{'step':^22}\n"
    f"{'model':<13} {'side':<19} |{'':>4} {'MB':>8}|{'':>5} {'MB':>8}|{'':>4} {'MB':>8}|{'saved':>7}|"
    f"{'ms':>7} {'to autocast':>14} {'to half':>7} {'ops':>4}|{'ms':>7} {'to autocast':>14}"
)


def _quartiles(found: Sequence[float]) -> str:
    return f"{found[1]:.2f} {found[0]:.2f}-{found[2]:.2f}" if found else "-"


def _number(found: float | None) -> str:
    return "-" if found is None else f"{found:.4g}"


def _line(row: Row) -> str:
    if row.note:
        return f"{row.model:<13} {row.side:<19} |{row.note}"
    to_half = f"{row.backward_to_half[1]:.2f}" if row.backward_to_half else "-"
    return (
        f"{row.model:<13} {row.side:<19} |{row.weight_casts:>4} {row.weight_bytes / 1e6:>8.1f}"
        f"|{row.gradient_casts:>5} {row.gradient_bytes / 1e6:>8.1f}"
        f"|{row.activation_casts:>4} {row.activation_bytes / 1e6:>8.1f}|{row.saved / 1e6:>7.1f}"
        f"|{_number(row.backward_ms):>7} {_quartiles(row.backward_to_autocast):>14} {to_half:>7} {row.ops:>4}"
        f"|{_number(row.step_ms):>7} {_quartiles(row.step_to_autocast):>14}"
        + (f" peak {row.peak / 1e6:.0f} MB" if row.peak is not None else "")
    )


def table(rows: Sequence[Row]) -> str:
    """Write the table to print: the rows, the geometric means of their times, and the targets."""
    told = (f"{'reached' if reached else 'MISSED '}  {what}" for what, reached in targets(rows))
    timed = [row for row in rows if row.backward_to_autocast and row.step_to_autocast]
    means = _all_means(timed)
    return "\n".join([_HEADER, *map(_line, rows), "", *means, *([""] if means else []), *told])


_COMPILED_HEADER = f"{'':<34}|{'forward + backward':^24}|{'step':^24}\n{'model':<13} {'side':<19} " + 2 * (
    f"|{'ms':>8} {'to autocast':>15}"
)


def compiled_table(rows: Sequence[Row]) -> str:
    """Write the table of models under torch.compile: times, and their geometric means over the models."""
    return "\n".join([_COMPILED_HEADER, *map(_compiled_line, rows), "", *_all_means(rows)])


def _compiled_line(row: Row) -> str:
    if row.note:
        return f"{row.model:<13} {row.side:<19} |{row.note}"
    backward = f"{_number(row.backward_ms):>8} {_quartiles(row.backward_to_autocast):>15}"
    step = f"{_number(row.step_ms):>8} {_quartiles(row.step_to_autocast):>15}"
    return f"{row.model:<13} {row.side:<19} |{backward}|{step}"


def _all_means(rows: Sequence[Row]) -> list[str]:
    return [_means(side, [r for r in rows if r.side == side]) for side in dict.fromkeys(row.side for row in rows)]


def _means(side: str, rows: Sequence[Row]) -> str:
    backward = [row.backward_to_autocast[1] for row in rows if row.backward_to_autocast]
    step = [row.step_to_autocast[1] for row in rows if row.step_to_autocast]
    if not backward:
        return f"{side}: not timed"
    spread = f"{min(backward):.3f} to {max(backward):.3f}"
    return (
        f"{side}: forward and backward {geometric_mean(backward):.3f} of {AUTOCAST}'s time in the geometric mean "
        f"({spread}), whole step {geometric_mean(step):.3f}"
    )
