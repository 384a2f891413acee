"""Capture ``x.data`` and ``x.data = new`` in a model's code as nodes; torch.export alone sees neither."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from autocastfx.capture.data_attribute import data, set_data
from autocastfx.capture.failure import calling_frame, place
from autocastfx.errors import CaptureError
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.sizes import example

__all__ = ["DataWrites", "detach_unwritten"]

_DATA = cast("Any", torch.Tensor.data)
_GET, _SET = _DATA.__get__, _DATA.__set__


class DataWrites(TorchFunctionMode):
    """Records the attribute ``data`` of tensors as the operators ``autocastfx::data`` and ``autocastfx::set_data``.

    Raises:
        CaptureError: a tensor gets data of another size, dtype or device, which a graph cannot hold.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling() or func not in (_GET, _SET):
            return func(*args, **kwargs)
        if func == _GET:
            return data(args[0])
        held, new = args
        if (held.dtype, held.device, held.shape) != (new.dtype, new.device, new.shape):
            named = (*self.model.named_parameters(), *self.model.named_buffers())
            name = next((repr(name) for name, tensor in named if tensor is held), "a tensor")
            frame = calling_frame()
            raise CaptureError(
                f"forward gives {name} other data: {_kind(held)} becomes {_kind(new)}, at "
                f"{place(frame.f_code.co_filename, frame.f_lineno)}. A graph holds tensors of fixed sizes and dtypes: "
                "change it before the conversion."
            )
        set_data(held, new)
        return None


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {[example(n) for n in tensor.shape]} on {tensor.device}"


def detach_unwritten(graph: fx.Graph) -> None:
    """Replace ``x.data`` by ``x.detach()``, which lists and passes know, if no node writes into the storage."""
    reads = [node for node in graph.nodes if node.target is data]
    written = alias_sets(graph) if reads else {}
    for node in reads:
        if node not in written:
            node.target = torch.ops.aten.detach.default
