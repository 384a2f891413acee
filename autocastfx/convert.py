"""``convert``: the whole way from a model to an :class:`AmpModule`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from autocastfx.amp_module import AmpModule, Variant
from autocastfx.call import Call, CallSignature
from autocastfx.capture.export import Captured, capture
from autocastfx.errors import CaptureError, UnsupportedError
from autocastfx.kernel_facts import load_kernel_facts
from autocastfx.op_list import OpListLike, load_op_list
from autocastfx.pattern import chosen
from autocastfx.pipeline import LOW, Converter
from autocastfx.plan import Precision

__all__ = ["convert"]


def convert(
    model: nn.Module | fx.GraphModule | ExportedProgram,
    example_inputs: tuple[Any, ...] | torch.Tensor | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    op_list: OpListLike = "default",
    weights: str = "cast",
    fold: str = "exact",
    calibrate: Any = None,
    device: torch.device | str | None = None,
    keep_output_dtype: bool = True,
    plan: Any = None,
    recompose: bool | Sequence[str] = True,
) -> AmpModule:
    """Turn a float32 model into a graph whose every cast to 16 bits, and back, is a node.

    Args:
        model: left as it is; the result shares its parameters and buffers, so training one trains the other.
        example_inputs: positional inputs of one call, as a tuple (one tensor may stand alone). Their sizes and dtypes
            matter, their values do not. Other sizes are served too, if need be by a further capture.
        example_kwargs: keyword inputs of that call.
        dtype: the 16-bit dtype: ``torch.float16`` or ``torch.bfloat16``.
        op_list: which op runs in which precision: a preset's name, a YAML path, an ``OpList``, or a sequence of these,
            of which the later win. ``"default"`` is the preset of ``dtype``.
        weights: ``"cast"``: parameters stay float32 and are cast in the graph. ``"cached"`` and ``"low"`` are reserved.
        fold: ``"exact"``: a ``deny`` op may take and give 16 bits between low neighbours, where the table of kernel
            facts says that this changes no more than an ulp; ``"none"``: never. ``"kernel"`` is reserved.
        calibrate: reserved.
        device: decide for the kernels of this device; the model's own by default.
        keep_output_dtype: cast float32 outputs back to float32.
        plan: reserved.
        recompose: replace what the model writes out in several ops by the one operator that computes it, which may run
            in 16 bits where the parts may not: ``True``, all patterns; ``False``, none; or the names of those wanted.
            ``"tanh_gelu"`` is ``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``. Rules for ops no longer
            see the parts. A list with ``placement: follow`` recomposes nothing.

    Returns:
        A ``torch.fx.GraphModule`` that is called like ``model``.

    Raises:
        CaptureError: the model cannot be captured; it says why and what would help.
        OpListError: a list is wrong; with file, line and column.
        BannedOpError: the list bans an op of the model.
        UnsupportedError: a reserved argument was given.
        ValueError: ``dtype`` is no 16-bit dtype, or ``recompose`` names no pattern.
        VerifyError: a defect of this package; nothing is handed out.
    """
    _check_arguments(dtype, weights, fold, calibrate, plan)
    lists = load_op_list(op_list, default=LOW[dtype])
    converter = Converter(lists, load_kernel_facts(), dtype, keep_output_dtype, fold, chosen(recompose))
    if isinstance(model, AmpModule):
        raise UnsupportedError("the model is converted already: convert the original again, with the other arguments.")
    if isinstance(model, ExportedProgram):
        if example_inputs is None and example_kwargs is None and model.example_inputs is not None:
            example_inputs, example_kwargs = model.example_inputs
        module: nn.Module = model.module()
    elif isinstance(model, nn.Module):
        module = model
    else:
        raise TypeError(f"convert takes an nn.Module, a GraphModule or an ExportedProgram, not {type(model).__name__}")
    if example_inputs is None and example_kwargs is None:
        raise UnsupportedError(
            "convert(model) without inputs is not built yet: give one call's inputs, convert(model, (x,)) or "
            "convert(model, example_kwargs={...})."
        )
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs or ())
    baked = isinstance(module, fx.GraphModule) and hasattr(module, "_in_spec")  # torch.export made it
    signature = CallSignature.of(module.forward, by_position=len(args) if baked else 0)  # it insists on the form too
    try:
        call = signature.bind(args, example_kwargs or {})
    except TypeError as error:
        raise CaptureError(f"the example inputs do not fit {type(module).__name__}.forward: {error}.") from error
    leaves = tuple(name for name in converter.op_list.rules if "." in name and "::" not in name)
    target = torch.device(device) if device is not None else None
    maker = _Maker(converter, module, signature, leaves, target, baked)
    amp_model = AmpModule(module, signature, maker)
    flags = tuple(m.training for m in module.modules())
    modes = [flags] if baked else list(dict.fromkeys([flags, (True,) * len(flags), (False,) * len(flags)]))
    for mode in modes:
        try:
            amp_model.capture(call, mode)
        except CaptureError:
            if mode == flags:
                raise
    _warn_of_slow_kernels(amp_model, dtype)
    return amp_model


@dataclass(frozen=True)
class _Maker:
    """Makes variants: from a call, while the caller's model is at hand; or from what was captured, for a device."""

    converter: Converter
    model: nn.Module | None
    signature: CallSignature
    leaves: tuple[str, ...]
    device: torch.device | None
    baked: bool

    def capture(self, call: Call, modes: tuple[bool, ...], held: Mapping[str, torch.Tensor], sizes: str) -> Variant:
        if self.model is None:
            raise CaptureError("the original model is not at hand")
        found = capture(self.model, self.signature, call, training=modes, held=held, leaves=self.leaves, sizes=sizes)
        return self.rebuild(found, held, self.device or found.device)

    def rebuild(self, captured: Captured, held: Mapping[str, torch.Tensor], device: torch.device) -> Variant:
        return self.converter(captured, held, device)

    def without_model(self) -> _Maker:
        return replace(self, model=None)


def _check_arguments(dtype: torch.dtype, weights: str, fold: str, calibrate: Any, plan: Any) -> None:
    if dtype not in LOW:
        raise ValueError(f"dtype is torch.float16 or torch.bfloat16, not {dtype!r}")
    reserved = {
        "weights": (weights, ("cast",)),
        "fold": (fold, ("exact", "none")),
        "calibrate": (calibrate, (None,)),
        "plan": (plan, (None,)),
    }
    for name, (given, built) in reserved.items():
        if not any(given is one or given == one for one in built):
            raise UnsupportedError(f"{name}={given!r} is reserved and not built yet; leave it at {built[0]!r}.")


def _warn_of_slow_kernels(amp_model: AmpModule, dtype: torch.dtype) -> None:
    if dtype != torch.float16 or amp_model.plan.device != "cpu":
        return
    if any(n.op.startswith("conv") and n.placement.run is Precision.LOW for n in amp_model.plan.nodes):
        warnings.warn(
            "float16 convolutions on a CPU are hundreds of times slower than float32 ones; use dtype=torch.bfloat16 "
            "there.",
            stacklevel=3,
        )
