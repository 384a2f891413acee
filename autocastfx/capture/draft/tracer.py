"""Trace the ATen operators that a model's Python code calls, each with a stand-in for its result.

Sizes that the code reads become nodes. Dtypes and numbers of dimensions come from the guesses so far (see ``guess``).
"""

from __future__ import annotations

import itertools
import operator
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.proxy import Attribute, TraceError
from torch.utils import _pytree as pytree

from autocastfx.capture.call import CallSignature
from autocastfx.capture.draft.guess import ANY, Guess, StandIns
from autocastfx.capture.draft.overload import overload, reflected
from autocastfx.capture.draft.traced_value import Sizes, Value, is_tensor
from autocastfx.capture.watch_casts import follows_dtype
from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import value

__all__ = ["TORCH", "Tracer"]

TORCH = str(Path(torch.__file__).parent)
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


def _unchecked(*_: Any, **__: Any) -> None:
    pass


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
                    stack.enter_context(mock.patch.object(m, name, _unchecked))
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
        by_torch = self.frame(_FX, _OURS).f_code.co_filename.startswith(TORCH)
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
        held = value(node)
        return len(held) if self.members(node) and isinstance(held, (list, tuple)) else None

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
        found: Any = getattr(torch.ops.aten, name, None)
        if isinstance(python, types.FunctionType):
            last = next(iter(reversed(self.graph.nodes)))  # in torch 2.11 this is not an iterator
            try:
                return python(*args, **kwargs)
            except TypeError:  # it asks for a real tensor
                if found is None:
                    raise
                for node in itertools.takewhile(lambda n: n is not last, list(reversed(self.graph.nodes))):
                    self.graph.erase_node(node)
        if found is None:
            raise TraceError(f"{name} is no operator")
        return self.packet(found, args, kwargs)

    def packet(self, packet: OpOverloadPacket, args: Any, kwargs: Any) -> Value:
        """Record a node that calls the fitting overload of ``packet``."""
        found = overload(packet, self.create_arg(tuple(args)), self.create_arg(dict(kwargs)))
        if found is None:
            raise TraceError(f"no overload of {of_function(packet)} takes the arguments")
        target, nodes, named = found
        return self.emit(target, nodes, named)

    def held(self, tensor: torch.Tensor) -> Value:
        """Turn a parameter, a buffer or a constant into a value."""
        if id(tensor) not in self._names:
            name = f"traced_constant_{len(self.constants)}"
            self.constants[name] = self._tensors[name] = tensor
            self._names[id(tensor)] = name
        return self.getattr("", tensor, None)

    def frame(self, *but: str) -> types.FrameType:
        """Return the innermost frame whose code is in none of the folders ``but``."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(but):
            frame = frame.f_back
        return frame

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
        if own.dtype == target and follows_dtype(self.frame(TORCH, _OURS)):
            return x
        return self.emit(torch.ops.aten.to.dtype, (x, target), {})
