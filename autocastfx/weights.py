"""16-bit working copies of float32 parameters, made anew when a parameter has changed, and how a graph reads them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from autocastfx.errors import UnsupportedError

__all__ = ["ATTRIBUTE", "WorkingCopies", "working_copy"]

ATTRIBUTE = "_working_copies"  # where graphs find those of the model that runs them


def working_copy(copies: WorkingCopies | None, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``master`` in ``dtype``: its working copy, through which the float32 gradient goes back to it.

    A cast, as if there were no copies, where these cannot be kept: while a compiler or exporter traces, while a CUDA
    graph is captured, of a tensor that is put in a parameter's place for one call, and of abstract values (``copies``
    is None).
    """
    if copies is None:
        return master.to(dtype)
    if torch.compiler.is_compiling():
        copies.warn_of_compiler()
        return master.to(dtype)
    copy = copies.of(master, dtype)
    if copy is None or (master.is_cuda and torch.cuda.is_current_stream_capturing()):
        return master.to(dtype)
    if master.requires_grad and torch.is_grad_enabled():
        return _Bridge.apply(master, copy)
    return copy


class _Bridge(torch.autograd.Function):
    """The copy forwards; backwards what the backward of a cast gives, to one weight as soon as its gradient is there.

    Each read has its own, so that the gradients of several reads add up in float32, as those of several casts do.
    """

    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        (grad,) = grads
        return (grad.float() if grad is not None else None), None


class _Copy:
    """A copy, and what its master was when it was copied."""

    __slots__ = ("form", "master", "pointer", "storage", "tensor", "version")

    def __init__(self, master: weakref.ref[torch.Tensor], dtype: torch.dtype) -> None:
        self.master, self.tensor = master, torch.empty(0, dtype=dtype)
        self.form: tuple[Any, ...] = ()
        self.version, self.pointer = -1, 0
        self.storage: StorageWeakRef | None = None

    def is_fresh(self, master: torch.Tensor) -> bool:
        """Whether ``master`` has neither been written to nor been given other memory (``p.data = other``)."""
        if self.version != master._version or self.pointer != master.data_ptr():
            return False
        return self.storage is not None and not self.storage.expired()  # else another's memory may have its address

    def fit(self, master: torch.Tensor) -> None:
        """Be of the form and on the device of ``master``."""
        form = (master.shape, master.stride(), master.device)
        if form != self.form:
            self.form, self.tensor = form, torch.empty_like(master, dtype=self.tensor.dtype)

    def note(self, master: torch.Tensor) -> None:
        """Remember ``master`` as it now is."""
        self.version, self.pointer = master._version, master.data_ptr()
        self.storage = StorageWeakRef(master.untyped_storage())


class WorkingCopies:
    """The working copies of one converted model: one of each parameter, whatever its names and whoever reads it.

    A copy is made when it is read first. If one is read whose master has changed since, all that are stale are made
    anew at once. Neither keeps a master alive.

    Changes are seen by the version counter, by the address of the memory, and after the step of any
    ``torch.optim.Optimizer``: fused ones write without counting. What writes into ``parameter.data`` cannot be seen.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self._held: dict[tuple[int, torch.dtype], _Copy] = {}
        self._watches = self._has_warned = False

    def of(self, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The copy of ``master``, as ``master`` now is; None of what is no plain parameter.

        Raises:
            UnsupportedError: the model is sharded.
        """
        held = self._held.get((id(master), dtype))
        if held is None or held.master() is not master:
            if type(master) is not nn.Parameter or master.is_inference():
                return None
            held = self._adopt(master, dtype)
        if not held.is_fresh(master):
            self.refresh()
        return held.tensor

    def refresh(self) -> None:
        """Make all copies anew whose masters have changed."""
        live = [(held, master) for held in list(self._held.values()) if (master := held.master()) is not None]
        stale = [(held, master) for held, master in live if not held.is_fresh(master)]
        if not stale:
            return
        with torch.inference_mode(False), torch.no_grad():  # what inference mode makes, no backward can use
            for held, master in stale:
                held.fit(master)
            cast("Any", torch)._foreach_copy_([held.tensor for held, _ in stale], [master for _, master in stale])
        for held, master in stale:
            held.note(master)

    def expire(self, masters: Iterable[Any] | None = None) -> None:
        """Take ``masters`` (all, if None) for changed."""
        changed = None if masters is None else {id(master) for master in masters}
        for (number, _), held in list(self._held.items()):
            if changed is None or number in changed:
                held.version = -1

    @torch.compiler.assume_constant_result
    def warn_of_compiler(self) -> None:
        """Say once that a compiled or exported graph casts."""
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

        self._held[key] = _Copy(weakref.ref(master, forget), dtype)
        return self._held[key]

    def _refuse_sharded(self) -> None:
        owner = self._owner()
        if owner is None:
            return
        looked_at = owner.modules() if not self._held else (owner,)  # in a later call it is the owner that was sharded
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


def _after_step(copies: weakref.ref[WorkingCopies]) -> Callable[..., None]:
    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = copies() if not torch.compiler.is_compiling() else None
        if found is not None:
            found.expire(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)

    return stepped
