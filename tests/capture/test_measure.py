"""A captured graph runs on a batch: it writes into copies, and values in its sub-graphs are measured, too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autocastfx import calibrate, convert
from autocastfx.capture.measure import copies_of_written, written_outside
from tests.decided import traced
from tests.helpers import Function


def batches(count: int = 3, scale: float = 1.0, size: int = 8) -> list[Tensor]:
    return [scale * torch.randn(4, size) for _ in range(count)]


class Written(nn.Module):
    def forward(self, whole: Tensor, part: Tensor) -> Tensor:
        whole.add_(3)
        return torch.exp(part)


def test_inputs_that_share_memory_share_it_in_copies() -> None:
    whole = torch.zeros(4, 8)
    found = calibrate(Written(), [(whole, whole[1:])])
    (exp,) = (value for value in found.values if value.op == "exp")
    assert exp.largest == pytest.approx(math.exp(3))
    assert not whole.any()


def test_statistics_are_updated_in_copies() -> None:
    model = nn.BatchNorm1d(8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calibrate(model, batches(), training=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_buffers_go_on_from_batch_to_batch() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x)
            return self.total * 1.0

    assert calibrate(Sum(), [torch.ones(2)] * 5)["mul"].largest == 5.0


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x @ x.transpose(0, 1)).mul(10.0) @ x
        y = torch.cond(x.sum() > 0, lambda x: (x * 3.0) @ x, lambda x: (x * 5.0) @ x, (x,))
        return self.linear(y + scale)


def test_sub_graphs_are_measured_inside() -> None:
    model = Branches().eval()
    ranges = calibrate(model, [torch.eye(4) * 2.0])
    inside = {r.name: r.largest for r in ranges.values if "/" in r.name}
    muls = sorted(v for n, v in inside.items() if n.rpartition("/")[2].startswith("mul"))
    assert muls == [6.0, 40.0], "the branch that did not run has no range"
    both = ranges.merged(calibrate(model, [torch.eye(4) * -2.0]))
    assert sorted(r.largest for r in both.values if "/mul" in r.name) == [6.0, 10.0, 40.0]
    amp_model = convert(model, calibrate=[torch.eye(4) * 200.0], dtype="float16")
    forced = [n.name for n in amp_model.plan.nodes if n.decision.source == "forced:range" and "/" in n.name]
    assert [n for n in forced if "mul" in n], "400 000 in the region without gradients"
    assert amp_model(torch.eye(4) * 200.0).isfinite().all()


def test_loops_are_measured_in_every_round() -> None:
    from torch._higher_order_ops import while_loop

    def looped(x: Tensor) -> Tensor:
        rounds = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, x * 2.0), (rounds, x))[1]

    ranges = calibrate(Function(looped), [torch.ones(2)])
    assert max(r.largest for r in ranges.values if "/mul" in r.name) == 16.0


def test_copies_are_those_of_what_is_written_into_and_share_memory_likewise() -> None:
    graph = traced(lambda x, y: x[1:].add_(y), torch.zeros(4), torch.ones(3))
    assert written_outside(graph, {}) == {"args_0"}
    assert not written_outside(traced(lambda x: x + 1, torch.zeros(4)), {})
    whole, other = torch.zeros(4), torch.zeros(4)
    copies = copies_of_written({"whole": whole, "args_0": whole[1:], "other": other}, frozenset({"args_0"}))
    assert copies.keys() == {"whole", "args_0"}
    copies["args_0"].fill_(1.0)
    assert copies["whole"].tolist() == [0, 1, 1, 1]
    assert not whole.any()
