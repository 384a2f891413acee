"""16-bit working copies of float32 parameters (``weights="cached"``), renewed when a parameter has changed."""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autocastfx.errors import UnsupportedError
from autocastfx.runtime.operators.float8 import quantize
from autocastfx.training.copying_step import SOURCE
from autocastfx.training.loss_scale import is_capturing
from autocastfx.training.masters import TensorMark


def working_copies(
    copies: WorkingCopies | None, masters: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the working copies of several ``masters``, as :func:`working_copy` does.

    They share one autograd node, so that the host does less; the masters' gradients are there once it has those of all.
    """
    if copies is None:
        return [master.to(dtype) for master in masters]
    group = copies.groups.get((dtype, *map(id, masters)))
    if group is not None and all(map(_learns, masters)) and torch.is_grad_enabled():
        return group.read(masters)
    entries = copies.of(masters, dtype) if group is None else group.copies
    tensors = [master.to(dtype) if one is None else one.tensor for one, master in zip(entries, masters, strict=True)]
    learning = [i for i, master in enumerate(masters) if entries[i] is not None and master.requires_grad]
    if learning and torch.is_grad_enabled():
        read = read_copies([tensors[i] for i in learning], *[masters[i] for i in learning])
        for i, copy in zip(learning, read, strict=True):
            tensors[i] = copy
    return tensors


# A 16-bit working copy of a parameter, and how autograd gives what is read the parameter's gradient.

_owners: Callable[[int], int] = cast("Any", torch._C)._storage_Use_Count
_next_sequence_number: Callable[[], int] = cast("Any", torch._C)._autograd._get_sequence_nr


class WorkingCopy:
    """A working copy, with a mark of its master at the time of copying."""

    __slots__ = ("aliases", "dtype", "filled", "mark", "master", "quantized", "tensor")

    def __init__(self, master: weakref.ref[torch.Tensor], dtype: torch.dtype) -> None:
        self.master, self.dtype = master, dtype
        self.tensor = torch.empty(0, dtype=dtype)
        self.aliases = 0  # tensors of groups that share its memory
        self.mark: TensorMark | None = None
        self.filled: Filled | None = None
        self.quantized: dict[object, list[torch.Tensor]] = {}  # data and scale, by layout and CUDA stream

    def become(self, tensor: torch.Tensor, master: torch.Tensor, filled: Filled | None) -> None:
        """Hold ``tensor``, a copy of the present ``master``. Graphs that read the previous copy keep it."""
        self.quantized = {}
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


_expired: Callable[[int], bool] = cast("Any", torch.UntypedStorage)._expired
_learns: Callable[[torch.Tensor], bool] = operator.attrgetter("requires_grad")
ATTRIBUTE = "_working_copies"  # the model's attribute through which its graphs read the copies


def working_copy(copies: WorkingCopies | None, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the working copy of ``master`` in ``dtype``; its backward gives ``master`` the float32 gradient.

    Args:
        copies: the result of :meth:`WorkingCopies.fresh` in this call of the graph; with None, ``master`` is cast.
        master: float32. A tensor that is not a plain parameter is cast too.
        dtype: the 16-bit dtype.
    """
    return working_copies(copies, [master], dtype)[0]


def quantized_copy(
    copies: WorkingCopies | None,
    master: torch.Tensor,
    low: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
    power_of_two: bool,
) -> list[torch.Tensor]:
    """Return ``low`` in float8 and its scale, quantised once for each copy.

    Args:
        copies: as for :func:`working_copy`; with None, ``low`` is quantised in each call.
        master: a parameter.
        low: its working copy, or that transposed.
        layout: see the operator ``quantize``.
        dtype: likewise.
        power_of_two: likewise.
    """
    copy = copies.held.get((id(master), low.dtype)) if copies is not None else None
    if copy is None:
        return list(quantize(low, layout, dtype, power_of_two))
    stream = torch.cuda.current_stream(low.device) if low.is_cuda else None
    made, key = copy.quantized, (layout, dtype, power_of_two, low.stride(), stream)
    if key not in made:
        with torch.inference_mode(False), torch.no_grad():
            made[key] = list(quantize(low.detach(), layout, dtype, power_of_two))
    return made[key]


class WorkingCopies:
    """The working copies of a converted model: one per parameter and dtype, shared by its names and its graphs.

    A copy is made when first read. When a graph begins to run, all copies whose masters have changed are renewed at
    once. Copies do not keep masters alive; the node of a group does, until copies of other parameters are read.

    A change is noticed by the version counter, by the address of the memory, and by the step of any
    ``torch.optim.Optimizer``, because fused ones do not increase the counter. Writes into ``parameter.data`` are not
    noticed. Once a CUDA graph has captured a step, whose replay nobody sees, all copies are renewed in each call.
    """

    def __init__(self, owner: nn.Module) -> None:
        torch.compiler.assume_constant_result(WorkingCopies._warn_of_compiler)  # not as a decorator: it imports dynamo
        self._owner = weakref.ref(owner)
        self.held: dict[tuple[int, torch.dtype], WorkingCopy] = {}
        self.groups: dict[tuple[Any, ...], CopyGroup] = {}  # by dtype and masters
        self._watches = self._has_warned = False
        self.are_replayed = False  # the weights may change by the replay of a CUDA graph

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
        if self.are_replayed:
            self.expire()
        stale: list[tuple[WorkingCopy, torch.Tensor]] = []
        kept: list[tuple[Filled, torch.Tensor]] = []
        for copy in list(self.held.values()):  # in each call, for each weight: only what must be
            master, mark = copy.master(), copy.mark
            if master is None:
                continue
            if (
                mark is None
                or mark.version != master._version
                or mark.pointer != master.data_ptr()
                or _expired(mark.storage.cdata)
            ):
                stale.append((copy, master))
            elif copy.filled is not None:
                kept.append((copy.filled, copy.tensor))
        if not (stale or kept):
            return self
        if self._is_captured(tensor for _, tensor in (*kept, *stale)):
            self._forget_groups()  # with their nodes, which run on the stream that they were made on
            return None
        self._renew(stale)
        streams = {filled.device: torch.cuda.current_stream(filled.device) for filled in {one for one, _ in kept}}
        for filled, tensor in kept:
            filled.wait(tensor, streams[filled.device])
        if streams and any(not group.streams.issubset(streams.values()) for group in self.groups.values()):
            self._forget_groups()  # of another stream; copies that were stale have got other memory there
        return self

    def of(self, masters: Sequence[torch.Tensor], dtype: torch.dtype) -> list[WorkingCopy | None]:
        """Return the copy of each master, made if it is read first.

        It is None of a tensor that is not a plain parameter, and while a CUDA graph is captured.

        Raises:
            UnsupportedError: the model is sharded.
        """
        entries = [self.held.get((id(master), dtype)) or self._adopted(master, dtype) for master in masters]
        owner = self._owner()
        present = {id(parameter) for parameter in owner.parameters()} if owner is not None else set[int]()
        if any(not present.issuperset(key[1:]) for key in self.groups):
            self._forget_groups()  # autograd's nodes keep the parameters that they give gradients
        copies = [copy for copy in entries if copy is not None]
        if len(copies) == len(entries):
            self.groups[(dtype, *map(id, masters))] = CopyGroup(copies)
        return entries

    def _forget_groups(self) -> None:
        for group in self.groups.values():
            for copy in group.copies:
                copy.aliases = 0
        self.groups.clear()

    def _renew(self, stale: list[tuple[WorkingCopy, torch.Tensor]]) -> None:
        """Renew each copy from its master, in place where no graph of autograd waits to read what is there.

        Other threads never see a copy before it is filled.
        """
        if not stale:
            return
        waiting = {id(copy) for group in self.groups.values() if group.is_held for copy in group.copies}
        with torch.inference_mode(False), torch.no_grad():  # backward cannot use tensors made in inference mode
            tensors = [
                copy.tensor
                if id(copy) not in waiting and copy.takes(master)
                else torch.empty_like(master, dtype=copy.dtype)
                for copy, master in stale
            ]
            cast("Any", torch)._foreach_copy_(tensors, [master for _, master in stale])
        filled = {tensor.device: Filled(tensor.device) for tensor in tensors if tensor.is_cuda}
        if any(copy.aliases and tensor is not copy.tensor for (copy, _), tensor in zip(stale, tensors, strict=True)):
            self._forget_groups()
        for (copy, master), tensor in zip(stale, tensors, strict=True):
            copy.become(tensor, master, filled.get(tensor.device))

    def writable(self, masters: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return fresh copies that no graph of autograd waits to read, by the ids of their masters."""
        waiting = {id(copy) for group in self.groups.values() if group.is_held for copy in group.copies}
        idle = [(masters[number], copy) for (number, _), copy in list(self.held.items()) if number in masters]
        idle = [(master, copy) for master, copy in idle if id(copy) not in waiting and copy.takes(master)]
        return {id(m): copy.tensor for m, copy in idle if copy.mark is not None and copy.mark.fits(m)}

    def note_written(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Note that a step wrote these copies and their masters."""
        filled = {tensor.device: Filled(tensor.device) for tensor in copies.values() if tensor.is_cuda}
        for (number, _), copy in list(self.held.items()):
            master = copy.master()
            if master is not None and copy.tensor is copies.get(number):
                copy.become(copy.tensor, master, filled.get(copy.tensor.device))

    def expire(self, masters: Iterable[Any] | None = None) -> None:
        """Mark the copies of ``masters`` (all if None) as stale."""
        changed = None if masters is None else {id(master) for master in masters}
        for (number, _), copy in list(self.held.items()):
            if changed is None or number in changed:
                copy.mark = None

    def _is_captured(self, read: Iterable[torch.Tensor]) -> bool:
        """True while a CUDA graph is captured that reads these tensors. One with gradients may go on to a step."""
        captured = is_capturing(read)
        self.are_replayed = self.are_replayed or (captured and torch.is_grad_enabled())
        return captured

    def _warn_of_compiler(self) -> None:
        """Warn once that compiled and exported graphs cast instead."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                'weights="cached" has no effect under torch.compile and torch.export: the graph that they see casts '
                'its parameters in each call, as with weights="cast".',
                stacklevel=2,
            )

    def _adopted(self, master: torch.Tensor, dtype: torch.dtype) -> WorkingCopy | None:
        if type(master) is not nn.Parameter or master.is_inference() or self._is_captured((master,)):
            return None
        self._refuse_sharded()
        self._watch_optimizers()
        key = (id(master), dtype)
        mine = weakref.ref(self)

        def forget(gone: weakref.ref[torch.Tensor]) -> None:
            copies = mine()
            if copies is not None and key in copies.held and copies.held[key].master is gone:
                del copies.held[key]
                copies._forget_groups()  # another parameter may get the number of this one

        copy = WorkingCopy(weakref.ref(master, forget), dtype)
        self._renew([(copy, master)])
        self.held[key] = copy  # filled: another thread may read it at once
        return copy

    def _refuse_sharded(self) -> None:
        owner = self._owner()
        if owner is None:
            return
        looked_at = owner.modules() if not self.held else (owner,)  # later, only the owner may have been sharded
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
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        isinstance(mode, (FakeTensorMode, ProxyTorchDispatchMode)) for mode in _get_current_dispatch_mode_stack()
    )


def _after_step(copies: weakref.ref[WorkingCopies]) -> Callable[..., None]:
    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        model_copies = copies() if not torch.compiler.is_compiling() else None
        if model_copies is not None:
            changed = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            model_copies.expire(changed)
            model_copies.are_replayed = model_copies.are_replayed or is_capturing(changed)

    setattr(stepped, SOURCE, copies)
    return stepped
