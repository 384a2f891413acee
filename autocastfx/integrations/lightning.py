"""A precision plugin for Lightning: ``Trainer(plugins=AutocastFXPrecision(torch.float16))``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import new_class
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autocastfx.errors import UncapturedGraphWarning
from autocastfx.integrations.backend import CompileBackend
from autocastfx.training.grad_scaler import GradScaler

# Lightning has two names, and a trainer takes plugins of its own alone: the base class is that of all installed ones.
_NAMES = ("lightning.pytorch", "pytorch_lightning")
_INSTALLED = [name for name in _NAMES if find_spec(name.partition(".")[0])] or _NAMES
MixedPrecision: Any = new_class(
    "MixedPrecision", tuple(import_module(f"{name}.plugins.precision").MixedPrecision for name in _INSTALLED)
)


class AutocastFXPrecision(MixedPrecision):
    """Converts the modules of a ``LightningModule`` in place, and scales losses in float16.

    The modules keep their class, parameters and checkpoints. What ``training_step`` computes by itself, as the loss,
    stays float32. Gradients are unscaled before Lightning's hooks see them and before it clips, of fused optimizers
    too.

    Attributes:
        backend: what converts; ``backend.graphs`` has the plans.
        scaler: a :class:`GradScaler` in float16, else None. ``scaler.step_was_skipped`` tells ``lr_scheduler_step``
            when to wait.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        device: str = "cuda",
        modules: Sequence[str] | None = None,
        scaler: GradScaler | None = None,
        **options: Any,
    ) -> None:
        """Choose how to convert.

        Args:
            dtype: ``torch.float16`` or ``torch.bfloat16``.
            device: where the losses are: ``"cuda"`` or ``"cpu"``.
            modules: paths of the modules to convert; None: all direct children with parameters.
            scaler: None, with float16: ``GradScaler(device)``.
            options: of :class:`CompileBackend`.

        Raises:
            ValueError: an argument has no such choice.
        """
        self.backend, self.modules = CompileBackend(dtype=dtype, **options), modules
        if dtype is torch.float16 and scaler is None:
            scaler = GradScaler(device)
        super().__init__("16-mixed" if dtype is torch.float16 else "bf16-mixed", device, scaler)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the chosen modules in place.

        Warns:
            UncapturedGraphWarning: the module has parameters outside them.

        Raises:
            AttributeError: there is no module of a given path.
        """
        names = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
        chosen = [module.get_submodule(name) for name in (names if self.modules is None else self.modules)]
        known = {id(p) for one in chosen for p in one.parameters()}
        others = [name for name, p in module.named_parameters() if id(p) not in known]
        if others:
            shown = ", ".join(others[:5]) + (", …" if len(others) > 5 else "")
            told = f"the parameters {shown} belong to no module that is converted: what reads them runs in float32."
            warnings.warn(told, UncapturedGraphWarning, stacklevel=2)
        for one in chosen:
            self.backend.compile(one)
        return module

    def autocast_context_manager(self) -> AbstractContextManager[Any]:
        """Nothing: the modules are converted."""
        return nullcontext()

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale the gradients, let Lightning clip them, and step or skip."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if model.automatic_optimization and (result is None or not self.scaler.is_scaled):
            return result  # training_step has returned None, or a callback keeps it from backward
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        stepped = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return stepped

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip as Lightning does; the gradients are unscaled already."""
        super(MixedPrecision.__mro__[1], self).clip_gradients(optimizer, *args, **kwargs)

    def _clip_gradients(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Let the Lightning clip that ``model`` is of: the other one leaves it alone."""
        for lightning in MixedPrecision.__bases__:
            lightning._clip_gradients(self, model, *args, **kwargs)
