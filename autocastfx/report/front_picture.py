"""Draw plans by the bytes that they move and their errors, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

Place = tuple[float, float]  # bytes, and an error

_WIDTH, _HEIGHT = 680, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 660, 70, 366
_CUT, _MEASURED, _START, _TUNED = "#0072B2", "#E69F00", "#000000", "#D55E00"  # of Okabe and Ito, for all readers
_SHAPES = {_CUT: "m-3 -3h6v6h-6z", _MEASURED: "m0 -5l5 5l-5 5l-5 -5z", _START: "m-5 -5h10v10h-10z"}
_STYLE = (
    "text{font:12px sans-serif;fill:#222;paint-order:stroke;stroke:#fff;stroke-width:3px}.grid{stroke:#e4e4e4}"
    ".axis{stroke:#666;fill:none}.limit{stroke-dasharray:5 4}"
)
_MARGIN = 0.06  # of an axis, on either side of the points
_MIDDLE, _END = 'text-anchor="middle"', 'text-anchor="end"'


def front_picture(
    title: str,
    cuts: Sequence[Place],
    measured: Sequence[Place],
    start: Place | None,
    tuned: Place | None,
    most_error: float | None = None,
    most_bytes: float | None = None,
) -> str:
    """Return the SVG text, which ends with a newline, of plans and the budget.

    ``cuts`` are those of the sweep, with the errors that are predicted; other errors were measured. The axis of errors
    is of ratios, so errors are above 0. Only ``tuned`` may be without one: it is then drawn on the lower edge.
    """
    points = [*cuts, *measured, *filter(None, (start, tuned))] or [(1e6, 1.0)]
    across = _Axis.around([x / 1e6 for x, _ in points], _LEFT, _RIGHT)
    up = _Axis.around([math.log10(y) for _, y in points if y] or [0.0], _BOTTOM, _TOP)
    has_error = tuned is None or tuned[1] > 0
    named = ((start, _START, "start"), (tuned, _TUNED, "tuned" if has_error else "tuned, without error"))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 22, title),
        *_axes(across, up, most_error, most_bytes),
        f'<polyline points="{" ".join(_at(p, across, up) for p in sorted(cuts))}" fill="none" stroke="{_CUT}"/>',
        *(_mark(_at(place, across, up), _CUT) for place in cuts),
        *(_mark(_at(place, across, up), _MEASURED) for place in measured),
        *(_mark(_at(place, across, up), colour, said) for place, colour, said in named if place is not None),
        _mark(f"{_LEFT + 7},46", _CUT) + _text(_LEFT + 20, 50, "predicted, of a cut"),
        _mark(f"{_LEFT + 167},46", _MEASURED) + _text(_LEFT + 180, 50, "measured"),
        f'<path class="axis limit" d="M{_LEFT + 260} 46h20"/>' + _text(_LEFT + 288, 50, "budget"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class _Axis:
    """From numbers, or their logarithms, to places in the picture."""

    least: float
    most: float
    start: float
    end: float

    @classmethod
    def around(cls, numbers: Sequence[float], start: float, end: float) -> _Axis:
        low, high = min(numbers), max(numbers)
        margin = _MARGIN * (high - low) or 0.1 * abs(high) or 0.1
        return cls(low - margin, high + margin, start, end)

    def at(self, number: float) -> float:
        share = (number - self.least) / (self.most - self.least)
        return round(self.start + share * (self.end - self.start), 1)

    def steps(self) -> list[float]:
        """Round numbers at equal distances: 1, 2 or 5 times a power of ten."""
        rough = (self.most - self.least) / 8
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
        return [i * step for i in range(math.ceil(self.least / step), math.floor(self.most / step) + 1)]

    def decades(self) -> list[float]:
        """Logarithms of round numbers; the fewer, the longer the axis."""
        digits = (1,) if self.most - self.least > 2 else (1, 2, 5) if self.most - self.least > 0.8 else range(1, 10)
        powers = range(math.floor(self.least), math.ceil(self.most))
        logarithms = [math.log10(digit) + power for power in powers for digit in digits]
        return [number for number in logarithms if self.least <= number <= self.most]


def _axes(across: _Axis, up: _Axis, most_error: float | None, most_bytes: float | None) -> Iterator[str]:
    for number in across.steps():
        x = across.at(number)
        yield f'<path class="grid" d="M{x} {_TOP}V{_BOTTOM}"/>{_text(x, _BOTTOM + 18, f"{number:g}", _MIDDLE)}'
    for number in up.decades():
        y = up.at(number)
        yield f'<path class="grid" d="M{_LEFT} {y}H{_RIGHT}"/>{_text(_LEFT - 8, y + 4, f"{10**number:.0e}", _END)}'
    if most_error is not None and up.least <= math.log10(most_error) <= up.most:
        yield f'<path class="axis limit" d="M{_LEFT} {up.at(math.log10(most_error))}H{_RIGHT}"/>'
    if most_bytes is not None and across.least <= most_bytes / 1e6 <= across.most:
        yield f'<path class="axis limit" d="M{across.at(most_bytes / 1e6)} {_TOP}V{_BOTTOM}"/>'
    middle = (_TOP + _BOTTOM) / 2
    yield f'<path class="axis" d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>'
    yield _text((_LEFT + _RIGHT) / 2, _BOTTOM + 40, "MB moved in a call", _MIDDLE)
    yield _text(18, middle, "relative error", f'{_MIDDLE} transform="rotate(-90 18 {middle})"')


def _at(place: Place, across: _Axis, up: _Axis) -> str:
    moved, error = place
    return f"{across.at(moved / 1e6)},{up.at(math.log10(error)) if error else _BOTTOM}"


def _mark(place: str, colour: str, said: str = "") -> str:
    """A mark whose shape differs with its colour, and words beside it."""
    x, y = map(float, place.split(","))
    mark = f'<path fill="{colour}" d="M{place}{_SHAPES.get(colour, "m0 -7l6 11h-12z")}"/>'
    is_right = x > (_LEFT + _RIGHT) / 2
    return mark + (_text(x - 9 if is_right else x + 9, y - 9, said, _END if is_right else "") if said else "")


def _text(x: float, y: float, said: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{escape(said)}</text>'
