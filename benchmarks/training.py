"""Build the training step of each side that ``benchmarks.train_step`` counts and times."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import autocastfx
from benchmarks.models import FullModel


@dataclass(frozen=True)
class Side:
    """A way to train: with arguments of ``convert``, or by hand."""

    convert: dict[str, str] | None = None
    is_autocast: bool = False
    is_half: bool = False


FLOAT32, AUTOCAST, HALF = "float32", "torch.autocast", "pure half"
DEFAULT, FASTEST = "cast, fold=exact", "cached, fold=kernel"
RECOMPUTE = "cast, fold=exact, saved=recompute"
SIDES: dict[str, Side] = {
    FLOAT32: Side(),
    AUTOCAST: Side(is_autocast=True),
    **{
        f"{weights}, fold={fold}": Side({"weights": weights, "fold": fold})
        for weights in ("cast", "cached")
        for fold in ("none", "exact", "kernel")
    },
    HALF: Side(is_half=True),
}
# Beside those, for what is kept for backward.
FURTHER: dict[str, Side] = {RECOMPUTE: Side({"weights": "cast", "fold": "exact", "saved": "recompute"})}


def side_of(name: str) -> Side:
    """The side of this name."""
    return {**SIDES, **FURTHER}[name]


@dataclass(frozen=True)
class Setting:
    """Settings that all sides share; ``dtype`` is the 16-bit dtype. A CUDA graph can hold a capturable step."""

    device: str
    dtype: torch.dtype
    is_compiled: bool = False
    is_capturable: bool = False


@dataclass(frozen=True)
class Training:
    """A model in training, and the parts of its step.

    Attributes:
        model: the module whose parameters are trained.
        inputs: keyword arguments of the next call; may be replaced.
        prepare: renews working copies, if there are any, so that the next call does not.
        forward: returns the loss, and the model's other outputs.
        backward: computes the parameters' gradients from a loss, which it scales if needed.
        step: runs the optimizer's part and drops the gradients.
        optimizer: its ``param_groups`` hold the learning rate.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    prepare: Callable[[], object]
    forward: Callable[[], Any]
    backward: Callable[[Tensor], object]
    step: Callable[[], object]
    optimizer: Any

    def forward_and_backward(self) -> None:
        """Run forward and backward."""
        self.backward(self.forward()[0])


def training(name: str, full: FullModel, setting: Setting, *, masters: str = "") -> Training:
    """Build the side of this name, with AdamW; float16 losses are scaled.

    Args:
        name: one of ``SIDES``.
        full: the model, and the first inputs.
        setting: settings that all sides share.
        masters: of bfloat16 parameters, as for ``LossScalingOptimizer``; empty: none. float16 ones always have some.

    Raises:
        UnsupportedError: ``convert`` does not take the side's arguments.
    """
    side, dtype = side_of(name), setting.dtype
    model: Any = full.build().to(setting.device).train()
    inputs = {key: tensor.to(setting.device) for key, tensor in full.inputs().items()}
    if side.is_half:
        model.to(dtype)
        inputs = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in inputs.items()}
    if side.convert is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "float16 convolutions on a CPU")
            model = autocastfx.convert(model, (), inputs, dtype=dtype, keep_output_dtype=False, **side.convert)  # type: ignore[arg-type]
    return training_of(name, model, inputs, setting, masters=masters)


def adamw(parameters: Iterable[nn.Parameter], setting: Setting) -> torch.optim.AdamW:
    """Return the optimizer that all sides have."""
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True, capturable=setting.is_capturable)


def training_of(
    name: str,
    model: Any,
    inputs: dict[str, Tensor],
    setting: Setting,
    *,
    masters: str = "",
    optimizer: Any = None,
) -> Training:
    """Build the side of this name from its own model, converted or made 16-bit already.

    Its optimizer is one of its own, or one that sides of the same parameters share.
    """
    side, dtype = side_of(name), setting.dtype
    called = torch.compile(model) if setting.is_compiled else model

    def forward() -> Any:
        with torch.autocast(setting.device, dtype) if side.is_autocast else contextlib.nullcontext():
            return called(**inputs)

    optimizer = optimizer or adamw(model.parameters(), setting)
    backward: Callable[[Tensor], object] = lambda found: found.backward()  # noqa: E731
    update: Callable[[], object] = optimizer.step
    if dtype == torch.float16 and side.is_autocast:
        scaler = torch.amp.GradScaler(setting.device)
        backward, update = lambda found: scaler.scale(found).backward(), lambda: _scaled(scaler, optimizer)
    elif dtype == torch.float16 and name != FLOAT32:
        optimizer = autocastfx.LossScalingOptimizer(optimizer)
        backward, update = optimizer.backward, optimizer.step
    elif masters:
        optimizer = autocastfx.LossScalingOptimizer(optimizer, autocastfx.NoLossScale(), masters=masters)
        backward, update = optimizer.backward, optimizer.step

    def step() -> None:
        update()
        optimizer.zero_grad()  # of masters too, where there are any

    prepare = model.refresh_weights if "cached" in name else lambda: None
    return Training(model, inputs, prepare, forward, backward, step, optimizer)


def _scaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.update()
