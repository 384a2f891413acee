"""Keep for backward what a plan says, in the form that it says: as computed, in fewer bits, or not at all.

The forward pass stays as it is, to the bit. An op of which backward reads a value that is kept otherwise runs under
``torch.autograd.graph.saved_tensors_hooks``, which hand autograd a :class:`Kept` in place of the tensor. Tensors in a
``Kept`` go through the hooks that are set around the call, so that ``torch.utils.checkpoint`` and ``save_on_cpu`` work
as without it. Nothing is kept without gradients, or inside of ``torch.func``'s transforms, which allow no hooks.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from autocastfx.plan.plan import PlannedSaved
from autocastfx.policy.float8 import E4M3
from autocastfx.policy.saved import Keep

_C: Any = torch._C
_MOST, _SMALLEST = torch.finfo(E4M3).max, 1e-30


class Form(NamedTuple):
    """How a tensor becomes smaller ones, and again itself, in its dtype and strides."""

    pack: Callable[[Tensor], tuple[Tensor, ...]]
    unpack: Callable[[torch.dtype, tuple[Tensor, ...]], Tensor]


def _rows_in_float8(x: Tensor) -> tuple[Tensor, ...]:
    # Not ``quantize``, whose numbers are for products: here a scale needs no power of two, and strides stay.
    largest = x.abs().amax(-1, keepdim=True).float().clamp_(min=_SMALLEST)
    scale = largest / _MOST
    return (x / scale).clamp_(-_MOST, _MOST).to(E4M3), scale


def _from_float8(dtype: torch.dtype, parts: tuple[Tensor, ...]) -> Tensor:
    return (parts[0].float() * parts[1]).to(dtype)


def _in_bfloat16(x: Tensor) -> tuple[Tensor, ...]:
    return (x.bfloat16(),)


def _from_bfloat16(dtype: torch.dtype, parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0].to(dtype)


FORMS: Mapping[Keep, Form] = {
    Keep.LOW: Form(_in_bfloat16, _from_bfloat16),
    Keep.FLOAT8: Form(_rows_in_float8, _from_float8),
}
Forms = Callable[[PlannedSaved], Form | None]


def planned_form(one: PlannedSaved) -> Form | None:
    """The form that a plan gives a value; None: as computed."""
    return FORMS.get(one.keep)


class Kept(ABC):
    """A value that backward can ask for. What several ops read is made once for all of them."""

    views = 0
    left = 0
    made: Tensor | None = None

    @abstractmethod
    def store(self) -> None:
        """Make sure that it is there in backward; the value itself may be freed then."""

    @abstractmethod
    def restore(self) -> Tensor:
        """Give the value."""

    def show(self) -> Tensor:
        """Give the value to one of the ops that read it."""
        made = self.made
        if made is None:
            made, self.left = self.restore(), self.views
        self.left -= 1
        self.made = made if self.left > 0 else None
        return made


class _Packed:
    """A tensor in the hands of the hooks that are set around the call, if any are."""

    def __init__(self, tensor: Tensor) -> None:
        hooks = _C._autograd._top_saved_tensors_default_hooks(True)
        self._version: int | None = tensor._version
        self._unpack: Callable[[Any], Tensor] | None = hooks[1] if hooks is not None else None
        self._held: Any = hooks[0](tensor) if hooks is not None else tensor

    def __call__(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was written into since, as autograd says of what it saves itself.
        """
        if self._unpack is not None:  # once, which is all that torch.utils.checkpoint allows
            self._held, self._unpack, self._version = self._unpack(self._held), None, None
        held: Tensor = self._held
        if self._version is not None and held._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{held.dtype} of size {list(held.shape)} is at version {held._version}; expected version "
                f"{self._version} instead."
            )
        return held


class KeptValue(Kept):
    """A tensor as computed, or in a form that takes fewer bytes; made when the first op saves it."""

    def __init__(self, value: Tensor, form: Form | None) -> None:
        self.value: Tensor | None = value.detach()
        self.form = form
        self.dtype = value.dtype
        self.parts: tuple[_Packed, ...] = ()

    def store(self) -> None:
        """Pack the tensor, once."""
        if self.value is not None:
            value, self.value = self.value, None
            with torch.no_grad(), _C._DisableAutocast():
                made = (value,) if self.form is None else self.form.pack(value)
            self.parts = tuple(map(_Packed, made))

    def restore(self) -> Tensor:
        """Unpack the tensor."""
        self.store()
        parts = tuple(part() for part in self.parts)
        return parts[0] if self.form is None else self.form.unpack(self.dtype, parts)


class _Shape(NamedTuple):
    """Stands for a tensor whose numbers do not matter, so that it need not be kept."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def restore(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device).zero_()


class Recomputed(Kept):
    """A value that its op computes again, from values that are kept; a random one by the same random numbers.

    Args:
        call, args, kwargs: the op and its arguments, with what is kept in place of tensors. For a random op, tensors
            among them stand for any of their sizes.
        like: for a random op, a tensor on its device.
    """

    def __init__(self, call: Callable[..., Tensor], args: Any, kwargs: Any, like: Tensor | None = None) -> None:
        self.call, self.args, self.kwargs = call, args, kwargs
        self.state: Tensor | None = None
        self.inside: weakref.ref[_Inside] | None = None  # weak: tensors in a cycle would stay for long
        if like is not None:
            self.device, self.state = like.device, _random_state(like.device)
            self.args = pytree.tree_map_only(
                Tensor, lambda x: _Shape(x.shape, x.stride(), x.dtype, x.device), self.args
            )

    def store(self) -> None:
        """Store what it is computed from."""
        for source in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(source, Kept):
                source.store()

    def restore(self) -> Tensor:
        """Compute it again."""
        if self.state is not None:
            result, made = self.rerun()
            if self.inside is not None and (inside := self.inside()) is not None:  # which this op's backward reads soon
                inside.take(made)
            return result
        args, kwargs = pytree.tree_map(_restored, (self.args, self.kwargs), is_leaf=_is_kept)
        with torch.no_grad(), _C._DisableAutocast():
            return self.call(*args, **kwargs)

    def rerun(self) -> tuple[Tensor, list[Tensor]]:
        """Compute it again; also gives what autograd saves of that, the inputs and the result apart."""
        args, kwargs = pytree.tree_map(_restored, (self.args, self.kwargs), is_leaf=_is_kept)
        args = pytree.tree_map_only(Tensor, _derivable, args)
        saved: list[Tensor] = []
        now = _random_state(self.device) if self.state is not None else None
        try:
            if self.state is not None:
                _set_random_state(self.device, self.state)
            with torch.enable_grad(), _C._DisableAutocast(), saved_tensors_hooks(saved.append, _as_saved):
                result = self.call(*args, **kwargs)
        finally:
            if now is not None:
                _set_random_state(self.device, now)
        others = {_storage(x) for x in (result, *pytree.tree_leaves(args)) if isinstance(x, Tensor)}
        return result.detach(), [x.detach() for x in saved if _storage(x) not in others]


def _is_kept(leaf: Any) -> bool:
    return isinstance(leaf, (Kept, _Shape))


def _restored(leaf: Any) -> Any:
    return leaf.restore() if _is_kept(leaf) else leaf


def _derivable(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def _as_saved(x: Any) -> Any:
    return x


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _random_state(device: torch.device) -> Tensor | None:
    """The state of a device's random numbers; None where it cannot be read: while a CUDA graph is captured."""
    if device.type == "cpu":
        return torch.get_rng_state()
    if device.type == "meta" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    return cast("Tensor", torch.get_device_module(device).get_rng_state(device))


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


# Rewrite a graph so that its ops save what was chosen.


class _View(NamedTuple):
    """What autograd holds in place of a tensor: the value that it shows, and where it lies in that."""

    kept: Kept
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    whole: tuple[torch.Size, tuple[int, ...]]  # of the value itself

    def unpack(self) -> Tensor:
        base = self.kept.show()
        if base.stride() != self.whole[1]:
            base = torch.empty_strided(*self.whole, dtype=base.dtype, device=base.device).copy_(base)
        if (self.size, self.stride, self.offset) == (*self.whole, 0):
            return base
        return base.as_strided(self.size, self.stride, self.offset)


class _Late:
    """What autograd holds of a tensor that may be the op's result, or made inside of it: known when it has run."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.give: Callable[[], Tensor] | None = None

    def unpack(self) -> Tensor:
        if self.give is None:  # read by the op's own forward
            return cast("Tensor", self.tensor)
        return self.give()


def _keeps() -> bool:
    return torch.is_grad_enabled() and not _C._are_functorch_transforms_active()


def _is_whole(x: Tensor) -> bool:
    """True if ``x`` shows each element of its storage once."""
    return x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes


def keeping(form: Form | None) -> Callable[..., Any]:
    """Return a function that keeps a tensor in ``form``; it gives other arguments, such as sizes, as they are."""

    def keep(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return KeptValue(value, form) if _keeps() else None

    return keep


def running_again(call: Callable[..., Tensor]) -> Callable[..., Recomputed | None]:
    """Return a function that takes the arguments of ``call``, kept ones among them, to compute it in backward."""

    def recompute(*args: Any, **kwargs: Any) -> Recomputed | None:
        return Recomputed(call, args, kwargs) if _keeps() else None

    return recompute


def drawing_again(call: Callable[..., Tensor]) -> Callable[..., Recomputed | None]:
    """Likewise for a random op, before it runs; takes a tensor on its device first. None where it cannot be."""

    def redraw(like: Tensor, *args: Any, **kwargs: Any) -> Recomputed | None:
        made = Recomputed(call, args, kwargs, like) if _keeps() else None
        return made if made is not None and made.state is not None else None

    return redraw


def saving(call: Callable[..., Any], *, keeps_own: bool, reruns_inside: bool, form: Form | None) -> Callable[..., Any]:
    """Return a function that calls ``call`` and lets autograd hold what is kept in place of tensors.

    It takes tensors, what is kept of each, and what gives ``call``'s own result or what its kernel makes again; then
    the arguments of ``call``. With ``keeps_own`` it also returns what is kept of the result, by default in ``form``.
    """

    def save(
        values: tuple[Tensor, ...], kept: tuple[Any, ...], own: Recomputed | None, *args: Any, **kwargs: Any
    ) -> Any:
        if not _keeps():
            result = call(*args, **kwargs)
            return (result, None) if keeps_own else result
        known = {_storage(x): (x, one) for x, one in zip(values, kept, strict=True) if _is_whole(x)}
        late: list[_Late] = []
        shown: list[Kept] = []

        def pack(x: Tensor) -> _View | _Late:
            found = known.get(_storage(x))
            if found is None or found[0].dtype != x.dtype:
                late.append(_Late(x))
                return late[-1]
            value, one = found
            one.views += 1
            shown.append(one)
            return _View(one, x.shape, x.stride(), int(x.storage_offset()), (value.shape, value.stride()))

        with saved_tensors_hooks(pack, lambda held: held.unpack()):
            result = call(*args, **kwargs)
        known.clear()  # autograd holds ``pack``
        for one in shown:  # not before, where tensors would come into the hooks above
            one.store()
        own_kept: Any = own if own is not None else KeptValue(result, form) if keeps_own else None
        _settle(late, result, args, own_kept if keeps_own else None, own if reruns_inside else None)
        return (result, own_kept) if keeps_own else result

    return save


def _settle(late: list[_Late], result: Any, args: Any, own: Any, inside: Recomputed | None) -> None:
    """Say what gives the tensors that the op saved and that are none of the values kept."""
    given = {_storage(x) for x in pytree.tree_leaves(args) if isinstance(x, Tensor)}
    made = result if isinstance(result, Tensor) and _is_whole(result) else None
    again = _Inside(inside) if inside is not None else None
    for one in late:
        x = cast("Tensor", one.tensor)
        if made is not None and own is not None and _storage(x) == _storage(made) and x.dtype == made.dtype:
            own.store()
            own.views += 1
            one.give = _View(own, x.shape, x.stride(), int(x.storage_offset()), (made.shape, made.stride())).unpack
        elif again is not None and not (_storage(x) in given or _is_result(x, result)):
            one.give = again.give_next()
        else:
            one.give = _Packed(x.detach())
        one.tensor = None


def _is_result(x: Tensor, result: Any) -> bool:
    return any(isinstance(y, Tensor) and _storage(x) == _storage(y) for y in pytree.tree_leaves(result))


class _Inside:
    """The tensors that a kernel makes and saves: the op runs again to make them, once for all of them."""

    def __init__(self, op: Recomputed) -> None:
        self.op, self.count, self.left = op, 0, 0
        self.made: list[Tensor] = []

    def give_next(self) -> Callable[[], Tensor]:
        """Return what gives the next one of them, in the order in which they were saved."""
        self.op.store()
        self.op.inside = weakref.ref(self)
        self.count += 1
        return partial(self._give, self.count - 1)

    def take(self, made: list[Tensor]) -> None:
        """Hold what was made, until each was given once."""
        self.made, self.left = made, self.count

    def _give(self, number: int) -> Tensor:
        if not self.made:
            self.take(self.op.rerun()[1])
        made = self.made
        self.left -= 1
        self.made = made if self.left > 0 else []
        return made[number]


def keep_chosen(graph: fx.Graph, planned: Collection[PlannedSaved], forms: Forms = planned_form) -> fx.Graph:
    """Return a graph whose ops save what was chosen, and which gives the same to the bit.

    Args:
        graph: a flat graph of functions; stays as it is.
        planned: the parts of the plan for the nodes of these names; there may be others.
        forms: gives the form of a value that is kept.
    """
    return _Rewrite(graph, planned, forms).graph


class _Rewrite:
    """The rewriting of one graph."""

    def __init__(self, graph: fx.Graph, planned: Collection[PlannedSaved], forms: Forms) -> None:
        self.forms = forms
        self.nodes = {node.name: node for node in graph.nodes}
        self.values = {one.name: one for one in planned if not one.inside}
        self.inside = {one.name: one.inside for one in planned if one.inside}
        self.again = {name for one in planned for name in one.recomputes if not one.inside}
        self.reads: dict[str, list[str]] = {}
        changed = (one for one in self.values.values() if one.keep is Keep.RECOMPUTE or forms(one) is not None)
        for one in changed:
            for reader in one.readers:
                self.reads.setdefault(reader, []).append(one.name)
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.kept: dict[str, fx.Node] = {}
        for node in graph.nodes:
            self.made[node] = self._copied(node)

    def _copied(self, node: fx.Node) -> fx.Node:
        reads = [name for name in self.reads.get(node.name, ()) if name in self.nodes]
        is_inside, is_random = node.name in self.inside, self.inside.get(node.name) == "drawn"
        if node.op != "call_function" or not (reads or is_inside):
            return self.graph.node_copy(node, self.made.__getitem__)
        keeps_own = node.name in reads or (is_random and node.name in self.again)
        others = [name for name in reads if name != node.name]
        kept = tuple(self._kept(self.nodes[name]) for name in others)
        own = self._rerun(node) if is_inside or (keeps_own and node.name in self.again) else None
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.made.__getitem__)
        values = tuple(self.made[self.nodes[name]] for name in others)
        planned = self.values.get(node.name)
        form = self.forms(planned) if planned is not None else None
        call = cast("Callable[..., Any]", node.target)
        function = saving(call, keeps_own=keeps_own, reruns_inside=is_inside, form=form)
        target = _named(function, "saving", node)
        made = self.graph.call_function(target, (values, kept, own, *args), kwargs)
        made.meta.update(node.meta)
        if not keeps_own:
            return made
        result, self.kept[node.name] = (self.graph.call_function(item, (made,)) for item in _ITEMS)
        return result

    def _kept(self, node: fx.Node) -> fx.Node:
        """The node that gives what is kept of ``node``, made at its first use."""
        if node.name not in self.kept:
            if node.name in self.again:
                self.kept[node.name] = self._rerun(node)
            else:
                one = self.values.get(node.name)
                target = _named(keeping(None if one is None else self.forms(one)), "keeping", node)
                self.kept[node.name] = self.graph.call_function(target, (self.made[node],))
        return self.kept[node.name]

    def _rerun(self, node: fx.Node) -> fx.Node:
        is_random = self.inside.get(node.name) == "drawn"
        by_sizes = is_random and node.name not in self.again

        def source(read: fx.Node) -> fx.Node:
            return self.made[read] if by_sizes else self._kept(read)

        args, kwargs = fx.map_arg((node.args, node.kwargs), source)
        like = (self.made[node.all_input_nodes[0]],) if is_random else ()
        function = (drawing_again if is_random else running_again)(cast("Any", node.target))
        return self.graph.call_function(_named(function, "again", node), (*like, *args), kwargs)


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def _second(pair: tuple[Any, Any]) -> Any:
    return pair[1]


_ITEMS = (_first, _second)


def _named(function: Callable[..., Any], what: str, node: fx.Node) -> Callable[..., Any]:
    """Give a function of the rewritten graph a name of its own, for tracebacks."""
    function.__name__ = f"{what}_{node.name}"
    return function
