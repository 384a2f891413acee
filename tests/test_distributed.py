"""Data-parallel training of a converted model: the gradients are the average of those of the parts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autocastfx
from autocastfx import AmpModule
from tests.processes import run_in_processes

PROCESSES = 2


class Net(nn.Module):
    """A tied weight, statistics, a constant that the graph holds, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bn, self.head = nn.Embedding(9, 4), nn.BatchNorm1d(4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.a, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, i: Tensor, scale: float = 1.0) -> Tensor:
        y = self.bn(self.a(self.embed(i))) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.head(torch.tanh(self.frozen(y))) * scale


def converted(low: torch.dtype, weights: str = "cast") -> AmpModule:
    torch.manual_seed(0)
    return autocastfx.convert(Net(), (torch.arange(4),), dtype=low, weights=weights)


def part(rank: int) -> Tensor:
    return torch.arange(6) + rank


def gradients(amp_model: nn.Module, *args: Any) -> list[Tensor]:
    amp_model.zero_grad()
    amp_model(*args).square().mean().backward()
    return [p.grad.clone() for p in amp_model.parameters() if p.grad is not None]


def _work(folder: Path, low: torch.dtype) -> None:
    torch.save(_train(dist.get_rank(), low), folder / f"{dist.get_rank()}.pt")


def _train(rank: int, low: torch.dtype) -> dict[str, Any]:
    amp_model = converted(low)
    with torch.no_grad():
        amp_model.a.weight.add_(rank)  # DDP begins by giving every rank the first one's tensors
    parallel = DistributedDataParallel(amp_model)
    found = {"first": gradients(parallel, part(rank)), "further": gradients(parallel, part(rank), 2.0)}
    with parallel.no_sync():
        parallel(part(rank)).square().mean().backward()
    parallel(part(rank)).square().mean().backward()
    found["accumulated"] = [p.grad for p in amp_model.parameters() if p.grad is not None]
    cached = DistributedDataParallel(converted(low, "cached"))
    found["cached"] = gradients(cached, part(rank))
    with autocastfx.gradient_histogram(cached) as histogram:
        found["recorded"] = gradients(cached, part(rank))
    counts = {name: e.total + e.zeros for name, e in histogram.parameters.items()}
    state = {name: t.clone() for name, t in amp_model.state_dict().items()}
    return {"gradients": found, "counts": counts, "state": state, "keys": list(parallel.state_dict())}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the processes found."""
    folder = tmp_path_factory.mktemp("distributed")
    run_in_processes(_work, PROCESSES, folder, torch.bfloat16)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def averaged(*args: Any) -> list[Tensor]:
    alone = [gradients(converted(torch.bfloat16), part(rank), *args) for rank in range(PROCESSES)]
    return [sum(pair) / PROCESSES for pair in zip(*alone, strict=True)]


def assert_close(found: list[Tensor], expected: list[Tensor], roundings: int) -> None:
    """Both are sums of the same float32 numbers; only the order of the additions may differ."""
    bound = roundings * torch.finfo(torch.float32).eps
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= bound * b.norm()


def test_the_gradients_are_the_average_of_the_parts(trained: list[dict[str, Any]]) -> None:
    for one in trained:
        assert_close(one["gradients"]["first"], averaged(), 2)


def test_with_working_copies_the_average_is_the_same_to_the_bit(trained: list[dict[str, Any]]) -> None:
    for one in trained:
        found = one["gradients"]
        assert all(torch.equal(a, b) for a, b in zip(found["cached"], found["first"], strict=True))


def test_recording_the_gradients_changes_no_average(trained: list[dict[str, Any]]) -> None:
    sizes = {f"module.{name}": p.numel() for name, p in Net().named_parameters() if p.requires_grad}
    for one in trained:
        found = one["gradients"]
        assert all(torch.equal(a, b) for a, b in zip(found["recorded"], found["first"], strict=True))
        assert one["counts"] == sizes


def test_a_graph_captured_later_is_trained_alike(trained: list[dict[str, Any]]) -> None:
    for one in trained:
        assert_close(one["gradients"]["further"], averaged(2.0), 2)


def test_gradients_accumulate_without_synchronising(trained: list[dict[str, Any]]) -> None:
    # on top of "further", which is not zeroed
    expected = [2 * a + b for a, b in zip(averaged(), averaged(2.0), strict=True)]
    for one in trained:
        assert_close(one["gradients"]["accumulated"], expected, 8)


def test_all_ranks_have_the_same_parameters_and_keys(trained: list[dict[str, Any]]) -> None:
    first, second = trained
    names = [n for n, _ in Net().named_parameters(remove_duplicate=False)]
    assert all(torch.equal(first["state"][n], second["state"][n]) for n in names)
    assert first["keys"] == [f"module.{name}" for name in Net().state_dict()]


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_wrapped_it_gives_the_same_to_the_bit(options: dict[str, Any], low: torch.dtype) -> None:
    alone, amp_model = converted(low), converted(low)
    parallel = DistributedDataParallel(amp_model, **options)
    for _ in range(3):
        expected, found = gradients(alone, part(0)), gradients(parallel, part(0))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(amp_model.bn.running_mean, alone.bn.running_mean)
    assert amp_model.bn.num_batches_tracked == 3


@pytest.mark.usefixtures("process_group")
def test_modes_and_evaluation_go_through_the_wrapper() -> None:
    alone = converted(torch.bfloat16).eval()
    parallel = DistributedDataParallel(copy.deepcopy(alone)).eval()
    with torch.no_grad():
        assert torch.equal(parallel(part(0)), alone(part(0)))
    assert torch.equal(parallel.train()(part(0)), alone.train()(part(0)))


@pytest.mark.usefixtures("process_group")
def test_a_wrapper_around_the_original_is_not_lost() -> None:
    """Converting the wrapper's module afterwards shares the parameters that the wrapper reduces."""
    torch.manual_seed(0)
    model = Net()
    DistributedDataParallel(model)
    amp_model = autocastfx.convert(model, (part(0),), dtype=torch.bfloat16)
    assert all(a is b for a, b in zip(amp_model.parameters(), model.parameters(), strict=True))
