"""Loss scaling in loops of Hugging Face Accelerate, and so in ``transformers.Trainer``."""

from __future__ import annotations

from typing import Any

from autocastfx.errors import UnsupportedError
from autocastfx.training.grad_scaler import GradScaler


def use_grad_scaler(accelerator: Any, scaler: GradScaler | None = None) -> GradScaler:
    """Let an ``accelerate.Accelerator`` scale losses, for a model that is converted to float16.

    ::

        accelerator = Accelerator()  # or trainer.accelerator, before trainer.train()
        scaler = use_grad_scaler(accelerator)

    From then on ``accelerator.backward`` scales, ``clip_grad_norm_`` and ``clip_grad_value_`` unscale before they clip,
    prepared optimizers skip steps that overflowed, prepared schedulers wait then, and checkpoints hold the scale.
    Accelerate's own ``mixed_precision="fp16"`` does so on accelerators alone, and runs the model under torch.autocast.

    Args:
        accelerator: one that has prepared no optimizer yet, with ``mixed_precision="no"``.
        scaler: None: ``GradScaler(accelerator.device.type)``.

    Returns:
        The scaler.

    Raises:
        UnsupportedError: the accelerator converts models by itself, or has prepared an optimizer.
    """
    if accelerator.native_amp or accelerator.mixed_precision != "no":
        raise UnsupportedError(
            f"the accelerator has mixed_precision={accelerator.mixed_precision!r}, which converts models a second "
            'time: make it with mixed_precision="no", or with neither fp16=True nor bf16=True in TrainingArguments.'
        )
    if accelerator._optimizers:
        raise UnsupportedError(
            "the accelerator has prepared an optimizer, which took no scaler: call use_grad_scaler before prepare()."
        )
    used = GradScaler(accelerator.device.type) if scaler is None else scaler

    def unscale_gradients(optimizer: Any = None) -> None:
        prepared = accelerator._optimizers if optimizer is None else optimizer
        for one in prepared if isinstance(prepared, (tuple, list)) else [prepared]:
            inner = one
            while getattr(inner, "scaler", None) is used:  # accelerate's wrapper
                inner = inner.optimizer
            used.unscale_(inner)

    used.is_host_asked = True  # accelerate takes a call of the optimizer's step for a step that was made
    accelerator.scaler, accelerator.unscale_gradients = used, unscale_gradients
    return used
