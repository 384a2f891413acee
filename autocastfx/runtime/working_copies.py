"""16-bit working copies of float32 parameters (``weights="cached"``), renewed when a parameter has changed."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autocastfx.errors import UnsupportedError
from autocastfx.training.tensor_mark import TensorMark

__all__ = ["ATTRIBUTE", "WorkingCopies", "working_copy"]

ATTRIBUTE = "_working_copies"  # the model's attribute through which its graphs read the copies
# Autograd does not treat its result as a view, so later writes to the master do not invalidate it.
_SHARING: Any = torch.ops.aten._unsafe_view.default


def working_copy(
    copies: WorkingCopies | None, master: torch.Tensor, dtype: torch.dtype, several: bool = False
) -> torch.Tensor:
    """Return the working copy of ``master`` in ``dtype``; its backward gives ``master`` the float32 gradient.

    Args:
        copies: the result of :meth:`WorkingCopies.fresh` in this call of the graph; with None, ``master`` is cast.
        master: float32. A tensor that is not a plain parameter is cast too.
        dtype: the 16-bit dtype.
        several: True if the graph reads the result several times: the gradients then add up in 16 bits, as those of a
            cast do.
    """
    held = copies.copy_of(master, dtype) if copies is not None else None
    if held is None:
        return master.to(dtype)
    if not (master.requires_grad and torch.is_grad_enabled()):
        return held.tensor
    if several:
        return _Bridge.apply(master, held.tensor)
    read = _SHARING(master, held.sizes)
    read.data = held.tensor  # the autograd history stays that of a float32 tensor, so autograd casts the gradient
    return read


class _Bridge(torch.autograd.Function):
    """Returns the copy in forward; its backward is that of a cast."""

    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        (grad,) = grads
        return (grad.float() if grad is not None else None), None


class _Copy:
    """A working copy, with a mark of its master at the time of copying."""

    __slots__ = ("dtype", "filled", "mark", "master", "sizes", "tensor")

    def __init__(self, master: weakref.ref[torch.Tensor], dtype: torch.dtype) -> None:
        self.master, self.dtype = master, dtype
        self.tensor = torch.empty(0, dtype=dtype)
        self.sizes: list[int] = []
        self.mark: TensorMark | None = None
        self.filled: _Filled | None = None

    def become(self, tensor: torch.Tensor, master: torch.Tensor, filled: _Filled | None) -> None:
        """Hold ``tensor``, a copy of the present ``master``. Graphs that read the previous copy keep it."""
        self.tensor, self.sizes = tensor, list(master.shape)
        self.mark, self.filled = TensorMark(master), filled


class _Filled:
    """Where on a CUDA device copies were filled, so that other streams can wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device)
        self.event = self.stream.record_event()

    def wait(self, tensor: torch.Tensor) -> None:
        """Let the current stream read ``tensor``, which stays allocated until it has."""
        stream = torch.cuda.current_stream(tensor.device)
        if stream != self.stream:
            stream.wait_event(self.event)
            tensor.record_stream(stream)


class WorkingCopies:
    """The working copies of a converted model: one per parameter and dtype, shared by its names and its graphs.

    A copy is made when first read. When a graph begins to run, all copies whose masters have changed are renewed at
    once. Copies do not keep masters alive.

    A change is noticed by the version counter, by the address of the memory, and by the step of any
    ``torch.optim.Optimizer``, because fused ones do not increase the counter. Writes into ``parameter.data`` are not
    noticed.
    """

    def __init__(self, owner: nn.Module) -> None:
        torch.compiler.assume_constant_result(WorkingCopies._warn_of_compiler)  # not as a decorator: it imports dynamo
        self._owner = weakref.ref(owner)
        self._held: dict[tuple[int, torch.dtype], _Copy] = {}
        self._watches = self._has_warned = False

    def fresh(self) -> WorkingCopies | None:
        """Renew stale copies and return ``self``.

        Returns None where copies cannot be used: while compiling, exporting or tracing, under transforms of torch.func,
        with abstract tensors, and while a CUDA graph is captured.
        """
        if torch.compiler.is_compiling():
            self._warn_of_compiler()
            return None
        if torch._C._is_tracing() or torch._C._are_functorch_transforms_active() or _is_abstract_or_traced():
            return None
        stale: list[tuple[_Copy, torch.Tensor]] = []
        kept: list[tuple[_Filled, torch.Tensor]] = []
        on_cuda = False
        for held in list(self._held.values()):
            master = held.master()
            if master is not None:
                on_cuda = on_cuda or master.is_cuda
                mark = held.mark
                if mark is None or not mark.fits(master):
                    stale.append((held, master))
                elif held.filled is not None:
                    kept.append((held.filled, held.tensor))
        if on_cuda and torch.cuda.is_current_stream_capturing():
            return None
        _renew(stale)
        for filled, tensor in kept:
            filled.wait(tensor)
        return self

    def copy_of(self, master: torch.Tensor, dtype: torch.dtype) -> _Copy | None:
        """Return the copy of ``master``, made now if needed; None if ``master`` is not a plain parameter.

        Raises:
            UnsupportedError: the model is sharded.
        """
        held = self._held.get((id(master), dtype))
        if held is None or held.master() is not master:
            if type(master) is not nn.Parameter or master.is_inference():
                return None
            if master.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            held = self._adopt(master, dtype)
        return held

    def expire(self, masters: Iterable[Any] | None = None) -> None:
        """Mark the copies of ``masters`` (all if None) as stale."""
        changed = None if masters is None else {id(master) for master in masters}
        for (number, _), held in list(self._held.items()):
            if changed is None or number in changed:
                held.mark = None

    def _warn_of_compiler(self) -> None:
        """Warn once that compiled and exported graphs cast instead."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                'weights="cached" has no effect under torch.compile and torch.export: the graph that they see casts '
                'its parameters in each call, as with weights="cast".',
                stacklevel=2,
            )

    def _adopt(self, master: torch.Tensor, dtype: torch.dtype) -> _Copy:
        self._refuse_sharded()
        self._watch_optimizers()
        key = (id(master), dtype)
        mine = weakref.ref(self)

        def forget(gone: weakref.ref[torch.Tensor]) -> None:
            copies = mine()
            if copies is not None and key in copies._held and copies._held[key].master is gone:
                del copies._held[key]

        held = _Copy(weakref.ref(master, forget), dtype)
        _renew([(held, master)])
        self._held[key] = held  # filled: another thread may read it at once
        return held

    def _refuse_sharded(self) -> None:
        owner = self._owner()
        if owner is None:
            return
        looked_at = owner.modules() if not self._held else (owner,)  # later, only the owner may have been sharded
        if any(module.__dict__.get("_is_fsdp_managed_module", False) for module in looked_at):
            raise UnsupportedError(
                'weights="cached" does not work under fully_shard, which gathers parameters into memory that no '
                'working copy can follow. Convert with weights="cast", and leave the casts to the graph.'
            )

    def _watch_optimizers(self) -> None:
        if not self._watches:
            self._watches = True
            handle = register_optimizer_step_post_hook(_after_step(weakref.ref(self)))
            weakref.finalize(self, handle.remove)


def _is_abstract_or_traced() -> bool:
    """True under a mode that makes tensors abstract or traces operations."""
    return any(
        isinstance(mode, (FakeTensorMode, ProxyTorchDispatchMode)) for mode in _get_current_dispatch_mode_stack()
    )


def _renew(stale: list[tuple[_Copy, torch.Tensor]]) -> None:
    """Renew each copy from its master. Other threads never see a copy before it is filled."""
    if not stale:
        return
    with torch.inference_mode(False), torch.no_grad():  # backward cannot use tensors made in inference mode
        copies = [torch.empty_like(master, dtype=held.dtype) for held, master in stale]
        cast("Any", torch)._foreach_copy_(copies, [master for _, master in stale])
    filled = {copy.device: _Filled(copy.device) for copy in copies if copy.is_cuda}
    for (held, master), copy in zip(stale, copies, strict=True):
        held.become(copy, master, filled.get(copy.device))


def _after_step(copies: weakref.ref[WorkingCopies]) -> Callable[..., None]:
    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = copies() if not torch.compiler.is_compiling() else None
        if found is not None:
            found.expire(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)

    return stepped
