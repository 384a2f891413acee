"""What Dynamo does otherwise than Python, or torch's own modules, and is mended while it captures."""

from __future__ import annotations

import dis
import inspect
import logging
import threading
import warnings
from collections import deque
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FunctionType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import fake_tensor
from torch.nn.modules import transformer

from autocastfx.capture.leave_intact import is_installed
from autocastfx.errors import CaptureError, StateWarning
from autocastfx.graph.node import line_of

# What forward prints, warns of and logs: in one graph, it is said when the graph has run, in each call.

_LOGS = frozenset(("debug", "info", "warning", "warn", "error", "critical", "log"))


@contextmanager
def messages_after_graph() -> Generator[None]:
    """While open, let Dynamo call ``print``, ``warnings.warn`` and methods of loggers behind a graph, not break it.

    Keyword arguments break it all the same, but for those of ``warnings.warn``; so do messages in a graph inside it.
    """
    from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable

    functions = {*torch._dynamo.config.reorderable_logging_functions, print, warnings.warn}
    before, log = DebuggingVariable.call_function, cast("Any", LoggingLoggerVariable.call_method)

    @wraps(before)
    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.value is warnings.warn:  # its level names a line of the caller's, which is not there
            category = {"category": args[1]} if len(args) > 1 else {}
            named = {name: one for name, one in {**category, **kwargs}.items() if name != "stacklevel"}
            args, kwargs = [*args[:1], *filter(None, [named.pop("category", None)])], named
        return _said_behind(tx, self, args, kwargs)

    @wraps(log)
    def call_method(self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        from torch._dynamo.exc import Unsupported
        from torch._dynamo.source import AttrSource

        try:
            return log(self, tx, name, args, kwargs)  # which may be told to leave the message out
        except Unsupported:
            if name not in _LOGS or self.source is None or not isinstance(self.value, logging.Logger):
                raise
            method = DebuggingVariable(getattr(self.value, name), source=AttrSource(self.source, name))
            return _said_behind(tx, method, args, kwargs)

    replaced = (
        patch.object(DebuggingVariable, "call_function", call_function),
        patch.object(LoggingLoggerVariable, "call_method", call_method),
    )
    with torch._dynamo.config.patch(reorderable_logging_functions=functions), replaced[0], replaced[1]:
        yield


def _said_behind(tx: Any, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Have ``function``, as Dynamo knows it, called behind the graph.

    Raises:
        Unsupported: it has keyword arguments, or is called in a graph inside the graph.
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import ConstantVariable

    if kwargs or tx.output.current_tracer.parent is not None:
        where = f"with {', '.join(kwargs)}" if kwargs else "in a graph inside a graph, as of activation checkpointing"
        raise cast("Any", Unsupported)(f"a call of {function.value.__name__} {where}")
    tx.output.root_tx.debug_locals.append((function, list(args)))
    return ConstantVariable.create(None)


# Objects that a model keeps and that Dynamo repeats or cannot hold: generators of random numbers, bounded deques.


def object_mends() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of an attribute of Dynamo's, with the owner and the name.

    - A ``torch.Generator`` is a constant of the graph, which draws from it; guards watch that it is the same object.
    - What is drawn from a ``random.Random`` breaks the graph, as Dynamo would give the same numbers in every call; and
      what NumPy draws, as they would be torch's numbers.
    - A ``deque`` keeps its bound, which Dynamo loses.
    - Attributes of a ``SimpleNamespace`` may be set, as those of other objects.
    - ``x.data`` that is kept or returned is the one of that line; Dynamo would read it when the graph has run.
    - ``x.requires_grad = True`` of a computed value does nothing where the model is one graph, which alone could read
      that gradient (:func:`refuse_leaves`).
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import ConstantVariable, builtin, user_defined
    from torch._dynamo.variables.lists import BaseListVariable
    from torch._dynamo.variables.misc import NumpyVariable, RandomVariable, get_np_to_tnp_map
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    as_proxy, draw = UserDefinedObjectVariable.as_proxy, cast("Any", RandomVariable.call_method)
    class_for: Any = BaseListVariable.cls_for_instance
    reading = _reading(TensorVariable)
    read: Any = getattr(TensorVariable, reading)
    setter: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)  # of torch 2.13, and 2.11
    setting = "_call_setattr" if hasattr(setter, "_call_setattr") else "call_setattr"
    assign: Any = getattr(setter, setting)

    @wraps(assign)
    def set_attribute(self: Any, tx: Any, owner: Any, name: Any, value: Any) -> Any:
        is_computed = isinstance(owner, TensorVariable) and owner.source is None and tx.output.root_tx.one_graph
        given = [one.as_python_constant() if one.is_python_constant() else None for one in (name, value)]
        if not is_computed or given != ["requires_grad", True] or owner.requires_grad:
            return assign(self, tx, owner, name, value)
        owner.as_proxy().node.meta[_LEAF] = True
        return value

    @wraps(as_proxy)
    def proxy_of(self: Any) -> Any:
        if not isinstance(self.value, torch.Generator) or self.source is None:
            return as_proxy(self)
        install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
        output = cast("Any", InstructionTranslator.current_tx()).output
        return output.register_static_attr_and_return_proxy("generator", self.value)

    @wraps(draw)
    def call_method(self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name in self._supported_fn_names:
            raise cast("Any", Unsupported)(f"a random.Random that the model keeps: {name} draws in Python")
        return draw(self, tx, name, args, kwargs)

    of_numpy: Any = NumpyVariable.call_function

    @wraps(of_numpy)
    def call_numpy(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if getattr(get_np_to_tnp_map().get(self.value), "__module__", "") == "torch._numpy.random":
            raise cast("Any", Unsupported)(f"a random number of NumPy's: {self.value.__name__} draws in Python")
        return of_numpy(self, tx, args, kwargs)

    class Bound(ConstantVariable):
        """The bound of a deque, whose contents Dynamo replaces, so that the order of changes is of no matter."""

        def is_constant_none(self) -> bool:
            return True

    def class_of(value: Any) -> Any:
        if type(value) is not deque or value.maxlen is None:
            return class_for(value)

        def bounded(items: Any, *, source: Any) -> Any:
            install_guard(AttrSource(source, "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
            return class_for(value)(items, maxlen=Bound(value.maxlen), source=source)

        return bounded

    is_standard: Any = user_defined.is_standard_setattr

    def is_standard_setattr(method: object) -> bool:
        return method is SimpleNamespace.__setattr__ or is_standard(method)

    @wraps(read)
    def read_attribute(self: Any, tx: Any, name: str) -> Any:
        return self.method_attr_data(tx) if name == "data" else read(self, tx, name)

    return [
        (TensorVariable, reading, read_attribute),
        (setter, setting, set_attribute),
        (user_defined, "is_standard_setattr", is_standard_setattr),
        (UserDefinedObjectVariable, "as_proxy", proxy_of),
        (RandomVariable, "call_method", call_method),
        (NumpyVariable, "call_function", call_numpy),
        (BaseListVariable, "cls_for_instance", staticmethod(class_of)),
    ]


def _reading(variable: Any) -> str:
    """Return the name of the method by which Dynamo reads an attribute."""
    return "var_getattr" if hasattr(variable, "var_getattr") else "tp_getattro_impl"  # from torch 2.15 on


def refuse_leaves(module: fx.GraphModule) -> None:
    """Refuse a graph of Dynamo's that gives out a value whose ``requires_grad`` forward has set.

    Raises:
        CaptureError: it does: who is given the value may read its gradient.
    """
    for node in module.graph.output_node().all_input_nodes:
        if node.meta.get(_LEAF):
            raise CaptureError(
                "forward sets requires_grad of a value that it has computed, and gives the value out "
                f"({line_of(node)}): a graph has no gradient for it. Compute the value outside of the model and pass "
                "it in; or convert in place, with autocastfx.enable, which runs such code as it is."
            )


_LEAF = "autocastfx_leaf"

# Tensors of a class with a ``__torch_function__``.


def class_mends() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of an attribute of Dynamo's, with the owner and the name.

    - What such a function computes with such tensors is of their class, and goes through it again; torch 2.13 switches
      it off inside of it, and the rest of the graph would do without.
    - It may read and update ``x.__dict__``, as MONAI's MetaTensor does to give its attributes on. Guards watch which
      attributes there are, besides their values. torch 2.11 breaks the graph.
    - An attribute that is set is in ``x.__dict__``, or set by the property of this name.
    """
    from torch._dynamo import side_effects
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, GlobalSource
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import VariableTracker, dicts, torch_function
    from torch._dynamo.variables.misc import DeletedVariable
    from torch._dynamo.variables.tensor import TensorVariable

    dispatch: Any = torch_function.call_torch_function

    @wraps(dispatch)
    def call_torch_function(*args: Any, is_subclass_dispatch: bool = False, **kwargs: Any) -> Any:
        return dispatch(*args, **kwargs)

    dispatching = (torch_function, "call_torch_function", call_torch_function)
    kinds: Any = getattr(side_effects, "AttrMutationKind", None)
    if kinds is None:
        return [dispatching]
    kind: Any = torch_function.TensorWithTFOverrideVariable
    read, store = getattr(kind, _reading(kind)), cast("Any", side_effects.SideEffects.store_attr)
    table: Any = dicts.SideEffectsProxyDict.get_example_value_dict

    @wraps(read)
    def read_attribute(self: Any, tx: Any, name: str) -> Any:
        if name != "__dict__":
            return read(self, tx, name)
        if self.source is not None:
            install_guard(AttrSource(self.source, name).make_guard(GuardBuilder.DICT_KEYS_MATCH))
        return dicts.DunderDictVariable.create(tx, self)

    @wraps(table)
    def table_of(variable: Any) -> dict[str, object]:
        if not isinstance(variable, TensorVariable):
            return table(variable)
        if variable.source is None:  # one that the graph makes
            return {}
        output = cast("Any", InstructionTranslator.current_tx()).output
        return dict(output.resolve_source_value(variable.source).__dict__)

    @wraps(store)
    def store_attribute(self: Any, item: Any, name: str, value: Any, *of_kind: Any) -> None:
        if of_kind or not isinstance(item, kind):
            store(self, item, name, value, *of_kind)
            return
        own = inspect.getattr_static(item.class_type, name, None)
        if isinstance(own, property) and own.fset is not None and not isinstance(value, DeletedVariable):
            tx: Any = InstructionTranslator.current_tx()
            source = AttrSource(AttrSource(GlobalSource(item.global_mangled_class_name(tx)), name), "fset")
            VariableTracker.build(tx, own.fset, source=source).call_function(tx, [item, value], {})
        else:
            store(self, item, name, value, *([] if hasattr(type(own), "__set__") else [kinds.INSTANCE_DICT]))

    return [
        dispatching,
        (kind, _reading(kind), read_attribute),
        (side_effects.SideEffects, "store_attr", store_attribute),
        (dicts.SideEffectsProxyDict, "get_example_value_dict", staticmethod(table_of)),
    ]


# Which results of a graph of Dynamo's are the next contents of the model's state: forward assigns them anew.


class _Latest(threading.local):
    """Of the graph that a thread captures: where state is among its results, by their numbers."""

    places: Mapping[int, str] = {}


_LATEST = _Latest()


def stored_results() -> Mapping[int, str]:
    """Return the names of buffers, and of attributes that the graph reads, by the results that become their contents.

    A backend calls this for the graph that it is given.
    """
    return _LATEST.places


def storing_mends() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of an attribute of Dynamo's, with the owner and the name."""
    from torch._dynamo.output_graph import OutputGraph

    before: Any = OutputGraph.compile_and_call_fx_graph

    @wraps(before)
    def compile_graph(self: Any, tx: Any, rv: Sequence[Any], root: Any) -> Any:
        _LATEST.places = _places(self, rv)
        return before(self, tx, rv, root)

    return [(OutputGraph, "compile_and_call_fx_graph", compile_graph)]


def _places(output: Any, results: Sequence[Any]) -> dict[int, str]:
    from torch._dynamo.variables import ConstDictVariable

    effects = output.side_effects
    read = {argument.source.name for argument in output.graphargs if argument.source is not None}
    stored: dict[int, str] = {}
    known: Sequence[Any] = list(effects.id_to_variable.values())
    for one in known:
        is_table = isinstance(one, ConstDictVariable) and _name_of(one.source).endswith("._buffers")
        if is_table and effects.is_modified(one):
            stored |= {id(value): key.vt.as_python_constant() for key, value in one.items.items()}
    for owner, table in effects.store_attr_mutations.items():
        if path := _name_of(owner.source):
            stored |= {id(value): name for name, value in table.items() if f"{path}.{name}" in read}
    return {i: stored[id(result)] for i, result in enumerate(results) if id(result) in stored}


def _name_of(source: Any) -> str:
    """Return how Dynamo reaches an object; nothing for one that forward has made."""
    try:
        return "" if source is None else source.name
    except NotImplementedError:
        return ""


# Values of small tensors and arrays that are made of numbers and sizes alone: Dynamo knows those of one element.

_SMALL = 64  # elements
_UNFILLED = {
    one.default for one in (torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty_strided)
}


def knowing_mends() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of an attribute of Dynamo's, with the owner and the name.

    - Such a tensor is computed while the graph is captured, and what the code asks of it is known: as ``any`` of
      ``np.array(x.shape) % 32``. Sizes in it are those of the call, as guards then say.
    - What nothing was written into yet is not known: kernels for abstract tensors begin with ``new_empty``.
    - A branch on a known value, or ``not``, is that on a number; for torch's Dynamo it depends on data.
    - Its item is a number, also of an array.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.tensor import NumpyNdarrayVariable

    method: Any = NumpyNdarrayVariable.call_method

    @wraps(method)
    def call_method(self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        known = _known(self) if name == "item" and not args and not kwargs else None
        return method(self, tx, name, args, kwargs) if known is None else ConstantVariable.create(known.item())

    dispatch: Any = fake_tensor.FakeTensorMode._dispatch_impl

    @wraps(dispatch)
    def dispatched(self: Any, operator: Any, *given: Any) -> Any:
        result = dispatch(self, operator, *given)
        if operator in _UNFILLED and isinstance(result, fake_tensor.FakeTensor):
            result.constant = None
        return result

    def on_known(step: Any) -> Any:
        @wraps(step)
        def run(self: Any, instruction: Any) -> None:
            if (known := _known(self.stack[-1])) is not None:
                self.stack[-1] = ConstantVariable.create(bool(known))
            step(self, instruction)

        return run

    def table_of(translator: Any) -> list[Any]:
        table, jumps = list[Any](translator.dispatch_table), symbolic_convert.generic_jump.__name__
        asking = {code for code, one in enumerate(table) if getattr(one, "__qualname__", "").startswith(f"{jumps}.")}
        return [on_known(one) if code in {*asking, dis.opmap["UNARY_NOT"]} else one for code, one in enumerate(table)]

    kind = type(symbolic_convert.InstructionTranslatorBase)
    translators = [one for one in vars(symbolic_convert).values() if isinstance(one, kind)]
    return [
        (fake_tensor, "CONSTANT_NUMEL_LIMIT", _SMALL),
        (fake_tensor.FakeTensorMode, dispatch.__name__, dispatched),
        (NumpyNdarrayVariable, "call_method", call_method),
        *((one, "dispatch_table", table_of(one)) for one in translators),
    ]


def _known(variable: Any) -> Tensor | None:
    """Return the one element of a tensor or array that Dynamo knows; None for others."""
    from torch._dynamo.variables.tensor import TensorVariable

    if not isinstance(variable.realize(), TensorVariable):
        return None
    known: Tensor | None = getattr(variable.as_proxy().node.meta.get("example_value"), "constant", None)
    return known if known is not None and known.numel() == 1 else None


# What does in a graph of Dynamo's something else than by itself: functions with a cache, and modules of torch's.


class _Seen(threading.local):
    """What a thread has seen while it captures."""

    pads = False

    def __init__(self) -> None:
        self.caches: dict[str, None] = {}  # functions, in words


_SEEN = _Seen()
_PARAMETERS = inspect.signature(nn.TransformerEncoder.forward)


def pads() -> bool:
    """Return whether an encoder in the graph that a backend is given may leave 0 in padded places by itself."""
    seen, _SEEN.pads = _SEEN.pads, False
    return seen


def tell_of_caches(told: dict[str, None]) -> None:
    """Warn of functions with an ``lru_cache`` that a backend's graph computes anew in each call, once of each.

    Args:
        told: the functions that were told of; the others are added.
    """
    seen, _SEEN.caches = _SEEN.caches, {}
    if new := [function for function in seen if function not in told]:
        told |= seen
        warnings.warn(
            f"forward calls {', '.join(new)}, whose functools.lru_cache a graph leaves out: it computes the result "
            "anew in each call. If that draws random numbers or reads what may change, compute it outside of forward.",
            StateWarning,
            stacklevel=2,
        )


def cache_mends() -> list[tuple[Any, str, Any]]:
    """Note functions with a cache, but for those of libraries, which cache what only depends on the arguments."""
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable

    call = WrapperUserFunctionVariable.call_function

    @wraps(call)
    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self.wrapper_obj, "__wrapped__", None) if hasattr(self.wrapper_obj, "cache_info") else None
        if isinstance(function, FunctionType) and not is_installed(function):
            code = function.__code__
            _SEEN.caches[f"{function.__qualname__} at {code.co_filename}:{code.co_firstlineno}"] = None
        return call(self, *args, **kwargs)

    return [(WrapperUserFunctionVariable, "call_function", call_function)]


def tell_of_padding() -> None:
    """Warn of such an encoder."""
    warnings.warn(
        "the converted model computes the padded places of an nn.TransformerEncoder's output, as torch does in "
        "training and under torch.compile. In evaluation without gradients the model itself may leave 0 there: "
        "read none of these places, or make the encoder with enable_nested_tensor=False.",
        StateWarning,
        stacklevel=2,
    )


def note_call(function: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Look at a function that Dynamo is about to follow, and at the variables of Dynamo's that it gets."""
    if function is nn.TransformerEncoder.forward:
        given = {name: one for name, one in _PARAMETERS.bind(*args, **kwargs).arguments.items() if not _is_none(one)}
        encoder = given["self"].value
        _SEEN.pads |= "src_key_padding_mask" in given and "mask" not in given and _may_leave_zeros(encoder)


def written_out(tx: Any, function: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a function that Dynamo follows in the place of torch's, which reads numbers; None if it follows that."""
    if function is transformer._detect_is_causal_mask and tx.f_code.co_filename != transformer.__file__:
        return None  # who else asks wants to know
    if function is F.batch_norm and not any(map(_is_of_tensor, (*args, *kwargs.values()))):
        return None
    return _WRITTEN_OUT.get(cast("Any", function)) if isinstance(function, Hashable) else None


def _is_said_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Do not compare a mask with the causal one, which only selects a faster kernel that needs no mask."""
    return is_causal is True


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Read the momentum from a tensor, as with ``momentum=None``: torch's operator takes a plain number."""
    if not training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, 0.0, eps)
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    result = F.batch_norm(input, mean, var, weight, bias, training, 1.0, eps)  # the statistics of this batch
    with torch.no_grad():
        for average, of_batch in ((running_mean, mean), (running_var, var)):
            average.mul_(1 - momentum).add_(of_batch * momentum)
    return result


def _equal(input: Tensor, other: Tensor) -> Any:
    """Compare as torch does: the shapes are equal, and so are all elements after promotion to one dtype."""
    return input.shape == other.shape and input.eq(other).all().item()


def _allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    """Compare as torch does, with broadcasting."""
    return input.isclose(other, rtol, atol, equal_nan).all().item()


_WRITTEN_OUT: Mapping[Any, Any] = {
    transformer._detect_is_causal_mask: _is_said_causal,
    F.batch_norm: _batch_norm,
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.allclose: _allclose,
    Tensor.allclose: _allclose,
}


def _may_leave_zeros(encoder: nn.TransformerEncoder) -> bool:
    return bool(encoder.use_nested_tensor) and not encoder.training


def _is_of_tensor(variable: Any) -> bool:
    """True for a number that Dynamo reads from a tensor, and not from Python."""
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(variable, SymNodeVariable) and bool(free_unbacked_symbols(variable.sym_num))


def _is_none(variable: Any) -> bool:
    return bool(variable.is_python_constant()) and variable.as_python_constant() is None
