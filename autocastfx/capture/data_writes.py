"""Capture ``x.data`` and ``x.data = new`` in a model's code as nodes; torch.export alone sees neither."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn

from autocastfx.capture.call_rules import Rule
from autocastfx.capture.data_attribute import data, set_data
from autocastfx.capture.failure import calling_frame, place
from autocastfx.errors import CaptureError
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.node import example

__all__ = ["data_rules", "detach_unwritten"]

_DATA = cast("Any", torch.Tensor.data)
_GET, _SET = _DATA.__get__, _DATA.__set__


def data_rules(model: nn.Module) -> Mapping[Any, Rule]:
    """Return rules that record ``data`` of tensors as the operators ``autocastfx::data`` and ``autocastfx::set_data``.

    The latter raises CaptureError where a tensor gets data of another size, dtype or device: a graph cannot hold that.
    """
    return {_GET: data, _SET: partial(_set, model)}


def _set(model: nn.Module, held: torch.Tensor, new: torch.Tensor) -> None:
    if (held.dtype, held.device, held.shape) != (new.dtype, new.device, new.shape):
        named = (*model.named_parameters(), *model.named_buffers())
        name = next((repr(name) for name, tensor in named if tensor is held), "a tensor")
        frame = calling_frame()
        raise CaptureError(
            f"forward gives {name} other data: {_kind(held)} becomes {_kind(new)}, at "
            f"{place(frame.f_code.co_filename, frame.f_lineno)}. A graph holds tensors of fixed sizes and dtypes: "
            "change it before the conversion."
        )
    set_data(held, new)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {[example(n) for n in tensor.shape]} on {tensor.device}"


def detach_unwritten(graph: fx.Graph) -> None:
    """Replace ``x.data`` by ``x.detach()``, which lists and passes know, if no node writes into the storage."""
    reads = [node for node in graph.nodes if node.target is data]
    written = alias_sets(graph) if reads else {}
    for node in reads:
        if node not in written:
            node.target = torch.ops.aten.detach.default
