"""Write a converted model as ONNX."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.fx.experimental._config as fx_config
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autocastfx.errors import MissingExtraError, UnsupportedError
from autocastfx.integrations.onnx_types import widen
from autocastfx.runtime.amp_module import AmpModule
from autocastfx.runtime.module_tree import signed_forward
from autocastfx.runtime.operators.short_attention import short_attention

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

__all__ = ["export"]

_ATEN: Any = torch.ops.aten
_ATTENTION = (_ATEN.scaled_dot_product_attention.default, short_attention)
_OPSET = 22  # the first whose convolutions and recurrent layers take bfloat16


def export(
    amp_model: AmpModule,
    args: tuple[Any, ...] = (),
    path: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    emulate: bool = False,
    **options: Any,
) -> ONNXProgram:
    """Write a converted model as ONNX, with its casts.

    Args:
        amp_model: in evaluation mode.
        args: positional arguments of a call.
        path: where to save it; None: nowhere.
        kwargs: keyword arguments of the call.
        emulate: write every 16-bit operator as the float32 one, its results rounded to 16 bits. A runtime without
            kernels of the dtype can run that, as onnxruntime on a CPU, which has few for bfloat16. It is not faster
            than float32.
        options: for ``torch.onnx.export``, as ``dynamic_shapes``, ``input_names`` or ``opset_version`` (22 by default).

    Returns:
        What ``torch.onnx.export`` returns: ``save`` and ``model_proto`` are there.

    Raises:
        MissingExtraError: onnx or onnxscript is not installed.
        TypeError: an argument is unknown, or does not fit the model's signature.
        UnsupportedError: the model is not a converted one, or is in training mode.
        VariantError: no variant fits the call, and none can be captured.
    """
    if not isinstance(amp_model, AmpModule):
        raise UnsupportedError(
            f"{type(amp_model).__name__} is not a converted model: give it to autocastfx.convert first, or to "
            "torch.onnx.export as it is."
        )
    if amp_model.training:
        raise UnsupportedError("the model is in training mode: call amp_model.eval() before you export it.")
    if "f" in options:
        raise TypeError("export() takes path=..., not f=...")
    try:
        for package in ("onnx", "onnxscript"):
            importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError("this needs onnx and onnxscript: pip install onnx onnxscript") from error
    given = dict(kwargs or {})
    amp_model._variant_for(args, given)  # where there is none yet, it is captured now, and not inside torch's export
    optimize, external_data = options.pop("optimize", True), options.pop("external_data", True)
    options = {"opset_version": _OPSET, "verbose": False} | options
    exported = _exported(amp_model, args, given, options.get("dynamic_shapes"))
    program: Any = torch.onnx.export(exported, optimize=False, **options)
    widen(program.model)
    if optimize:
        program.optimize()
    if emulate:
        widen(program.model, all_low=True)
    if path is not None:
        program.save(path, external_data=external_data)
    return program


class _Called(nn.Module):
    """The model as a plain module. Of a GraphModule, torch.export runs the shown graph, with arguments by position."""

    called: AmpModule

    def __init__(self, amp_model: AmpModule) -> None:
        super().__init__()
        self.__dict__["called"] = amp_model
        for held in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            self.__dict__[held] = amp_model.__dict__[held]
        self.training = amp_model.training
        self.forward = MethodType(signed_forward(amp_model._signature), self)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.called._run(args, kwargs)


def _exported(amp_model: AmpModule, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> ExportedProgram:
    """Export the model with the results of fused attention copied, which ONNX does not show.

    They may lie in memory in another order than what torch writes in place of attention, and views of it would fail.
    """
    sizes = pytree.tree_map_only(str, lambda _: torch.export.Dim.DYNAMIC, shapes)  # torch.onnx names them afterwards
    with cast("Any", fx_config).patch(backed_size_oblivious=True):  # a size of 1 stays dynamic
        program = torch.export.export(_Called(amp_model), args, kwargs, dynamic_shapes=sizes, strict=False)
    for graph in (module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)):
        for node in (found for target in _ATTENTION for found in graph.find_nodes(op="call_function", target=target)):
            with graph.inserting_after(node):
                copy = graph.call_function(_ATEN.clone.default, (node,), {"memory_format": torch.contiguous_format})
            node.replace_all_uses_with(copy)
            copy.args, copy.meta["val"] = (node,), node.meta["val"].contiguous()
    return program
