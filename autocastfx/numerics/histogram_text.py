"""Show gradients by magnitude against float16's range, as text and as a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autocastfx.errors import MissingExtraError
from autocastfx.numerics.exponent_counts import Exponents, shift_of

__all__ = ["plot", "table"]


@dataclass(frozen=True)
class _Band:
    """A range of exponents with the same fate in float16, and its look in the picture."""

    title: str
    low: float
    high: float
    colour: str  # from Okabe and Ito's palette, distinct for colour-blind readers
    hatch: str


_BANDS = (  # in the order of Shares
    _Band("becomes zero", -math.inf, -25, "#D55E00", "xx"),
    _Band("denormal", -25, -14, "#E69F00", "//"),
    _Band("normal", -14, 16, "#0072B2", ""),
    _Band("becomes infinite", 16, math.inf, "#CC79A7", ".."),
)
_ROWS, _WIDTH = 8, 40
_LEAST = 0.0005  # the smallest share that rounds to 0.1 %
_EDGES = (-25, -14, 16)


def table(activations: Exponents, weights: Exponents, values: Mapping[str, Exponents], loss_scale: float) -> str:
    """Write shares with and without ``loss_scale``, shares by power of two, and the values that lose most to zero."""
    lines = [f"{'gradients in float16':<24}{'unscaled':>12}{f'times {_power(loss_scale)}':>14}"]
    for title, part in (("activation gradients", activations), ("weight gradients", weights)):
        lines.append(
            f"{title}: {part.total:,}, largest {part.largest:.3g}; besides {part.zeros:,} zero, "
            f"{part.non_finite:,} not finite"
        )
        for band, plain, scaled in zip(_BANDS, part.shares(), part.shares(loss_scale), strict=True):
            lines.append(f"  {band.title:<22}{_percent(plain):>12}{_percent(scaled):>14}")
        lines += _margins(part, loss_scale)
    lines += ["", f"{'from':<8}{'activations':>12}{'weights':>12}"]
    for exponent in _seen(activations, weights):
        shares = [_share(part, exponent) for part in (activations, weights)]
        bar = "#" * round(_WIDTH * max(shares))
        lines.append(f"{_power(2.0**exponent):<8}{_percent(shares[0]):>12}{_percent(shares[1]):>12}  {bar}".rstrip())
    worst = sorted(values, key=lambda name: -values[name].shares().zero)[:_ROWS]
    lost = [name for name in worst if values[name].shares().zero > 0]
    if lost:
        width = max(map(len, lost)) + 2
        lines += ["", "activation gradients that lose most:"]
        lines.append(f"  {'value':<{width}}{'zero unscaled':>14}{f'times {_power(loss_scale)}':>14}")
        for name in lost:
            plain, scaled = values[name].shares().zero, values[name].shares(loss_scale).zero
            lines.append(f"  {name:<{width}}{_percent(plain):>14}{_percent(scaled):>14}")
    return "\n".join(lines) + "\n"


def _margins(part: Exponents, loss_scale: float) -> Iterator[str]:
    """Yield the distances from float16's limits, in powers of two."""
    plain, scaled = part.margin(), part.margin(loss_scale)
    if plain is None or scaled is None:
        return
    ends = f"from {_power(2.0**plain.smallest)} to {_power(2.0**plain.largest)}"
    yield f"  powers of two left, {ends}; below 0: beyond the limit"
    for title, name in (("to infinite", "to_infinite"), ("to denormal", "to_denormal"), ("to zero", "to_zero")):
        yield f"    {title:<20}{getattr(plain, name):>12}{getattr(scaled, name):>14}"


def plot(activations: Exponents, weights: Exponents, loss_scale: float, path: str | os.PathLike[str]) -> None:
    """Draw both histograms, unscaled on the left and times ``loss_scale`` on the right.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    shift = shift_of(loss_scale)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "a picture needs matplotlib, which is not installed: pip install 'autocastfx[plot]', or use table()."
        ) from error
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    axes: Any = figure.subplots(2, 2, sharex=True, sharey="row")
    found = _seen(activations, weights)
    ends = [-29, 17, *found, *(e + shift for e in found)]
    span = (min(ends) - 2, max(ends) + 3)
    for row, (title, part) in zip(
        axes, (("Activation gradients", activations), ("Weight gradients", weights)), strict=True
    ):
        for axis, scale in zip(row, (1.0, loss_scale), strict=True):
            _draw(axis, part, scale, span)
        row[0].set_ylabel(f"{title}\n% of those not zero")
    axes[0][0].set_title("Without a loss scale", fontweight="bold")
    axes[0][1].set_title(f"Times a loss scale of {_math(shift)}", fontweight="bold")
    for axis in axes[1]:
        axis.set_xlabel("Magnitude")
    figure.suptitle("Gradients by magnitude, and what float16 makes of them")
    keys = [axes[0][0].bar([0], [0], color=b.colour, hatch=b.hatch, edgecolor="white") for b in _BANDS]
    figure.legend(keys, [b.title for b in _BANDS], loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def _draw(axis: Any, part: Exponents, scale: float, span: tuple[int, int]) -> None:
    shift, (low, high) = shift_of(scale), span
    for band, share in zip(_BANDS, part.shares(scale), strict=True):
        left, right = max(band.low, low), min(band.high, high)
        axis.axvspan(left, right, color=band.colour, alpha=0.09, linewidth=0)
        inside = {e + shift: n for e, n in part.counts.items() if band.low <= e + shift < band.high}
        heights = [100 * n / part.total for n in inside.values()]
        axis.bar(list(inside), heights, width=1, align="edge", color=band.colour, hatch=band.hatch, edgecolor="white")
        if band.high != math.inf or share:
            middle = (left + right) / 2
            axis.text(middle, 0.97, _percent(share), transform=axis.get_xaxis_transform(), ha="center", va="top")
    for edge in _EDGES:
        axis.axvline(edge, color="0.35", linewidth=0.8, linestyle="--")
    ticks = sorted(
        {*_EDGES, *(e for e in range(low, high) if e % 8 == 0 and min(abs(e - edge) for edge in _EDGES) > 2)}
    )
    axis.set_xticks(ticks, [_math(e) for e in ticks])
    axis.set_xlim(low, high)
    axis.margins(y=0.2)


def _seen(*parts: Exponents) -> range:
    """Return the exponents from the first to the last with a share of at least ``_LEAST``."""
    found = [e for part in parts for e in part.counts if _share(part, e) >= _LEAST]
    return range(min(found), max(found) + 1)


def _share(part: Exponents, exponent: int) -> float:
    return part.counts.get(exponent, 0) / max(part.total, 1)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= _LEAST or not share else "< 0.1 %"


def _power(number: float) -> str:
    return f"2**{shift_of(number)}"


def _math(exponent: int) -> str:
    return f"$2^{{{exponent}}}$"
