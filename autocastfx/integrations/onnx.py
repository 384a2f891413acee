"""Write a converted model as ONNX."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.fx.experimental._config as fx_config
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature
from autocastfx.errors import MissingExtraError, UnsupportedError
from autocastfx.runtime.amp_module import AmpModule, signed_forward
from autocastfx.runtime.operators.short_attention import short_attention

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch.onnx import ONNXProgram

# Give operators of an ONNX graph float32 between casts where ONNX does not define them for the dtypes that they read.
#
# torch's kernels take 16-bit values beside float32 parameters, and compute in float32. ONNX's operators mostly take
# one dtype, so what torch's exporter writes of a converted model is invalid.

# ONNX lets the parameters of a batch norm have another dtype than its input. But onnxscript's optimizer merges them
# into a convolution before it whatever their dtype, and onnxruntime has no kernel for it.
_ONE_DTYPE = {"BatchNormalization": {"T1": "T", "T2": "T"}}
_CASTS = ("Cast", "CastLike")


def widen(model: ir.Model, *, all_low: bool = False) -> None:
    """Let operators compute in float32, in place, that ONNX does not define for the dtypes that they read.

    With ``all_low`` every operator does that reads 16-bit values, and rounds its results to 16 bits.
    """
    from onnx import defs

    for node in tuple(model.graph.all_nodes()):
        version = model.opset_imports.get(node.domain)
        if node.domain or version is None:
            continue
        schema = defs.get_schema(node.op_type, version)
        kinds = (kind for formal in (*schema.inputs, *schema.outputs) for kind in formal.types)
        if not any(kind.startswith("seq") for kind in kinds):  # such operators compute nothing
            _widen_node(node, schema, all_low=all_low)


def _widen_node(node: ir.Node, schema: Any, *, all_low: bool) -> None:
    from onnx_ir import DataType

    allowed = {one.type_param_str: one.allowed_type_strs for one in schema.type_constraints}
    read, made = list(_typed(node, node.inputs, schema.inputs)), list(_typed(node, node.outputs, schema.outputs))
    dtypes: dict[str, set[DataType]] = {}
    for value, variable in read:
        dtypes.setdefault(variable, set()).update([] if value.dtype is None else [value.dtype])
    for value, variable in made:
        dtype = _made_dtype(node, dtypes.get(variable, set()))
        if value.dtype is None and dtype is not None:
            value.dtype = dtype
    for variable, read_dtypes in dtypes.items():
        low = read_dtypes & {DataType.FLOAT16, DataType.BFLOAT16}
        kinds = {f"tensor({dtype.name.lower()})" for dtype in low}
        mixed = DataType.FLOAT in read_dtypes or not kinds <= set(allowed.get(variable, [variable]))
        if low and (mixed or (all_low and node.op_type not in _CASTS)):
            for value in dict.fromkeys(one for one, its in read if its == variable and one.dtype in low):
                _cast_before(node, value)
            for value in dict.fromkeys(one for one, its in made if its == variable and one.dtype in low):
                _cast_after(node, value)


def _typed(node: Any, values: Iterable[ir.Value | None], formals: Iterable[Any]) -> Iterator[tuple[ir.Value, str]]:
    """Yield the tensors among ``values``, each with the type variable of the schema that binds its dtype."""
    import onnx_ir as ir

    one_dtype, declared = _ONE_DTYPE.get(node.op_type, {}), list(formals)
    for index, value in enumerate(values):
        formal = declared[min(index, len(declared) - 1)]  # the last may stand for several
        if value is not None and formal.is_homogeneous and not isinstance(value.type, ir.SequenceType):
            name: str = formal.type_str
            yield value, one_dtype.get(name, name)


def _made_dtype(node: ir.Node, read: set[ir.DataType]) -> ir.DataType | None:
    """Return the dtype of an output that torch's exporter left untyped; None if it is of no concern here."""
    from onnx_ir import DataType

    if node.op_type == "Cast":
        return DataType(node.attributes["to"].as_int())
    if node.op_type == "CastLike":
        like = node.inputs[1]
        return None if like is None else like.dtype
    if node.op_type in ("Constant", "ConstantOfShape") and "value" in node.attributes:
        return node.attributes["value"].as_tensor().dtype
    if node.op_type == "Constant" and {"value_float", "value_floats"} & set(node.attributes):
        return DataType.FLOAT
    return DataType.FLOAT if DataType.FLOAT in read else next(iter(read), None)


def _cast_before(node: Any, value: ir.Value) -> None:
    import onnx_ir as ir

    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
    cast.outputs[0].dtype, cast.outputs[0].shape = ir.DataType.FLOAT, value.shape
    node.graph.insert_before(node, cast)
    for index, read in enumerate(node.inputs):
        if read is value:
            node.replace_input_with(index, cast.outputs[0])


def _cast_after(node: Any, value: Any) -> None:
    import onnx_ir as ir

    cast = ir.node("Cast", [value], {"to": value.dtype})
    result = cast.outputs[0]
    result.dtype, result.shape, result.name = value.dtype, value.shape, value.name
    value.dtype, value.name = ir.DataType.FLOAT, f"{value.name}_float32"
    ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    node.graph.insert_after(node, cast)


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
    # the graph of this call; symbolic where sizes are to stay open
    given = dict(kwargs or {})
    shapes = options.get("dynamic_shapes")
    model = amp_model if shapes is None else amp_model._with_own_captures(any_size=True)
    frozen = model.freeze(*args, **given)
    if any(variant.plan.quantized for variant in model.variants):
        raise UnsupportedError("ONNX has no operator for the model's float8 products: convert it without float8.")
    # export as it is; operators that ONNX does not define for 16 bits then compute in float32
    optimize, external_data = options.pop("optimize", True), options.pop("external_data", True)
    options = {"opset_version": _OPSET, "verbose": False} | options
    exported = _exported(_Called(frozen, amp_model._signature), args, given, shapes)
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
    """A frozen graph as a plain module: torch.export gives a GraphModule its keyword arguments by position."""

    called: fx.GraphModule

    def __init__(self, frozen: fx.GraphModule, signature: CallSignature) -> None:
        super().__init__()
        self.__dict__["called"] = frozen
        for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            self.__dict__[table] = frozen.__dict__[table]
        self.training = frozen.training
        self.forward = MethodType(signed_forward(signature), self)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.called.forward(*args, **kwargs)


def _exported(called: _Called, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> ExportedProgram:
    """Export the model with the results of fused attention copied, which ONNX does not show.

    They may lie in memory in another order than what torch writes in place of attention, and views of it would fail.
    """
    sizes = pytree.tree_map_only(str, lambda _: torch.export.Dim.DYNAMIC, shapes)  # torch.onnx names them afterwards
    with cast("Any", fx_config).patch(backed_size_oblivious=True):  # a size of 1 stays dynamic
        program = torch.export.export(called, args, kwargs, dynamic_shapes=sizes, strict=False)
    for graph in (module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)):
        for node in (call for target in _ATTENTION for call in graph.find_nodes(op="call_function", target=target)):
            with graph.inserting_after(node):
                copy = graph.call_function(_ATEN.clone.default, (node,), {"memory_format": torch.contiguous_format})
            node.replace_all_uses_with(copy)
            copy.args, copy.meta["val"] = (node,), node.meta["val"].contiguous()
    return program
