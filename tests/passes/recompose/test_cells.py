"""The state of an LSTM or a GRU cell stays float32 from call to call: the cell is written out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from tests.decided import decided
from tests.helpers import relative_error
from tests.nearness import assert_as_near_as_autocast, trained_on

STEPS, WIDTH, FAR = 3, 8, 20.3  # beside which 16 bits do not see a step
X = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Counter(nn.Module):
    """What a loop adds to the state of a cell, which begins with numbers or with a layer's output, in small steps."""

    def __init__(self, cell: type[nn.RNNCellBase], *, begins: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell: Any = cell(WIDTH, WIDTH)
        self.begin = nn.Linear(WIDTH, WIDTH).requires_grad_(False) if begins else None
        if self.begin is not None:
            nn.init.zeros_(self.begin.weight)
            nn.init.constant_(self.begin.bias, 20.0)  # which 16 bits hold
        with torch.no_grad():
            self.cell.weight_hh.mul_(0.01)  # the state is large
            self.cell.bias_ih[WIDTH : 2 * WIDTH] += 20 if cell is nn.LSTMCell else 6  # forget next to nothing

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros_like(x)
        cell = begin = self.begin(x) if self.begin is not None else torch.full_like(x, FAR)
        for _ in range(STEPS):
            if isinstance(self.cell, nn.LSTMCell):
                hidden, cell = self.cell(x, (hidden, cell))
            else:
                cell = self.cell(x, cell)
        return cell - begin


@pytest.mark.parametrize(
    ("cell", "dtype", "way"),
    [
        (nn.LSTMCell, torch.bfloat16, "convert"),
        (nn.LSTMCell, torch.float16, "enable"),
        (nn.GRUCell, torch.float16, "convert"),
        (nn.GRUCell, torch.bfloat16, "enable"),
    ],
)
def test_a_state_that_adds_up_is_as_exact_as_under_torch_autocast(cell: Any, dtype: torch.dtype, way: str) -> None:
    model = Counter(cell)
    ours = (
        autocastfx.convert(model, (X,), dtype=dtype, check=False)
        if way == "convert"
        else autocastfx.enable(copy.deepcopy(model), dtype=dtype)
    )
    assert_as_near_as_autocast(trained_on(X), model, ours, dtype)


def test_a_state_that_begins_in_16_bits_is_float32_from_there_on() -> None:
    model = Counter(nn.LSTMCell, begins=True)
    exact = model(X).detach()
    with torch.autocast("cpu", torch.bfloat16):
        autocast = relative_error(model(X).detach().float(), exact)
    ours = relative_error(autocastfx.convert(model, (X,), dtype="bfloat16", check=False)(X).detach(), exact)
    assert ours < autocast / 2


class Once(nn.Module):
    """One call of a cell, which returns all of its state."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Any:
        return self.cell(x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_the_formula_is_that_of_the_cell(cell: Any, bias: bool) -> None:
    model = Once(cell(WIDTH, WIDTH, bias=bias))
    amp_model = autocastfx.convert(model, (X,), dtype="bfloat16")
    plan = amp_model.plan
    assert [one.pattern for one in plan.recomposed] == ["recurrent_cell"]
    assert [node.dtype for node in plan.nodes if node.op == "linear"] == ["bfloat16", "bfloat16"]
    given = zip(torch.utils._pytree.tree_leaves(amp_model(X)), torch.utils._pytree.tree_leaves(model(X)), strict=True)
    for ours, theirs in given:
        assert relative_error(ours, theirs) < 4 * torch.finfo(torch.bfloat16).eps


def test_where_products_are_float32_a_cell_stays_whole() -> None:
    plan = decided(Once(nn.LSTMCell(WIDTH, WIDTH)), X, dtype="bfloat16", op_list="float32").plan
    assert (plan["lstm_cell"].op, plan["lstm_cell"].dtype) == ("lstm_cell", "float32,float32")


@pytest.mark.parametrize("category", ["allow", "deny"])
def test_a_persons_rule_for_the_cell_keeps_it_whole(category: str) -> None:
    mine = autocastfx.OpList.of({category: ["gru_cell"]}, name="mine")
    model = Once(nn.GRUCell(WIDTH, WIDTH))
    plan = decided(model, X, dtype="bfloat16", op_list=["default", mine]).plan
    assert plan["gru_cell"].dtype == {"allow": "bfloat16", "deny": "float32"}[category]


def test_a_gru_layer_of_many_steps_is_float32_where_its_kernel_rounds_the_state() -> None:
    dtypes = {
        (device, steps): decided(nn.GRU(WIDTH, WIDTH), torch.rand(steps, 4, WIDTH), dtype="bfloat16", device=device)
        .plan["gru"]
        .dtype
        for device in ("cpu", "cuda")
        for steps in (5, 30)
    }
    assert dtypes.pop(("cpu", 30)) == "float32,float32"
    assert set(dtypes.values()) == {"bfloat16,bfloat16"}
