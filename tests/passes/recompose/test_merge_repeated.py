"""What is computed twice from the same values is computed once, and only that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.plan.plan import Recomposed
from tests.decided import decided, rewritten
from tests.helpers import Function, op_list, text

LOW = torch.bfloat16
X, W = (torch.randn(8, 8, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
SEEN = torch.ones(8, 8, dtype=torch.bool).tril()


def twice(x: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    for _ in range(2):
        x = x @ w + torch.where(seen, w.exp(), 0.0)
    return x


def merged(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[tuple[str, ...]]:
    model = autocastfx.convert(Function(function), inputs, dtype=LOW, **options)
    return [one.replaced for one in model.plan.recomposed if one.pattern == "repeated"]


def test_the_graph_before_and_after() -> None:
    assert rewritten(twice, X, W, SEEN, dtype=LOW, recompose=False) == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
          matmul: bf16 = matmul(args_0_bfloat16, args_1_bfloat16)
          exp: f32 = exp(args_1)
          where: f32 = where(args_2, exp)
          add: f32 = add(matmul, where)
        + add_bfloat16: bf16 = to(add)
          matmul_1: bf16 = matmul(add_bfloat16, args_1_bfloat16)
          exp_1: f32 = exp(args_1)
          where_1: f32 = where(args_2, exp_1)
          add_1: f32 = add(matmul_1, where_1)
          return add_1
    """)
    assert rewritten(twice, X, W, SEEN, dtype=LOW) == text("""
        + args_0_bfloat16: bf16 = to(args_0)
        + args_1_bfloat16: bf16 = to(args_1)
          matmul: bf16 = matmul(args_0_bfloat16, args_1_bfloat16)
          exp: f32 = exp(args_1)
          where: f32 = where(args_2, exp)
          add: f32 = add(matmul, where)
        + add_bfloat16: bf16 = to(add)
          matmul_1: bf16 = matmul(add_bfloat16, args_1_bfloat16)
          add_1: f32 = add(matmul_1, where)
          return add_1
    """)
    plan = decided(twice, X, W, SEEN, dtype=LOW).plan
    assert plan.recomposed == (Recomposed("repeated", "exp", ("exp_1",)), Recomposed("repeated", "where", ("where_1",)))
    assert autocastfx.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("recompose", [True, ("repeated",)], ids=str)
def test_numbers_and_gradients_are_the_same(recompose: Any) -> None:
    """Sums of four terms and of two follow each other, in another order in each."""
    found: list[list[Tensor]] = []
    small = X[:4, :4], W[:4, :4], SEEN[:4, :4]
    for asked in (False, recompose):
        model = autocastfx.convert(
            Function(twice), small, op_list=autocastfx.OpList(unlisted="keep"), recompose=asked, dtype="float16"
        )
        x, w = small[0].clone().requires_grad_(), small[1].clone().requires_grad_()
        y = model(x, w, small[2])
        found.append([y.detach(), *torch.autograd.grad(y.sum(), (x, w))])
    assert torch.equal(found[0][0], found[1][0])
    for before, after in zip(*found, strict=True):
        assert (after - before).abs().max() <= 4 * torch.finfo(torch.float32).eps * before.abs().max()


def written(x: Tensor) -> Tensor:
    a, b = x.exp(), x.exp()
    a.add_(1)
    return a @ b


def handed_out(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp(), x.exp()


def viewed_and_handed_out(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp().view(-1), x.exp().view(2, -1)


def source_is_written(x: Tensor) -> Tensor:
    y = x * 2
    a = y.exp()
    y[0] = 5.0
    return a - y.exp()


def view_of_the_source_is_written(x: Tensor) -> Tensor:
    y = x * 2
    a = y.exp()
    y.view(-1).add_(1)
    return a - y.exp()


def source_of_the_view_is_written(x: Tensor) -> Tensor:
    y = x * 2
    v = y.view(-1)
    a = v.exp()
    y.add_(1)
    return a - v.exp()


def input_is_written(x: Tensor) -> Tensor:
    a = x.exp()
    x[0] = 5.0
    return a - x.exp()


@torch.library.custom_op("autocastfx_tests::written", mutates_args=("x",))
def writes(x: Tensor) -> None:
    x.add_(1)


def operator_writes(x: Tensor) -> Tensor:
    y = x * 2
    a = y.exp()
    writes(y)
    return a - y.exp()


WRITTEN = (written, source_is_written, view_of_the_source_is_written, source_of_the_view_is_written, input_is_written,
           operator_writes)  # fmt: skip


@pytest.mark.parametrize("function", WRITTEN)
def test_what_is_written_to_is_read_before_and_after(function: Callable[[Tensor], Tensor]) -> None:
    model = autocastfx.convert(
        Function(function), (X.clone(),), op_list=autocastfx.OpList(unlisted="keep"), dtype="float16"
    )
    assert "repeated" not in {one.pattern for one in model.plan.recomposed}
    assert model(X.clone()).equal(function(X.clone()))


OTHER: dict[str, Callable[..., Any]] = {
    "dropout": lambda x: torch.dropout(x, 0.5, True) @ torch.dropout(x, 0.5, True),
    "random": lambda x: (torch.rand_like(x) @ x) @ torch.rand_like(x),
    "outputs": handed_out,
    "views of it are outputs": viewed_and_handed_out,
    "1 and 1.0": lambda x: torch.full_like(x, True) @ torch.full_like(x, 1.0).mT,
    "0.0 and -0.0": lambda x: (x * 0.0) @ (x * -0.0),
    "keyword arguments": lambda x: x.sum(0, keepdim=True) @ x.sum(0, keepdim=True, dtype=torch.float32).mT,
    "whole numbers": lambda x: x[torch.arange(8) + 1 - 1] @ x[torch.arange(8) + 1 - 1 + 0],
}


@pytest.mark.parametrize("function", OTHER.values(), ids=OTHER)
def test_it_stays(function: Callable[..., Any]) -> None:
    assert merged(function, X) == []


def test_running_statistics_are_updated_as_often() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) @ self.norm(x)

    model = Twice().train()
    amp_model = autocastfx.convert(model, (X,), dtype=LOW)
    before = model.norm.state_dict()["num_batches_tracked"].clone()
    amp_model(X)
    assert model.norm.state_dict()["num_batches_tracked"] == before + 2
    assert "repeated" not in {one.pattern for one in amp_model.plan.recomposed}


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(8), nn.InstanceNorm1d(8, track_running_stats=True)], ids=["batch", "instance"]
)
def test_running_statistics_change_between_two_reads(norm: nn.Module) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            before = self.norm.running_mean.exp()
            return 0 * self.norm(x).sum() + before - self.norm.running_mean.exp()

    model = Model().train()
    amp_model = autocastfx.convert(model, (X[None] + 1,), op_list=autocastfx.OpList(unlisted="keep"), dtype="float16")
    assert amp_model(X[None] + 1).count_nonzero() == 8


def test_a_view_of_running_statistics_changes_with_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            view = self.norm.running_mean.view(2, 4)
            before = view.exp()
            return 0 * self.norm(x).sum() + before - view.exp()

    amp_model = autocastfx.convert(
        Model().train(), (X + 1,), op_list=autocastfx.OpList(unlisted="keep"), dtype="float16"
    )
    assert amp_model(X + 1).count_nonzero() == 8


def test_a_buffer_changes_between_two_reads() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            before = self.memory.exp()
            self.memory[0] = x[0, 0]
            return before - self.memory.exp()

    amp_model = autocastfx.convert(Model(), (X,), op_list=autocastfx.OpList(unlisted="keep"), dtype="float16")
    assert amp_model(X).count_nonzero() == 1


def doubles(buffer: Tensor) -> Tensor:
    """A function without a schema, which a list names: nothing says that it writes."""
    return buffer.mul_(2).sum()


def gives_a_view(x: Tensor) -> Tensor:
    y = x * 2
    a = y.exp()
    return a - y.exp() + doubles(y.view(-1)) - y.exp()


def gives_what_is_viewed(x: Tensor) -> Tensor:
    y = x * 2
    v = y.view(-1)
    a = v.exp()
    return (a + doubles(y)) - v.exp()


@pytest.mark.parametrize("function", [gives_a_view, gives_what_is_viewed])
def test_what_a_python_function_may_write_into_is_read_before_and_after(function: Callable[[Tensor], Tensor]) -> None:
    lists = autocastfx.OpList.of({"unlisted": "keep", "keep": [f"{__name__}.doubles"]})
    model = autocastfx.convert(Function(function), (X.clone(),), op_list=lists, dtype="float16")
    assert any("doubles" in node.op for node in model.plan.nodes)
    assert model(X.clone()).equal(function(X.clone()))


def test_a_long_chain_of_views() -> None:
    def chain(x: Tensor) -> Tensor:
        x = x.exp()
        for _ in range(1200):
            x = x.view(-1)
        return x

    assert merged(chain, X) == []


def test_it_stays_where_rules_differ(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return x @ w.tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(), Layer()

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return self.second(self.first(x, w), w)

    convert = functools.partial(autocastfx.convert, Model(), (X, W), dtype=LOW)
    assert len(convert().plan.recomposed) == 1
    pinned = op_list(tmp_path, "modules: [{path: second, category: float32, ops: [tanh]}]")
    model = convert(op_list=["bfloat16", pinned])
    assert model.plan.recomposed == ()


def test_what_was_recomposed_twice_is_one() -> None:
    def gelus(x: Tensor) -> Tensor:
        return (x * torch.sigmoid(x)) @ (x * torch.sigmoid(x))

    plan = decided(gelus, X, dtype=LOW).plan
    assert [(one.pattern, one.node) for one in plan.recomposed] == [
        ("silu", "mul_silu"),
        ("silu", "mul_silu"),
        ("repeated", "mul_silu"),
    ]
    assert [n.op for n in plan.nodes] == ["silu", "matmul"]


def test_custom_operators_may_do_anything() -> None:
    calls: list[int] = []

    @torch.library.custom_op("autocastfx_tests::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x + 1

    @counted.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    model = autocastfx.convert(Function(lambda x: counted(x) @ counted(x)), (X,), dtype=LOW)
    calls.clear()
    model(X)
    assert len(calls) == 2
