"""Trace the ATen operators that a model's Python code calls, each with a stand-in for its result.

Sizes that the code reads become nodes. Dtypes and numbers of dimensions come from the guesses so far (see ``guess``).
"""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import sys
import types
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional
import torch.utils.checkpoint
from torch import fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute, TraceError
from torch.utils import _device as torch_device
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature
from autocastfx.capture.draft.guess import ANY, Guess, StandIns
from autocastfx.capture.failure import TORCH, frame_outside
from autocastfx.capture.leave_intact import patched_here
from autocastfx.capture.rewrites import follows_dtype
from autocastfx.capture.whole_calls import CHECKPOINT, AutogradCall, places, refuse_checkpoint
from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import value

# Find the ATen operator for a call in a model's Python code, so that drafts read like exported graphs.

_KEYWORDS = {"input": "self", "axis": "dim", "x": "self"}
_REFLECTED = {
    operator.sub: "__rsub__",
    operator.truediv: "__rdiv__",
    operator.pow: "__rpow__",
    operator.floordiv: "__rfloordiv__",
    operator.mod: "__rmod__",
}
_SYMMETRIC = (operator.add, operator.mul, operator.and_, operator.or_, operator.xor)


def overload(
    packet: OpOverloadPacket, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None:
    """Return the overload of ``packet`` that torch chooses for the arguments, and these; None if none fits.

    Args:
        packet: the operator's overloads.
        args: nodes with abstract values, and plain values.
        kwargs: the same by name.
    """
    for some_args, some_kwargs in _spellings(packet, args, kwargs):
        try:
            given = map_arg((some_args, some_kwargs), value)
            name = torch._C._jit_resolve_packet(str(packet._qualified_op_name), *given[0], **given[1])
        except Exception:  # torch raises RuntimeError or TypeError, and whatever a conversion raises
            continue
        return getattr(packet, name or "default"), some_args, some_kwargs
    return None


def _spellings(
    packet: OpOverloadPacket, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    named = {_KEYWORDS.get(name, name): arg for name, arg in kwargs.items()}
    if "out" in named and named["out"] is None:
        del named["out"]
    for spelled in dict.fromkeys((tuple(kwargs), tuple(named))):
        given = dict(zip(spelled, named.values(), strict=True)) if len(spelled) == len(named) else named
        yield args, given
        for name in packet.overloads():
            yield _lists(getattr(packet, name), args, given)
        for start in (1, 0):  # x.view(2, 3), torch.zeros(2, 3)
            if len(args) > start and all(_is_number(arg) for arg in args[start:]):
                yield (*args[:start], list(args[start:])), given


def _is_number(arg: Any) -> bool:
    return type(arg) is int or (isinstance(arg, fx.Node) and isinstance(value(arg), int))


def _lists(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Repeat a single number if the operator takes several, as for the sizes of a square kernel."""
    arguments: Any = target._schema.arguments
    counts = {a.name: a.N for a in arguments if "List[int]" in str(a.type)}
    names = [a.name for a in target._schema.arguments]

    def spelled(name: str, arg: Any) -> Any:
        return [arg] * (counts[name] or 1) if name in counts and _is_number(arg) else arg

    spread = tuple(spelled(name, arg) for name, arg in zip(names, args, strict=False))
    return (*spread, *args[len(spread) :]), {name: spelled(name, arg) for name, arg in kwargs.items()}


def reflected(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Turn ``2 - x`` into the method of ``x`` that Python calls for it; return other calls unchanged."""
    if len(args) != 2 or isinstance(args[0], (fx.Proxy, torch.Tensor)):
        return function, args
    if function in _SYMMETRIC:
        return function, (args[1], args[0])
    if function in _REFLECTED:
        return getattr(torch.Tensor, _REFLECTED[function]), (args[1], args[0])
    return function, args


# Stand-ins for tensors and sizes in a model's code while it is traced without inputs.

# Properties of tensors, and the operators that compute them.
_OPERATORS = {"T": "numpy_T", "mT": "mT", "mH": "mH", "H": "matrix_H", "real": "real", "imag": "imag"}
_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")


class Value(fx.Proxy):
    """The value of a node: a tensor, a number, or several of these. Its tracer records operations on it."""

    def __init__(self, node: fx.Node, tracer: Any) -> None:
        super().__init__(node, tracer)
        self.tracer: Any = tracer

    @property
    def is_tensor(self) -> bool:
        """True if this is one tensor."""
        return isinstance(value(self.node), torch.Tensor)

    def __getattr__(self, name: str) -> Any:
        tracer = self.tracer
        if self.is_tensor:
            if name == "shape":
                return tracer.sizes(self)
            if name == "ndim":
                return tracer.rank(self)
            if name == "dtype":
                return tracer.dtype(self)
            if name == "device":
                return tracer.device
            if name in _OPERATORS:
                return tracer.call(_OPERATORS[name], (self,), {})
            if name == "layout" or (name.startswith("is_") and not callable(getattr(torch.Tensor, name, None))):
                return getattr(value(self.node), name)
        members = tracer.members(self.node)
        return self[members.index(name)] if name in members else super().__getattr__(name)

    def __getitem__(self, index: Any) -> Any:
        count = self.tracer.count(self.node)
        if isinstance(index, slice) and count is not None:
            return tuple(self[i] for i in range(count)[index])
        return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})

    def __setitem__(self, index: Any, new: Any) -> None:
        self.tracer.assign(self, index, new)

    def __len__(self) -> int:
        count = self.tracer.count(self.node)
        if count is None:
            raise TraceError(f"the length of {self.node.name!r} is not known")
        return count

    def __iter__(self) -> Iterator[Any]:
        count = self.tracer.count(self.node)
        if count is None:
            count = _unpacked_to(sys._getframe(1))
        return self.tracer.iter(self) if count is None else iter([self[i] for i in range(count)])

    def __index__(self) -> int:
        raise TraceError("a value is used as a plain number (a loop over a length, float(x), a list of so many)")

    __float__ = __int__ = __index__


class Sizes(Value):
    """``x.shape`` of a tensor whose number of dimensions is not known."""

    def __init__(self, node: fx.Node, tracer: Any, source: Value) -> None:
        super().__init__(node, tracer)
        self.source = source

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            raise TraceError(f"the number of dimensions of {self.source.node.name!r} is not known")
        return self.tracer.emit(torch.ops.aten.sym_size.int, (self.source, index), {})

    def __iter__(self) -> Iterator[Any]:
        count = _unpacked_to(sys._getframe(1))
        if count is None:
            raise TraceError(f"the number of dimensions of {self.source.node.name!r} is not known")
        self.tracer.stand_ins.pin(self.source.node, Guess(ranks=(count,)))
        return iter([self[i] for i in range(count)])


def is_tensor(leaf: Any) -> bool:
    """True for a tensor in the model's code, real or traced."""
    return leaf.is_tensor if isinstance(leaf, Value) else isinstance(leaf, torch.Tensor)


def _unpacked_to(frame: types.FrameType) -> int | None:
    """Return the number of names that the current statement of ``frame`` unpacks a value to; None if it does not."""
    instruction = next(i for i in dis.get_instructions(frame.f_code) if i.offset == frame.f_lasti)
    return instruction.argval if instruction.opname == "UNPACK_SEQUENCE" else None


def _in_place(name: str) -> Callable[[Value, Any], Any]:
    function = getattr(operator, name)

    def write(self: Value, other: Any) -> Any:
        if self.is_tensor:  # torch.fx would record a new value, and leave the old one as it was
            return self.tracer.call(of_function(function) + "_", (self, other), {})
        return function(self, other)

    return write


for _name in _IN_PLACE:
    setattr(Value, f"__i{_name.rstrip('_')}__", _in_place(_name))


_FX = str(Path(fx.__file__).parent)
_OURS = str(Path(__file__).parents[1])  # the folder of capture, to skip its frames
_SIZES = ("size", "dim", "ndimension", "numel", "nelement")
_CASTS: dict[str, torch.dtype | None] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
    "bool": torch.bool,
    **dict.fromkeys(("to", "type", "type_as", "cuda", "cpu")),
}
# torch's modules that read the number of dimensions before any operator reveals it, with that of a batch.
_RANKS: dict[type[nn.Module], int] = {
    nn.RNNBase: 3,
    nn.RNNCellBase: 2,
    nn.EmbeddingBag: 2,
    nn.MultiheadAttention: 3,
    nn.TransformerEncoder: 3,
    nn.TransformerEncoderLayer: 3,
    nn.TransformerDecoder: 3,
    nn.TransformerDecoderLayer: 3,
    nn.Transformer: 3,
}


class Tracer(fx.Tracer):
    """One trace.

    Attributes:
        inputs: names of the arguments that become placeholders.
        stand_ins: the guesses of all values.
        device: the model's device.
        constants: tensors that are neither parameters nor buffers, by the name under which the graph reads them.
        out_spec: the nesting of the output.
    """

    def __init__(
        self, inputs: Sequence[str], signature: CallSignature, stand_ins: StandIns, device: torch.device
    ) -> None:
        super().__init__()
        self.inputs, self.signature, self.stand_ins, self.device = inputs, signature, stand_ins, device
        self.constants: dict[str, torch.Tensor] = {}
        self.out_spec = pytree.tree_structure(0)
        self._names: dict[int, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._read: dict[str, Value] = {}

    # -- the interface of torch.fx

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Make placeholders for the required arguments, and the function to call with them."""
        self._tensors = {**dict(self.root.named_parameters()), **dict(self.root.named_buffers())}
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        given = [self.create_proxy("placeholder", name, (), {}) for name in self.inputs]

        def call(root: nn.Module, *values: Any) -> Any:
            args, kwargs = self.signature.split(dict(zip(self.inputs, values, strict=True)))
            flat, self.out_spec = pytree.tree_flatten(root(*args, **kwargs))
            return tuple(flat)

        return call, [self.root, *given]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return False: every module is traced into."""
        return False

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace into ``m``, without the checks of torch's own modules, which compare unknown sizes."""
        rank = next((rank for kind, rank in _RANKS.items() if isinstance(m, kind)), None)
        if rank is not None:
            dtype = torch.int64 if isinstance(m, nn.EmbeddingBag) else next(m.parameters()).dtype
            for leaf in pytree.tree_leaves(args or tuple(kwargs.values())[:1]):
                if isinstance(leaf, Value):
                    self.stand_ins.pin(leaf.node, Guess((dtype,), (rank,)))
        with ExitStack() as stack:
            if type(m).__module__.startswith("torch.nn.modules"):
                for name in (n for n in dir(type(m)) if n.lstrip("_").startswith("check_")):
                    stack.enter_context(mock.patch.object(m, name, _no))
            return super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> Value:
        """Return the stand-in for ``node`` in the model's code."""
        return Value(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        """Turn a parameter or buffer into a value, the same for all its names."""
        name = self._names.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in self._read:
            self._read[name] = self.create_proxy("get_attr", name, (), {})
        return self._read[name]

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        name: Any = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        """Record a call in the model's code."""
        if kind == "call_method":
            return self.call(str(target), args, kwargs)
        if kind == "call_function":
            return self._function(target, args, kwargs)
        made = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        self.stand_ins.begin(made.node, Guess.of(self._tensors[target]) if kind == "get_attr" else ANY)
        return made

    def create_arg(self, a: Any) -> Any:
        """Turn values into nodes, and tensors that are not registered into constants."""
        if isinstance(a, fx.Node):
            return a
        if isinstance(a, (Value, Attribute)):
            return a.node
        return self.held(a).node if isinstance(a, torch.Tensor) else super().create_arg(a)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Answer comparisons of sizes in torch's own code as if the sizes were equal; refuse those of the model."""
        by_torch = frame_outside(_FX, _OURS).f_code.co_filename.startswith(TORCH)
        if by_torch and isinstance(value(obj.node), (bool, int)):
            compares = obj.node.target in (operator.eq, operator.ne)
            return obj.node.target is operator.eq if compares else bool(value(obj.node))
        raise TraceError("its control flow depends on a size or on a tensor's values")

    # -- attributes of values in the model's code

    def sizes(self, x: Value) -> Any:
        """``x.shape``."""
        if x.node.op == "get_attr":
            return self._tensors[str(x.node.target)].shape
        rank = self.stand_ins.guess(x.node).rank
        if rank is not None:
            return tuple(self.emit(torch.ops.aten.sym_size.int, (x, i), {}) for i in range(rank))
        return Sizes(self.emit(torch.ops.aten.sym_size.default, (x,), {}).node, self, x)

    def rank(self, x: Value) -> int:
        """``x.ndim``."""
        rank = self.stand_ins.guess(x.node).rank
        if rank is None:
            raise TraceError(f"the number of dimensions of {x.node.name!r} is not known")
        return rank

    def dtype(self, x: Value) -> torch.dtype:
        """``x.dtype``."""
        dtype = self.stand_ins.guess(x.node).dtype
        if dtype is None:
            raise TraceError(f"the dtype of {x.node.name!r} is not known")
        return dtype

    def count(self, node: fx.Node) -> int | None:
        """Return the number of members of a list or tuple; None if it depends on sizes."""
        if op_name(node) in ("chunk", "tensor_split") and isinstance(node.args[1], int):
            return node.args[1]
        abstract = value(node)
        return len(abstract) if self.members(node) and isinstance(abstract, (list, tuple)) else None

    def members(self, node: fx.Node) -> list[str]:
        """Return the names of an operator's results (``values``, ``indices``); none if it has one result."""
        returns = node.target._schema.returns if isinstance(node.target, OpOverload) else []
        return [r.name for r in returns] if len(returns) > 1 else []

    def assign(self, x: Value, index: Any, new: Any) -> None:
        """``x[index] = new``."""
        parts = index if isinstance(index, tuple) else (index,)
        by_tensor = [part for part in parts if is_tensor(part)]
        if not by_tensor:
            self.call("copy_" if is_tensor(new) else "fill_", (x[index], new), {})
        elif not is_tensor(new) and len(parts) == 1:
            self.call("masked_fill_", (x, parts[0], new), {})
        elif is_tensor(new) and len(by_tensor) == len(parts):
            self.call("index_put_", (x, list(parts), new), {})
        else:
            raise TraceError("an item assignment mixes tensors and slices in its index")

    # -- recording

    def emit(self, target: Any, args: Any, kwargs: Any) -> Value:
        """Record a node that calls ``target``.

        Raises:
            TraceError: gradients are off, which a graph would lose.
        """
        if not torch.is_grad_enabled():
            raise TraceError("a region under torch.no_grad is not traced")
        name = of_function(target).rpartition(".")[2].rpartition("::")[2]
        made = super().create_proxy("call_function", target, tuple(args), dict(kwargs), name)
        self.stand_ins.infer(made.node)
        return self.proxy(made.node)

    def call(self, name: str, args: Any, kwargs: Any, function: Any = None) -> Any:
        """Run a call by ``name``: record the operator, or run torch's Python function around operators."""
        x: Any = args[0] if args else None
        if isinstance(x, Value) and x.is_tensor:
            if name in _SIZES:
                return self._size(x, name, (*args[1:], *kwargs.values()))
            if name in _CASTS:
                return self._cast(x, name, (*args[1:], *kwargs.values()))
        python = function if function is not None else getattr(torch.Tensor, name, None)
        packet: Any = getattr(torch.ops.aten, name, None)
        if isinstance(python, types.FunctionType):
            last = next(iter(reversed(self.graph.nodes)))  # in torch 2.11 this is not an iterator
            try:
                return python(*args, **kwargs)
            except TypeError:  # it asks for a real tensor
                if packet is None:
                    raise
                for node in itertools.takewhile(lambda n: n is not last, list(reversed(self.graph.nodes))):
                    self.graph.erase_node(node)
        if packet is None:
            raise TraceError(f"{name} is no operator")
        return self.packet(packet, args, kwargs)

    def packet(self, packet: OpOverloadPacket, args: Any, kwargs: Any) -> Value:
        """Record a node that calls the fitting overload of ``packet``."""
        choice = overload(packet, self.create_arg(tuple(args)), self.create_arg(dict(kwargs)))
        if choice is None:
            raise TraceError(f"no overload of {of_function(packet)} takes the arguments")
        target, nodes, named = choice
        return self.emit(target, nodes, named)

    def held(self, tensor: torch.Tensor) -> Value:
        """Turn a parameter, a buffer or a constant into a value."""
        if id(tensor) not in self._names:
            name = f"traced_constant_{len(self.constants)}"
            self.constants[name] = self._tensors[name] = tensor
            self._names[id(tensor)] = name
        return self.getattr("", tensor, None)

    def _function(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function is getattr:
            raise TraceError(f"it reads the attribute {args[1]!r} of a tensor")
        if function is operator.getitem and isinstance(args[1], str):
            raise TraceError(f"{args[0].node.name!r} is no tensor: it has a member {args[1]!r}")
        if function is operator.getitem or not any(map(is_tensor, pytree.tree_leaves((args, kwargs)))):
            return self.emit(function, args, kwargs)
        function, args = reflected(function, args)
        if isinstance(function, OpOverload):
            return self.emit(function, args, kwargs)
        if isinstance(function, OpOverloadPacket):
            return self.packet(function, args, kwargs)
        return self.call(of_function(function), args, kwargs, function)

    def _size(self, x: Value, name: str, given: tuple[Any, ...]) -> Any:
        if name in ("dim", "ndimension"):
            return self.rank(x)
        if name in ("numel", "nelement"):
            return self.emit(torch.ops.aten.sym_numel.default, (x,), {})
        if not given or x.node.op == "get_attr":
            return self.sizes(x)[given[0]] if given else self.sizes(x)
        return self.emit(torch.ops.aten.sym_size.int, (x, given[0]), {})

    def _cast(self, x: Value, name: str, given: tuple[Any, ...]) -> Any:
        """Record ``x.to(...)`` and similar casts; none for a cast to another value's dtype that changes nothing."""
        target = next((g for g in given if isinstance(g, torch.dtype) or is_tensor(g)), _CASTS[name])
        own = self.stand_ins.guess(x.node)
        if target is None:
            if name == "type":
                raise TraceError("x.type() is not traced")
            return x  # to another device
        if is_tensor(target):
            wanted = self.stand_ins.guess(self.create_arg(target))
            if wanted.dtypes == own.dtypes:
                return x
            if wanted.dtype is None:
                raise TraceError("a cast follows a value whose dtype is not known")
            return self.emit(torch.ops.aten.to.dtype, (x, wanted.dtype), {})
        if own.dtype == target and follows_dtype(frame_outside(TORCH, _OURS)):
            return x
        return self.emit(torch.ops.aten.to.dtype, (x, target), {})


# Patch torch while a model is traced, so that its Python functions are traced into and some calls stay whole.

# Functions of these modules dispatch to arguments that are not tensors, unless these tests return False.
_WITH_TESTS = (torch.nn.functional, torch.functional, sys.modules["torch._tensor"])
_TESTS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_FROM_DATA = ("tensor", "as_tensor", "asarray")


@contextmanager
def run_through(tracer: Tracer, leaves: Sequence[str]) -> Generator[None, None, None]:
    """While open, ``tracer`` sees the operators inside of torch's Python functions, and each creation of a tensor.

    Calls of other threads are unchanged.

    Args:
        tracer: the tracer of the model.
        leaves: dotted paths of Python functions that stay whole, as custom autograd functions do.
    """
    with ExitStack() as stack:

        def patch(owner: Any, name: str, new: Any) -> None:
            stack.enter_context(patched_here(owner, name, new))

        for module in _WITH_TESTS:
            for name in (n for n in _TESTS if hasattr(module, n)):
                patch(module, name, _no)
        for name in (n for n in vars(torch.nn.functional) if n.startswith("_verify_")):  # they compare sizes
            patch(torch.nn.functional, name, _no)
        makers = {id(function) for function in torch_device._device_constructors()}
        for name, function in list(vars(torch).items()):
            if id(function) in makers:
                patch(torch, name, _recorded(tracer, function))
        patch(torch, "is_tensor", is_tensor)
        patch(torch.autograd.Function, "apply", classmethod(functools.partial(_applied, tracer)))
        patch(torch.utils.checkpoint, CHECKPOINT, refuse_checkpoint)
        patch(torch.amp.autocast_mode.autocast, "__enter__", _refuse_autocast)
        for owner, attribute, function in places(leaves):
            whole = functools.partial(_whole, tracer, function)
            patch(owner, attribute, staticmethod(whole) if isinstance(owner, type) else whole)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.enable_grad())
        yield


def _recorded(tracer: Tracer, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes tensors, so that the graph makes them in each call instead of baking one in."""
    packet: Any = getattr(torch.ops.aten, function.__name__, None)

    def make(*args: Any, **kwargs: Any) -> Any:
        by_torch = sys._getframe(1).f_code.co_filename.startswith(TORCH) and not _has_values(args, kwargs)
        if by_torch:
            return function(*args, **kwargs)
        if packet is None or function.__name__ in _FROM_DATA:
            return tracer.call("lift_fresh_copy", (tracer.held(function(*args, **kwargs)),), {})
        return tracer.packet(packet, args, {k: v for k, v in kwargs.items() if k != "requires_grad"})

    return make


def _applied(tracer: Tracer, kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    if kind.__module__.split(".")[0] == "torch":
        raise TraceError(f"{kind.__name__} is not traced")
    return tracer.emit(AutogradCall(kind), args, kwargs)


def _whole(tracer: Tracer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return tracer.emit(function, args, kwargs) if _has_values(args, kwargs) else function(*args, **kwargs)


def _no(*_: Any, **__: Any) -> bool:
    return False


def _has_values(*given: Any) -> bool:
    return any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(given))


def _refuse_autocast(*_: Any) -> Any:
    raise TraceError("a region under torch.autocast is not traced")
