"""Results of operators for any size, which torch's own ask about, and the sizes of matrix products."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from autocastfx.graph.node import argument, example, tensors, value

# Abstract results for any size, of operators whose own abstract results in torch ask about sizes.
#
# torch unrolls the loop of ``lstm``, ``gru`` and ``rnn`` over the length, and asks of ``linear`` whether its input is
# contiguous, which a size of 1 decides. A graph captured so holds for that length, or that size, alone. torch 2.11
# also takes the size of ``x[:, :n]`` for a number of its own, of which it does not know what else is as large.

_aten: Any = torch.ops.aten
_fake_impls: Any = fake_impls


def _input(
    input: Tensor,
    hidden: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    steps, batch = (1, 0) if batch_first else (0, 1)
    return _results(input, (input.shape[steps], input.shape[batch]), hidden, weights, bidirectional, batch_first)


def _packed(
    data: Tensor,
    batch_sizes: Tensor,
    hidden: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    return _results(data, (data.shape[0],), hidden, weights, bidirectional, False)


def _results(
    input: Tensor,
    sizes: tuple[Any, ...],
    hidden: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    states = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    read = [input, *states, *weights]
    dtype, differing = input.dtype, {t.dtype for t in read} - {input.dtype}
    if differing and torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
    elif differing:
        raise RuntimeError(f"a recurrent layer takes one dtype, not {input.dtype} and {differing.pop()}")
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    output = input.new_empty((*sizes, width), dtype=dtype)
    last = (torch.empty_like(state, dtype=dtype) for state in states)
    results = (output.transpose(0, 1) if batch_first else output, *last)
    return tuple(_made_of(t, read) for t in results)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dtype != weight.dtype:
        raise RuntimeError(f"linear: an input of {input.dtype} does not fit a weight of {weight.dtype}")
    if input.device != weight.device:
        raise RuntimeError(f"linear: an input on {input.device} does not fit a weight on {weight.device}")
    if weight.ndim != 2 or input.ndim == 0 or input.layout != torch.strided:
        product = input @ weight.t()  # which says what is wrong, if something is
        return product if bias is None else product + bias
    torch._check(
        input.shape[-1] == weight.shape[1],
        lambda: f"linear: a last size of {input.shape[-1]} does not fit a weight of size {list(weight.shape)}",
    )
    output = input.new_empty((*input.shape[:-1], weight.shape[0]))
    return _made_of(output, [input, weight] if bias is None else [input, weight, bias])


def _made_of(output: Tensor, read: Sequence[Tensor]) -> Tensor:
    """Let autograd see where ``output`` comes from."""
    learning = next((t for t in read if t.requires_grad), None)
    return output if learning is None or not torch.is_grad_enabled() else output + learning.sum()


RECURRENT: Mapping[Any, Callable[..., tuple[Tensor, ...]]] = {
    getattr(getattr(_aten, name), overload): rule
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload, rule in (("input", _input), ("data", _packed))
}


_Slice = Callable[..., Tensor]


def _slice(
    own: _Slice, mode: Any, op: Any, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    """Of ``aten::slice``, as in torch 2.13; ``own`` is torch's, for what it refuses and where data decides the size."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    if x.ndim == 0 or step <= 0 or x.is_quantized:
        return own(mode, op, x, dim, start, end, step)
    size = x.shape[dim]
    first = 0 if start is None else _place(size, start)
    last = size if end is None or statically_known_true(end == sys.maxsize) else _place(size, end)
    if first is None or last is None:
        return own(mode, op, x, dim, start, end, step)
    length = last - first
    if not guard_or_false(length >= 0):
        length = 0 if guard_or_false(length <= 0) else torch.sym_max(length, 0)
    sizes, strides = list[Any](x.shape), list[Any](x.stride())
    offset = x.storage_offset() + first * strides[dim]
    sizes[dim], strides[dim] = (length + step - 1) // step, strides[dim] * step
    return x.as_strided(sizes, strides, offset)


def _place(size: Any, index: Any) -> Any:
    """Where in ``size`` a slice begins or ends; None if it is not known from which end the index counts."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    place = _fake_impls._compute_slice_index(size, index)
    if place is None and guard_or_false(index >= 0):
        return torch.sym_min(index, size)
    if place is None and guard_or_false(index < 0):
        return torch.sym_max(index + size, 0)
    return place


_KEYS = tuple(
    getattr(cast("Any", torch._C).DispatchKey, name) for name in ("Autograd", "CompositeImplicitAutograd", "Meta")
)


class _Kernels:
    """torch's Python kernels of these operators, which only tracers call, replaced while a thread asks for it.

    Other threads get torch's own, and so does a tracer that would record what a rule does.
    """

    def __init__(self, rules: Mapping[Any, Callable[..., Any]]) -> None:
        self.rules = rules
        self._lock, self._opened = threading.Lock(), 0
        self._thread = threading.local()
        self._own: dict[Any, dict[Any, Any]] = {}

    @contextmanager
    def asked(self, answer: bool) -> Generator[None, None, None]:
        """Ask for the rules in this thread, or for torch's own kernels, for as long as it is open."""
        before, self._thread.is_asked = self._is_asked(), answer
        with self._lock:
            self._opened += 1
            if self._opened == 1:
                self._install()
        try:
            yield
        finally:
            self._thread.is_asked = before
            with self._lock:
                self._opened -= 1
                if self._opened == 0:
                    self._remove()

    def _is_asked(self) -> bool:
        return getattr(self._thread, "is_asked", False)

    def _install(self) -> None:
        for op, rule in self.rules.items():
            self._own[op] = dict(op.py_kernels)
            op.py_kernels.update({key: self._either(op, key, rule, self._own[op].get(key)) for key in _KEYS})
            op._dispatch_cache.clear()
        own = self._own_slice = _fake_impls.op_implementations_dict[_aten.slice.Tensor]

        def either(*args: Any, **kwargs: Any) -> Tensor:
            return _slice(own, *args, **kwargs) if self._is_asked() else own(*args, **kwargs)

        _fake_impls.op_implementations_dict[_aten.slice.Tensor] = either

    def _remove(self) -> None:
        _fake_impls.op_implementations_dict[_aten.slice.Tensor] = self._own_slice
        for op, kernels in self._own.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
        self._own.clear()

    def _either(
        self, op: Any, key: Any, rule: Callable[..., Any], own: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_asked() and get_proxy_mode() is None:
                return rule(*args, **kwargs)
            return op._op_dk(key, *args, **kwargs) if own is None else own(*args, **kwargs)

        return call


_RULES = _Kernels({**RECURRENT, _aten.linear.default: _linear})


def any_size() -> AbstractContextManager[None]:
    """While open, a tracer in this thread takes these results for those of the operators."""
    return _RULES.asked(True)


def own_sizes() -> AbstractContextManager[None]:
    """While open inside :func:`any_size`, torch's own kernels make the results, whose loops a compiler needs."""
    return _RULES.asked(False)


# Abstract values of a graph: dtypes, and concrete sizes in place of symbolic ones.


def dtypes_of(abstract: Any) -> tuple[torch.dtype, ...]:
    """Return the dtypes of all tensors in an abstract value."""
    return tuple(leaf.dtype for leaf in pytree.tree_leaves(abstract) if isinstance(leaf, torch.Tensor))


def concrete_sizes(graph: fx.Graph) -> Callable[[Any], Any]:
    """Return a function that gives abstract values of ``graph`` the sizes of the example inputs.

    It is the identity if any size in the graph depends on data, because such a size has no example. Data-dependent
    floats and booleans become 1: no dtype depends on them.
    """
    leaves = [leaf for node in graph.nodes for leaf in pytree.tree_leaves(value(node))]
    if any(isinstance(leaf, (torch.Tensor, torch.SymInt)) and _depends_on_data(leaf) for leaf in leaves):
        return lambda abstract: abstract
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports sympy, which takes long

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())  # for a number that a tensor holds
    made: dict[int, tuple[FakeTensor, Any]] = {}  # keeps the abstract value alive, so that its id is not reused

    def concrete(leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            if id(leaf) not in made:
                made[id(leaf)] = leaf, _of_example_sizes(leaf, mode)
            return made[id(leaf)][1]
        number = example(leaf)
        return leaf.node.pytype(1) if number is None and isinstance(leaf, (torch.SymFloat, torch.SymBool)) else number

    def concrete_value(abstract: Any) -> Any:
        is_leaf = isinstance(abstract, torch.Tensor)
        return concrete(abstract) if is_leaf else pytree.tree_map(concrete, abstract)

    return concrete_value


def in_dtype_of(captured: Any, actual: Any) -> Any:
    """The abstract value ``captured``, its tensors in the dtypes of those of ``actual``."""
    leaves, spec = pytree.tree_flatten(captured)
    cast_leaves = (_in_dtype_of(a, b) for a, b in zip(leaves, pytree.tree_leaves(actual), strict=True))
    return pytree.tree_unflatten(cast_leaves, spec)


def _in_dtype_of(captured: Any, actual: Any) -> Any:
    if not isinstance(captured, torch.Tensor) or captured.dtype == actual.dtype:
        return captured
    if not isinstance(captured, FakeTensor) or captured.layout != torch.strided:
        return actual
    with captured.fake_mode:
        return torch.empty_strided(captured.shape, captured.stride(), dtype=actual.dtype, device=captured.device)


def abstract_call(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``target`` on abstract values, without gradients and without an ambient autocast."""
    leaves = pytree.tree_leaves((args, kwargs))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    if mode is None:
        return target(*args, **kwargs)
    with mode, torch._C._DisableAutocast(), enable_python_dispatcher(), torch.no_grad():  # it knows symbolic sizes
        return RECURRENT.get(target, target)(*args, **kwargs)


def abstract_copy(abstract: Any) -> Any:
    """Return an abstract value like another one, whose sizes are numbers, in memory of its own."""
    return pytree.tree_map_only(FakeTensor, lambda leaf: _of_example_sizes(leaf, leaf.fake_mode), abstract)


def _of_example_sizes(abstract: FakeTensor, mode: FakeTensorMode) -> FakeTensor:
    """Do as ``torch.empty_strided`` under ``mode``, but without dispatch, which takes most of the time."""
    sizes = [example(n) for n in abstract.shape], [example(n) for n in abstract.stride()]
    with no_dispatch():
        elements = torch.empty_strided(*sizes, dtype=abstract.dtype, device="meta")
    return FakeTensor(mode, elements, abstract.device)


def _depends_on_data(leaf: torch.Tensor | torch.SymInt) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided:
        return True
    return bool(free_unbacked_symbols(leaf))


# Find how many elements a contraction adds up for each element of its result.

# Sources of the depth: a weight (convolutions), a weight whose first dimension is the input's (transposed ones), two
# matrices, two vectors, an einsum's equation, the dimensions named (tensordot), nothing (``outer`` contracts none), or
# the numbers of elements read and produced.
KINDS = ("weight", "transposed_weight", "matrices", "vectors", "equation", "dimensions", "outer", "elements")
_LEFT = ("mat1", "batch1", "mat", "self", "input", "x")
_RIGHT = ("mat2", "batch2", "vec", "other", "tensor", "weight", "y")


Size = Callable[[Any], Any]


@dataclass(frozen=True)
class Product:
    """A contraction.

    Attributes:
        depth: the number of elements added up into one element of the result.
        is_sum: True if each result is one row times one column at any sizes: a dot product per member of a batch.
    """

    depth: float
    is_sum: bool = False


def product(node: fx.Node, kind: str, size: Size = example) -> Product | None:
    """Describe ``node`` as a contraction; None if its sizes are unknown or depend on data.

    Args:
        node: a node with an abstract value.
        kind: one of :data:`KINDS`.
        size: maps a size, which may be symbolic, to a number: its value for the example inputs, or its upper bound;
            to itself, if the depth is to be symbolic; to None if unknown.
    """
    if kind == "outer":
        return Product(1)
    if kind in ("weight", "transposed_weight"):
        sizes, axis = _sizes(argument(node, "weight"), size), int(kind != "weight")
        groups = argument(node, "groups") if axis else 1
        return Product(math.prod(sizes) // max(sizes[axis], 1) // (groups or 1)) if sizes else None
    if kind == "vectors":
        sizes = _sizes(next((a for n in _LEFT if (a := argument(node, n)) is not None), None), size)
        return Product(sizes[-1], is_sum=True) if sizes else None
    if kind == "matrices":
        return _of_matrices(node, size)
    if kind == "equation":
        operands = argument(node, "tensors") or argument(node, "operands") or ()
        return _of_equation(str(argument(node, "equation")), operands, size)
    if kind == "dimensions":
        sizes, dims = _sizes(argument(node, "self"), size), argument(node, "dims_self")
        return Product(math.prod(sizes[d] for d in dims)) if sizes and isinstance(dims, (list, tuple)) else None
    before, after = (_sizes(each, size) for each in (next(iter(node.all_input_nodes), None), node))
    return Product(math.prod(before) // max(math.prod(after), 1)) if before is not None and after is not None else None


def _of_matrices(node: fx.Node, size: Size) -> Product | None:
    left, right = (next((a for n in names if (a := argument(node, n)) is not None), None) for names in (_LEFT, _RIGHT))
    sizes, others = _sizes(left, size), _sizes(right, size)
    if not sizes:
        return None
    rows, columns = _shape(left)[-2:-1], _shape(right)[-1:] if others and len(others) > 1 else ()
    return Product(sizes[-1], all(_is_one(n) for n in (*rows, *columns)) and others is not None)


def _of_equation(equation: str, operands: Sequence[Any], size: Size) -> Product | None:
    """Describe an einsum. It contracts the letters that its result lacks, and never the dimensions of an ellipsis."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != len(operands):
        return None
    letters: list[dict[str, Any]] = []
    sizes: dict[str, float] = {}
    for term, operand in zip(terms, operands, strict=True):
        before, dots, after = term.partition("...")
        known, shape = _sizes(operand, size), _shape(operand)
        if known is None:
            return None
        by_letter = dict(zip(before, shape, strict=False)) | dict(zip(reversed(after), reversed(shape), strict=False))
        sizes.update(zip(before, known, strict=False))
        sizes.update(zip(reversed(after), reversed(known), strict=False))
        letters.append(by_letter | ({"...": None} if dots and len(shape) > len(before + after) else {}))
    kept = {*result.replace("...", ""), "..."}
    shared = set.intersection(*(set(each) for each in letters))
    apart = [n for each in letters for letter, n in each.items() if letter in kept and letter not in shared]
    contracted = math.prod(n for letter, n in sizes.items() if letter not in kept)
    return Product(contracted, all(map(_is_one, apart)) and contracted > 1)


def _is_one(size: Any) -> bool:
    """True for a size that is 1 in every call; false for a symbolic size, even if it is 1 in the example."""
    return isinstance(size, int) and size == 1


def _shape(node: object) -> tuple[Any, ...]:
    """Return the sizes of a node's first tensor, symbolic or not."""
    node_tensors = tensors(node) if isinstance(node, fx.Node) and value(node) is not None else ()
    return tuple(node_tensors[0].shape) if node_tensors else ()


def _sizes(node: object, size: Size) -> list[Any] | None:
    """Return the sizes of a node's first tensor as numbers; None if one is unknown."""
    node_tensors = tensors(node) if isinstance(node, fx.Node) and value(node) is not None else ()
    sizes = [size(n) for n in node_tensors[0].shape] if node_tensors else [None]
    return None if None in sizes else sizes
