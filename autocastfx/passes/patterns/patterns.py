"""The patterns that recomposing knows: formulas as models write them, and the operators that compute the same."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.proxy import GraphAppendingTracer

from autocastfx.errors import ArgumentError
from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import example, is_float32, tensors
from autocastfx.plan.plan import ALIGNED_PRODUCT
from autocastfx.runtime.operators.norms import rms_norm
from autocastfx.runtime.operators.quick_gelu import SLOPE, quick_gelu

# Patterns: formulas of several ops that one operator computes, and the search for them in a captured graph.

_TOLERANCE = 1e-6  # relative, of the numbers in a formula: models round sqrt(2/pi) to seven digits and more
_COMMUTES = ("add", "mul")

Formula = Callable[..., Any]
Found = Mapping[str, Any]  # what stands for each parameter of a formula: a node, or a number, or a list of dimensions
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Bound = Mapping[fx.Node, Any]


@dataclass(frozen=True)
class Pattern:
    """A function that models write out.

    Attributes:
        name: under which ``convert(recompose=...)`` chooses it.
        formulas: the ways in which it is written. Operands may stand in either order where that changes nothing.
        target: the operator that computes the same.
        arguments: of the operator, for what stands for the parameters of a formula; None where it does not compute the
            same of these.
        numbers: those parameters that stand for what is written into the graph, and not for a value.
        owns_casts: whether a cast of an input to float32 belongs to the function: norms are defined in float32.
        own_layout: whether the operator lays its result out in its own way, and not as the formula does.
        needs_range: whether it computes the same only in a dtype of float32's range. A row of scores that are masked
            whole gives equal weights where each is lost in finfo.min, and others where a smaller number stands for it.
        finite: those parameters that must be made in the graph, of finite numbers.
        by_default: whether ``recompose=True`` asks for it.
    """

    name: str
    formulas: tuple[Formula, ...]
    target: OpOverload
    arguments: Callable[[Found], Arguments | None]
    numbers: frozenset[str] = frozenset()
    owns_casts: bool = False
    own_layout: bool = False
    needs_range: bool = False
    finite: frozenset[str] = frozenset()
    by_default: bool = True

    @property
    def op(self) -> str:
        """The op name of ``target``."""
        return of_function(self.target)

    @cached_property
    def _results(self) -> Mapping[str, tuple[fx.Node, ...]]:
        """The last node of each formula's graph, by its op name."""
        results = [_graph(formula) for formula in self.formulas]
        return {op: tuple(r for r in results if op_name(r) == op) for op in {op_name(r) for r in results}}

    def occurrences(self, node: fx.Node) -> Iterator[tuple[Found, Arguments]]:
        """Yield the parameters' values and the operator's arguments, for each way to read ``node`` as a formula."""
        for result in self._results.get(op_name(node), ()):
            for bound in self._matches(result, node, {}):
                values = {str(known.target): value for known, value in bound.items()}
                arguments = self.arguments(values)
                if arguments is not None:
                    yield values, arguments

    def may_be_in(self, ops: frozenset[str]) -> bool:
        """True if a graph of these ops can hold a formula of the pattern."""
        return any(formula <= ops for formula in self._ops)

    @cached_property
    def _ops(self) -> tuple[frozenset[str], ...]:
        """The ops of each formula."""
        results = (result for same in self._results.values() for result in same)
        calls = ("call_function", "call_method")
        return tuple(frozenset(op_name(n) for n in result.graph.nodes if n.op in calls) for result in results)

    def _matches(self, known: Any, captured: Any, bound: Bound) -> Iterator[Bound]:
        """Every way to read ``captured``, an argument in a captured graph, as ``known``, one in a formula's graph."""
        if not isinstance(known, fx.Node):
            if _is_same(known, captured):
                yield bound
        elif known.op == "placeholder":
            values = [captured] if known.target in self.numbers else self._values(captured)
            if known in bound:
                yield from (bound for one in values if _is_same(bound[known], one))
            else:
                yield from ({**bound, known: one} for one in values)
        elif isinstance(captured, fx.Node):
            captured = _behind_casts(captured)
            if op_name(known) == op_name(captured) and known.kwargs.keys() == captured.kwargs.keys():
                rest = list(known.kwargs.values()), [captured.kwargs[key] for key in known.kwargs]
                orders = (known.args, known.args[::-1]) if op_name(known) in _COMMUTES else (known.args,)
                for args in orders if len(known.args) == len(captured.args) else ():
                    yield from self._all_match((*args, *rest[0]), (*captured.args, *rest[1]), bound)

    def _all_match(self, known: Sequence[Any], captured: Sequence[Any], bound: Bound) -> Iterator[Bound]:
        if not known:
            yield bound
            return
        for first in self._matches(known[0], captured[0], bound):
            yield from self._all_match(known[1:], captured[1:], first)

    def _values(self, captured: Any) -> list[fx.Node]:
        """The values that may stand for a parameter: what is read, and what the model's casts to float32 read there."""
        if not isinstance(captured, fx.Node):
            return []
        values = [captured]
        while op_name(values[-1]) == "to" and is_float32(values[-1].all_input_nodes[0]):
            values.append(values[-1].all_input_nodes[0])
        return values[::-1] if self.owns_casts else values


def _graph(formula: Formula) -> fx.Node:
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    parameters = inspect.signature(formula).parameters
    result: fx.Proxy = formula(*(fx.Proxy(graph.placeholder(name), tracer) for name in parameters))
    return result.node


def _is_same(known: Any, captured: Any) -> bool:
    if isinstance(known, (list, tuple)):
        return isinstance(captured, (list, tuple)) and list(known) == list(captured)
    if isinstance(known, bool) or isinstance(captured, bool):
        return known is captured
    if isinstance(known, (int, float)):
        return isinstance(captured, (int, float)) and math.isclose(captured, known, rel_tol=_TOLERANCE)
    return bool(known == captured)


def _behind_casts(node: fx.Node) -> fx.Node:
    """Return the value before the model's own casts, which belong to the formula that they stand in."""
    while op_name(node) == "to" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


# Scaled dot-product attention as models write it out, and where torch's operator computes the same.

NUMBERS = frozenset(("scale", "divisor", "dim", "first", "second"))

Scaled = Callable[[Any, Any, Any], Any]


def formulas(*, masked: bool) -> tuple[Callable[..., Any], ...]:
    """Scores scaled in some way, their softmax with or without a dtype, and dropout that drops nothing, or none."""
    scaled: tuple[Scaled, ...] = (
        lambda scores, scale, divisor: scores * scale,
        lambda scores, scale, divisor: scores / divisor,
        lambda scores, scale, divisor: scores,
    )
    softmax: tuple[Callable[[Any, Any], Any], ...] = (
        lambda scores, dim: torch.ops.aten.softmax.int(scores, dim, torch.float32),
        lambda scores, dim: torch.ops.aten.softmax.int(scores, dim),
    )
    dropped: tuple[Callable[[Any], Any], ...] = (lambda y: y, lambda y: torch.dropout(y, 0.0, True))
    return tuple(_attention(*parts, masked=masked) for parts in product(scaled, softmax, dropped))


def _attention(
    scaled: Scaled, softmax: Callable[[Any, Any], Any], dropped: Callable[[Any], Any], *, masked: bool
) -> Callable[..., Any]:
    def scores(q: Any, k: Any, first: Any, second: Any, scale: Any, divisor: Any) -> Any:
        return scaled(torch.matmul(q, k.transpose(first, second)), scale, divisor)

    def of_all(q: Any, k: Any, v: Any, first: Any, second: Any, scale: Any, divisor: Any, dim: Any) -> Any:
        return torch.matmul(dropped(softmax(scores(q, k, first, second, scale, divisor), dim)), v)

    def of_some(q: Any, k: Any, v: Any, mask: Any, first: Any, second: Any, scale: Any, divisor: Any, dim: Any) -> Any:
        return torch.matmul(dropped(softmax(scores(q, k, first, second, scale, divisor) + mask, dim)), v)

    return of_some if masked else of_all


def arguments(values: Found) -> Arguments | None:
    """Of ``scaled_dot_product_attention``, where it gives what is written out.

    Batches and heads must be the same for query, key and value; a mask must have the sizes of the scores, or 1. The
    pattern asks that it is made of finite numbers: where a row is masked by -inf alone, what is written out gives NaN
    and the operator 0. What this cannot see is a row that finfo.min masks whole: its result is the same, its gradient
    is not.
    """
    q, k, v = (tensors(values[name])[0] for name in "qkv")
    scale = 1 / values["divisor"] if _is_number(values.get("divisor")) else values.get("scale", 1.0)
    written = [values["first"], values["second"], values["dim"]]
    if q.ndim != 4 or not _is_number(scale) or not all(isinstance(dim, int) for dim in written):
        return None
    first, second, dim = (n % q.ndim for n in written)
    if {first, second} != {2, 3} or dim != 3 or not _sizes(q)[:2] == _sizes(k)[:2] == _sizes(v)[:2]:
        return None
    mask = values.get("mask")
    if mask is not None:
        scores, sizes = (*q.shape[:3], k.shape[2]), tensors(mask)[0].shape
        # In the example; that the mask was added says that it fits other sizes, too.
        fits = len(sizes) == 4 and all(
            example(n) in (example(whole), 1) for n, whole in zip(sizes, scores, strict=True)
        )
        if not fits:
            return None
    return (values["q"], values["k"], values["v"], mask), {"scale": float(scale)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0 and math.isfinite(value)


def _sizes(tensor: torch.Tensor) -> tuple[str, ...]:
    """Sizes as text: comparing symbols would add conditions to the graph."""
    return tuple(str(size) for size in tensor.shape)


_aten: Any = torch.ops.aten
One = Callable[[Any], Any]
Two = Callable[[Any, Any], Any]
Three = Callable[[Any, Any, Any], Any]
Four = Callable[[Any, Any, Any, Any], Any]
Five = Callable[[Any, Any, Any, Any, Any], Any]


# -- activations ------------------------------------------------------------------------------------------------------


def _tanh_gelu() -> Iterator[One]:
    scale, cube = math.sqrt(2 / math.pi), 0.044715
    yield from _half_of(lambda x: torch.tanh(scale * (x + cube * x**3)))
    yield from _half_of(lambda x: torch.tanh(scale * (x + cube * (x * x * x))))
    yield from _half_of(lambda x: torch.tanh(scale * (x + cube * x * x * x)))
    yield from _half_of(lambda x: torch.tanh(scale * (x + cube * (x * x) * x)))
    yield from _half_of(lambda x: torch.tanh(x * scale * (1 + cube * x * x)))
    yield from _half_of(lambda x: torch.tanh(x * scale * (1 + cube * (x * x))))
    yield from _half_of(lambda x: torch.tanh(x * scale * (1 + cube * x**2)))


def _erf_gelu() -> Iterator[One]:
    yield from _half_of(lambda x: torch.erf(x / math.sqrt(2)))
    yield from _half_of(lambda x: torch.erf(x * math.sqrt(0.5)))


def _half_of(part: One) -> Iterator[One]:
    """Half of x times one plus ``part``."""
    yield lambda x: 0.5 * x * (1 + part(x))
    yield lambda x: 0.5 * (x * (1 + part(x)))
    yield lambda x: x * (0.5 * (1 + part(x)))


def _of_x(**further: Any) -> Callable[[Found], Arguments]:
    return lambda values: ((values["x"],), further)


# -- norms ------------------------------------------------------------------------------------------------------------

_SQUARES: tuple[One, ...] = (lambda y: y**2, lambda y: y * y, torch.square)
_DIVIDED: tuple[Three, ...] = (  # by the root of a variance and epsilon
    lambda y, variance, eps: y * torch.rsqrt(variance + eps),
    lambda y, variance, eps: y / torch.sqrt(variance + eps),
    lambda y, variance, eps: y * (variance + eps) ** -0.5,
    lambda y, variance, eps: y / (variance + eps) ** 0.5,
)


def _rms_norms(square: One, divided: Three) -> Iterator[Three | Four]:
    def norm(x: Any, dims: Any, eps: Any) -> Any:
        return divided(x, square(x).mean(dims, True), eps)

    yield lambda x, dims, eps, weight: weight * norm(x, dims, eps)
    yield norm


def _layer_norms(variance: Two, divided: Three) -> Iterator[Three | Four | Five]:
    def norm(x: Any, dims: Any, eps: Any) -> Any:
        return divided(x - x.mean(dims, True), variance(x, dims), eps)

    yield lambda x, dims, eps, weight, bias: weight * norm(x, dims, eps) + bias
    yield lambda x, dims, eps, weight: weight * norm(x, dims, eps)
    yield norm


def _mean_of(square: One) -> Two:
    return lambda x, dims: square(x - x.mean(dims, True)).mean(dims, True)


_VARIANCES: tuple[Two, ...] = (
    *(_mean_of(square) for square in _SQUARES),
    lambda x, dims: _aten.var.dim(x, dims, False, True),
    lambda x, dims: _aten.var.correction(x, dims, correction=0, keepdim=True),
)


def _norm(count: int) -> Callable[[Found], Arguments | None]:
    """Arguments of a norm of ``count`` parameters, where it is over the last dimension and that has one size."""

    def arguments(values: Found) -> Arguments | None:
        x, eps, given = values["x"], values["eps"], [values[name] for name in ("weight", "bias") if name in values]
        size = tensors(x)[0].shape[-1] if tensors(x)[0].ndim else None
        is_one = type(size) is int and all(tuple(tensors(parameter)[0].shape) == (size,) for parameter in given)
        if not (is_one and _dimension(x, values["dims"]) == tensors(x)[0].ndim - 1 and isinstance(eps, (int, float))):
            return None
        return (x, [size], *given, *[None] * (count - len(given)), float(eps)), {}

    return arguments


def _dimension(x: fx.Node, dims: Any) -> int | None:
    """The only one of ``dims`` of ``x``, counted from the first."""
    one = dims[0] if isinstance(dims, (list, tuple)) and len(dims) == 1 else dims
    return one % max(tensors(x)[0].ndim, 1) if isinstance(one, int) else None


# -- softmax ----------------------------------------------------------------------------------------------------------


def _softmax() -> Iterator[Three]:
    yield _over_sum(lambda x, dims, dim: x - x.amax(dims, True))
    yield _over_sum(lambda x, dims, dim: x - x.max(dim, True)[0])
    yield _over_sum(lambda x, dims, dim: x - x.amax(dims, True).detach())
    yield _over_sum(lambda x, dims, dim: x - x.max(dim, True)[0].detach())


def _over_sum(shifted: Three) -> Three:
    def softmax(x: Any, dims: Any, dim: Any) -> Any:
        exponentials = torch.exp(shifted(x, dims, dim))
        return exponentials / exponentials.sum(dims, True)

    return softmax


def _along(values: Found) -> Arguments | None:
    dims = {_dimension(values["x"], values[name]) for name in ("dims", "dim") if name in values}
    return ((values["x"], dims.pop()), {}) if len(dims) == 1 and None not in dims else None


# ---------------------------------------------------------------------------------------------------------------------

_SIZES = frozenset(("dims", "dim", "eps"))


def _quick_gelu(x: Any) -> Any:
    return x * torch.sigmoid(SLOPE * x)


def _silu(x: Any) -> Any:
    return x * torch.sigmoid(x)


PATTERNS = (
    Pattern("tanh_gelu", tuple(_tanh_gelu()), _aten.gelu.default, _of_x(approximate="tanh")),
    Pattern("erf_gelu", tuple(_erf_gelu()), _aten.gelu.default, _of_x()),
    Pattern("quick_gelu", (_quick_gelu,), quick_gelu, _of_x()),
    Pattern("silu", (_silu,), _aten.silu.default, _of_x()),
    Pattern(
        "rms_norm",
        tuple(formula for pair in product(_SQUARES, _DIVIDED) for formula in _rms_norms(*pair)),
        rms_norm,
        _norm(1),
        _SIZES,
        owns_casts=True,
    ),
    Pattern(
        "layer_norm",
        tuple(formula for pair in product(_VARIANCES, _DIVIDED) for formula in _layer_norms(*pair)),
        _aten.layer_norm.default,
        _norm(2),
        _SIZES,
        owns_casts=True,
        own_layout=True,
    ),
    Pattern("softmax", tuple(_softmax()), _aten.softmax.int, _along, _SIZES, own_layout=True),
    *(
        Pattern(
            name,
            formulas(masked=masked),
            _aten.scaled_dot_product_attention.default,
            arguments,
            NUMBERS,
            own_layout=True,
            needs_range=masked,
            finite=frozenset(("mask",) if masked else ()),
            by_default=False,
        )
        for name, masked in (("attention", False), ("masked_attention", True))
    ),
)
LOSS_CAST = "loss_cast"  # no formula: the model's own cast to float32 before a cross entropy that is float32 anyway
REPEATED = "repeated"  # what is computed again from the same values
MATH_ATTENTION = "math_attention"  # the other way: attention with dropout on a CPU, which torch computes in float32
SHORT_ATTENTION = "short_attention"  # attention of few tokens on a CPU, of which backward computes the weights anew
GROUPED_ATTENTION = "grouped_attention"  # attention whose heads share keys and values, without a copy for each
DENSE_MASK = "dense_mask"  # a mask of strides that no fused attention of CUDA takes, laid out anew
TF32_PRODUCT = "tf32_product"  # a product that stays float32, and that a list lets CUDA compute in TF32
WIDE_LINEAR = "wide_linear"  # a large 16-bit product with a cast weight, which gets a float32 gradient straight from it
_ON_CUDA = (ALIGNED_PRODUCT, GROUPED_ATTENTION, DENSE_MASK, TF32_PRODUCT, WIDE_LINEAR)
_OTHERS = (REPEATED, LOSS_CAST, MATH_ATTENTION, SHORT_ATTENTION, *_ON_CUDA)


def chosen(recompose: bool | Sequence[str]) -> tuple[str, ...]:
    """The names of the patterns that ``convert``'s argument asks for; ``True`` is all but those on demand.

    Raises:
        ValueError: there is no pattern of a name, or the argument is no such choice.
    """
    known = (*(pattern.name for pattern in PATTERNS), *_OTHERS)
    if isinstance(recompose, bool):
        on_demand = {pattern.name for pattern in PATTERNS if not pattern.by_default}
        return tuple(name for name in known if recompose and name not in on_demand)
    if isinstance(recompose, str):
        raise ArgumentError(
            f"recompose is True, False or a sequence of names: give ({recompose!r},), not {recompose!r}"
        )
    if not isinstance(recompose, Collection):
        raise ArgumentError(f"recompose is True, False or a sequence of names, not {recompose!r}")
    if unknown := [name for name in recompose if name not in known]:
        raise ArgumentError(f"recompose: there is no pattern {unknown[0]!r}; the patterns are {', '.join(known)}")
    return tuple(name for name in known if name in recompose)
