"""Write a converted model as ONNX. Operators that ONNX does not define for the dtypes at hand get float32 between casts.

torch's kernels take 16-bit values beside float32 parameters, and compute in float32; ONNX's operators mostly take one
dtype. What torch's exporter writes of such operators is therefore invalid.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from autocastfx.errors import MissingExtraError, UnsupportedError
from autocastfx.runtime.amp_module import AmpModule

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch.onnx import ONNXProgram

__all__ = ["export"]

_OPSET = 22  # the first whose convolutions and recurrent layers take bfloat16
# ONNX lets the parameters of a batch norm have another dtype than its input. But onnxscript's optimizer merges them
# into a convolution before it whatever their dtype, and onnxruntime has no kernel for it.
_ONE_DTYPE = {"BatchNormalization": {"T1": "T", "T2": "T"}}
_CASTS = ("Cast", "CastLike")


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
    given = dict(kwargs or {})
    amp_model._variant_for(args, given)  # where there is none yet, it is captured now, and not inside torch's export
    optimize, external_data = options.pop("optimize", True), options.pop("external_data", True)
    options = {"opset_version": _OPSET, "verbose": False} | options
    try:
        program = torch.onnx.export(amp_model, args, kwargs=given, dynamo=True, optimize=False, **options)
    except ImportError as error:
        raise MissingExtraError("this needs onnx and onnxscript: pip install onnx onnxscript") from error
    if program is None:
        raise AssertionError("torch.onnx.export returns a program with dynamo=True")
    _widen(program.model)
    if optimize:
        program.optimize()
    if emulate:
        _widen(program.model, all_low=True)
    if path is not None:
        program.save(path, external_data=external_data)
    return program


def _widen(model: ir.Model, *, all_low: bool = False) -> None:
    """Let operators compute in float32 that ONNX does not define for the dtypes that they read, or all 16-bit ones."""
    from onnx import defs
    from onnx_ir import DataType

    for node in tuple(model.graph.all_nodes()):
        version = model.opset_imports.get(node.domain)
        if node.domain or version is None:
            continue
        schema = defs.get_schema(node.op_type, version)
        allowed = {one.type_param_str: one.allowed_type_strs for one in schema.type_constraints}
        read = list(_typed(node, node.inputs, schema.inputs))
        made = list(_typed(node, node.outputs, schema.outputs))
        dtypes: dict[str, set[DataType | None]] = {}
        for value, variable in read:
            dtypes.setdefault(variable, set()).add(value.dtype)
        for value, variable in made:
            if value.dtype is None:
                value.dtype = _made_dtype(node, dtypes.get(variable, set()))
        for variable, found in dtypes.items():
            low = found & {DataType.FLOAT16, DataType.BFLOAT16}
            wide = DataType.FLOAT in found or any(f"tensor({kind.name.lower()})" not in allowed[variable] for kind in low)
            if low and (wide or (all_low and node.op_type not in _CASTS)):
                for value, _ in (one for one in read if one[1] == variable and one[0].dtype in low):
                    _cast_before(node, value)
                for value, _ in (one for one in made if one[1] == variable and one[0].dtype in low):
                    _cast_after(node, value)


def _typed(
    node: ir.Node, values: Iterable[ir.Value | None], formals: Iterable[Any]
) -> Iterator[tuple[ir.Value, str]]:
    """Yield the tensors among ``values``, each with the type variable of the schema that binds its dtype."""
    import onnx_ir as ir

    one_dtype, declared = _ONE_DTYPE.get(node.op_type, {}), list(formals)
    for index, value in enumerate(values):
        formal = declared[min(index, len(declared) - 1)]  # the last may stand for several
        if value is not None and formal.is_homogeneous and not isinstance(value.type, ir.SequenceType):
            yield value, one_dtype.get(formal.type_str, formal.type_str)


def _made_dtype(node: ir.Node, read: set[ir.DataType | None]) -> ir.DataType | None:
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


def _cast_before(node: ir.Node, value: ir.Value) -> None:
    import onnx_ir as ir

    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
    cast.outputs[0].dtype, cast.outputs[0].shape = ir.DataType.FLOAT, value.shape
    node.graph.insert_before(node, cast)
    for index, read in enumerate(node.inputs):
        if read is value:
            node.replace_input_with(index, cast.outputs[0])


def _cast_after(node: ir.Node, value: ir.Value) -> None:
    import onnx_ir as ir

    cast = ir.node("Cast", [value], {"to": value.dtype})
    result = cast.outputs[0]
    result.dtype, result.shape, result.name = value.dtype, value.shape, value.name
    value.dtype, value.name = ir.DataType.FLOAT, f"{value.name}_float32"
    ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    node.graph.insert_after(node, cast)
