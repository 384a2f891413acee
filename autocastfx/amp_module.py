"""The converted model: a GraphModule that picks the variant which fits a call, and else behaves as the original."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, cast

import torch
from torch import fx, nn
from torch._guards import TracingContext
from torch.utils import _pytree as pytree

from autocastfx.call import Call, CallSignature
from autocastfx.errors import CaptureError, NotCapturedError, UnsupportedError, VariantError
from autocastfx.forwarding import forwarded
from autocastfx.mirror import mirror
from autocastfx.plan import Plan
from autocastfx.variant import Variant

__all__ = ["AmpModule", "Variant"]


class Maker(Protocol):
    """Makes variants for an :class:`AmpModule`, which knows of no pass itself."""

    @property
    def model(self) -> nn.Module | None: ...

    @property
    def baked(self) -> bool: ...

    def capture(self, call: Call, modes: tuple[bool, ...], held: Mapping[str, torch.Tensor], sizes: str) -> Variant: ...

    def draft(self, modes: tuple[bool, ...], held: Mapping[str, torch.Tensor]) -> Variant: ...

    def rebuild(self, captured: Any, held: Mapping[str, torch.Tensor], device: torch.device) -> Variant: ...

    def without_model(self) -> Maker: ...


class AmpModule(fx.GraphModule):
    """A converted model. Called like the original, with the same parameters, buffers and ``state_dict`` keys.

    Parameters are the original's own float32 ones. ``graph``, ``code`` and ``plan`` show the variant that was captured
    first in the current mode. After editing ``graph`` call ``recompile()``.

    Of a model converted without inputs they show a draft, until the first call captures the variants that run.
    """

    def __init__(self, model: nn.Module, signature: CallSignature, maker: Maker) -> None:
        super().__init__(nn.Module(), fx.Graph())
        self._lineno_map: dict[int, int | None] = {}  # Dynamo reads it; this class's forward is not a graph's code
        self._signature = signature
        self._maker = maker
        mirror(model, self, {id(model): self})
        self._own_modules = tuple(self.modules())
        self._table = "_variants"
        while self._table in self._modules:  # a model that was converted before, and exported, holds one already
            self._table += "_"
        self.add_module(self._table, nn.ModuleList())
        type(self).forward = _signed(signature)  # GraphModule gives each instance a class of its own

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What ``forward`` does: run the variant that fits the call. If none does, capture one while the original is at
        hand.

        Raises:
            TypeError: the arguments do not fit the original's signature.
            VariantError: no variant fits, and none can be captured.
        """
        call = self._signature.bind(args, kwargs)
        variant = self._fitting(call)
        if variant is None:
            variant = self._further(call)
        kind = variant.autocast
        if kind is not None and torch.is_autocast_enabled(kind):  # a region around the call must not decide again
            with torch.autocast(kind, enabled=False):
                return pytree.tree_unflatten(variant.function(self, *call.tensors), variant.out_spec)
        return pytree.tree_unflatten(variant.function(self, *call.tensors), variant.out_spec)

    def _fitting(self, call: Call) -> Variant | None:
        modes = self._modes()
        sizes = [t.shape for t in call.tensors]
        for variant in self.variants:
            if variant.modes == modes and variant.structure == call.structure and variant.guard.holds(sizes):
                return variant
        return None

    def variant_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Variant:
        """The variant that such a call runs; captured now if there is none yet.

        Raises:
            TypeError: the arguments do not fit the original's signature.
            VariantError: no variant fits, and none can be captured.
        """
        call = self._signature.bind(args, kwargs)
        return self._fitting(call) or self._further(call)

    def _further(self, call: Call) -> Variant:
        return cast("Any", torch.compiler).disable(self._capture_for)(call)

    def _capture_for(self, call: Call) -> Variant:
        if not self.variants:
            return self.capture_modes(call)
        try:
            return self.capture(call, self._modes())
        except CaptureError as error:
            raise VariantError(f"{self._why_none_fits(call)}; a further one cannot be captured: {error}") from error

    def _why_none_fits(self, call: Call) -> str:
        same_mode = [v for v in self.variants if v.modes == self._modes()]
        same_call = [v for v in same_mode if v.structure == call.structure]
        if not same_mode:
            return "no variant was captured for these modes (train or eval) of the modules"
        if not same_call:
            known = "; ".join(f"({v.structure})" for v in same_mode)
            return f"no variant was captured for the call ({call.structure}), only for {known}"
        broken = same_call[0].guard.broken([t.shape for t in call.tensors])
        return f"no variant holds for these sizes: {broken} does not hold"

    def _modes(self) -> tuple[bool, ...]:
        return tuple([m.training for m in self._own_modules])

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All captured variants, in the order of capture."""
        return tuple(v for v in self.shown if not v.plan.unverified)

    @property
    def shown(self) -> tuple[Variant, ...]:
        """The captured variants; drafts while there are none."""
        return tuple(cast("list[Variant]", self._modules[self._table]))

    def capture(self, call: Call, modes: tuple[bool, ...]) -> Variant:
        """Capture the original as it runs ``call`` in ``modes``, and add the variant.

        Raises:
            CaptureError: the original is not at hand, or cannot be captured.
        """
        known = next((v.captured for v in self.variants if v.captured is not None), None)
        sizes = known.sizes if known is not None else "all"  # do not try again what was too slow once
        return self.add_variant(self._maker.capture(call, modes, self.held(), sizes))

    def capture_modes(self, call: Call) -> Variant:
        """Capture the original as it runs ``call``, in its present modes, in training and in evaluation.

        Returns:
            The variant for the present modes.

        Raises:
            CaptureError: it cannot be captured in its present modes. What fails in another mode is left to its first
                call.
        """
        now = self._modes()
        first = self.capture(call, now)
        for modes in () if self._maker.baked else dict.fromkeys([(True,) * len(now), (False,) * len(now)]):
            if modes != now:
                with suppress(CaptureError):
                    self.capture(call, modes)
        return first

    def draft(self) -> None:
        """Show drafts, made without inputs, until the first call. None where the model's code cannot be traced so.

        Raises:
            BannedOpError: the list bans an op of the model.
        """
        now = self._modes()
        for modes in [now] if self._maker.baked else dict.fromkeys([now, (True,) * len(now), (False,) * len(now)]):
            with suppress(CaptureError):
                self.add_variant(self._maker.draft(modes, self.held()))

    def add_variant(self, variant: Variant) -> Variant:
        """Mount ``variant`` as the last one. The first one that was captured from inputs takes the place of drafts."""
        if not variant.plan.unverified and not self.variants:
            self._modules[self._table] = nn.ModuleList()
        return self._mount(len(self.shown), variant)

    def _mount(self, index: int, variant: Variant) -> Variant:
        variant.mount(f"{self._table}.{index}")
        table = cast("nn.ModuleList", self._modules[self._table])
        if index == len(table):
            table.append(variant)
        else:
            table[index] = variant
        constants = [name for name, _ in self.named_buffers() if name.startswith(f"{self._table}.")]
        self._ddp_params_and_buffers_to_ignore = constants  # the same on every rank
        return variant

    @property
    def _active(self) -> Variant:
        if not self.shown:
            raise self._not_captured()
        modes = self._modes()
        return next((v for v in self.shown if v.modes == modes), self.shown[0])

    def _not_captured(self) -> NotCapturedError:
        try:
            self._maker.draft(self._modes(), self.held())
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
        if "_table" not in self.__dict__ or (not self.shown and TracingContext.try_get() is not None):
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

    def __str__(self) -> str:
        return super().__str__() if self.shown else f"{nn.Module.__repr__(self)}\n# {self._not_captured()}"

    def held(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by the original's names, tied ones under each of their names."""
        named = (*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False))
        return {name: tensor for name, tensor in named if not name.startswith(f"{self._table}.")}

    def train(self, mode: bool = True) -> AmpModule:
        """Switch all modules to training or evaluation, as ``nn.Module.train`` does.

        Raises:
            UnsupportedError: the model came out of torch.export, which bakes its mode in.
        """
        if self._maker.baked:
            raise UnsupportedError(
                "the model came out of torch.export, which bakes in the mode it was exported in. Convert the module "
                "that was exported instead."
            )
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AmpModule:
        here = self._place()
        probe = fn(torch.empty(0, device=here))
        if probe.dtype != torch.float32:
            raise UnsupportedError(
                f"an AmpModule's parameters stay float32, so it cannot become {probe.dtype}: its graph holds the "
                "casts. Move it with .to(device) alone, or convert again with another dtype."
            )
        super()._apply(fn, recurse)
        if self._place() != here:
            for index, variant in enumerate(self.shown):
                self._move(index, variant, self._place())
        return self

    def _place(self) -> torch.device:
        return next((t.device for t in self.held().values()), torch.device("cpu"))

    def _move(self, index: int, variant: Variant, device: torch.device) -> None:
        if variant.captured is not None and device.type != variant.device.type:
            rebuilt = self._maker.rebuild(variant.captured, self.held(), device)
            variant = self._mount(index, rebuilt.to(device))
        variant.move(device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            maker = self.__dict__.get("_maker")
            if maker is None or maker.model is None or name.startswith("__"):
                raise
            return forwarded(maker.model, self, name, error)

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpModule:
        tree = copy.deepcopy(self._tree(), memo)
        result = _rebuild(tree, self._signature, self._maker, [_copied(v, memo) for v in self.shown])
        memo[id(self)] = result
        return result

    def __copy__(self) -> AmpModule:
        return _rebuild(self._tree(), self._signature, self._maker, [_copied(v, None) for v in self.shown])

    def __reduce__(self) -> tuple[Any, ...]:
        maker = self._maker.without_model() if self.variants else self._maker  # which captures at the first call
        return (_rebuild, (self._tree(), self._signature, maker, list(self.shown)))

    def _tree(self) -> nn.Module:
        """The mirrored modules without the variants, as a plain module."""
        tree = nn.Module()
        for key, own in self.__dict__.items():
            if key in tree.__dict__:
                tree.__dict__[key] = own.copy() if isinstance(own, (dict, set)) else own
        del tree._modules[self._table]
        return tree


def _signed(signature: CallSignature) -> Callable[..., Any]:
    """A forward that shows the original's signature to whoever inspects it (export, trainers, help)."""

    def forward(self: AmpModule, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs)

    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([first, *signature.parameters])
    return forward


def _rebuild(tree: nn.Module, signature: CallSignature, maker: Maker, variants: list[Variant]) -> AmpModule:
    result = AmpModule(tree, signature, maker)
    for key in tree.__dict__:
        if "_hooks" in key:  # and which of them take keywords
            result.__dict__[key] = tree.__dict__[key]
    for variant in variants:
        result.add_variant(variant)
    return result


def _copied(variant: Variant, memo: dict[int, Any] | None) -> Variant:
    restore, parts = variant.__reduce__()
    made = restore(*(copy.deepcopy(parts, memo) if memo is not None else parts))
    made.captured = variant.captured
    return made
