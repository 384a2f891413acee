"""Build the sides of a comparison from one model, captured once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor, nn

from autocastfx import AmpModule
from autocastfx.capture.call import CallSignature
from autocastfx.capture.kept_whole import functions_at
from autocastfx.dtypes import dtype_name
from autocastfx.passes.pipeline import Converter
from autocastfx.policy.kernel_facts import kept_in_float32, load_kernel_facts
from autocastfx.policy.op_list import OpList, load_op_list
from autocastfx.policy.saved import rules_of
from autocastfx.runtime.amp_module import view
from autocastfx.runtime.captures import Captures
from benchmarks.gpu.measure import failure
from benchmarks.models.gpu import built
from benchmarks.training import Setting, Training, adamw, halved, side_of, training_of

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Source:
    """A float32 model in training mode on its device, with its inputs and its graph.

    Converted sides and torch.autocast share its parameters; the 16-bit side has a copy.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    captures: Captures
    prepared: dict[object, AmpModule] = field(default_factory=dict[object, AmpModule])
    optimizers: dict[bool, torch.optim.Optimizer] = field(default_factory=dict[bool, torch.optim.Optimizer])

    def prepare(self, names: Iterable[str], dtypes: Iterable[torch.dtype]) -> None:
        """Convert for sides to come, each of which is built once: a large model takes seconds.

        Where regions are compiled, a forward and backward let the compiler do so now. What fails does so again when the
        side is measured, and is its row then.
        """
        options = [side_of(name).convert for name in names]
        for dtype, one in product(dtypes, filter(None, options)):
            made = self.converted(dtype, **one)
            if "fuse" in one:
                try:
                    made(**self.inputs)[0].backward()
                except Exception as error:
                    failure(error)
                made.zero_grad()
            self.prepared[_key(dtype, one)] = made

    def converted(self, dtype: torch.dtype, weights: str, fold: str, **others: str) -> AmpModule:
        """Convert the captured graph, as ``convert`` does with these arguments."""
        given = {"weights": weights, "fold": fold, **others}
        if _key(dtype, given) in self.prepared:
            return self.prepared.pop(_key(dtype, given))
        converter = _converter(self.model, dtype, **given)
        amp_model = view(self.captures, converter, None, converter.op_list.functions())
        for graph in self.captures.graphs:
            amp_model._prepare(graph)
        return amp_model

    def side(self, name: str, setting: Setting, *, shares_state: bool = False) -> Training:
        """Build the training of a side; a side of 16-bit parameters has float32 masters.

        Args:
            name: a key of ``SIDES``.
            setting: settings that all sides share.
            shares_state: True if the float32 sides share AdamW's state, as they share the parameters: for timing alone.
        """
        side, model, inputs = side_of(name), self.model, self.inputs
        if side.is_half or side.is_liger:
            model = copy.deepcopy(model)
        if side.is_half:
            model, inputs = halved(name, model, inputs, setting.dtype)
        if side.convert is not None:
            model = self.converted(setting.dtype, **side.convert)
        optimizer = None
        if shares_state and not (side.is_half or side.is_liger):
            optimizer = self.optimizers.setdefault(setting.is_capturable, adamw(self.model.parameters(), setting))
        return training_of(name, model, inputs, setting, masters="float32" if side.is_half else "", optimizer=optimizer)


def source(name: str, device: str, *, dropout: bool = True) -> Source:
    """Build a model and capture it in training mode."""
    model, inputs = built(name, device, dropout=dropout)
    converter = _converter(model, torch.bfloat16, "cast", "exact")
    leaves = converter.op_list.functions()
    captures = Captures(model, CallSignature.of(model.forward), functions_at(leaves))
    view(captures, converter, None, leaves)._probe((), inputs, converts=False)
    return Source(model, inputs, captures)


def _key(dtype: torch.dtype, options: Mapping[str, str]) -> object:
    return dtype, *sorted(options.items())


def _converter(
    model: nn.Module, dtype: torch.dtype, weights: str, fold: str, saved: str = "as computed", fuse: str = "none"
) -> Converter:
    lists = kept_in_float32(model, dtype).merged(load_op_list("default", default=dtype_name(dtype)))  # as convert does
    if entries := rules_of(saved):
        lists = lists.merged(OpList.of({"saved": entries}))
    return Converter(lists, load_kernel_facts(), dtype, keep_output_dtype=False, fold=fold, weights=weights, fuse=fuse)
