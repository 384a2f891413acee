"""The variants of a converted model: find the one that fits a call, and capture further ones."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autocastfx.capture.call import Call, CallSignature
from autocastfx.capture.draft.draft import capture_symbolically
from autocastfx.capture.export import Captured, capture
from autocastfx.capture.leave_intact import capturing, garbage_left, own_thread_state
from autocastfx.capture.progress import stage
from autocastfx.capture.python_state import has_hooks, later_hooks, names_of, process_hooks, unfollowed_names
from autocastfx.errors import CaptureError, ManyVariantsWarning, StateWarning, UnsupportedError, VariantError, shown
from autocastfx.graph.node import uses
from autocastfx.plan.plan import Precision, Prices
from autocastfx.plan.ranges import mode_of
from autocastfx.policy.kernel_facts import PARAMETERS, load_kernel_facts
from autocastfx.policy.op_list import OpList
from autocastfx.runtime.module_tree import foreseen
from autocastfx.runtime.variant import Variant

# Tell of hooks on modules that calls of a converted model do not run.


class HookWatch:
    """The hooks that a converted model has told of, each module once.

    torch numbers all hooks in a process, so that one comparison says whether there is a new one.
    """

    def __init__(self) -> None:
        self._seen = RemovableHandle.next_id
        self._captured: set[str] = set()
        self._late: set[str] = set()

    @property
    def is_due(self) -> bool:
        """True if hooks have been registered, somewhere in the process, since the last look."""
        return self._seen != RemovableHandle.next_id

    def tell_captured(self, model: nn.Module | None) -> None:
        """Warn of the forward hooks on modules of ``model``, which has just been captured."""
        if names := _new(unfollowed_names(model) if model is not None else (), self._captured):
            warnings.warn(
                f"hooks on {names} ran while the model was captured. The graph does to tensors what they did; calls of "
                "the converted model do not run them. autocastfx.enable converts in place, and keeps hooks.",
                StateWarning,
                stacklevel=2,
            )

    def tell_late(self, owner: nn.Module, own: Sequence[nn.Module], model: nn.Module | None) -> None:
        """Warn of hooks that have come since the last look.

        Args:
            owner: the converted model, whose own hooks run.
            own: its modules, which it does not call.
            model: the original, if it is at hand and has been captured.
        """
        since, self._seen = self._seen, RemovableHandle.next_id

        def is_late(module: nn.Module) -> bool:
            return module is not owner and later_hooks(module, since)

        others = model.modules() if model is not None else ()
        every = process_hooks(since)
        if not every and not any(map(is_late, filter(has_hooks, chain(own, others)))):
            return
        named = names_of(model, is_late) if model is not None else []
        if names := _new([*named, *names_of(owner, is_late), *every], self._late):
            warnings.warn(
                f"hooks on {names} came after the model was converted, and its calls do not run them: a graph calls no "
                "modules. Register them on the converted model itself, whose own hooks run, or convert in place, with "
                "autocastfx.enable, which follows hooks.",
                StateWarning,
                stacklevel=2,
            )


def _new(names: Iterable[str], told: set[str]) -> str:
    """Return the names that are not in ``told``, to which they are added, as one text."""
    new_names = [name for name in dict.fromkeys(names) if name not in told]
    told.update(new_names)
    return ", ".join(new_names)


MANY = 8  # variants for one call structure, which are captured without a warning
_LOG = logging.getLogger("autocastfx")

Held = Mapping[str, torch.Tensor]  # parameters and buffers by the original's names
Modes = tuple[bool, ...]  # the training flag of each module of the original


class _Converts(Protocol):
    """Makes a variant of a captured graph, for a device. An ``AmpModule`` itself imports no pass."""

    @property
    def op_list(self) -> OpList: ...

    @property
    def weights(self) -> str: ...

    @property
    def fold(self) -> str: ...

    @property
    def prices(self) -> Prices | None: ...

    @property
    def is_low_model(self) -> bool: ...

    def __call__(self, captured: Captured, tensors: Held, device: torch.device) -> Variant: ...


@dataclass(frozen=True)
class Original:
    """The model that a converted model was made from, and how further variants are made.

    Attributes:
        converter: makes variants of captured graphs.
        model: the caller's; None once it is not at hand: then nothing more is captured.
        signature: of its forward.
        leaves: dotted paths of the functions that capture keeps whole.
        device: that the conversion was asked for; None for the one that a graph was captured on.
        baked: the model came out of torch.export, with one mode.
        tell_unmatched: warns of what was given to the conversion and matches nothing; called with the converted model,
            if its first call captures.
        kept_name: of the model's class, once the model is gone.
        switched: the modes that its ``eval`` and ``train`` gave, then.
    """

    converter: _Converts
    model: nn.Module | None
    signature: CallSignature
    leaves: tuple[str, ...]
    device: torch.device | None
    baked: bool
    tell_unmatched: Callable[[Any], None]
    kept_name: str = ""
    switched: tuple[Modes, Modes] | None = None

    @property
    def class_name(self) -> str:
        """The name of the model's class."""
        return type(self.model).__name__ if self.model is not None else self.kept_name

    @property
    def is_low(self) -> bool:
        """True if its weights are stored in 16 bits."""
        return self.converter.weights == "low"

    def capture(self, call: Call, modes: Modes, held: Held, sizes: str) -> Variant:
        """Capture the model as it runs ``call`` in ``modes``, and convert the graph.

        Raises:
            CaptureError: the model is not at hand, or cannot be captured.
        """
        if self.model is None and self.is_low:
            raise CaptureError(
                'weights="low" keeps no original: convert it again, in evaluation, with the inputs of this call'
            )
        if self.model is None:
            raise CaptureError("the original model is not at hand")
        follows = self.converter.op_list.placement == "follow"
        with own_thread_state(), garbage_left():
            with stage(f"capturing {type(self.model).__name__} in {mode_of(modes)} mode", "capture"):
                captured = capture(
                    *(self.model, self.signature, call),
                    training=modes,
                    held=held,
                    leaves=self.leaves,
                    sizes=sizes,
                    follows=follows,
                )
            return self.convert(captured, held, self.device or captured.device)

    def draft(self, modes: Modes, held: Held) -> Variant:
        """Capture the model without inputs, and convert the graph.

        Raises:
            CaptureError: the model is not at hand, or its code cannot be traced.
        """
        if self.model is None:
            raise CaptureError("the original model is not at hand")
        if self.converter.op_list.placement == "follow":
            raise CaptureError("an op list that follows torch.autocast's dispatch needs the inputs' dtypes and sizes")
        if self.converter.is_low_model:
            raise CaptureError("what a 16-bit model has in float32 shows in the dtypes of a call's values")
        with stage(f"drafting {type(self.model).__name__} in {mode_of(modes)} mode", "capture"):
            captured = capture_symbolically(self.model, self.signature, training=modes, held=held, leaves=self.leaves)
        return self.convert(captured, held, self.device or captured.device)

    def convert(self, captured: Captured, held: Held, device: torch.device) -> Variant:
        """Convert what was captured, for ``device``."""
        with stage(f"converting {len(captured.graph.nodes)} nodes for {device.type}", "passes"):
            return self.converter(captured, held, device)

    def without_model(self) -> Original:
        """The same, but what was captured is all that can be converted."""
        if self.model is None:
            return self
        modes = (foreseen(self.model, training=False).modes, foreseen(self.model, training=True).modes)
        return replace(self, model=None, kept_name=self.class_name, switched=modes)


class VariantTable(nn.ModuleList):
    """Variants in the order of capture; drafts while nothing is captured.

    Attributes:
        path: the table's path in its owner.
        original: makes further variants.
        constants: names, in the owner, of the tensors that variants own.
        hooks: tells of hooks that do not run.
    """

    def __init__(self, path: str, original: Original) -> None:
        super().__init__()
        self.path, self.original = path, original
        self.constants: list[str] = []
        self.hooks = HookWatch()

    @property
    def shown(self) -> tuple[Variant, ...]:
        """All variants: the captured ones, or drafts before the first capture."""
        return tuple(cast("list[Variant]", self))

    @property
    def captured(self) -> tuple[Variant, ...]:
        """All captured variants."""
        return tuple(v for v in self.shown if not v.plan.unverified)

    def fitting(self, call: Call, modes: Modes) -> Variant | None:
        """Return the first variant that serves ``call`` in ``modes``, or None."""
        sizes = [t.shape for t in call.tensors]
        for variant in self.captured:
            fits = variant.modes == modes and variant.structure == call.structure and variant.guard.holds(sizes)
            if fits and variant.first_broken() is None:
                return variant
        return None

    def reads(self, name: str) -> bool:
        """True if a variant depends on this attribute of the root module."""
        return any(not read.module and read.name == name for v in self.shown for read in v.state.reads)

    def active(self, modes: Modes) -> Variant | None:
        """Return the variant to show in ``modes``: the first one for these modes, else the first of all."""
        return next((v for v in self.shown if v.modes == modes), next(iter(self.shown), None))

    def further(self, call: Call, modes: Modes, held: Held) -> Variant:
        """Capture and mount a variant for a call that no variant fits.

        Raises:
            VariantError: the model cannot be captured with this call.
        """
        why = self._why_none_fits(call, modes)
        _LOG.info("capturing variant %d: %s", len(self.captured) + 1, why)
        try:
            made = self.capture(call, modes, held)
        except CaptureError as error:
            raise VariantError(f"{why}; a further one cannot be captured: {error}") from None
        alike = sum(v.modes == modes and v.structure == call.structure for v in self.captured)
        if alike == MANY + 1:
            warnings.warn(
                f"more than {MANY} variants were captured for the call ({call.structure}), each in seconds. The last "
                f"one, because {why}. Give the model fewer sizes or values, as by padding to a few lengths, or write "
                "that code so that one graph serves all; the logger autocastfx tells the reason of each capture.",
                ManyVariantsWarning,
                stacklevel=2,
            )
        return made

    def _why_none_fits(self, call: Call, modes: Modes) -> str:
        same_mode = [v for v in self.captured if v.modes == modes]
        same_call = [v for v in same_mode if v.structure == call.structure]
        if not same_mode:
            return "no variant was captured for these modes (train or eval) of the modules"
        if not same_call:
            known = "; ".join(f"({v.structure})" for v in same_mode)
            return f"no variant was captured for the call ({call.structure}), only for {known}"
        sizes = [t.shape for t in call.tensors]
        for variant in same_call:
            now = variant.first_broken() if variant.guard.holds(sizes) else None
            if now is not None:
                was = next(r.value for r in variant.state.reads if r.path == now.path)
                return f"no variant holds attribute {now.path!r} as it is: it was {shown(was)}, and is {now.word}"
        broken = same_call[0].guard.broken(sizes, call.structure.tensor_names())
        return f"no variant fits these sizes: {broken}"

    def capture(self, call: Call, modes: Modes, held: Held) -> Variant:
        """Capture the original as it runs ``call`` in ``modes``, and mount the variant.

        Raises:
            CaptureError: the original is not at hand, or cannot be captured.
        """
        with capturing():
            before = [v.captured for v in self.captured if v.captured is not None]
            sizes = before[0].sizes if before else "all"  # do not repeat an attempt that was too slow
            variant = self.original.capture(call, modes, held, sizes)
            if variant.captured is not None:
                self._warn_of_news(variant.captured, before)
            self.hooks.tell_captured(self.original.model)
            return self.add(variant)

    def _warn_of_news(self, captured: Captured, before: Sequence[Captured]) -> None:
        """Warn of what the model does and the graph does not, unless that was said of a graph captured before."""
        said = {name for one in before for name in one.changes}
        if new := [name for name in captured.changes if name not in said]:
            warnings.warn(
                f"forward changes {', '.join(map(repr, new))}, which the converted model leaves as they are. If others "
                "read them, keep them in buffers, or give them out as outputs.",
                StateWarning,
                stacklevel=2,
            )
        if captured.pads and not any(one.pads for one in before):
            warnings.warn(
                "the converted model computes the padded places of an nn.TransformerEncoder's output, as torch does in "
                "training and under torch.compile. In evaluation without gradients the model itself may leave 0 there: "
                "read none of these places, or make the encoder with enable_nested_tensor=False.",
                StateWarning,
                stacklevel=2,
            )

    def capture_modes(self, call: Call, now: Modes, held: Held) -> Variant:
        """Capture the original as it runs ``call`` in the modes ``now``, in training mode and in evaluation mode.

        Returns:
            The variant for ``now``.

        Raises:
            CaptureError: the original cannot be captured in the modes ``now``. Failures in other modes are ignored:
                the first call in such a mode captures again.
        """
        first = self.capture(call, now, held)
        for modes in self._switched():
            if modes != now:
                with suppress(CaptureError):
                    self.capture(call, modes, held)
        return first

    def _switched(self) -> list[Modes]:
        """Return the modes that the original has after ``train`` and ``eval``, if they change nothing else."""
        model = self.original.model
        if self.original.baked or model is None:
            return []
        both = [foreseen(model, training=training) for training in (True, False)]
        return list(dict.fromkeys(one.modes for one in both if not one.changes))

    def draft(self, now: Modes, held: Held) -> None:
        """Mount drafts, which are made without inputs; none if the model's code cannot be traced without.

        Raises:
            BannedOpError: the list bans an op of the model.
        """
        for modes in dict.fromkeys([now, *self._switched()]):
            with capturing(), suppress(CaptureError):
                self.add(self.original.draft(modes, held))

    def add(self, variant: Variant) -> Variant:
        """Mount ``variant`` as the last one. The first variant captured from inputs replaces the drafts."""
        if not variant.plan.unverified and not self.captured:
            self._modules.clear()
        return self._mount(len(self), variant)

    def _mount(self, index: int, variant: Variant) -> Variant:
        with stage(f"compiling {len(variant.graph.nodes)} nodes", "code", is_logged=False):
            variant.mount(f"{self.path}.{index}", self.original.signature)
        variant.watch(self.original.model)
        self.add_module(str(index), variant)
        self.constants[:] = [f"{self.path}.{name}" for name, _ in self.named_buffers()]
        return variant

    def refuse_move(self, device: torch.device) -> None:
        """Refuse to move an unpickled variant to a device type whose kernels cannot run its nodes.

        Other variants keep their captured graph, so that ``move`` converts them anew for the device.

        Raises:
            UnsupportedError: a node combines 16-bit values with float32 parameters, which the new device cannot.
        """
        for variant in self.shown:
            if variant.captured is not None or device.type in (variant.device.type, "meta"):
                continue
            facts = load_kernel_facts().float32_parameters
            here, there = (facts.get(kind, frozenset[str]()) for kind in (variant.device.type, device.type))
            planned = (n for n in variant.plan.nodes if n.captured != variant.plan.low)  # else parameters are low, too
            low = {node.name: node.op for node in planned if node.placement.run is Precision.LOW}
            for node in (n for n in variant.graph.nodes if low.get(n.name) in here - there):
                if not any(use.argument in PARAMETERS for use in uses(node)):
                    continue
                raise UnsupportedError(
                    f"node {node.name} ({low[node.name]}) takes 16-bit values beside float32 parameters, which kernels "
                    f"of {device.type} do not, and an unpickled model cannot be decided anew. Convert the model on "
                    f"{device.type} and load this one's state_dict, or convert with fold='none' before pickling."
                )

    def move(self, device: torch.device, held: Held) -> None:
        """Move all variants to ``device``. If its type differs, they are converted anew for its kernels."""
        for index, variant in enumerate(self.shown):
            moved = variant
            if variant.captured is not None and device.type != variant.device.type:
                moved = self._mount(index, self.original.convert(variant.captured, held, device).to(device))
            moved.move(device)


def up_to_date(variants: Iterable[Variant]) -> list[Variant]:
    """Return the variants that fit the original's present attributes, for saving.

    Without the original, stale variants would not be noticed.

    Raises:
        VariantError: all variants are stale: an attribute has changed since they were captured.
    """
    first_broken = [(variant, variant.first_broken()) for variant in variants]
    fitting = [variant for variant, read in first_broken if read is None]
    if first_broken and not fitting:
        read = next(read for _, read in first_broken if read is not None)
        raise VariantError(
            f"attribute {read.path!r} is {read.word} now, and no variant was captured with this value: call the "
            "converted model once, then save it."
        )
    return fitting
