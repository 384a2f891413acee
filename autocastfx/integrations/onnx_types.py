"""Give operators of an ONNX graph float32 between casts where ONNX does not define them for the dtypes that they read.

torch's kernels take 16-bit values beside float32 parameters, and compute in float32. ONNX's operators mostly take one
dtype, so what torch's exporter writes of a converted model is invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["widen"]

# ONNX lets the parameters of a batch norm have another dtype than its input. But onnxscript's optimizer merges them
# into a convolution before it whatever their dtype, and onnxruntime has no kernel for it.
_ONE_DTYPE = {"BatchNormalization": {"T1": "T", "T2": "T"}}
_CASTS = ("Cast", "CastLike")


def widen(model: ir.Model, *, all_low: bool = False) -> None:
    """Let operators compute in float32 that ONNX does not define for the dtypes that they read, or all 16-bit ones.

    Args:
        model: is changed.
        all_low: every operator that reads 16-bit values, and rounds its results to 16 bits.
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
    for variable, found in dtypes.items():
        low = found & {DataType.FLOAT16, DataType.BFLOAT16}
        kinds = {f"tensor({dtype.name.lower()})" for dtype in low}
        mixed = DataType.FLOAT in found or not kinds <= set(allowed.get(variable, [variable]))
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
