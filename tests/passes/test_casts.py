"""Where casts stand, and how many readers share one."""

from __future__ import annotations

import torch

import autocastfx
from tests.decided import decided, rewritten
from tests.helpers import Function, listing


def test_one_cast_serves_all_readers_and_stands_after_the_producer() -> None:
    def fan(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return (y @ x) + (y @ x.t()) + (y.t() @ y)

    x = torch.rand(8, 8)
    lines = listing(decided(fan, x, dtype=torch.bfloat16).graph).splitlines()
    assert sum("= to(exp)" in line for line in lines) == 1
    position = next(i for i, line in enumerate(lines) if "= to(exp)" in line)
    assert lines[position - 1] == "  exp: f32 = exp(args_0)"


def test_a_parameter_is_cast_where_it_is_first_read() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    names = [n.name for n in decided(model, torch.rand(2, 8), dtype=torch.bfloat16).graph.nodes]
    assert (
        names.index("linear") < names.index("_1_weight") < names.index("_1_weight_bfloat16") < names.index("linear_1")
    )


def test_an_output_that_is_read_low_too_is_cast_back_once() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x @ x
        return y, y @ x, y

    x = torch.rand(8, 8)
    amp_model = autocastfx.convert(Function(both), (x,), dtype=torch.bfloat16)
    first, second, third = amp_model(x)
    assert first.dtype == second.dtype == third.dtype == torch.float32
    assert first is third
    assert listing(amp_model.graph).count("= to(matmul)") == 1


def test_of_several_results_each_is_cast_by_itself() -> None:
    def largest(x: torch.Tensor) -> torch.Tensor:
        values, _ = (x @ x).topk(2)
        return values.add_(x[:, :2].exp())

    rules = ["default", autocastfx.OpList.of({"allow": ["topk"]})]
    lines = rewritten(largest, torch.rand(8, 8), dtype=torch.bfloat16, op_list=rules)
    assert "topk: bf16,torch.int64 = topk(matmul)" in lines
    assert "getitem_float32: f32 = to(getitem)" in lines
    assert "add_: f32 = add_(getitem_float32, exp)" in lines
