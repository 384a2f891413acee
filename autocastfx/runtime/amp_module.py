"""The converted model: a GraphModule that picks the variant which fits a call, and else behaves as the original."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch._guards import TracingContext
from torch.jit._trace import TracerWarning
from torch.utils import _pytree as pytree

from autocastfx.capture.call import Call, CallSignature, device_among
from autocastfx.capture.leave_intact import capturing
from autocastfx.errors import CaptureError, NotCapturedError, UnsupportedError, VariantError
from autocastfx.graph.node import NodeRun, Observer, attribute
from autocastfx.plan.plan import Plan, Precision
from autocastfx.runtime import module_tree
from autocastfx.runtime.stored_low import own_tensors, refuse_gradients, refuse_training, stored_low
from autocastfx.runtime.variant import Variant
from autocastfx.runtime.variant_table import Original, VariantTable, up_to_date
from autocastfx.runtime.working_copies import WorkingCopies

_C: Any = torch._C

# Show the values of a converted model's calls to observers, node by node.


def run_observed(variant: Variant, observers: Sequence[Observer], owner: nn.Module, *tensors: Any) -> Any:
    """Run a variant's graph as its function does, and call each observer after each node that computes."""
    nodes = {node.name: node for node in variant.graph.nodes if node.op == "call_function"}

    def show(node: fx.Node, value: Any, read: Sequence[Any]) -> None:
        if node.name in nodes:
            result = value[0] if f"{node.name}_result" in map(str, node.users) else value
            for observe in observers:
                observe(nodes[node.name], result, read)

    run = NodeRun(variant.keeping, lambda node: attribute(owner, str(node.target)), show)
    return run.run(*tensors, enable_io_processing=False)


_KINDS: WeakKeyDictionary[type[nn.Module], type[AmpModule]] = WeakKeyDictionary()  # by the class of the original


class AmpModule(fx.GraphModule):
    """A converted model. Called like the original, with the same parameters, buffers and ``state_dict`` keys.

    Parameters are the original's own float32 ones. ``graph``, ``code`` and ``plan`` show the variant that was captured
    first in the current mode. After editing ``graph`` call ``recompile()``.

    Of a model converted without inputs they show a draft, until the first call captures the variants that run.
    """

    def __new__(cls, model: nn.Module, signature: CallSignature, original: Original) -> AmpModule:
        """GraphModule makes a class for each instance; here models of one class share one, so that they can stack.

        ``torch.func.stack_module_state`` stacks models of one class alone.
        """
        if original.model is None:
            return super().__new__(cls, model, signature, original)
        kind = type(original.model)
        if kind not in _KINDS:
            _KINDS[kind] = type(AmpModule.__name__, (AmpModule,), {"__module__": AmpModule.__module__})
        return object.__new__(_KINDS[kind])

    def __init__(self, model: nn.Module, signature: CallSignature, original: Original) -> None:
        super().__init__(nn.Module(), fx.Graph())
        self._lineno_map: dict[int, int | None] = {}  # Dynamo reads it; this class's forward is not a graph's code
        self._signature = signature
        self._original = original
        self._observers: tuple[Observer, ...] = ()
        self._autocastfx_copies = WorkingCopies(self)
        module_tree.mirror(model, self, {id(model): self}, is_tree=type(model) is nn.Module)  # as _tree makes it
        self._own_modules = tuple(m for m in self.modules() if m is self or isinstance(m, module_tree.Part))
        self._original_modes = module_tree.OriginalModes(original.model)
        self._table = "_variants"
        while self._table in self._modules:  # a model that was converted before, and exported, holds one already
            self._table += "_"
        self.add_module(self._table, VariantTable(self._table, original))
        self._ddp_params_and_buffers_to_ignore = self._mounted.constants  # the same on every rank
        self.forward = MethodType(module_tree.signed_forward(signature), self)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the variant that fits the call. If none does, capture one while the original is at hand.

        Raises:
            TypeError: the arguments do not fit the original's signature.
            VariantError: no variant fits, and none can be captured.
            UnsupportedError: a gradient is asked of weights that are stored in 16 bits, or a parameter is a DTensor.
        """
        call = self._signature.bind(args, kwargs)
        if not torch.compiler.is_compiling() and (hooks := self._mounted.hooks).is_due:
            hooks.tell_late(self, self._own_modules, self._original.model if self.variants else None)
        variant = self._variant_of(call)
        kind = variant.autocast
        function = variant.function
        if self._observers and not torch.compiler.is_compiling():
            function = partial(run_observed, variant, self._observers)
        try:
            if kind is not None and torch.is_autocast_enabled(kind):  # a region around the call must not decide again
                with torch.autocast(kind, enabled=False):
                    outputs = function(self, *call.tensors)
            else:
                outputs = function(self, *call.tensors)
        except RuntimeError as error:
            module_tree.refuse_sharded(self, error)
            raise
        if self._is_low:
            refuse_gradients(outputs)
        return pytree.tree_unflatten(outputs, variant.out_spec)

    @contextmanager
    def _observed_by(self, observer: Observer) -> Generator[None]:
        """While open, calls run node by node and show their values to ``observer``; not those in compiled code."""
        self._observers = (*self._observers, observer)
        try:
            yield
        finally:
            self._observers = tuple(one for one in self._observers if one is not observer)

    @property
    def _is_low(self) -> bool:
        return self._original.is_low

    def _variant_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Variant:
        """The variant that such a call runs; captured now if there is none yet.

        Raises:
            TypeError: the arguments do not fit the original's signature.
            VariantError: no variant fits, and none can be captured.
        """
        return self._variant_of(self._signature.bind(args, kwargs))

    def _variant_of(self, call: Call) -> Variant:
        if _C._get_tracing_state() is not None:  # Dynamo follows this, and not is_tracing()
            return self._variant_of_trace(call)
        return self._mounted.fitting(call, self._modes()) or self._further(call)

    def _variant_of_trace(self, call: Call) -> Variant:
        """Choose a graph while ``torch.jit.trace`` records the call, which records none of this; sizes are numbers."""
        state = _C._get_tracing_state()
        _C._set_tracing_state(None)
        try:
            variant = self._variant_of(call)
        finally:
            _C._set_tracing_state(state)
        if variant.guard.conditions:  # no trace captures a further graph
            warnings.warn(
                f"the trace runs the graph for sizes where {variant.guard}, and does not check that.",
                TracerWarning,
                stacklevel=2,
            )
        return variant

    def _further(self, call: Call) -> Variant:
        return cast("Any", torch.compiler).disable(self._capture_for)(call)

    def _capture_for(self, call: Call) -> Variant:
        if not all(isinstance(p, nn.Parameter) for p in self.parameters()):
            raise VariantError(
                "no variant fits this call, and none can be captured while other tensors take the place of the "
                "parameters, as in torch.func.functional_call: call the converted model once with such inputs before."
            )
        with capturing():
            modes = self._modes()
            if not self.variants:
                first = self._mounted.capture_modes(call, modes, self._held())
                self._original.tell_unmatched(self)
                return first
            module_tree.read_again(self._own_modules)
            made = self._mounted.fitting(call, modes)  # meanwhile, by another thread
            return made or self._mounted.further(call, modes, self._held())

    @property
    def _working_copies(self) -> WorkingCopies | None:
        """The 16-bit copies that graphs read by this name, once in each call."""
        return self._autocastfx_copies.fresh()

    def _modes(self) -> tuple[bool, ...]:
        if self._original_modes.modules and not torch.compiler.is_compiling():
            self._original_modes.follow(self._own_modules)
        return tuple([m.training for m in self._own_modules])

    @property
    def _mounted(self) -> VariantTable:
        return cast("VariantTable", self._modules[self._table])

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All captured variants, in the order of capture."""
        return self._mounted.captured

    @property
    def _shown(self) -> tuple[Variant, ...]:
        """The captured variants; drafts while there are none."""
        return self._mounted.shown

    @property
    def _active(self) -> Variant:
        active = self._mounted.active(self._modes())
        if active is None:
            raise self._not_captured()
        return active

    def _not_captured(self) -> NotCapturedError:
        try:
            self._original.draft(self._modes(), self._held())
        except CaptureError as error:
            return NotCapturedError(
                f"there is no graph to show before the first call: {error}. Call the model once, or give convert the "
                "inputs of one call."
            )
        return NotCapturedError("there is no graph to show before the first call: call the model once.")

    @property
    def plan(self) -> Plan:
        """Every decision of the variant that ``graph`` shows, with its reason."""
        return self._active.plan

    @property
    def _graph(self) -> fx.Graph:
        if "_table" not in self.__dict__ or (not self._shown and TracingContext.try_get() is not None):
            return self.__dict__["_blank"]  # Dynamo looks at the graph of what it traces
        return self._active.graph

    @_graph.setter
    def _graph(self, graph: fx.Graph) -> None:
        if "_table" in self.__dict__:
            self._active.graph = graph
        else:
            self.__dict__["_blank"] = graph  # what GraphModule's own __init__ sees

    @property
    def _code(self) -> str:
        return self._active.code

    def recompile(self) -> Any:
        """Make the shown variant run its graph as it now is."""
        if "_table" in self.__dict__:
            self._active.compile_graph()
        return None

    def __repr__(self) -> str:
        name, variant = f"AmpModule of {self._original.class_name}", self._mounted.active(self._modes())
        if variant is None:
            return f"{name}, captured at its first call"
        plan, runs = variant.plan, Counter(node.placement.run for node in variant.plan.nodes)
        counts = ", ".join(f"{runs[p]} {p}" for p in Precision if runs[p])
        kind = "draft until the first call" if plan.unverified else f"{variant.mode} mode"
        return (
            f"{name}: {plan.low} on {plan.device}, op list {plan.op_list}\n"
            f"  {kind}, 1 of {len(self._shown)} variants: {counts}; {len(plan.casts)} casts"
        )

    def __str__(self) -> str:
        return super().__str__() if self._shown else f"{self!r}\n# {self._not_captured()}"

    def _held(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by the original's names, tied ones under each of their names."""
        named = (*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False))
        return {name: tensor for name, tensor in named if not name.startswith(f"{self._table}.")}

    def _given_to(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Variant, Call, dict[str, Any]]:
        """The variant that such a call runs, what the call gives its inputs, and what it reads from elsewhere."""
        return self._variant_for(args, kwargs), self._signature.bind(args, kwargs), {}

    def train(self, mode: bool = True) -> AmpModule:
        """Switch to training or evaluation, as the original's own ``train`` or ``eval`` does.

        Raises:
            UnsupportedError: the model came out of torch.export, which bakes its mode in, or its weights are stored in
                16 bits.
        """
        if self._is_low and mode:
            refuse_training()
        if self._original.baked:
            raise UnsupportedError(
                "the model came out of torch.export, which bakes in the mode it was exported in. Convert the module "
                "that was exported instead."
            )
        model, known = self._original.model, self._original.switched
        if known is not None:
            module_tree.set_modes(self._own_modules, known[mode])
        elif model is None or not module_tree.switch(self._own_modules, model, self._held, training=mode):
            super().train(mode)
        self._original_modes.forget()
        self._autocastfx_copies.expire()  # weights are exchanged between training and evaluation, not always visibly
        return self

    def requires_grad_(self, requires_grad: bool = True) -> AmpModule:
        """Ask for gradients of all parameters, or for none.

        Raises:
            UnsupportedError: the weights are stored in 16 bits.
        """
        if self._is_low and requires_grad:
            refuse_training()
        super().requires_grad_(requires_grad)
        return self

    def _store_low(self, low: torch.dtype) -> None:
        """Become a model of its own for inference: the weights that all variants read in 16 bits are stored so.

        Neither the original nor any of its tensors is referred to any more, and no further variant can be captured.
        """
        names = frozenset[str].intersection(*(stored_low(v, low) for v in self.variants))
        tensors = self._held()
        own_tensors(self._own_modules, [tensors[name] for name in names if name in tensors], low)
        self._original = self._mounted.original = self._original.without_model()
        for variant in self.variants:
            variant.captured = None  # it was decided for float32 weights
        self._original_modes = module_tree.OriginalModes(None)
        module_tree.forget_original(self._own_modules)
        self.train(False)

    def refresh_weights(self) -> None:
        """Make the 16-bit working copies of ``weights="cached"`` anew.

        Needed after writes into ``parameter.data`` (``p.data.copy_(other)``), which torch does not count. All other
        changes are seen without it, by the next call; after this one, it finds nothing to do.
        """
        self._autocastfx_copies.expire()
        self._autocastfx_copies.fresh()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AmpModule:
        here = self._place()
        for dtype in dict.fromkeys((torch.float32, *(p.dtype for p in self.parameters() if self._is_low))):
            probe = fn(torch.empty(0, dtype=dtype, device=here))
            if probe.dtype != dtype:
                kept = "keep the dtypes that they are stored in" if self._is_low else "stay float32"
                raise UnsupportedError(
                    f"an AmpModule's parameters {kept}, so it cannot become {probe.dtype}: its graph holds the "
                    "casts. Move it with .to(device) alone, or convert again with another dtype."
                )
            self._mounted.refuse_move(probe.device)
        super()._apply(fn, recurse)
        if self._place() != here:
            self._mounted.move(self._place(), self._held())
        return self

    def _place(self) -> torch.device:
        return device_among(self._held().values())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            original = self.__dict__.get("_original")
            if original is None or original.model is None or name.startswith("__"):
                raise
            return module_tree.forwarded(original.model, self, name, error)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module, which takes no other's place.

        Raises:
            UnsupportedError: there is a part of this name.
        """
        module_tree.refuse_replacing(self, name, module)
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        module_tree.refuse_replacing(self, name, value)
        if "_table" in self.__dict__ and name not in self.__dict__ and self._mounted.reads(name):
            module_tree.set_on_original(self._original.model, name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpModule:
        tree = copy.deepcopy(self._tree(), memo)
        result = _rebuild(tree, self._signature, self._original, [v.copied(memo) for v in self._shown])
        memo[id(self)] = result
        return result

    def __copy__(self) -> AmpModule:
        return _rebuild(self._tree(), self._signature, self._original, [v.copied(None) for v in self._shown])

    def __reduce__(self) -> tuple[Any, ...]:
        has_captured = bool(self.variants)  # else the model is needed, for the first call captures
        original = self._original.without_model() if has_captured else self._original
        return (_rebuild, (self._tree(), self._signature, original, up_to_date(self._shown)))

    def _tree(self) -> nn.Module:
        """The mirrored modules without the variants, as a plain module."""
        tree = nn.Module()
        for key, own in self.__dict__.items():
            if key in tree.__dict__:
                tree.__dict__[key] = own.copy() if isinstance(own, (dict, set)) else own
        del tree._modules[self._table]
        return tree


def _rebuild(tree: nn.Module, signature: CallSignature, original: Original, variants: list[Variant]) -> AmpModule:
    result = AmpModule(tree, signature, original)
    for key in tree.__dict__:
        if "_hooks" in key:  # and which of them take keywords
            result.__dict__[key] = tree.__dict__[key]
    for variant in variants:
        result._mounted.add(variant)
    result._mounted.refuse_move(result._place())  # where torch.load(map_location=...) has put it
    return result
