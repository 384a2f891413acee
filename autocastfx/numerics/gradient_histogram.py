"""``gradient_histogram``: how large the gradients of a training run are, and which loss scale they ask for."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autocastfx.errors import CalibrationError, MissingExtraError
from autocastfx.files import plain_data
from autocastfx.graph.alias import storage_of
from autocastfx.graph.magnitude import NOTHING, Exponents, Margin, Tally, read_tallies, shift_of
from autocastfx.graph.node import is_cast
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.training.gradients import local
from autocastfx.training.loss_scale import suggest_loss_scale
from autocastfx.training.optimizer import LossScalingOptimizer


class GradientHistogram:
    """Magnitudes of the gradients of the unscaled loss, by powers of two. Reading one waits for the device.

    Memory does not grow with the number of steps: some 2 kB for each value and parameter.
    """

    def __init__(self, scale: Scale = 1.0) -> None:
        self._scale = scale
        self._tallies: dict[tuple[str, str, torch.device], Tally] = {}
        self._is_recording = True

    @property
    def values(self) -> Mapping[str, Exponents]:
        """Activation gradients by the name of the value: a node of a converted model's graph, or a module."""
        return self._read(_VALUES)

    @property
    def parameters(self) -> Mapping[str, Exponents]:
        """Weight gradients by the name of the parameter."""
        return self._read(_PARAMETERS)

    @property
    def activations(self) -> Exponents:
        """All activation gradients together."""
        return sum(self.values.values(), NOTHING)

    @property
    def weights(self) -> Exponents:
        """All weight gradients together."""
        return sum(self.parameters.values(), NOTHING)

    @property
    def largest(self) -> float:
        """The largest finite magnitude of all.

        Raises:
            CalibrationError: none was recorded.
        """
        largest = max(self.activations.largest, self.weights.largest)
        if not largest:
            raise CalibrationError(_NOTHING)
        return largest

    def suggested_loss_scale(self, *, margin: float = 1.0) -> float:
        """The largest power of two by which no recorded gradient overflows in float16; ``suggest_loss_scale(largest)``.

        Args:
            margin: a further factor by which gradients stay below 65504, for those of later steps may be larger.

        Raises:
            CalibrationError: none was recorded.
        """
        return suggest_loss_scale(self.largest, margin=margin)

    def margin(self, loss_scale: float | None = None) -> Margin:
        """How far all gradients together are from float16's limits, in powers of two. It prints as a sentence.

        Args:
            loss_scale: a power of two; the suggested one by default.

        Raises:
            CalibrationError: none was recorded.
            ValueError: ``loss_scale`` is no power of two.
        """
        scale = self.suggested_loss_scale() if loss_scale is None else loss_scale
        margin = (self.activations + self.weights).margin(scale)
        if margin is None:
            raise CalibrationError(_NOTHING)
        return margin

    def table(self, loss_scale: float | None = None) -> str:
        """The counts as text, what becomes of the gradients in float16, and how far they are from its limits.

        Args:
            loss_scale: a power of two to compare with none; the suggested one by default.

        Raises:
            CalibrationError: none was recorded.
            ValueError: ``loss_scale`` is no power of two.
        """
        scale = self.suggested_loss_scale() if loss_scale is None else loss_scale
        activations, weights, values = self.activations, self.weights, self.values
        lines = [f"{'gradients in float16':<24}{'unscaled':>12}{f'times {_power(scale)}':>14}"]
        for title, part in (("activation gradients", activations), ("weight gradients", weights)):
            lines.append(
                f"{title}: {part.total:,}, largest {part.largest:.3g}; besides {part.zeros:,} zero, "
                f"{part.non_finite:,} not finite"
            )
            for band, plain, scaled in zip(_BANDS, part.shares(), part.shares(scale), strict=True):
                lines.append(f"  {band.title:<22}{_percent(plain):>12}{_percent(scaled):>14}")
            lines += _margins(part, scale)
        lines += ["", f"{'from':<8}{'activations':>12}{'weights':>12}"]
        for exponent in _seen(activations, weights):
            shares = [_share(part, exponent) for part in (activations, weights)]
            bar = "#" * round(_WIDTH * max(shares))
            lines.append(
                f"{_power(2.0**exponent):<8}{_percent(shares[0]):>12}{_percent(shares[1]):>12}  {bar}".rstrip()
            )
        worst = sorted(values, key=lambda name: -values[name].shares().zero)[:_ROWS]
        lost = [name for name in worst if values[name].shares().zero > 0]
        if lost:
            width = max(map(len, lost)) + 2
            lines += ["", "activation gradients that lose most:"]
            lines.append(f"  {'value':<{width}}{'zero unscaled':>14}{f'times {_power(scale)}':>14}")
            for name in lost:
                plain, scaled = values[name].shares().zero, values[name].shares(scale).zero
                lines.append(f"  {name:<{width}}{_percent(plain):>14}{_percent(scaled):>14}")
        return "\n".join(lines) + "\n"

    def plot(self, path: str | os.PathLike[str], loss_scale: float | None = None) -> None:
        """Write a picture of the histogram without a loss scale and with one. Needs the extra ``plot`` (matplotlib).

        Args:
            path: its ending says the format: ``.png``, ``.svg`` or ``.pdf``.
            loss_scale: a power of two; the suggested one by default.

        Raises:
            CalibrationError: none was recorded.
            MissingExtraError: matplotlib is not installed.
            ValueError: ``loss_scale`` is no power of two.
        """
        scale = self.suggested_loss_scale() if loss_scale is None else loss_scale
        activations, weights = self.activations, self.weights
        shift = shift_of(scale)
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError(
                "a picture needs matplotlib, which is not installed: pip install 'autocastfx[plot]', or use table()."
            ) from error
        figure = Figure(figsize=(11, 6.4), layout="constrained")
        axes: Any = figure.subplots(2, 2, sharex=True, sharey="row")
        exponents = _seen(activations, weights)
        ends = [-29, 17, *exponents, *(e + shift for e in exponents)]
        span = (min(ends) - 2, max(ends) + 3)
        for row, (title, part) in zip(
            axes, (("Activation gradients", activations), ("Weight gradients", weights)), strict=True
        ):
            for axis, factor in zip(row, (1.0, scale), strict=True):
                _draw(axis, part, factor, span)
            row[0].set_ylabel(f"{title}\n% of those not zero")
        axes[0][0].set_title("Without a loss scale", fontweight="bold")
        axes[0][1].set_title(f"Times a loss scale of {_math(shift)}", fontweight="bold")
        for axis in axes[1]:
            axis.set_xlabel("Magnitude")
        figure.suptitle("Gradients by magnitude, and what float16 makes of them")
        keys = [axes[0][0].bar([0], [0], color=b.colour, hatch=b.hatch, edgecolor="white") for b in _BANDS]
        figure.legend(keys, [b.title for b in _BANDS], loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=150)

    def to_json(self) -> str:
        """Everything that was recorded as JSON text, by the names of the attributes."""
        names = ("activations", "weights", _VALUES, _PARAMETERS)
        return json.dumps(plain_data({name: getattr(self, name) for name in names}), indent=1)

    def _read(self, kind: str) -> dict[str, Exponents]:
        keys = [key for key in self._tallies if key[0] == kind]
        histograms: dict[str, Exponents] = {}
        for (_, name, _), exponents in zip(keys, read_tallies([self._tallies[key] for key in keys]), strict=True):
            histograms[name] = histograms.get(name, NOTHING) + exponents
        return histograms

    def record(self, kind: str, name: str, gradient: torch.Tensor) -> None:
        """Count a gradient; it stays as it is. A hook of ``torch.Tensor.register_hook``."""
        if not self._is_recording or not gradient.is_floating_point():
            return
        elements = gradient.coalesce()._values() if gradient.layout is torch.sparse_coo else local(gradient)
        key = (kind, name, elements.device)
        if key not in self._tallies:
            self._tallies[key] = Tally(elements.device)
        self._tallies[key].add(elements, self._factor(elements.device))

    def _factor(self, device: torch.device) -> torch.Tensor | None:
        if isinstance(self._scale, LossScalingOptimizer):
            scaler = self._scale.loss_scaler
            return scaler.state(device).scale.to(device).reciprocal() if scaler.rule.is_checked else None
        scale = self._scale() if callable(self._scale) else self._scale
        return None if scale == 1.0 else torch.full((), 1 / scale, dtype=torch.float32, device=device)

    def stop(self) -> None:
        """Count no more, whatever backward passes are still to come."""
        self._is_recording = False


# Show gradients by magnitude against float16's range, as text and as a picture.


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


def _margins(part: Exponents, loss_scale: float) -> Iterator[str]:
    """Yield the distances from float16's limits, in powers of two."""
    plain, scaled = part.margin(), part.margin(loss_scale)
    if plain is None or scaled is None:
        return
    ends = f"from {_power(2.0**plain.smallest)} to {_power(2.0**plain.largest)}"
    yield f"  powers of two left, {ends}; below 0: beyond the limit"
    for title, name in (("to infinite", "to_infinite"), ("to denormal", "to_denormal"), ("to zero", "to_zero")):
        yield f"    {title:<20}{getattr(plain, name):>12}{getattr(scaled, name):>14}"


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
    exponents = [e for part in parts for e in part.counts if _share(part, e) >= _LEAST]
    return range(min(exponents), max(exponents) + 1)


def _share(part: Exponents, exponent: int) -> float:
    return part.counts.get(exponent, 0) / max(part.total, 1)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= _LEAST or not share else "< 0.1 %"


def _power(number: float) -> str:
    return f"2**{shift_of(number)}"


def _math(exponent: int) -> str:
    return f"$2^{{{exponent}}}$"


Scale = float | Callable[[], float] | LossScalingOptimizer
_VALUES, _PARAMETERS = "values", "parameters"
_NOTHING = "no gradient other than zero was recorded: run backward passes of the model inside the with block."


@contextmanager
def gradient_histogram(model: nn.Module, *, scale: Scale = 1.0) -> Generator[GradientHistogram]:
    """Record how large gradients are while training runs inside the ``with`` block.

    ::

        with autocastfx.gradient_histogram(model, scale=optimizer) as histogram:
            train(model, steps=100)
        print(histogram.table())
        optimizer = LossScalingOptimizer(adamw, StaticLossScale(histogram.suggested_loss_scale()))

    Of a converted model, those of the values of its graph are recorded, casts and views left out; of any other module,
    those of the outputs of its modules. Gradients and results stay the same to the bit. What ``torch.compile`` has
    compiled is not looked into; parameters are always recorded.

    What float16 has rounded to zero is recorded as zero: to see how small gradients would be, record the float32 model,
    a bfloat16 one, or a large scale.

    Args:
        model: converted or not; it may be wrapped in DistributedDataParallel, where this process's gradients are seen.
        scale: by what the losses are multiplied, which is divided out: the ``LossScalingOptimizer`` of the losses, a
            number, or a function that gives the present number (``grad_scaler.get_scale``).

    Raises:
        CalibrationError: the model has no parameter that asks for a gradient.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        name = type(model).__name__
        raise CalibrationError(f"{name} has no parameter that asks for a gradient: unfreeze what is to be trained.")
    histogram = GradientHistogram(scale)
    with ExitStack() as hooks:
        hooks.callback(histogram.stop)
        for name, parameter in trained:
            handle = parameter.register_hook(partial(histogram.record, _PARAMETERS, name))
            hooks.callback(handle.remove)
        seen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        inside: set[nn.Module] = set()
        for name, module in model.named_modules():
            if module in inside:
                continue
            if isinstance(module, AmpModule):
                inside.update(module.modules())
                observer = partial(_after_node, histogram, seen, f"{name}." if name else "")
                hooks.enter_context(module._observed_by(observer))
            else:
                hook = partial(_after, histogram, seen, name or type(module).__name__)
                hooks.callback(module.register_forward_hook(hook).remove)
        yield histogram


def _after(
    histogram: GradientHistogram, seen: WeakTensorKeyDictionary, name: str, _: Any, inputs: Any, outputs: Any
) -> None:
    """Record the gradients of ``outputs``, once each; those that are views of ``inputs`` have their gradients."""
    stores = {storage_of(tensor) for tensor in _tensors(inputs)}
    for tensor in _tensors(outputs):
        if tensor.requires_grad and tensor not in seen and storage_of(tensor) not in stores:
            seen[tensor] = True
            tensor.register_hook(partial(histogram.record, _VALUES, name))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.layout is torch.strided)


def _after_node(
    histogram: GradientHistogram, seen: WeakTensorKeyDictionary, prefix: str, node: fx.Node, outputs: Any, inputs: Any
) -> None:
    if not is_cast(node) and torch.is_grad_enabled():
        _after(histogram, seen, prefix + node.name, node, inputs, outputs)
