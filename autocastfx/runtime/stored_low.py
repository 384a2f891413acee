"""``weights="low"``: a converted model for inference alone, whose weights are stored in 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autocastfx.capture.call import Call, CallSignature, device_among
from autocastfx.capture.leave_intact import isolated, modes_after, set_modes
from autocastfx.errors import CaptureError, NotCapturedError, UnsupportedError
from autocastfx.graph.node import NodeRun, attribute, dtypes
from autocastfx.runtime.amp_module import AmpModule, Origin, signed_forward, view
from autocastfx.runtime.captures import Captures
from autocastfx.runtime.frozen import CALL, member_name
from autocastfx.runtime.variant import Variant

_INSTEAD = 'Convert with weights="cast" or weights="cached" to train, or for gradients.'
_AGAIN = 'weights="low" keeps no original: convert it again, in evaluation, with the inputs of this call.'


def stored_low(
    model: nn.Module, signature: CallSignature, converter: Any, device: torch.device | None, leaves: tuple[str, ...],
    whole: Iterable[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any],
) -> LowModule:  # fmt: skip
    """Capture ``model`` in evaluation, for any sizes if it can be, and return what shares nothing with it."""
    with isolated(model):
        set_modes(list(model.modules()), modes_after(model, training=False))
        try:
            amp_model = view(Captures(model, signature, whole, any_size=True), converter, device, leaves)
            frozen = amp_model.freeze(*args, **kwargs)
        except (CaptureError, UnsupportedError):  # operators that take no symbolic sizes, outputs that are numbers
            amp_model = view(Captures(model, signature, whole), converter, device, leaves)
            frozen = amp_model.freeze(*args, **kwargs)
        (variant,) = amp_model.variants
        names = _read_low(variant, converter.low)
        held = amp_model._held()
        _own_tensors(frozen.modules(), [held[name] for name in names if name in held], converter.low)
    variant.captured = None  # it was decided for float32 weights
    cast("Any", frozen)._modules[CALL].again = _AGAIN
    return LowModule(frozen, Origin(converter, frozen, signature, leaves, device, type(model).__name__), (variant,))


class LowModule(AmpModule):
    """A model of its own, which runs one graph, in evaluation."""

    def __new__(cls, frozen: fx.GraphModule, origin: Origin, variants: Sequence[Variant]) -> LowModule:
        """Make no class for each instance."""
        return object.__new__(cls)

    def __init__(self, frozen: fx.GraphModule, origin: Origin, variants: Sequence[Variant]) -> None:
        self._set_up(frozen, origin, nn.ModuleList(variants))
        self.__dict__["forward"] = MethodType(signed_forward(origin.signature), self)

    @property
    def _is_low(self) -> bool:
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the graph, between hooks."""
        return nn.Module._call_impl(self, *args, **kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the graph.

        Raises:
            VariantError: it was captured for another call.
            UnsupportedError: a gradient is asked for.
        """
        outputs = self._run_observed_call(args, kwargs) if self._observers else self._model.forward(*args, **kwargs)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(outputs)):
            raise UnsupportedError(
                'weights="low" is for inference: an input or a parameter requires gradients, which would be 16-bit '
                f"ones. Call under torch.no_grad(). {_INSTEAD}"
            )
        return outputs

    def _run_observed_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the graph node by node, for observers."""
        variant, call, outside = self._given_to(args, kwargs)
        inputs = [str(node.target) for node in variant.graph.find_nodes(op="placeholder")]
        values = {**outside, **dict(zip(inputs, call.tensors, strict=True))}

        def read(node: fx.Node) -> Any:
            return values[str(node.target)] if node.target in values else attribute(self, str(node.target))

        run = NodeRun(variant.keeping, read, self._shown_to_observers(variant))
        return variant.output(run.run(*call.tensors, enable_io_processing=False), call.tensors)

    @property
    def _active(self) -> Variant:
        if not self._variants:
            raise NotCapturedError("a file of a model of weights='low' keeps no plan: look at it before it is saved.")
        return self.variants[0]

    def _given_to(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Variant, Call, dict[str, Any]]:
        variant, held, inside = self._active, self._held(), f"{self._active.prefix}."
        reads = (str(node.target) for node in variant.graph.find_nodes(op="get_attr"))
        outside = cast("nn.Module", self._model._modules[CALL])
        others = (name for name in reads if name not in held and not name.startswith(inside))
        return variant, self._signature.bind(args, kwargs), {n: attribute(outside, member_name(n)) for n in others}

    def _view_of(self, part: nn.Module) -> Any:
        return self if part is self._model else part

    def freeze(self, *_: Any, **__: Any) -> fx.GraphModule:
        """Return the graph, which is static already."""
        return cast("fx.GraphModule", self._model)

    def train(self, mode: bool = True) -> LowModule:
        """Refuse training; evaluation is what it does.

        Raises:
            UnsupportedError: training is asked for.
        """
        if mode:
            raise UnsupportedError(f'weights="low" keeps no float32 weights, so the model cannot train. {_INSTEAD}')
        return self

    def eval(self) -> LowModule:
        """Do nothing: it is what it does."""
        return self

    def requires_grad_(self, requires_grad: bool = True) -> LowModule:
        """Refuse gradients, likewise."""
        return self.train(requires_grad)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LowModule:
        before = device_among(self._held().values())
        for parameter in self.parameters():
            self._refuse_dtype(fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device)).dtype, parameter)
        self._model._apply(fn, recurse)
        now = device_among(self._held().values())
        if now != before:
            _move(cast("fx.GraphModule", self._model), now)
        return self

    def to(self, *args: Any, **kwargs: Any) -> LowModule:
        """Move the model to a device.

        Raises:
            UnsupportedError: another dtype is asked for.
        """
        nn.Module.to(self, *args, **kwargs)
        return self

    def float(self) -> Any:
        """Refuse: parameters keep their dtypes."""
        return self.to(torch.float32)

    def _refuse_dtype(self, dtype: torch.dtype, parameter: torch.Tensor) -> None:
        if parameter.dtype != dtype:
            raise UnsupportedError(
                f"an AmpModule's parameters keep the dtypes that they are stored in, so it cannot become {dtype}. "
                "Move it with .to(device) alone, or convert again with another dtype."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> LowModule:
        made = LowModule(copy.deepcopy(self._model, memo), self._original, self.variants)
        memo[id(self)] = made
        return made

    def __copy__(self) -> LowModule:
        return LowModule(copy.copy(self._model), self._original, self.variants)

    def __reduce__(self) -> tuple[Any, ...]:
        return LowModule, (self._model, self._original, ())


def _read_low(variant: Variant, low: torch.dtype) -> frozenset[str]:
    """Return the names of the parameters that a newly made graph reads in 16 bits."""
    reads = (node for node in variant.graph.nodes if node.op == "get_attr")
    return frozenset(str(node.target) for node in reads if dtypes(node) == (low,))


def _own_tensors(modules: Iterable[nn.Module], low_ones: Iterable[torch.Tensor], low: torch.dtype) -> None:
    """Replace all parameters and buffers of ``modules`` by copies that require no gradient; tied ones share a copy.

    Args:
        modules: the modules to change.
        low_ones: the parameters whose copies are 16-bit.
        low: the 16-bit dtype.
    """
    narrow = {id(t) for t in low_ones}
    made: dict[int, torch.Tensor] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            plain = tensor.detach().to(low) if id(tensor) in narrow else tensor.detach().clone()
            made[id(tensor)] = nn.Parameter(plain, requires_grad=False) if isinstance(tensor, nn.Parameter) else plain
        return made[id(tensor)]

    with torch.inference_mode(False):
        for module in modules:
            tables: tuple[Any, ...] = (module._parameters, module._buffers)
            for table in tables:
                table.update({name: own(tensor) for name, tensor in table.items() if tensor is not None})


def _move(frozen: fx.GraphModule, device: torch.device) -> None:
    """Let a graph take tensors of ``device``, and make its own there."""
    call: Any = frozen._modules[CALL]
    (*_, old), *_ = [kept for kept in call.kept if kept[2] is not None] or [(None, None, device)]
    call.kept = tuple((dtype, ndim, place and device) for dtype, ndim, place in call.kept)

    def moved(own: torch.device) -> torch.device:
        return device if own.type == old.type else own

    for one in frozen.modules():
        if isinstance(one, fx.GraphModule):
            for node in one.graph.nodes:
                node.args, node.kwargs = pytree.tree_map_only(torch.device, moved, (node.args, node.kwargs))
            one.recompile()
