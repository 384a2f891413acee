"""Gradients of all kinds are unscaled, checked and clipped."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.optim import SGD

from autocastfx import LossScalingOptimizer
from tests.training.test_optimizer import INPUTS, Model


def test_sparse_gradients_are_unscaled_and_checked() -> None:
    def run(scaled: bool, bad: bool = False) -> tuple[torch.Tensor, LossScalingOptimizer | None]:
        embedding = nn.Embedding(5, 2, sparse=True)
        nn.init.ones_(embedding.weight)
        bare = SGD(embedding.parameters(), 0.5)
        optimizer = LossScalingOptimizer(bare) if scaled else None
        loss = embedding(torch.tensor([1, 3, 1])).square().sum() * (math.inf if bad else 1.0)
        optimizer.backward(loss) if optimizer else loss.backward()
        (optimizer or bare).step()
        return embedding.weight.detach(), optimizer

    weight, optimizer = run(scaled=True)
    assert weight.equal(run(scaled=False)[0])
    assert weight.eq(1).all(1).tolist() == [True, False, True, False, True]
    weight, optimizer = run(scaled=True, bad=True)
    assert weight.eq(1).all()
    assert optimizer is not None
    assert optimizer.last_step.skipped
    assert optimizer.last_step.culprits == ("group 0, parameter 0 of shape (5, 2)",)


def test_sparse_gradients_are_clipped_by_the_norm_of_what_they_add_up_to() -> None:
    norms: list[float] = []
    for sparse in (False, True):
        embedding = nn.Embedding(5, 2, sparse=sparse)
        optimizer = LossScalingOptimizer(SGD(embedding.parameters(), 1.0))
        optimizer.backward(embedding(torch.tensor([1, 3, 1])).sum())
        norms.append(optimizer.clip_grad_norm_(0.5).item())
        assert embedding.weight.grad is not None
        grad = embedding.weight.grad.to_dense()
        assert grad[:, 0].tolist() == pytest.approx([0, 1 / math.sqrt(10), 0, 0.5 / math.sqrt(10), 0], rel=1e-5)
    assert norms == [pytest.approx(math.sqrt(10))] * 2


def test_the_largest_element_of_no_elements_is_zero(tmp_path: Path) -> None:
    """As a process has it that holds no part of a small gradient."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        weight = nn.Parameter(distribute_tensor(torch.ones(0, 2), dist.device_mesh.init_device_mesh("cpu", (1,))))
        optimizer = LossScalingOptimizer(SGD([weight], 1.0))
        optimizer.backward(weight.sum().to_local())
        assert optimizer.clip_grad_norm_(0.5, math.inf).item() == 0
    finally:
        dist.destroy_process_group()


def test_a_parameter_without_a_gradient_may_stand_beside_a_sparse_one() -> None:
    embedding, unused = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(2))
    optimizer = LossScalingOptimizer(SGD([*embedding.parameters(), unused], 1.0))
    optimizer.backward(embedding(torch.tensor([1])).sum())
    optimizer.step()
    assert not optimizer.last_step.skipped
    assert unused.eq(1).all()


def test_gradients_of_double_precision_keep_it() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    optimizer = LossScalingOptimizer(SGD([weight, nn.Parameter(torch.ones(1))], 1.0))
    optimizer.backward((weight / 3).sum())
    optimizer.step()
    assert weight.tolist() == [1 - 1 / 3, 2 - 1 / 3]


def test_clipping_sees_unscaled_gradients() -> None:
    model, bare = Model(), Model()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.0))
    optimizer.backward(model(INPUTS))
    bare(INPUTS).backward()
    norm = optimizer.clip_grad_norm_(0.5)
    expected = torch.nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
    assert norm.equal(expected)
    assert model.weight.grad is not None
    assert model.weight.grad.equal(bare.weight.grad)
    optimizer.clip_grad_value_(0.01)
    assert float(model.weight.grad.abs().max()) == pytest.approx(0.01, rel=torch.finfo(torch.float32).eps)
    optimizer.step()
    assert optimizer.last_step.grad_norm == float(expected)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_whose_norm_is_below_the_limit_stay_as_they_are(norm_type: float) -> None:
    model, bare = Model(), Model()
    optimizer = LossScalingOptimizer(SGD(model.parameters(), 0.0))
    optimizer.backward(model(INPUTS))
    bare(INPUTS).backward()
    assert 0 < optimizer.clip_grad_norm_(2.0**20, norm_type) < 2.0**20
    for clipped, plain in zip(model.parameters(), bare.parameters(), strict=True):
        assert (clipped.grad is None) == (plain.grad is None)
        assert clipped.grad is None or clipped.grad.equal(plain.grad)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_no_gradients_have_a_norm_of_zero(norm_type: float) -> None:
    optimizer = LossScalingOptimizer(SGD(Model().parameters(), 0.1))
    assert optimizer.clip_grad_norm_(1.0, norm_type) == 0
    optimizer.clip_grad_value_(1.0)
    optimizer.step()
    assert optimizer.last_step.grad_norm == 0
