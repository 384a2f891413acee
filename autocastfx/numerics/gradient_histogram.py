"""``gradient_histogram``: how large the gradients of a training run are, and which loss scale they ask for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autocastfx.errors import CalibrationError
from autocastfx.graph.node import is_cast
from autocastfx.numerics.exponent_counts import NOTHING, Exponents, Margin, Tally, read_all
from autocastfx.numerics.histogram_text import plot, table
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.training.gradients import local
from autocastfx.training.loss_scale import suggest_loss_scale
from autocastfx.training.optimizer import LossScalingOptimizer

__all__ = ["GradientHistogram", "gradient_histogram"]

Scale = float | Callable[[], float] | LossScalingOptimizer
_Record = Callable[[torch.Tensor], None]
_VALUES, _PARAMETERS = "values", "parameters"
_NOTHING = "no gradient other than zero was recorded: run backward passes of the model inside the with block."


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
        found = max(self.activations.largest, self.weights.largest)
        if not found:
            raise CalibrationError(_NOTHING)
        return found

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
        found = (self.activations + self.weights).margin(
            self.suggested_loss_scale() if loss_scale is None else loss_scale
        )
        if found is None:
            raise CalibrationError(_NOTHING)
        return found

    def table(self, loss_scale: float | None = None) -> str:
        """The counts as text, what becomes of the gradients in float16, and how far they are from its limits.

        Args:
            loss_scale: a power of two to compare with none; the suggested one by default.

        Raises:
            CalibrationError: none was recorded.
            ValueError: ``loss_scale`` is no power of two.
        """
        scale = self.suggested_loss_scale() if loss_scale is None else loss_scale
        return table(self.activations, self.weights, self.values, scale)

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
        plot(self.activations, self.weights, scale, path)

    def to_json(self) -> str:
        """Everything that was recorded as JSON text, by the names of the attributes."""
        parts = {_VALUES: self.values, _PARAMETERS: self.parameters}
        sums = {"activations": asdict(self.activations), "weights": asdict(self.weights)}
        return json.dumps({**sums, **{k: {n: asdict(e) for n, e in v.items()} for k, v in parts.items()}}, indent=1)

    def _read(self, kind: str) -> dict[str, Exponents]:
        keys = [key for key in self._tallies if key[0] == kind]
        found: dict[str, Exponents] = {}
        for (_, name, _), exponents in zip(keys, read_all([self._tallies[key] for key in keys]), strict=True):
            found[name] = found.get(name, NOTHING) + exponents
        return found

    def record(self, kind: str, name: str, gradient: torch.Tensor) -> None:
        """Count a gradient; it stays as it is. A hook of ``torch.Tensor.register_hook``."""
        if not self._is_recording or not gradient.is_floating_point():
            return
        held = gradient.coalesce()._values() if gradient.layout is torch.sparse_coo else local(gradient)
        key = (kind, name, held.device)
        if key not in self._tallies:
            self._tallies[key] = Tally(held.device)
        self._tallies[key].add(held, self._factor(held.device))

    def _factor(self, device: torch.device) -> torch.Tensor | None:
        if isinstance(self._scale, LossScalingOptimizer):
            scaler = self._scale.loss_scaler
            return scaler.state(device).scale.to(device).reciprocal() if scaler.rule.is_checked else None
        scale = self._scale() if callable(self._scale) else self._scale
        return None if scale == 1.0 else torch.full((), 1 / scale, dtype=torch.float32, device=device)

    def stop(self) -> None:
        """Count no more, whatever backward passes are still to come."""
        self._is_recording = False


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
            handle = parameter.register_hook(partial(_observe, histogram, _PARAMETERS, name))
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
                hook = partial(_after_forward, histogram, seen, name or type(module).__name__)
                hooks.callback(module.register_forward_hook(hook).remove)
        yield histogram


def _observe(histogram: GradientHistogram, kind: str, name: str, gradient: torch.Tensor) -> None:
    histogram.record(kind, name, gradient)


def _watch(histogram: GradientHistogram, seen: WeakTensorKeyDictionary, name: str, outputs: Any, inputs: Any) -> None:
    """Record the gradients of ``outputs``, once each; those that are views of ``inputs`` have their gradients."""
    stores = {_store(tensor) for tensor in _tensors(inputs)}
    for tensor in _tensors(outputs):
        if tensor.requires_grad and tensor not in seen and _store(tensor) not in stores:
            seen[tensor] = True
            tensor.register_hook(partial(_observe, histogram, _VALUES, name))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.layout is torch.strided)


def _store(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _after_forward(
    histogram: GradientHistogram, seen: WeakTensorKeyDictionary, name: str, _: nn.Module, inputs: Any, outputs: Any
) -> None:
    _watch(histogram, seen, name, outputs, inputs)


def _after_node(
    histogram: GradientHistogram, seen: WeakTensorKeyDictionary, prefix: str, node: fx.Node, outputs: Any, inputs: Any
) -> None:
    if not is_cast(node) and torch.is_grad_enabled():
        _watch(histogram, seen, prefix + node.name, outputs, inputs)
