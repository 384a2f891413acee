"""Steps of fused optimizers that also write the 16-bit copies of the weights that they update, where asked for.

It is not the default: a write through ``parameter.data`` right after a step, as clipping weights does, would be missed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.optim.optimizer as _globals
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from autocastfx.training.loss_scale import is_capturing
from autocastfx.training.wrapping_optimizer import steps_by_itself

OPTIMIZER_STEP, VARIABLE = "optimizer_step", "AUTOCASTFX_TRITON"  # as in runtime/kernels/chosen
SOURCE = "copies_of_model"  # of a model's hook of all steps: a weak reference to its copies


@contextmanager
def writing_copies(optimizer: Optimizer, own: Any) -> Generator[set[int]]:
    """Let a step inside write copies where a kernel can. Yields a set that gets the ids of the masters of those.

    ``own`` and the copies of models say which of the given masters have copies that their step may write: those that
    hold what their masters round to (``writable``). After the step they are told which it wrote (``note_written``).
    """
    written, copies, sources = set[int](), dict[int, Tensor](), list[Any]()
    groups = optimizer.param_groups
    if steps_by_itself(optimizer, (Adam, AdamW, SGD)) and any(group.get("fused") for group in groups):
        parameters = (p for group in groups for p in group["params"])
        masters = {id(p): p for p in parameters if p.grad is not None and type(p) in _PLAIN}
        device = next(iter(masters.values())).device if masters else torch.device("cpu")
        if not is_capturing(masters.values()) and kernel_of(type(optimizer).__name__.lower(), device) is not None:
            hooks = _globals._global_optimizer_post_hooks.values()
            sources = [own, *filter(None, (getattr(hook, SOURCE, lambda: None)() for hook in hooks))]
        for source in sources:
            copies |= source.writable(masters)
    with _CopyingStep(copies, written) if copies else nullcontext():
        yield written
    for source in sources if written else ():
        source.note_written({number: copies[number] for number in written})


class _CopyingStep(TorchDispatchMode):
    """Puts kernels that write ``copies`` in the place of torch's fused operators."""

    def __init__(self, copies: Mapping[int, Tensor], written: set[int]) -> None:
        super().__init__()
        self.copies, self.written = copies, written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbers, kind = kwargs or {}, _KINDS.get(func)
        is_other = numbers.get("amsgrad") or numbers.get("is_first_step") or numbers.get("grad_scale") is not None
        if kind is None or is_other or not all(_are_plain(some) for some in args[:4] if some):
            return func(*args, **numbers)
        alike: dict[Any, list[int]] = {}
        for index, tensors in enumerate(zip(*filter(None, args[:4]), strict=True)):
            copy, key = self.copies.get(id(tensors[0])), None
            if copy is not None and len({*map(Tensor.stride, (copy, *tensors))}) == 1 and copy.numel():
                key = (copy.dtype, copy.numel() % 4) if copy.device == tensors[0].device else None
            alike.setdefault(key, []).append(index)
        for key, chosen in alike.items():
            lists = [[some[i] for i in chosen] if some else [] for some in args]
            kernel = kernel_of(kind, lists[0][0].device) if key is not None else None
            if kernel is None:
                func(*lists, **numbers)
                continue
            ids = [id(parameter) for parameter in lists[0]]
            kernel(lists, numbers, copies := [self.copies[number] for number in ids])
            torch.autograd.graph.increment_version(copies)
            self.written.update(ids)
        return None


_PLAIN = {Tensor, nn.Parameter}  # no DTensor, nor an abstract one
_KINDS = {getattr(torch.ops.aten, f"_fused_{kind}_").default: kind for kind in ("adam", "adamw", "sgd")}


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    return _PLAIN.issuperset(map(type, tensors)) and tensors[0].dtype == torch.float32  # torch sorts by dtype


@cache
def kernel_of(kind: str, device: torch.device) -> Callable[..., None] | None:
    """Return Triton's kernel of ``"adam"``, ``"adamw"`` or ``"sgd"``, if it gave torch's own bits when first asked for.

    It is called with the lists and the numbers of torch's operator, and with the copies to write.
    """
    asked = os.environ.get(VARIABLE, "").split(",")
    if device.type != "cuda" or not {OPTIMIZER_STEP, "all"} & {*asked} or not find_spec("triton"):
        return None
    from autocastfx.training import step_kernel  # Triton is imported by those who use it

    return partial(step_kernel.step, kind) if step_kernel.gives_torchs_bits(kind, device) else None
