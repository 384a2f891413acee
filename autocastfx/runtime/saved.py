"""Keep for backward what a plan says, in the form that it says: as computed, in fewer bits, or not at all.

The forward pass stays as it is, to the bit. An op of which backward reads a value that is kept otherwise runs under
``torch.autograd.graph.saved_tensors_hooks``, which hand autograd a :class:`SavedValue` in place of the tensor. Tensors
in one go through the hooks that are set around the call, so that ``torch.utils.checkpoint`` and ``save_on_cpu`` work as
without it. Nothing is kept without gradients, or inside of ``torch.func``'s transforms, which allow no hooks.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from autocastfx.graph.alias import storage_of
from autocastfx.plan.plan import PlannedSaved
from autocastfx.policy.float8 import E4M3
from autocastfx.policy.saved import Keep

_C: Any = torch._C
_MOST, _SMALLEST = torch.finfo(E4M3).max, torch.finfo(torch.float32).smallest_normal


class Form(NamedTuple):
    """How a tensor becomes smaller ones, and again itself, in its dtype and strides."""

    pack: Callable[[Tensor], tuple[Tensor, ...]]
    unpack: Callable[[torch.dtype, tuple[Tensor, ...]], Tensor]


def row_dim(x: Tensor) -> int:
    """The dimension whose numbers lie side by side in memory: the channels of an image in channels_last."""
    return min(range(x.dim()), key=lambda d: (x.stride(d), -d), default=-1)


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The middle of each row in memory, and the largest distance from it.

    The middle is 0 unless all of a row lies close around it. What is left of such a number is less than half of it, so
    rounding that loses less; and kernels that subtract a mean inside have the digits that they need.
    """
    row = row_dim(x)
    low, high = x.aminmax(dim=row, keepdim=True) if x.numel() else (x.sum(row, keepdim=True),) * 2
    middle = low / 2 + high / 2
    middle = middle.where(high - low < middle.abs(), 0)
    return middle, torch.maximum(high - middle, middle - low)


def _in_float8(x: Tensor) -> tuple[Tensor, ...]:
    # Not ``quantize``, whose numbers are for products: here a scale needs no power of two, and strides stay. An Inf
    # makes its row NaN.
    middle, most = _rows(x)
    scale = (most.float() / _MOST).clamp_(min=_SMALLEST)
    return ((x - middle) / scale).clamp_(-_MOST, _MOST).to(E4M3), scale, middle


def _from_float8(dtype: torch.dtype, parts: tuple[Tensor, ...]) -> Tensor:
    return (parts[0].float() * parts[1] + parts[2]).to(dtype)


def _in_bfloat16(x: Tensor) -> tuple[Tensor, ...]:
    middle, _ = _rows(x)
    return (x - middle).bfloat16(), middle


def _from_bfloat16(dtype: torch.dtype, parts: tuple[Tensor, ...]) -> Tensor:
    return (parts[0] + parts[1]).to(dtype)


FORMS: Mapping[Keep, Form] = {
    Keep.BFLOAT16: Form(_in_bfloat16, _from_bfloat16),
    Keep.FLOAT8: Form(_in_float8, _from_float8),
}
Forms = Callable[[PlannedSaved], Form | None]


def planned_form(one: PlannedSaved) -> Form | None:
    """The form that a plan gives a value; None: as computed."""
    return FORMS.get(one.keep)


class SavedValue(ABC):
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
                f"{self._version} instead. Backward reads it, or computes others again from it: see plan.saved."
            )
        return held


class KeptValue(SavedValue):
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


class _Bits:
    """A tensor of two numbers, of which one is 0, in a bit for each: a mask."""

    def __init__(self, x: Tensor) -> None:
        flat = x.as_strided((x.numel(),), (1,))
        self.size, self.stride, self.dtype = x.shape, x.stride(), x.dtype
        scale = flat.amax() if x.dtype != torch.bool else flat.new_ones(())
        ones = torch.nn.functional.pad((flat != 0).to(torch.uint8), (0, -len(flat) % 8)).view(-1, 8)
        places = torch.arange(8, dtype=torch.uint8, device=x.device)
        bits = (ones << places).sum(1, dtype=torch.uint8)
        self.parts = (_Packed(bits), _Packed(scale))

    @staticmethod
    def fits(x: Tensor) -> bool:
        """True for a mask, or for a mask times a number; looks at the numbers where that does not wait for a device."""
        if not _is_whole(x) or x.numel() == 0:
            return False
        return x.dtype == torch.bool or (x.device.type == "cpu" and bool(((x == 0) | (x == x.amax())).all()))

    def restore(self) -> Tensor:
        """Give the tensor again."""
        bits, scale = (part() for part in self.parts)
        places = torch.arange(8, dtype=torch.uint8, device=bits.device)
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=bits.device)
        flat = ((bits[:, None] >> places) & 1).view(-1)[: made.numel()]
        made.as_strided((made.numel(),), (1,)).copy_(flat.to(self.dtype) * scale)
        return made


class Recomputed(SavedValue):
    """A value that its op computes again, from values that are kept.

    Args:
        call, args, kwargs: the op and its arguments, with what is kept in place of tensors.
    """

    def __init__(self, call: Callable[..., Tensor], args: Any, kwargs: Any) -> None:
        self.call, self.args, self.kwargs = call, args, kwargs

    def store(self) -> None:
        """Store what it is computed from."""
        for source in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(source, SavedValue):
                source.store()

    def restore(self) -> Tensor:
        """Compute it again."""
        args, kwargs = pytree.tree_map(_restored, (self.args, self.kwargs), is_leaf=_is_kept)
        with torch.no_grad(), _C._DisableAutocast():
            return self.call(*args, **kwargs)

    def rerun(self) -> list[Tensor]:
        """Compute it again for what autograd saves of that, the inputs and the result apart."""
        args, kwargs = pytree.tree_map(_restored, (self.args, self.kwargs), is_leaf=_is_kept)
        args = pytree.tree_map_only(Tensor, _derivable, args)
        saved: list[Tensor] = []
        with torch.enable_grad(), _C._DisableAutocast(), saved_tensors_hooks(saved.append, as_it_is):
            result = self.call(*args, **kwargs)
        others = {storage_of(x) for x in (result, *pytree.tree_leaves(args)) if isinstance(x, Tensor)}
        return [x.detach() for x in saved if storage_of(x) not in others]


class Dropped(SavedValue):
    """A result of dropout. It is computed again from the input and the mask, which backward keeps anyway."""

    def __init__(self, source: SavedValue, mask: _Bits, share: float) -> None:
        self.source, self.mask, self.share = source, mask, share

    def store(self) -> None:
        """Store the input; the mask is."""
        self.source.store()

    def restore(self) -> Tensor:
        """Multiply as the kernel does."""
        value, mask = self.source.restore(), self.mask.restore()
        with torch.no_grad(), _C._DisableAutocast():
            if mask.dtype == torch.bool:  # CUDA's kernel, whose backward is the same product
                return torch.ops.aten.native_dropout_backward(value, mask, 1 / (1 - self.share))
            return value * mask


def _is_kept(leaf: Any) -> bool:
    return isinstance(leaf, SavedValue)


def _restored(leaf: Any) -> Any:
    return leaf.restore() if _is_kept(leaf) else leaf


def _derivable(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def as_it_is(x: Any) -> Any:
    """Return ``x``, where a hook has to be."""
    return x


# Rewrite a graph so that its ops save what was chosen.


class _View(NamedTuple):
    """What autograd holds in place of a tensor: the value that it shows, and where it lies in that."""

    kept: SavedValue
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    whole: tuple[torch.Size, tuple[int, ...]]  # of the value itself

    @classmethod
    def of(cls, x: Tensor, value: Tensor, kept: SavedValue) -> _View:
        """``x``, which shows ``value``, of which ``kept`` is kept."""
        kept.views += 1
        return cls(kept, x.shape, x.stride(), int(x.storage_offset()), (value.shape, value.stride()))

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
    return (
        torch.is_grad_enabled()
        and not _C._are_functorch_transforms_active()
        and _C._autograd._saved_tensors_hooks_is_enabled()
    )


def _is_whole(x: Tensor) -> bool:
    """True if ``x`` shows each element of its storage once, as it is."""
    if x.layout is not torch.strided or x.is_conj() or x.is_neg():
        return False
    return x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes


def keeping(form: Form | None) -> Callable[..., Any]:
    """Return a function that keeps a tensor in ``form``; it gives other arguments, such as sizes, as they are."""

    def keep(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_parameter = isinstance(value, nn.Parameter)  # which optimizers may write unseen
        return KeptValue(value.detach().clone() if is_parameter else value, form) if _keeps() else None

    return keep


def running_again(call: Callable[..., Tensor]) -> Callable[..., Recomputed | None]:
    """Return a function that takes the arguments of ``call``, kept ones among them, to compute it in backward."""

    def recompute(*args: Any, **kwargs: Any) -> Recomputed | None:
        return Recomputed(call, args, kwargs) if _keeps() else None

    return recompute


def saving(call: Callable[..., Any], *, keeps_own: bool, inside: str, form: Form | None) -> Callable[..., Any]:
    """Return a function that calls ``call`` and lets autograd hold what is kept in place of tensors.

    It takes tensors, what is kept of each, and ``own``; then the arguments of ``call``. ``own`` computes the result of
    ``call`` again, or is what is kept of the input of a dropout. With ``keeps_own`` the function also returns what is
    kept of the result, by default in ``form``. ``inside`` is that of the plan.
    """

    def save(
        values: tuple[Tensor, ...], kept: tuple[Any, ...], own: SavedValue | None, *args: Any, **kwargs: Any
    ) -> Any:
        if not _keeps():
            result = call(*args, **kwargs)
            return (result, None) if keeps_own else result
        known = {storage_of(x): (x, one) for x, one in zip(values, kept, strict=True) if _is_whole(x)}
        late: list[_Late] = []
        shown: list[SavedValue] = []

        def pack(x: Tensor) -> _View | _Late:
            found = known.get(storage_of(x))
            if found is None or not _is_plain(x, found[0]):
                late.append(_Late(x))
                return late[-1]
            shown.append(found[1])
            return _View.of(x, *found)

        with saved_tensors_hooks(pack, lambda held: held.unpack()):
            result = call(*args, **kwargs)
        known.clear()  # autograd holds ``pack``
        for one in shown:  # not before, where tensors would come into the hooks above
            one.store()
        own_kept: SavedValue | None = None
        if keeps_own and inside != "drawn":
            own_kept = own if own is not None else KeptValue(result, form)
        mask = _settle(late, result, args, own_kept, own if inside == "computed" else None, draws=inside == "drawn")
        if keeps_own and own_kept is None:
            has_both = own is not None and mask is not None
            own_kept = Dropped(own, mask, args[1]) if has_both and own and mask else KeptValue(result, form)
        return (result, own_kept) if keeps_own else result

    return save


def _is_plain(x: Tensor, value: Tensor) -> bool:
    """True for a view that sizes, strides and an offset describe."""
    return x.dtype == value.dtype and not (x.is_conj() or x.is_neg())


def _settle(
    late: list[_Late], result: Any, args: Any, own: SavedValue | None, inside: SavedValue | None, *, draws: bool
) -> _Bits | None:
    """Say what gives the tensors that the op saved and that are none of the values kept; returns the mask, if any."""
    outside = {storage_of(x) for x in pytree.tree_leaves((args, result)) if isinstance(x, Tensor)}
    made = result if isinstance(result, Tensor) and _is_whole(result) else None
    again = _Inside(inside) if isinstance(inside, Recomputed) else None
    mask: _Bits | None = None
    for one in late:
        x = cast("Tensor", one.tensor)
        is_inside = storage_of(x) not in outside
        if made is not None and own is not None and storage_of(x) == storage_of(made) and _is_plain(x, made):
            own.store()
            one.give = _View.of(x, made, own).unpack
        elif draws and is_inside and mask is None and _Bits.fits(x):
            mask = _Bits(x.detach())
            one.give = mask.restore
        elif again is not None and is_inside:
            one.give = again.give_next()
        else:
            one.give = _Packed(x.detach())
        one.tensor = None
    return mask


class _Inside:
    """The tensors that a kernel makes and saves: the op runs again to make them, once for all of them."""

    def __init__(self, op: Recomputed) -> None:
        self.op, self.count, self.left = op, 0, 0
        self.made: list[Tensor] = []

    def give_next(self) -> Callable[[], Tensor]:
        """Return what gives the next one of them, in the order in which they were saved."""
        self.op.store()
        self.count += 1
        return partial(self._give, self.count - 1)

    def _give(self, number: int) -> Tensor:
        made = self.made
        if not made:
            made, self.left = self.op.rerun(), self.count
        self.left -= 1
        self.made = made if self.left > 0 else []
        return made[number]


def keep_chosen(graph: fx.Graph, planned: Collection[PlannedSaved], forms: Forms = planned_form) -> fx.Graph:
    """Return a graph whose ops save what was chosen, and which gives the same to the bit.

    A node of one name gives the same in both, or that and what is kept of it.

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
        self.inside = {one.name: one.inside for one in planned if one.inside and one.keep is Keep.RECOMPUTE}
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
        inside, is_again = self.inside.get(node.name, ""), node.name in self.again
        if node.op != "call_function" or not (reads or inside):
            return self.graph.node_copy(node, self.made.__getitem__)
        keeps_own = node.name in reads or (inside == "drawn" and is_again)
        others = [name for name in reads if name != node.name]
        kept = tuple(self._kept(self.nodes[name]) for name in others)
        own: fx.Node | None = None
        if inside == "drawn" and is_again:
            own = self._kept(node.all_input_nodes[0])
        elif inside == "computed" or (keeps_own and is_again):
            own = self._rerun(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.made.__getitem__)
        values = tuple(self.made[self.nodes[name]] for name in others)
        planned = self.values.get(node.name)
        form = self.forms(planned) if planned is not None else None
        function = saving(cast("Any", node.target), keeps_own=keeps_own, inside=inside, form=form)
        # Under the name of the node, by which those who run the graph node by node know it.
        target = _named(function, "saving", node)
        made = self.graph.create_node("call_function", target, (values, kept, own, *args), kwargs, name=node.name)
        made.meta.update(node.meta)
        if not keeps_own:
            return made
        parts = [(f"{node.name}_{part}", (made, i)) for i, part in enumerate(("result", "kept"))]
        result, self.kept[node.name] = (
            self.graph.create_node("call_function", operator.getitem, args, name=name) for name, args in parts
        )
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
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._kept)
        return self.graph.call_function(_named(running_again(cast("Any", node.target)), "again", node), args, kwargs)


def _named(function: Callable[..., Any], what: str, node: fx.Node) -> Callable[..., Any]:
    """Give a function of the rewritten graph a name of its own, for tracebacks."""
    function.__name__, cast("Any", function).saved_call = f"{what}_{node.name}", node.target
    return function
