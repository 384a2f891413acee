"""The operator layer_norm: torch's beside float32 parameters, whose gradients are added up in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from autocastfx.graph.names import of_function
from autocastfx.runtime.operators import norms as module
from autocastfx.runtime.operators.norms import layer_norm
from tests.helpers import relative_error, saved_bytes

EPS = torch.finfo(torch.float32).eps
LOW = [torch.float16, torch.bfloat16]
SIZE = 64


def operator(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return layer_norm(x, [SIZE], weight, bias)


def between_casts(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The float32 norm of a 16-bit input, its result rounded: what the operator is to compute."""
    return functional.layer_norm(x.float(), (SIZE,), weight, bias).to(x.dtype)


def inputs(dtype: torch.dtype, *rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return 1 + 3 * torch.randn(*(rows or (4, 6)), SIZE).to(dtype), torch.randn(SIZE), torch.randn(SIZE)


def gradients(function: Callable[..., Tensor], *tensors: Tensor | None) -> list[Tensor]:
    """For a gradient of the result whose mean is not zero, so that a sum over rows grows."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    torch.manual_seed(1)
    given = 1 + torch.randn(y.shape)
    return list(torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], given.to(y.dtype)))


def assert_alike(found: list[Tensor], wanted: list[Tensor], roundings: float = 1 / 8) -> None:
    """Float32 numbers within some roundings of the sums, and 16-bit ones within ``roundings`` of theirs."""
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        # A float32 number near the middle of two 16-bit ones is rounded to either: rarely, so an eighth in the norm.
        assert relative_error(a, b) <= (32 * EPS if a.dtype == torch.float32 else roundings * torch.finfo(a.dtype).eps)


@pytest.fixture(params=["at once", "in parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward widens all rows at once, or in parts of four rows."""
    if request.param == "in parts":
        monkeypatch.setattr(module, "_PER_THREAD", 4 * SIZE // torch.get_num_threads())


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_result_and_gradients_are_those_of_the_float32_norm_between_casts(dtype: torch.dtype, count: int) -> None:
    x, *parameters = inputs(dtype)
    given = x, *parameters[:count]
    assert operator(*given).dtype == dtype
    assert_alike([operator(*given)], [between_casts(*given)])
    assert_alike(gradients(operator, *given), gradients(between_casts, *given))
    assert_alike(gradients(operator, x, None, parameters[1]), gradients(between_casts, x, None, parameters[1]))


@pytest.mark.parametrize("dtype", LOW)
def test_gradients_of_parameters_are_added_up_in_float32_over_any_number_of_rows(dtype: torch.dtype) -> None:
    """torch's kernel is off by more than a rounding of 16 bits, and the more the more rows there are."""
    given = inputs(dtype, 4 * module._part() // SIZE + 7)  # the last part is not full
    wanted = gradients(between_casts, *given)
    assert_alike(gradients(operator, *given), wanted)
    adds_up_low = gradients(lambda x, w, b: functional.layer_norm(x, (SIZE,), w, b), *given)
    assert relative_error(adds_up_low[2], wanted[2]) > torch.finfo(dtype).eps


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("rows", [(), (0,), (2, 3, 5)])
def test_any_number_of_dimensions_and_no_rows(rows: tuple[int, ...]) -> None:
    _, *parameters = inputs(torch.bfloat16)
    x = torch.randn(*rows, SIZE).bfloat16()
    assert_alike(gradients(operator, x, *parameters), gradients(between_casts, x, *parameters))
    whole = x.expand(2, *x.shape).transpose(0, -1)  # of strides of its own, and several dimensions are one row
    shape = whole.shape[-2:]
    weight = torch.randn(shape)
    found = gradients(lambda x, w: layer_norm(x, shape, w), whole, weight)
    assert_alike(found, gradients(lambda x, w: functional.layer_norm(x.float(), shape, w).to(x.dtype), whole, weight))


@pytest.mark.usefixtures("parts")
def test_only_what_is_asked_for_has_a_gradient() -> None:
    given = inputs(torch.bfloat16)
    wanted = gradients(between_casts, *given)
    for place, leaf in enumerate(given):
        with_one = [leaf.clone().requires_grad_() if place == i else t for i, t in enumerate(given)]
        torch.manual_seed(1)
        result = operator(*with_one)
        (found,) = torch.autograd.grad(result, with_one[place], (1 + torch.randn(result.shape)).bfloat16())
        assert_alike([found], [wanted[place]])
    assert not operator(*given).requires_grad


@pytest.mark.parametrize("dtype", LOW)
def test_16_bit_parameters_are_widened(dtype: torch.dtype) -> None:
    x, weight, bias = (t.to(dtype) for t in inputs(dtype))
    assert_alike([operator(x, weight, bias)], [between_casts(x, weight.float(), bias.float())])
    assert [g.dtype for g in gradients(operator, x, weight, bias)] == [dtype] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_of_16_bits_is_torchs(dtype: torch.dtype) -> None:
    given = [t.to(dtype) for t in inputs(dtype)]
    found, wanted = (gradients(f, *given) for f in (operator, lambda x, w, b: functional.layer_norm(x, (SIZE,), w, b)))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_second_derivatives_are_those_of_the_float32_norm() -> None:
    def twice(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in inputs(torch.bfloat16)]
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(torch.stack([g.float().square().sum() for g in first]).sum(), leaves))

    # That of the input comes by two ways, each rounded, and is rounded where they meet.
    assert_alike(twice(operator), twice(between_casts), roundings=3 / 2)


def test_several_gradients_at_once() -> None:
    def batched(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in inputs(torch.bfloat16)]
        y, generator = function(*leaves), torch.Generator().manual_seed(1)
        several = torch.randn(3, *y.shape, generator=generator).bfloat16()
        return list(torch.autograd.grad(y, leaves, several, is_grads_batched=True))

    assert_alike(batched(operator), batched(between_casts))


def test_transforms_of_functions_take_it() -> None:
    x, weight, bias = inputs(torch.bfloat16)

    def of_all(function: Callable[..., Tensor]) -> list[Tensor]:
        def total(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return function(x, weight, bias).float().square().sum()

        one = torch.func.grad(total, (0, 1, 2))(x, weight, bias)
        each = torch.func.vmap(torch.func.grad(total, (0, 1, 2)), (0, None, None))(x, weight, bias)
        return [*one, *each, torch.func.vmap(function, (0, None, None))(x, weight, bias)]

    assert_alike(of_all(operator), of_all(between_casts))


@pytest.mark.parametrize("dtype", LOW)
def test_backward_keeps_the_input_the_parameters_and_two_numbers_a_row(dtype: torch.dtype) -> None:
    x, weight, bias = (t.requires_grad_() for t in inputs(dtype))
    kept = saved_bytes(lambda: operator(x, weight, bias))
    assert kept == x.nbytes + weight.nbytes + bias.nbytes + 2 * 4 * 4 * 6
    assert kept < saved_bytes(lambda: between_casts(x, weight, bias))


def test_lists_call_it_by_the_name_of_torchs() -> None:
    assert of_function(layer_norm) == "layer_norm"
    torchs = str(torch.ops.aten.layer_norm.default._schema).removeprefix("aten::")
    assert str(layer_norm._schema) == f"autocastfx::{torchs}"


def test_abstract_tensors_have_its_shape_and_dtype() -> None:
    with FakeTensorMode() as mode:
        x, *parameters = (mode.from_tensor(t).requires_grad_() for t in inputs(torch.bfloat16))
        found = operator(x, *parameters)
        found.sum().backward()
    assert (found.shape, found.dtype, x.grad.dtype) == (x.shape, torch.bfloat16, torch.bfloat16)
    assert parameters[0].grad.dtype == torch.float32


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _, weight, bias = inputs(torch.bfloat16)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return operator(x, self.weight, self.bias)


def calls(graph: fx.GraphModule) -> list[Any]:
    return [n.target for n in graph.graph.nodes if n.op == "call_function"]


def test_an_exported_graph_holds_it_whole_and_a_decomposed_one_its_parts() -> None:
    (x, *_), model = inputs(torch.bfloat16), Norm()
    program = torch.export.export(model, (x,))
    assert calls(program.graph_module) == [layer_norm]
    parts = program.run_decompositions()
    assert {str(p).split(".")[0] for p in calls(parts.graph_module)} <= {"aten", "<built-in function getitem>"}
    with torch.no_grad():
        assert_alike([parts.module()(x)], [model(x)])


def test_a_compiler_sees_its_parts_and_gives_the_same() -> None:
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    (x, *_), model = inputs(torch.bfloat16), Norm()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)

    def run(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [leaf, model.weight, model.bias])]

    assert_alike(run(compiled), run(model))
    assert len(graphs) == 2
    assert not any("autocastfx" in str(call) for graph in graphs for call in calls(graph))
    torch._dynamo.reset()
