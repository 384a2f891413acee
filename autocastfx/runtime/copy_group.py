"""A 16-bit working copy of a parameter, and how autograd gives what is read the parameter's gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from autocastfx.training.masters import TensorMark

__all__ = ["CopyGroup", "Filled", "WorkingCopy", "casts_together", "read_copies"]

_owners: Callable[[int], int] = cast("Any", torch._C)._storage_Use_Count
_next_sequence_number: Callable[[], int] = cast("Any", torch._C)._autograd._get_sequence_nr


class WorkingCopy:
    """A working copy, with a mark of its master at the time of copying."""

    __slots__ = ("aliases", "dtype", "filled", "mark", "master", "tensor")

    def __init__(self, master: weakref.ref[torch.Tensor], dtype: torch.dtype) -> None:
        self.master, self.dtype = master, dtype
        self.tensor = torch.empty(0, dtype=dtype)
        self.aliases = 0  # tensors of groups that share its memory
        self.mark: TensorMark | None = None
        self.filled: Filled | None = None

    def become(self, tensor: torch.Tensor, master: torch.Tensor, filled: Filled | None) -> None:
        """Hold ``tensor``, a copy of the present ``master``. Graphs that read the previous copy keep it."""
        self.tensor, self.mark, self.filled = tensor, TensorMark(master), filled

    def takes(self, master: torch.Tensor) -> bool:
        """True if ``master`` can be copied into the memory that is there, which nobody else reads."""
        tensor = self.tensor
        return (
            cast("Any", tensor)._use_count() == 1
            and tensor.shape == master.shape
            and tensor.stride() == master.stride()
            and tensor.device == master.device
            and _owners(tensor.untyped_storage()._cdata) == 2 + self.aliases  # one is the storage asked here
            and (self.filled is None or self.filled.stream == torch.cuda.current_stream(self.filled.device))
        )


class Filled:
    """Where on a CUDA device copies were filled, so that other streams can wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.current_stream(device)
        self.event = self.stream.record_event()

    def wait(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Let ``stream``, the current one, read ``tensor``, which stays allocated until it has."""
        if stream != self.stream:
            stream.wait_event(self.event)
            tensor.record_stream(stream)


class CopyGroup:
    """Copies that a graph reads together, by one autograd node.

    The node saves nothing, so it runs backwards for one call after another, until a copy gets other memory or a call
    comes on another CUDA stream: autograd runs a node, and those that it keeps, on the stream that they were made on.
    """

    __slots__ = ("copies", "node", "streams", "tensors")

    def __init__(self, copies: list[WorkingCopy]) -> None:
        self.copies = copies
        self.tensors: list[torch.Tensor] = []
        self.node: Any = None
        self.streams = frozenset[torch.cuda.Stream]()  # of the node, one for each CUDA device

    def read(self, masters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the copies of ``masters``, through which these get gradients."""
        if self.node is None:
            self.tensors = list(read_copies([copy.tensor for copy in self.copies], *masters))
            self.node = self.tensors[0].grad_fn
            devices = {copy.filled.device for copy in self.copies if copy.filled is not None}
            self.streams = frozenset(map(torch.cuda.current_stream, devices))
            for copy in self.copies:
                copy.aliases += 1
        else:  # backward runs the latest node first: its turn is where this call has read
            self.node._set_sequence_nr(_next_sequence_number())
        return self.tensors

    @property
    def is_held(self) -> bool:
        """True if a graph of autograd that has not run backwards holds one of the tensors."""
        return any(tensor._use_count() > 1 for tensor in cast("list[Any]", self.tensors))


class _Reading(torch.autograd.Function):
    """Returns copies in forward; its backward is that of casts."""

    @staticmethod
    def forward(ctx: Any, copies: list[torch.Tensor], *masters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([copy.detach() for copy in copies])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *_in_float32(grads)


# Function.apply unwraps each argument of transforms of torch.func, in Python; under these no copy is read.
read_copies: Callable[..., tuple[torch.Tensor, ...]] = cast("Any", super(torch.autograd.Function, _Reading)).apply


def _in_float32(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    low = [grad for grad in grads if grad is not None]
    if torch.is_grad_enabled() or not low or not all(map(casts_together, low)):  # foreach has no second derivative
        return [None if grad is None else grad.float() for grad in grads]
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in low]
    cast("Any", torch)._foreach_copy_(wide, low)
    rest = iter(wide)
    return [None if grad is None else next(rest) for grad in grads]


def casts_together(grad: torch.Tensor) -> bool:
    """True on CUDA, where one kernel casts several gradients. On a CPU that saves nothing."""
    return grad.is_cuda
