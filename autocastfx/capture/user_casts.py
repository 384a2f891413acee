"""What a trace would lose: casts that change nothing here, and numbers where operators ask for one."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import fx
from torch._ops import OpOverload
from torch.autograd import grad_mode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autocastfx.capture.leave_intact import patched_here

# Note in Dynamo's nodes what a trace would lose: what a cast means that changes nothing in float32, and modules.


_NOTE = "autocastfx_cast"
_METHODS = ("to", "float", "type", "type_as")
_FACTORIES = (torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace)
_SWITCHES = (torch._C._set_grad_enabled, grad_mode._enter_inference_mode, grad_mode._exit_inference_mode)


@dataclass(frozen=True)
class NotedCast:
    """A cast, or a tensor that is made, as the model's code writes it.

    Attributes:
        source: the text of the call.
        asked: the value whose dtype the code has read last; None if it has read none.
    """

    source: str
    asked: fx.Node | None

    @property
    def follows(self) -> bool:
        """True if the code asks for the dtype of another value, and not for float32."""
        return ".dtype" in self.source and "float" not in self.source


def mends_that_note() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of attributes of Dynamo's, so that its casts hold a :class:`NotedCast`.

    Its switches of gradients hold the module that makes them, as its other nodes do.
    """
    from torch._dynamo.output_graph import SubgraphTracer
    from torch._dynamo.variables import TensorVariable

    create: Any = SubgraphTracer.create_proxy
    create_bare: Any = SubgraphTracer.create_node
    read: Any = TensorVariable.method_attr_dtype

    @wraps(create)
    def create_proxy(self: Any, kind: str, target: Any, *rest: Any, **kwargs: Any) -> Any:
        proxy = create(self, kind, target, *rest, **kwargs)
        is_cast = kind == "call_method" and target in _METHODS
        if is_cast or (kind == "call_function" and target in _FACTORIES):
            asked = getattr(self.output_graph, _NOTE, None)
            proxy.node.meta[_NOTE] = NotedCast(_source(self.output_graph.current_tx), asked)
        return proxy

    @wraps(create_bare)
    def create_node(self: Any, kind: str, target: Any, *rest: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = create_bare(self, kind, target, *rest, **kwargs)
        if target in _SWITCHES:
            node.meta["nn_module_stack"] = dict(self.output_graph.current_tx.nn_module_stack)
        return node

    @wraps(read)
    def method_attr_dtype(self: Any, tx: Any) -> Any:
        setattr(tx.output, _NOTE, self.as_proxy().node)
        return read(self, tx)

    return [
        (SubgraphTracer, "create_proxy", create_proxy),
        (SubgraphTracer, "create_node", create_node),
        (TensorVariable, "method_attr_dtype", method_attr_dtype),
    ]


def _source(frame: Any) -> str:
    """Return the text of the call that Dynamo is at; before Python 3.11, the whole line."""
    while frame.f_code.co_name == "__torch_function__" and frame.parent is not None:  # of a mode, like a default device
        frame = frame.parent
    file, at = frame.f_code.co_filename, frame.current_instruction.positions
    if at is None or None in (at.lineno, at.end_lineno, at.col_offset, at.end_col_offset):
        return linecache.getline(file, frame.lineno or 0)
    lines = [linecache.getline(file, number) for number in range(at.lineno, at.end_lineno + 1)]
    lines[-1] = lines[-1].encode()[: at.end_col_offset].decode(errors="ignore")
    lines[0] = lines[0].encode()[at.col_offset :].decode(errors="ignore")
    text = "".join(lines)
    return text[text.rfind(".to(") :] if ".to(" in text else text  # the text before is the receiver of the call


def run_cast(
    node: fx.Node, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], env: Mapping[fx.Node, Any]
) -> Any:
    """Run a cast, or what makes a tensor, so that a trace keeps what it means.

    ``x.float()`` of a float32 ``x`` returns ``x``, so a tracer would make later readers of ``x`` read the cast. Applied
    to an alias of ``x``, the cast stays in its place. ``x.to(y.dtype)`` and ``x.type_as(y)`` ask for the dtype of
    ``y``, not for float32, which a graph would bake in. They become ``type_as`` nodes, or aliases if ``y`` is unknown;
    so do tensors made with ``dtype=y.dtype``. ``tidy`` removes these nodes, unless dtypes are to be followed.

    Args:
        node: of Dynamo's graph, with a note or without.
        func: what it calls.
        args: values.
        kwargs: values.
        env: the values of nodes that are still to be read.
    """
    note = node.meta.get(_NOTE)
    if not isinstance(note, NotedCast):
        return func(*args, **kwargs)
    asked = env.get(note.asked) if note.asked is not None else None
    is_asked = isinstance(asked, torch.Tensor) and asked.dtype in (*args[1:], *kwargs.values())
    if func in _FACTORIES:
        made = func(*args, **kwargs)
        return _as_type_of(made, asked) if is_asked and note.follows else made
    alias, given = torch.ops.aten.alias.default(args[0]), (*args[1:], *kwargs.values())
    others = (torch.Tensor, torch.device, str)
    follows = note.follows or (func is not torch.Tensor.float and any(isinstance(one, others) for one in given))
    if not (follows and _changes_nothing(func, args, kwargs)):
        return func(alias, *args[1:], **kwargs)
    named = next((one for one in given if isinstance(one, torch.Tensor)), asked if is_asked else None)
    return alias if named is None else torch.ops.aten.type_as.default(alias, named)


def is_noted(node: fx.Node) -> bool:
    """True for a node that :func:`run_cast` runs otherwise."""
    return _NOTE in node.meta


def _as_type_of(made: torch.Tensor, other: Any) -> torch.Tensor:
    return torch.ops.aten.type_as.default(torch.ops.aten.alias.default(made), other)


def _changes_nothing(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    given = (*args[1:], *kwargs.values())
    if len(given) != 1 or set(kwargs) - {"dtype", "other"}:
        return False
    (target,) = given
    if isinstance(target, torch.Tensor):
        return (target.dtype, target.device) == (args[0].dtype, args[0].device)
    if isinstance(target, (str, torch.device)) and func is torch.Tensor.to:
        return torch.device(target) == args[0].device
    return target == args[0].dtype


# Keep a number that changes from call to call an input of the graph where an operator's schema asks for a ``float``.


Record = Callable[[OpOverload, Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any]
_OF_C = (BuiltinFunctionType, MethodDescriptorType)
_MAKES_SIZES = "upsample"  # in the names of operators whose sizes depend on their numbers


@contextmanager
def keeping_floats(record: Record | None = None) -> Generator[None]:
    """While open, call operators with the present numbers in the place of symbolic ones, and fix none.

    Args:
        record: called in the place of an operator, with its overload, what runs it so, and its own arguments; None:
            such operators run.
    """
    with ExitStack() as stack:
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
            stack.enter_context(patched_here(functional, name, _no))  # they go on to the operators
        stack.enter_context(_KeptFloats(record))
        yield


class _KeptFloats(TorchFunctionMode):
    def __init__(self, record: Record | None) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        overload = _taking_floats(func, args, kwargs)
        if overload is None:
            return func(*args, **kwargs)
        given, named = pytree.tree_map_only(torch.SymFloat, _present, (args, kwargs))
        run = partial(func, *given, **named)
        return run() if self.record is None else self.record(overload, run, args, kwargs)


def _no(*_: object) -> bool:
    return False


def _present(number: Any) -> float:
    return number.node.hint


def _taking_floats(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload | None:
    """Return the overload of a call that is given symbolic numbers for floats, and for nothing else; None otherwise."""
    numbers = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.SymFloat)]
    if not numbers or any(number.node.hint is None for number in numbers):
        return None
    name = str(func.__name__) if isinstance(func, _OF_C) else ""
    overload: Any = getattr(getattr(torch.ops.aten, name, None), "default", None) if name else None
    if overload is None or _MAKES_SIZES in name:
        return None
    arguments = overload._schema.arguments
    by_name = {argument.name: argument for argument in arguments}
    if len(args) > sum(not argument.kwarg_only for argument in arguments) or not kwargs.keys() <= by_name.keys():
        return None
    given = [*zip(arguments, args, strict=False), *((by_name[name], one) for name, one in kwargs.items())]
    kinds = [str(argument.real_type) for argument, one in given if isinstance(one, torch.SymFloat)]
    return overload if all(kind in ("float", "Optional[float]") for kind in kinds) else None


@contextmanager
def floats_kept() -> Generator[None]:
    """While open, let Dynamo find the results of operators without fixing their numbers, and ints as it does floats."""
    from torch._dynamo import utils

    run_node = cast("Any", utils.run_node)

    @wraps(run_node)
    def run(tracer: Any, node: Any, args: Any, kwargs: Any, nnmodule: Any) -> Any:
        if any(isinstance(one, torch.SymFloat) for one in (*args, *kwargs.values())):
            with keeping_floats():
                return run_node(tracer, node, args, kwargs, nnmodule)
        return run_node(tracer, node, args, kwargs, nnmodule)

    with patch.object(utils, "run_node", run), torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        yield
