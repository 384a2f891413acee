"""The operator rms_norm: the numbers of a norm that is written out, of which backward keeps less."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from autocastfx.graph.names import of_function
from autocastfx.runtime.operators import norms as rms_norm_module
from autocastfx.runtime.operators.norms import rms_norm
from tests.helpers import saved_bytes

EPS = torch.finfo(torch.float32).eps


def written(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    result = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return result if weight is None else weight * result


def operator(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return rms_norm(x, x.shape[-1:], weight, eps)


def inputs(weighted: bool = True, **options: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = 3 * torch.randn(4, 6, 64, **options)
    return (x, torch.randn(64, **options)) if weighted else (x,)


def gradients(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """For a gradient of the result that ``dtype`` holds exactly."""
    torch.manual_seed(1)
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    return torch.autograd.grad(y, leaves, torch.randn(y.shape).to(dtype).to(y.dtype))


@pytest.mark.parametrize("weighted", [True, False])
def test_float32_is_what_was_written_out(weighted: bool) -> None:
    tensors = inputs(weighted)
    assert torch.equal(operator(*tensors), written(*tensors))
    exact = gradients(written, tuple(t.double() for t in tensors))
    for found, before, reference in zip(gradients(operator, tensors), gradients(written, tensors), exact, strict=True):
        largest = float(reference.abs().max())
        assert (found - before).abs().max() <= 4 * EPS * largest
        assert (found - reference).abs().max() <= 4 * EPS * largest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    low = inputs(dtype=dtype)
    exact = tuple(t.double() for t in low)
    assert operator(*low).dtype == dtype
    assert torch.equal(operator(*low), written(*(t.float() for t in low)).to(dtype))
    mixed = operator(low[0], low[1].float())
    assert torch.equal(mixed, operator(*low))
    info = torch.finfo(dtype)
    for found, reference in zip(gradients(operator, low, dtype), gradients(written, exact, dtype), strict=True):
        assert found.dtype == dtype
        once = info.eps / 2 * reference.abs() + info.smallest_normal * info.eps
        assert ((found.double() - reference).abs() <= once + 8 * EPS * reference.abs().max()).all()


def test_first_and_second_derivatives_are_exact() -> None:
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,)))
    assert torch.autograd.gradcheck(lambda x, w: operator(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: operator(x, w, 1e-3), (x, weight))


def test_only_what_is_asked_for_has_a_gradient() -> None:
    x, weight = inputs()
    for wanted in ((x, weight.requires_grad_()), (x.clone().requires_grad_(), weight.detach())):
        leaf = next(t for t in wanted if t.requires_grad)
        (found,) = torch.autograd.grad(operator(*wanted).sum(), leaf)
        (expected,) = torch.autograd.grad(written(*wanted).sum(), leaf)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=32 * EPS * float(expected.abs().max() + 1))
    assert not operator(x.detach(), weight.detach()).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_the_input_the_weight_and_a_number_a_row(dtype: torch.dtype) -> None:
    x, weight = (t.requires_grad_() for t in inputs(dtype=dtype))
    kept = saved_bytes(lambda: operator(x, weight))
    assert kept == x.nbytes + weight.nbytes + 4 * 4 * 6
    assert kept < saved_bytes(lambda: written(x, weight))
    assert kept < saved_bytes(lambda: torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))


def test_an_epsilon_that_is_not_given_is_that_of_torch() -> None:
    x, weight = inputs()
    torch.testing.assert_close(
        rms_norm(x, [64], weight), nn.functional.rms_norm(x, (64,), weight), rtol=4 * EPS, atol=0
    )
    torch.testing.assert_close(rms_norm(x, [6, 64]), nn.functional.rms_norm(x, (6, 64)), rtol=4 * EPS, atol=0)


def test_lists_call_it_by_the_name_of_torchs() -> None:
    assert of_function(rms_norm) == "rms_norm"


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        return operator(x, self.weight)


def calls(module: fx.GraphModule) -> list[Any]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def test_an_exported_graph_holds_it_whole_and_a_decomposed_one_its_parts() -> None:
    (x,) = inputs(weighted=False)
    program = torch.export.export(Norm(), (x,))
    assert calls(program.graph_module) == [rms_norm]
    parts = calls(program.run_decompositions().graph_module)
    assert {str(p).split(".")[0] for p in parts} == {"aten"}
    assert len(parts) == 6


def test_a_compiler_sees_its_parts() -> None:
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    model, (x,) = Norm(), inputs(weighted=False)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    y = compiled(x.requires_grad_())
    y.sum().backward()
    assert torch.equal(y, model(x))
    assert len(graphs) == 2
    assert not any("autocastfx" in str(call) for graph in graphs for call in calls(graph))
    torch._dynamo.reset()


def test_transforms_of_functions_take_it() -> None:
    x, weight = inputs()
    expected = torch.func.grad(lambda x: written(x, weight).sum())(x)
    found = torch.func.grad(lambda x: operator(x, weight).sum())(x)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=32 * EPS)


def test_a_graph_with_it_is_copied_and_pickled_by_its_name() -> None:
    (x,) = inputs(weighted=False)
    assert pickle.loads(pickle.dumps(rms_norm.name())) == "autocastfx::rms_norm"
    assert torch.equal(torch.ops.autocastfx.rms_norm(x, [64], None, 1e-6), operator(x))


# ---- torch's own kernel on CUDA -------------------------------------------------------------------------------------


def test_torchs_own_kernel_takes_input_and_weight_of_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = (torch.float16, torch.float32, torch.float64)
    with FakeTensorMode():
        low, wide, double = (torch.empty(64, device="cuda", dtype=dtype) for dtype in dtypes)
    assert not rms_norm_module._has_own_kernel(wide, wide), "a fake tensor is none that a kernel reads"
    monkeypatch.setattr(rms_norm_module, "is_concrete", lambda tensor: True)
    assert rms_norm_module._has_own_kernel(wide, wide)
    assert rms_norm_module._has_own_kernel(low, low)
    others = ((low, wide), (wide, low), (wide, None), (double, double), (torch.ones(3), torch.ones(3)))
    assert not any(rms_norm_module._has_own_kernel(x, weight) for x, weight in others)


@pytest.mark.parametrize("eps", [1e-6, None])
def test_where_torchs_own_kernel_is_called_nothing_else_changes(
    eps: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = inputs()
    before = gradients(lambda x, w: rms_norm(x, [64], w, eps), (x, weight))
    expected = rms_norm(x, [64], weight, eps)
    monkeypatch.setattr(rms_norm_module, "_has_own_kernel", lambda x, weight: True)
    torch.testing.assert_close(rms_norm(x, [64], weight, eps), expected, rtol=4 * EPS, atol=0)
    found = gradients(lambda x, w: rms_norm(x, [64], w, eps), (x, weight))
    for one, other in zip(found, before, strict=True):
        assert (one - other).abs().max() <= 4 * EPS * float(other.abs().max())
    low = rms_norm(x.bfloat16(), [64], weight.bfloat16(), eps)
    assert low.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_gpu_one_dtype_takes_one_kernel(dtype: torch.dtype) -> None:
    low = tuple(t.cuda() for t in inputs(dtype=dtype))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = operator(*low)
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 1, on_device
    reference = written(*(t.double() for t in low))
    bound = torch.finfo(dtype).eps / 2 * reference.abs() + 8 * EPS * reference.abs().max()
    assert ((found.double() - reference).abs() <= bound).all()
