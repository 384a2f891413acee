"""Build the training step of each side that ``benchmarks.train_step`` counts and times."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import autocastfx
from benchmarks.models.families import FullModel


@dataclass(frozen=True)
class Side:
    """A way to train: with arguments of ``convert``, or by hand.

    Attributes:
        convert: the arguments.
        is_autocast: True for a model under torch.autocast.
        is_half: True for 16-bit parameters, with float32 masters where they are asked for.
        is_o2: True for what Apex's O2 does: 16-bit parameters but of batch norms, and masters updated by torch alone.
        is_liger: True for a model with the kernels of the package liger_kernel.
        is_eager: True if the model as a whole is not compiled where other sides are.
        tf32: whether float32 products may run in TF32 on CUDA; None: as torch has it.
    """

    convert: dict[str, str] | None = None
    is_autocast: bool = False
    is_half: bool = False
    is_o2: bool = False
    is_liger: bool = False
    is_eager: bool = False
    tf32: bool | None = None


FLOAT32, AUTOCAST, HALF = "float32", "torch.autocast", "pure half"
DEFAULT, FASTEST = "cast, fold=exact", "cached, fold=kernel"
RECOMPUTE, FUSED = "cast, fold=exact, saved=recompute", "cached, fold=kernel, fuse=inductor"
TF32, O2, LIGER, EAGER = "TF32", "Apex O2-like", "Liger, torch.autocast", "torch.autocast, eager"
SIDES: dict[str, Side] = {
    FLOAT32: Side(tf32=False),
    AUTOCAST: Side(is_autocast=True),
    **{
        f"{weights}, fold={fold}": Side({"weights": weights, "fold": fold})
        for weights in ("cast", "cached")
        for fold in ("none", "exact", "kernel")
    },
    HALF: Side(is_half=True),
}
# Beside those, on a GPU.
FURTHER: dict[str, Side] = {
    RECOMPUTE: Side({"weights": "cast", "fold": "exact", "saved": "recompute"}),
    FUSED: Side({"weights": "cached", "fold": "kernel", "fuse": "inductor"}, is_eager=True),
    TF32: Side(tf32=True),
    O2: Side(is_half=True, is_o2=True),
    LIGER: Side(is_autocast=True, is_liger=True),
    EAGER: Side(is_autocast=True, is_eager=True),
}


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
        prepare: renews working copies that are stale, if there are any, so that the next call does not.
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
            Cached copies have that optimizer too, whose step writes them.

    Raises:
        UnsupportedError: ``convert`` does not take the side's arguments.
    """
    side, dtype = side_of(name), setting.dtype
    model: Any = full.build().to(setting.device).train()
    inputs = {key: tensor.to(setting.device) for key, tensor in full.inputs().items()}
    if side.is_half:
        model, inputs = halved(name, model, inputs, dtype)
    if side.convert is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "float16 convolutions on a CPU")
            model = autocastfx.convert(model, (), inputs, dtype=dtype, keep_output_dtype=False, **side.convert)  # type: ignore[arg-type]
    return training_of(name, model, inputs, setting, masters=masters)


def halved(
    name: str, model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Make a model 16-bit for a side, in place, and return it with such inputs."""
    model.to(dtype)
    for module in model.modules() if side_of(name).is_o2 else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.float()
    return model, {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs.items()}


def adamw(parameters: Iterable[Tensor], setting: Setting) -> torch.optim.AdamW:
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
    called = with_liger(model) if side.is_liger else model
    if setting.is_compiled and not side.is_eager:
        called = torch.compile(called)

    def forward() -> Any:
        region = torch.autocast(setting.device, dtype) if side.is_autocast else contextlib.nullcontext()
        with region, tf32(side.tf32):
            return called(**inputs)

    def plainly(found: Tensor) -> None:
        with tf32(side.tf32):
            found.backward()

    by_torch = _MastersByTorch(model, setting) if side.is_o2 else None
    optimizer = by_torch.optimizer if by_torch else optimizer or adamw(model.parameters(), setting)
    backward: Callable[[Tensor], object] = plainly
    update: Callable[[], object] = optimizer.step
    if dtype == torch.float16 and (side.is_autocast or by_torch):
        scaler = torch.amp.GradScaler(setting.device)
        backward, update = lambda found: scaler.scale(found).backward(), lambda: _scaled(scaler, optimizer)
    elif dtype == torch.float16 and side.tf32 is None:
        optimizer = autocastfx.LossScalingOptimizer(optimizer)
        backward, update = optimizer.backward, optimizer.step
    elif (masters or "cached" in name) and not by_torch:
        rule = autocastfx.NoLossScale()
        optimizer = autocastfx.LossScalingOptimizer(optimizer, rule, masters=masters or "float32")
        backward, update = optimizer.backward, optimizer.step

    def step() -> None:
        if by_torch:
            by_torch.step(update)
            model.zero_grad()
        else:
            update()
            optimizer.zero_grad()  # of masters too, where there are any

    prepare = model._autocastfx_copies.fresh if "cached" in name else lambda: None
    return Training(model, inputs, prepare, forward, backward, step, optimizer)


def _scaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.update()


class _MastersByTorch:
    """float32 masters of 16-bit parameters, which torch's fused AdamW updates; gradients and weights are copied."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.low = list(model.parameters())
        self.masters = [parameter.detach().to(torch.float32, copy=True) for parameter in self.low]
        self.optimizer = adamw(self.masters, setting)

    def step(self, update: Callable[[], object]) -> None:
        """Update the parameters that have gradients."""
        pairs = [(high, low) for high, low in zip(self.masters, self.low, strict=True) if low.grad is not None]
        with torch.no_grad():
            for high, _ in pairs:
                high.grad = torch.empty_like(high) if high.grad is None else high.grad
            torch._foreach_copy_([high.grad for high, _ in pairs], [low.grad for _, low in pairs])
            update()
            torch._foreach_copy_([low for _, low in pairs], [high for high, _ in pairs])


@contextlib.contextmanager
def tf32(allowed: bool | None) -> Generator[None]:
    """While open, products and convolutions of float32 run in TF32 on CUDA, or do not; None changes nothing."""
    if allowed is None:
        yield
        return
    products: Any = torch.backends.cuda.matmul
    before = products.allow_tf32
    try:
        products.allow_tf32 = allowed
        cudnn: Any = torch.backends.cudnn
        with cudnn.flags(
            enabled=cudnn.enabled, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=allowed
        ):
            yield
    finally:
        products.allow_tf32 = before


def with_liger(model: Any) -> Callable[..., Any]:
    """Return what calls a model of transformers with Liger's kernels.

    Liger replaces functions and classes in the model's module. Other sides run these too, so a call alone sees them.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # type: ignore[import-not-found]

    module, kind = sys.modules[type(model).__module__], type(model)
    plain, forward = dict(vars(module)), kind.forward
    _apply_liger_kernel_to_instance(model=model)
    replaced = {name: value for name, value in vars(module).items() if value is not plain.get(name)}
    theirs, kind.forward = kind.forward, forward
    vars(module).update(plain)

    def call(**inputs: Tensor) -> Any:
        with mock.patch.multiple(module, **replaced), mock.patch.object(kind, "forward", theirs):
            return model(**inputs)

    return call
