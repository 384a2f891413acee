"""The table of kernel facts loads, and every line of it is so on this device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx.passes.analysis.units import PARAMETERS
from autocastfx.passes.decide.checks import Case, Classifier, decision_by_list
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import OpList
from autocastfx.policy.yaml_tree import is_known
from autocastfx.runtime.operators.norms import layer_norm, rms_norm
from benchmarks.kernel_calls import KernelCall, kernel_calls
from benchmarks.kernel_facts import DTYPES, FACTS, LISTED, differences, in_dtype, rounds_once, ulps, without_kernel
from tests.decided import decided
from tests.helpers import TORCH, Function, is_pinned_torch, relative_error, with_pinned_torch

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]
MISSING = [
    pytest.param(device, dtype, op, marks=[pytest.mark.gpu] if device == "cuda" else [])
    for (device, dtype), ops in FACTS.no_kernel.items()
    for op in sorted(ops)
]
# Has no call on a CPU, or none that torch's samples reach (F.rms_norm is composite there).
UNTRIED = {"cudnn_batch_norm", "_fused_rms_norm"}
MIXED = sorted(FACTS.mixed_args)
_PLAIN = {"sum", "nansum", "mean", "prod"}  # which need no dimension
COMPARE = {"eq", "ne", "lt", "le", "gt", "ge"}
ROUNDS_0D = {"add", "sub", "rsub"}  # on a CPU they round a 0-d operand to 16 bits; the others read it exactly


@functools.cache
def calls(device: str) -> Mapping[str, list[KernelCall]]:
    return kernel_calls(LISTED, device, samples=2)


@functools.cache
def missing(device: str, dtype: str) -> Mapping[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of statistics of one value, of complex halves: the samples are meant to
        return without_kernel(calls(device), DTYPES[dtype])


def test_in_place_ops_have_the_facts_of_their_base() -> None:
    facts = load_kernel_facts()
    assert not facts.runs("rrelu", "float16", "cpu")
    assert not facts.runs("rrelu_", "float16", "cpu")
    assert facts.runs("rrelu", "bfloat16", "cpu")
    assert facts.runs("rrelu", "float16", "cuda")


def test_only_a_product_of_a_value_with_itself_is_a_square() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    ops = torch.ops.aten
    calls = [(ops.mul.Tensor, (x, x)), (ops.mul.Tensor, (x, y)), (ops.mul.Tensor, (x, 2)), (ops.add.Tensor, (x, x))]
    facts = load_kernel_facts()
    assert [facts.stands_for(graph.call_function(*call)) for call in calls] == ["square", None, None, None]


def test_what_the_table_calls_missing_fails_on_this_device_and_is_placed_float32() -> None:
    x = torch.rand(1, 1, 4, 4, 4)
    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        torch.nn.functional.avg_pool3d(x.bfloat16(), 2)

    def pooled(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool3d(x @ x, 2) @ torch.ones(2, 2)

    amp_model = autocastfx.convert(Function(pooled), (x,), dtype=torch.bfloat16)
    assert amp_model.plan["avg_pool3d"].decision.source == "forced:no-kernel"
    assert amp_model(x).dtype == torch.float32


# ---- no_kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "dtype", "op"), MISSING)
def test_no_kernel(device: str, dtype: str, op: str) -> None:
    if not is_known(op):
        pytest.skip("this torch has no such operator")
    assert op in calls(device), "no sample reaches it: add a call to benchmarks/kernel_calls.py"
    assert op in missing(device, dtype), "float32 and this dtype both run it, forward and backward"


@with_pinned_torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_every_other_listed_op_has_a_kernel(device: str, dtype: str) -> None:
    assert differences(missing(device, dtype), calls(device), device, dtype) == []
    assert len(calls(device)) > 0.9 * len(LISTED)


def test_a_wrong_table_is_told() -> None:
    tried, found = ["add", "avg_pool3d", "linear"], {"linear": "RuntimeError: no"}
    lines = differences(found, tried, "cpu", "bfloat16")
    assert lines[:2] == [
        "cpu bfloat16: + linear has no kernel: RuntimeError: no",
        "cpu bfloat16: - avg_pool3d has a kernel",
    ]
    assert "cpu bfloat16: ? cdist was not tried" in lines


# ---- computes_in_float32 --------------------------------------------------------------------------------------------


def _runs(op: str, dtype: str, device: str) -> list[KernelCall]:
    if op not in calls(device) and not is_pinned_torch:
        pytest.skip("this torch has no sample of it")
    if not FACTS.runs(op, dtype, device):
        pytest.skip(f"{device} has no {dtype} kernel of {op}")
    if not FACTS.keeps_numbers(op, device):
        pytest.skip(f"it rounds in between on {device}")
    if device == "cpu" and op in UNTRIED:
        assert op not in calls(device)
        pytest.skip("has no call on a CPU")
    return calls(device)[op]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", sorted(FACTS.computes_in_float32))
@pytest.mark.parametrize("device", DEVICES)
def test_computes_in_float32(device: str, op: str, dtype: str) -> None:
    """One rounding, of the result: two float32 kernels may differ in their last bits, which can move it by one ulp."""
    if (device, op, dtype) == ("cpu", "scaled_dot_product_attention", "bfloat16") and TORCH >= (2, 15):
        pytest.skip("two ulp there, where heads are in groups")
    for call in _runs(op, dtype, device):
        if device == "cuda" and call.is_random:
            pytest.skip("draws other random numbers in another dtype")
        assert rounds_once(call, DTYPES[dtype]) <= 1, call


WITH_EPSILON = sorted(op for op in FACTS.computes_in_float32 if "norm" in op)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", WITH_EPSILON)
def test_an_epsilon_below_the_smallest_16_bit_number_is_not_rounded_to_zero(op: str, dtype: str) -> None:
    """Of equal values the variance is 0: with an epsilon of 0 the result would be NaN."""
    for call in _runs(op, dtype, "cpu"):
        names = [argument.name for argument in call.function._schema.arguments]
        assert "eps" in names or "epsilon" in names

        def small(name: str, argument: Any) -> Any:
            if name in ("eps", "epsilon"):
                return 1e-12
            is_data = isinstance(argument, torch.Tensor) and name == "input"
            return torch.ones_like(argument) if is_data else argument

        tiny = call.with_arguments(small)
        result = in_dtype(tiny, DTYPES[dtype])()
        first = result[0] if isinstance(result, tuple) else result
        assert first.isfinite().all()
        assert rounds_once(tiny, DTYPES[dtype]) <= 1


def test_a_kernel_that_rounds_its_epsilon_runs_in_float32_where_that_would_be_lost() -> None:
    """CUDA's group norm: below the smallest normal number of 16 bits an epsilon loses digits, or is 0."""
    assert FACTS.keeps_numbers("group_norm", "cpu")
    assert not FACTS.keeps_numbers("group_norm", "cuda")
    graph = fx.Graph()
    x = graph.placeholder("x")
    for eps, device, is_forced in ((1e-5, "cpu", False), (1e-5, "cuda", True), (1e-3, "cuda", False)):
        node = graph.call_function(torch.ops.aten.group_norm.default, (x, 8, None, None, eps))
        rules = OpList()
        known, listed = Classifier(rules, FACTS, torch.float16, device), decision_by_list(rules, None)
        case = Case(known, node, None, listed, frozenset(), frozenset(), {})
        assert (case.has_small_number() is not None) == is_forced
        assert case.has_large_number() is None


def test_the_measure_tells_a_kernel_that_rounds_in_between() -> None:
    assert "instance_norm" not in FACTS.computes_in_float32
    assert max(rounds_once(call, torch.bfloat16) for call in calls("cpu")["instance_norm"]) > 1


# ---- operands of several dtypes -------------------------------------------------------------------------------------


def _applied(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    function = getattr(torch.ops.aten, op)
    first = (torch.arange(a.numel()).reshape(a.shape) % 2 == 0,) if op == "where" else ()
    return function(*first, a, b)


def _operands(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).abs() + 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", MIXED)
def test_a_0d_operand_is_rounded_once_at_most_and_does_not_widen(op: str, dtype: str) -> None:
    low = _operands(64).to(DTYPES[dtype])
    for scalar in (torch.tensor(1 / 3), torch.tensor(1e-9)):
        result = _applied(op, low, scalar)
        read = scalar.to(low.dtype).float() if op in ROUNDS_0D else scalar
        assert result.dtype == (torch.bool if op in COMPARE else low.dtype)
        assert result.equal(_applied(op, low.float(), read.to(low.dtype) if op in COMPARE else read).to(result.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", [((4, 6), (4, 6)), ((4, 6), (6,)), ((6,), (4, 6)), ((4, 1), (1, 6))])
@pytest.mark.parametrize("op", MIXED)
@pytest.mark.parametrize("swapped", [False, True])
def test_operands_meet_in_the_widest_dtype(op: str, shapes: tuple[Any, Any], dtype: str, swapped: bool) -> None:
    """A kernel that takes a 16-bit operand beside a float32 one gives what it gives for a cast one, backward too."""
    weights = _operands(4, 6, seed=2)

    def run(cast: bool) -> tuple[torch.Tensor, ...]:
        wide = _operands(*shapes[0]).requires_grad_()
        low = _operands(*shapes[1], seed=1).to(DTYPES[dtype]).requires_grad_()
        operands = (wide, low.float() if cast else low)
        result = _applied(op, *(operands[::-1] if swapped else operands))
        if op in COMPARE:
            return (result,)
        assert result.dtype == torch.float32
        return (result, *torch.autograd.grad((result * weights).sum(), (wide, low)))

    for mixed, explicit in zip(run(cast=False), run(cast=True), strict=True):
        assert mixed.dtype == explicit.dtype
        assert mixed.equal(explicit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", sorted(FACTS.takes_dtype))
def test_a_dtype_argument_is_as_good_as_a_cast(op: str, dtype: str) -> None:
    def run(cast: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = _operands(16, 33).to(DTYPES[dtype]).requires_grad_()
        dim = () if op in _PLAIN else (1,)
        function = getattr(torch.ops.aten, op)
        result = function(x.float(), *dim) if cast else function(x, *dim, dtype=torch.float32)
        assert result.dtype == torch.float32
        (gradient,) = torch.autograd.grad((result * result).sum(), x)
        return result, gradient

    for asked, explicit in zip(run(cast=False), run(cast=True), strict=True):
        assert asked.dtype == explicit.dtype
        assert asked.equal(explicit)


# ---- folds and expands_range ----------------------------------------------------------------------------------------

# At level "exact", and at any level what takes float32 parameters.
FOLDS = [
    pytest.param(device, dtype, op, marks=[pytest.mark.gpu] if device == "cuda" else [])
    for (level, device, dtype), ops in FACTS.folds.items()
    for op in sorted(ops if level == "exact" else ops & FACTS.float32_parameters[device])
]
ROUNDING = [
    pytest.param(device, dtype, op, marks=[pytest.mark.gpu] if device == "cuda" else [])
    for (level, device, dtype), ops in FACTS.folds.items()
    for op in sorted(ops)
    if level == "kernel"
]
_aten = torch.ops.aten
# A call of each op that folds at level "kernel", of an input of 64 rows and of a weight and a bias of 512 numbers.
_ROUNDING: dict[str, Callable[..., torch.Tensor]] = {
    "layer_norm": lambda x, w, b: _aten.layer_norm(x, [512], w, b),  # on CUDA
    "autocastfx::layer_norm": lambda x, w, b: layer_norm(x, [512], w, b),
    "rms_norm": lambda x, w, b: _aten.rms_norm(x, [512], w) + 0 * b,
    "softmax": lambda x, w, b: _aten.softmax(x, -1) + 0 * (w + b),
    "_safe_softmax": lambda x, w, b: _aten._safe_softmax(x, -1) + 0 * (w + b),
    "log_softmax": lambda x, w, b: _aten.log_softmax(x, -1) + 0 * (w + b),
    "log_sigmoid": lambda x, w, b: _aten.log_sigmoid(x) + 0 * (w + b),
    "softplus": lambda x, w, b: _aten.softplus(x) + 0 * (w + b),
}


def _sized_as_in_models(device: str) -> dict[str, KernelCall]:
    """A call of each op that folds and reads float32 parameters, of an image or of tokens."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    images, tokens = some(4, 64, 32, 32), some(8, 128, 768)
    return {
        "group_norm": KernelCall(_aten.group_norm.default, (images, 8, 1 + some(64) / 8, some(64) / 8), {}),
        "autocastfx::layer_norm": KernelCall(layer_norm, (tokens, [768], 1 + some(768) / 8, some(768) / 8), {}),
        "autocastfx::rms_norm": KernelCall(rms_norm, (tokens, [768], 1 + some(768) / 8, 1e-6), {}),
    }


def _result_and_gradients(call: KernelCall, low: torch.dtype, *, folded: bool) -> tuple[torch.Tensor, ...]:
    """Of the op on 16-bit values, or of its float32 form between casts; parameters are float32 in both."""
    tensors = {n: a.detach().float() for n, a in call.named().items() if isinstance(a, torch.Tensor)}
    name = next(iter(tensors))
    tensors = {n: (a.to(low) if n == name else a).requires_grad_() for n, a in tensors.items()}
    given = {**tensors, name: tensors[name] if folded else tensors[name].float()}
    result = call.with_arguments(lambda n, a: given.get(n, a))().to(low)
    torch.manual_seed(0)
    gradients = torch.autograd.grad(result, list(tensors.values()), torch.randn_like(result))
    return result.detach(), *gradients


@pytest.mark.parametrize(("device", "dtype", "op"), FOLDS)
def test_what_folds_gives_what_the_op_gives_between_casts(device: str, dtype: str, op: str) -> None:
    """To an ulp, and the gradient to two: what ``fold="exact"`` promises, and what adds up in float32."""
    low, sized = DTYPES[dtype], _sized_as_in_models(device)
    tried = [*calls(device).get(op, []), *([sized[op]] if op in sized else [])]
    if op in FACTS.folds_with_parameters:
        tried = [c for c in tried if any(isinstance(c.named().get(name), torch.Tensor) for name in PARAMETERS)]
    assert tried
    for call in tried:
        got, *gradients = _result_and_gradients(call, low, folded=True)
        wanted, *expected = _result_and_gradients(call, low, folded=False)
        assert got.dtype == low
        assert ulps(got, wanted) <= 1, call
        for gradient, reference in zip(gradients, expected, strict=True):
            assert gradient.dtype == reference.dtype
            assert ulps(gradient.to(low), reference) <= 2, call


def test_a_group_norm_without_parameters_does_not_fold() -> None:
    """The measure tells: its gradient is computed from a mean and a deviation of 16 bits."""
    images = 10 + torch.randn(4, 64, 32, 32, generator=torch.Generator().manual_seed(0))
    call = KernelCall(_aten.group_norm.default, (images, 8), {})
    got = _result_and_gradients(call, torch.bfloat16, folded=True)
    assert ulps(got[1], _result_and_gradients(call, torch.bfloat16, folded=False)[1]) > 2

    def normed(x: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.group_norm(x @ x, 2, w) @ x

    inputs = torch.rand(2, 4, 8, 8), torch.rand(4)
    for fold in ("exact", "kernel"):
        for given, dtype in ((inputs[:1], "float32"), (inputs, "bfloat16")):
            amp_model = decided(normed, *given, dtype=torch.bfloat16, fold=fold)
            assert amp_model.plan["group_norm"].dtype == dtype


def test_the_measure_tells_a_kernel_that_adds_up_gradients_of_parameters_in_16_bits() -> None:
    """torch's layer_norm on a CPU, which takes float32 parameters beside 16-bit values, but is not listed for that."""
    tokens = torch.randn(8, 128, 768, generator=torch.Generator().manual_seed(0))
    call = KernelCall(_aten.layer_norm.default, (tokens, [768], torch.ones(768), torch.zeros(768)), {})
    got = _result_and_gradients(call, torch.bfloat16, folded=True)
    wanted = _result_and_gradients(call, torch.bfloat16, folded=False)
    assert ulps(got[2].bfloat16(), wanted[2]) > 2
    assert "layer_norm" not in FACTS.float32_parameters["cpu"]


@pytest.mark.parametrize(("device", "dtype", "op"), ROUNDING)
def test_what_folds_with_rounding_computes_in_float32_inside(device: str, dtype: str, op: str) -> None:
    """The output to an ulp, and each gradient to two roundings in the norm, of the float32 op on the same arguments."""
    low, generator = DTYPES[dtype], torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, generator=generator) for shape in ((64, 512), (512,), (512,), (64, 512))]
    x, scale, shift, out = (t.to(device, low) for t in given)

    def run(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        arguments = [t.to(dtype).requires_grad_() for t in (x, 1 + scale / 8, shift / 8)]
        result = _ROUNDING[op](*arguments)
        assert result.dtype == dtype
        return result.detach(), *torch.autograd.grad(result, arguments, out.to(dtype))

    (got, *gradients), (wanted, *expected) = run(low), run(torch.float32)
    assert ulps(got, wanted.to(low)) <= 1
    for found, reference in zip(gradients, expected, strict=True):
        assert relative_error(found, reference) <= 2 * torch.finfo(low).eps


def test_what_rounds_in_between_does_not_fold() -> None:
    """The measure above tells: instance_norm has no kernel of its own."""
    x = torch.randn(4, 16, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = functools.partial(torch.instance_norm, weight=None, bias=None, running_mean=None, running_var=None)
    got, wanted = (norm(t, use_input_stats=True, momentum=0, eps=1e-5, cudnn_enabled=False) for t in (x, x.float()))
    assert ulps(got, wanted.bfloat16()) > 1
    assert not any("instance_norm" in ops for ops in FACTS.folds.values())


def test_levels_of_folding_hold_the_lower_ones() -> None:
    def folded(level: str) -> set[str]:
        return {op for ops in FACTS.folds.values() for op in ops if FACTS.may_fold(op, "bfloat16", "cpu", level)}

    assert folded("none") == set()
    assert folded("none") < folded("exact") < folded("kernel")


def test_the_measure_tells_a_backward_that_uses_a_rounded_result() -> None:
    """softmax folds at no such level: its gradient is computed from the result as it is stored."""
    assert not any("softmax" in ops for (level, _, _), ops in FACTS.folds.items() if level == "exact")
    call = KernelCall(torch.ops.aten.softmax.int, (_operands(64, 64), -1), {})
    got = _result_and_gradients(call, torch.bfloat16, folded=True)
    assert ulps(got[1], _result_and_gradients(call, torch.bfloat16, folded=False)[1]) > 2


@functools.cache
def _many_calls() -> Mapping[str, list[KernelCall]]:
    return kernel_calls(FACTS.expands_range, "cpu", samples=6)


@pytest.mark.parametrize("op", sorted(FACTS.expands_range))
def test_a_result_leaves_the_range_of_its_inputs(op: str) -> None:
    def largest(tree: Any) -> float:
        tensors = [t.detach() for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.numel()]
        return max((float(t.abs().max()) for t in tensors if t.is_floating_point()), default=0.0)

    def leaves(call: KernelCall, scale: float) -> bool:
        scaled = call.with_arguments(
            lambda _, a: a.detach() * scale if isinstance(a, torch.Tensor) and a.dtype == torch.float32 else a
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of statistics of one value
            return largest(scaled()) > largest(scaled.named())

    assert any(leaves(call, scale) for call in _many_calls()[op] for scale in (1e-3, 1.0, 20.0, 300.0))
