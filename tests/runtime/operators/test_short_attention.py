"""The operator for attention of few tokens: torch's result, and the gradient of attention that is written out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from autocastfx.graph.names import of_function
from autocastfx.runtime.operators.short_attention import TOKENS, short_attention
from tests.helpers import TORCH, relative_error, saved_bytes

LOW = torch.bfloat16
EPS = torch.finfo(LOW).eps
torchs = functional.scaled_dot_product_attention
FUSED = "_scaled_dot_product_flash_attention_for_cpu_backward"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(queries: int = 40, keys: int = 36, dtype: torch.dtype = LOW, *, size: int = 16) -> list[Tensor]:
    """Query, key and value as models give them: heads of one product of all, transposed."""
    found = [random(2, n, 3, size, seed=seed).to(dtype) for seed, n in enumerate((queries, keys, keys))]
    return [t.transpose(1, 2).requires_grad_() for t in found]


@pytest.fixture(autouse=True)
def _wide_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


SEEN = torch.ones(2, 1, 40, 36, dtype=torch.bool).tril(2)
BIAS = random(1, 3, 40, 36, seed=5).to(LOW)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"is_causal": True},
    "truth values": {"attn_mask": SEEN},
    "a bias": {"attn_mask": BIAS},
    "a bias for all": {"attn_mask": BIAS[0, 0]},
    "a float32 bias": {"attn_mask": BIAS.float()},
    "-inf": {"attn_mask": torch.where(SEEN, BIAS, -torch.inf)},
    "finfo.min": {"attn_mask": torch.where(SEEN, BIAS, torch.finfo(LOW).min)},
}


def gradients(function: Callable[..., Tensor], given: Sequence[Tensor], **options: Any) -> list[Tensor]:
    result = function(*given, **options)
    asked = [t for t in given if t.requires_grad]
    return list(torch.autograd.grad(result, asked, random(*result.shape, seed=7).to(LOW).to(result.dtype)))


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[of_function(func)] += 1
        return func(*args, **(kwargs or {}))


def counted(run: Callable[[], Any]) -> Counter[str]:
    with Counted() as mode:
        run()
    return mode.calls


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_the_result_is_torchs_and_so_is_the_gradient_but_for_roundings(options: dict[str, Any]) -> None:
    given = inputs()
    assert torch.equal(short_attention(*given, **options), torchs(*given, **options))
    exact = gradients(torchs, [t.detach().double().requires_grad_() for t in given], **_double(options))
    ours, theirs = (gradients(function, given, **options) for function in (short_attention, torchs))
    for found, other, expected in zip(ours, theirs, exact, strict=True):
        assert found.dtype == LOW
        # scores, weights, their gradients and the result are rounded, to half an eps each and independently
        assert relative_error(found, expected) <= EPS
        assert relative_error(other, expected) <= EPS


def _double(options: dict[str, Any]) -> dict[str, Any]:
    def widened(held: Any) -> Any:
        return held.double() if isinstance(held, Tensor) and held.is_floating_point() else held

    return {key: widened(held) for key, held in options.items()}


def written_out(query: Tensor, key: Tensor, values: Tensor) -> Tensor:
    return ((query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)).softmax(-1) @ values


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_large_scores_are_rounded_as_in_attention_that_is_written_out(factor: int) -> None:
    q, k, v = inputs()
    given = [(t.detach() * by).requires_grad_() for t, by in ((q, factor), (k, factor), (v, 1))]
    assert factor < 8 or (given[0] @ given[1].mT / 4).abs().max() > 150
    exact = gradients(torchs, [t.detach().double().requires_grad_() for t in given])
    ours, theirs = (gradients(function, given) for function in (short_attention, written_out))
    for found, other, expected in zip(ours, theirs, exact, strict=True):
        assert relative_error(found, expected) <= 1.5 * relative_error(other, expected)


@pytest.mark.parametrize("mask", [SEEN.clone(), torch.zeros(2, 1, 40, 36, dtype=LOW)], ids=["bool", "float"])
def test_a_row_that_is_hidden_whole_has_no_gradient(mask: Tensor) -> None:
    mask[:, :, 4] = False if mask.dtype == torch.bool else -torch.inf
    of_query, of_key, of_values = gradients(short_attention, inputs(), attn_mask=mask)
    assert (of_query[:, :, 4] == 0).all()
    assert all(t.isfinite().all() for t in (of_query, of_key, of_values))


def test_torchs_backward_is_not_called() -> None:
    calls = counted(lambda: gradients(short_attention, inputs()))
    assert not calls[FUSED]
    assert calls["bmm"] + calls["baddbmm"] == 5
    assert counted(lambda: gradients(torchs, inputs()))[FUSED] == 1


@pytest.mark.parametrize("asked", [n for n in itertools.product((False, True), repeat=3) if any(n)], ids=str)
def test_only_what_is_asked_for_has_a_gradient(asked: tuple[bool, ...]) -> None:
    every = gradients(short_attention, inputs())
    given = [t.detach().requires_grad_(wanted) for t, wanted in zip(inputs(), asked, strict=True)]
    found = gradients(short_attention, given)
    for one, expected in zip(found, itertools.compress(every, asked), strict=True):
        assert torch.equal(one, expected)


def test_one_tensor_may_be_all_three() -> None:
    x = inputs(40, 40)[0]
    apart = gradients(short_attention, [x.detach().clone().requires_grad_() for _ in range(3)])
    (found,) = torch.autograd.grad(short_attention(x, x, x), x, random(2, 3, 40, 16, seed=7).to(LOW))
    assert relative_error(found, sum(t.float() for t in apart)) <= EPS


def test_it_keeps_no_more_than_torchs() -> None:
    given = inputs()
    kept = saved_bytes(lambda: short_attention(*given))
    assert kept == sum(t.nbytes for t in given) < saved_bytes(lambda: torchs(*given))


def is_torchs(given: Sequence[Tensor], **options: Any) -> bool:
    return counted(lambda: gradients(short_attention, given, **options))[FUSED] == 1


def test_it_is_torchs_where_there_are_many_tokens() -> None:
    assert not is_torchs(inputs(queries=TOKENS, keys=TOKENS))
    assert is_torchs(inputs(queries=TOKENS + 1))
    assert is_torchs(inputs(keys=TOKENS + 1))


def test_it_is_torchs_where_there_are_few_scores() -> None:
    assert not is_torchs(inputs(64, 22))  # 2 x 3 x 64 x 22 are 8448
    assert is_torchs(inputs(64, 21))


def test_it_is_torchs_on_a_cpu_without_wide_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_torchs(inputs())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert is_torchs(inputs())


def test_it_is_torchs_where_nothing_is_scaled() -> None:
    assert is_torchs(inputs(), scale=0.0)


AS_TORCHS: dict[str, Callable[[Callable[..., Tensor]], list[Tensor]]] = {
    "no tokens": lambda f: gradients(f, inputs(queries=0)),
    "heads of no size": lambda f: gradients(f, inputs(size=0), scale=1.0),
    "one batch for all": lambda f: gradients(f, [inputs()[0], *(t[:1].detach() for t in inputs()[1:])]),
    "one head for all": lambda f: gradients(f, [inputs()[0], *(t[:, :1].detach() for t in inputs()[1:])]),
    "float32": lambda f: gradients(f, inputs(dtype=torch.float32)),
    "float16": lambda f: gradients(f, inputs(dtype=torch.float16)),
    "a mask and causal": lambda f: gradients(f, inputs(), attn_mask=BIAS, is_causal=True),
    "without heads": lambda f: gradients(f, [t[:, 0].detach().requires_grad_() for t in inputs()]),
    "heads in groups": lambda f: gradients(
        f, [inputs()[0], *(t[:, :1].detach().requires_grad_() for t in inputs()[1:])], enable_gqa=True
    ),
}


@pytest.mark.parametrize("run", AS_TORCHS.values(), ids=AS_TORCHS)
def test_elsewhere_it_is_torchs(run: Callable[[Callable[..., Tensor]], list[Tensor]]) -> None:
    if run is AS_TORCHS["a mask and causal"] and TORCH >= (2, 15):
        pytest.skip("torch refuses it from 2.15 on")
    assert counted(lambda: run(short_attention)) == counted(lambda: run(torchs))
    for found, expected in zip(run(short_attention), run(torchs), strict=True):
        assert torch.equal(found, expected)


def test_with_dropout_it_is_torchs() -> None:
    found, expected = (
        counted(lambda f=function: gradients(f, inputs(), dropout_p=0.5)) for function in (short_attention, torchs)
    )
    assert found == expected


def test_without_gradients_it_is_torchs() -> None:
    with torch.no_grad():
        assert counted(lambda: short_attention(*inputs())) == counted(lambda: torchs(*inputs()))
        assert saved_bytes(lambda: short_attention(*inputs())) == 0
    constants = [t.detach() for t in inputs()]
    assert not short_attention(*constants).requires_grad


def test_values_may_have_another_size_and_weights_may_be_read_as_they_are() -> None:
    q, k, v = inputs()
    given = [nn.Parameter(q.detach()), k, torch.cat([v, v], -1)]
    asked = [given[0], k, v]
    exact = torch.autograd.grad(torchs(*(t.double() for t in given)).sum(), asked)
    found = torch.autograd.grad(short_attention(*given).sum(), asked)
    assert counted(lambda: short_attention(*given).sum().backward())[FUSED] == 0
    for one, expected in zip(found, exact, strict=True):
        assert relative_error(one, expected) <= EPS


def test_a_mask_may_be_learned() -> None:
    mask = BIAS.clone().requires_grad_()
    found, expected = (torch.autograd.grad(f(*inputs(), mask).sum(), mask)[0] for f in (short_attention, torchs))
    assert torch.equal(found, expected)


def test_what_torch_refuses_is_refused_alike() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        short_attention(*inputs(), SEEN[..., :5])


def test_the_gradient_can_be_differentiated() -> None:
    def second(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(function(*given).float().square().sum(), given, create_graph=True)
        return list(torch.autograd.grad(sum(t.float().square().sum() for t in first), given))

    with sdpa_kernel(SDPBackend.MATH):  # the fused one cannot
        exact = second(torchs, [t.detach().double().requires_grad_() for t in inputs()])
    for found, expected in zip(second(short_attention, inputs()), exact, strict=True):
        assert relative_error(found, expected) <= 8 * EPS  # of what is rounded eight times and more on its way


def test_several_gradients_at_once() -> None:
    given = inputs()
    result = short_attention(*given)
    several = random(4, *result.shape, seed=3).to(LOW)
    found = torch.autograd.grad(result, given, several, is_grads_batched=True, retain_graph=True)
    for n, gradient in enumerate(several):
        expected = torch.autograd.grad(result, given, gradient, retain_graph=True)
        assert all(relative_error(t[n], one) <= EPS for t, one in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's has no rule for batches either
def test_transforms_of_functions_take_it() -> None:
    q, k, v = (t.detach() for t in inputs())
    found, expected = (torch.func.grad(lambda q, f=f: f(q, k, v).sum())(q) for f in (short_attention, torchs))
    assert torch.equal(found, expected)
    found, expected = (torch.vmap(lambda q, k, v, f=f: f(q, k, v))(q, k, v) for f in (short_attention, torchs))
    assert torch.equal(found, expected)


def test_lists_call_it_by_the_name_of_torchs_whose_arguments_it_has() -> None:
    assert of_function(short_attention) == "scaled_dot_product_attention"
    schemas = (op._schema for op in (short_attention, torch.ops.aten.scaled_dot_product_attention.default))
    assert len({str(schema).partition("::")[2] for schema in schemas}) == 1


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return short_attention(q, k, v)


def test_a_compiler_and_an_exporter_see_torchs() -> None:
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    compiled = torch.compile(Attention(), backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    compiled(*inputs()).sum().backward()
    torch._dynamo.reset()
    program = torch.export.export(Attention(), tuple(inputs()))
    assert short_attention in {n.target for n in program.graph.nodes}
    graphs.append(program.run_decompositions().graph_module)
    calls = [str(n.target) for graph in graphs for n in graph.graph.nodes if n.op == "call_function"]
    assert any(FUSED in call for call in calls)
    assert not any("autocastfx" in call for call in calls)
