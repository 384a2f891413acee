"""Gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autocastfx
from tests.helpers import Straight
from tests.invariants.pair import LOW, Net, Pair, assert_close, net

pytestmark = [
    pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU"),
    pytest.mark.filterwarnings("ignore:.*are float64, and only float32 values:autocastfx.errors.StateWarning"),
]


@pytest.mark.parametrize("low", LOW)
def test_gradients_have_their_parameters_dtype_and_exist_where_they_should(low: torch.dtype) -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = m.teacher(x)
        y = m.b(torch.tanh(m.frozen(m.a(x))))
        return y * m.scale - target + m.wide(x.double()).float() + m.a(x).detach()

    model = net(
        run,
        teacher=nn.Linear(8, 8),
        frozen=nn.Linear(8, 8).requires_grad_(False),
        unused=nn.Linear(8, 8),
        wide=nn.Linear(8, 8).double(),
        scale=nn.Parameter(torch.tensor(2.0)),
    )
    x = torch.randn(5, 8)  # of three rows the gradient of the scale, a sum of signed terms, cancels
    pair = Pair.of(model, (x,), low)
    pair.agree(x)
    without = {name.partition(".")[0] for name, p in pair.original.named_parameters() if p.grad is None}
    assert without == {"teacher", "frozen", "unused"}
    pair.original.frozen.requires_grad_(True)
    pair.eager.frozen.requires_grad_(True)
    pair.agree(x)
    assert pair.original.frozen.weight.grad is not None


@pytest.mark.parametrize("low", LOW)
def test_gradients_reach_the_inputs(low: torch.dtype) -> None:
    model, x = net(lambda m, x: m.b(torch.tanh(m.a(x)))), torch.randn(3, 8)
    pair = Pair.of(model, (x,), low)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    pair.amp_model(mine).sum().backward()
    pair.eager(theirs).sum().backward()
    assert_close("gradient", mine.grad, theirs.grad, 2 * pair.bound((x,)))


def test_a_custom_backward_is_kept() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad():
        model = net(lambda m, x: m.b(Straight.apply(m.a(x))))
        model.a.weight.copy_(torch.eye(8) * 8)  # integers plus small biases: no rounding is close to a half
        model.a.bias.fill_(0.0625)
    pair = Pair.of(model, (x.round(),), torch.bfloat16)
    pair.agree(x.round())


@pytest.mark.parametrize("low", LOW)
def test_training_follows_float32(low: torch.dtype) -> None:
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    eager = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))
    model = copy.deepcopy(eager)
    first = F.mse_loss(eager(x), y).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # before the conversion
    amp_model = autocastfx.convert(model, (x,), dtype=low)
    other = torch.optim.SGD(eager.parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(30):
        for net_, opt in ((amp_model, optimizer), (eager, other)):
            opt.zero_grad()
            loss = F.mse_loss(net_(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    *_, mine, theirs = losses
    assert theirs < 0.9 * first
    assert abs(mine - theirs) < 30 * torch.finfo(low).eps * first


PICKS = torch.arange(8192) % 7
# Ways to read each row of a table some thousand times.
READS_OFTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda table: table[PICKS],
    "take": lambda table: table.take(PICKS[:, None] * 8 + torch.arange(8)),
    "index_select": lambda table: table.index_select(0, PICKS),
    "gather": lambda table: table.gather(0, PICKS[:, None].expand(-1, 8)),
    "embedding": lambda table: F.embedding(PICKS, table),
    "view, index": lambda table: table.view(-1, 2, 4)[PICKS].flatten(1),
    "expand": lambda table: table.expand(1171, 7, 8).reshape(-1, 8)[: len(PICKS)],
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("fold", ["none", "exact", "kernel"])
@pytest.mark.parametrize("read", READS_OFTEN)
def test_gradients_of_what_is_read_often_are_not_added_up_in_16_bits(read: str, fold: str, low: torch.dtype) -> None:
    """All else is exact in 16 bits, so that what is off is the sum: by one rounding, not by one for each term."""
    table = nn.Parameter(torch.arange(56.0).view(7, 8) / 32)
    model = Net(
        lambda m, scale: m.head(READS_OFTEN[read](m.table)) * scale, table=table, head=nn.Linear(8, 8, bias=False)
    )
    with torch.no_grad():
        model.head.weight.copy_(torch.eye(8))
    amp_model = autocastfx.convert(model, (torch.ones(8),), dtype=low, fold=fold)
    given = (1 + torch.randn(len(PICKS), 8)).to(low).float()
    (wanted,) = torch.autograd.grad(model(torch.ones(8)), table, given)
    (found,) = torch.autograd.grad(amp_model(torch.ones(8)), table, given)
    assert_close("gradient", found, wanted, torch.finfo(low).eps)
