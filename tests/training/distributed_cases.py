"""Cases that test_optimizer_distributed.py runs in several processes at once.

A case is a function; its asserts hold in every process. ``run`` runs them in one of the processes.
"""

from __future__ import annotations

import copy
import json
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autocastfx
from autocastfx import DynamicLossScale, LossScalingOptimizer
from autocastfx.errors import LossScaleError, UnsupportedError
from tests.golden.readme import outputs, section
from tests.golden.readme import run as run_markdown

PAGE = section((Path(autocastfx.__file__).parents[1] / "docs" / "gpu.md").read_text(encoding="utf-8"), "Many devices")
CASES: dict[str, Callable[[], None]] = {}
EPS, EPS_HALF = torch.finfo(torch.float32).eps, torch.finfo(torch.float16).eps
ROUNDINGS = 64  # of float32, in which two orders of the same additions may differ after a few steps
STEPS = 5
OF_TWO_GROUPS = ("fsdp_of_a_tensor_parallel_model", "a_group_of_processes")  # which two processes are too few for
BAD = (0, 2)  # steps in which one process overflows
SCALE = DynamicLossScale(init=2.0**10)


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def last() -> bool:
    """Whether this is the process that overflows."""
    return rank() == world() - 1


def case(*options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a case; once for each of the options, which are its argument, if there are any."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for option in options:
            CASES[f"{function.__name__}[{option}]"] = lambda option=option: function(option)
        if not options:
            CASES[function.__name__] = function
        return function

    return register


# -- models, data, optimizers -----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


class Sequence8(nn.Module):
    """What parallelize_module takes whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def made(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(process: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(97 * step + process))


def whole_batch(step: int) -> Tensor:
    return torch.cat([batch(process, step) for process in range(world())])


_converted: dict[tuple[torch.dtype, str], Any] = {}


def converted(low: torch.dtype, weights: str = "cast") -> Any:
    if (low, weights) not in _converted:
        _converted[low, weights] = autocastfx.convert(made(), (batch(0, 0),), dtype=low, weights=weights)
    return copy.deepcopy(_converted[low, weights])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


def optimizer_of(model: nn.Module, kind: str, **options: Any) -> LossScalingOptimizer:
    return LossScalingOptimizer(OPTIMIZERS[kind](model.named_parameters()), SCALE, **options)


def local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def full(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def state_of(optimizer: LossScalingOptimizer) -> list[dict[str, Any]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [{k: v for k, v in optimizer.state.get(p, {}).items() if v is not None} for p in parameters]


def tensors_of(model: nn.Module, optimizer: LossScalingOptimizer) -> list[Tensor]:
    """Weights, masters and optimizer state."""
    held = [v for state in state_of(optimizer) for v in state.values() if isinstance(v, Tensor)]
    return [*model.parameters(), *optimizer.masters.masters, *held]


# -- what holds everywhere --------------------------------------------------------------------------------------------


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b), f"{a} is not {b}"


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], eps: float = EPS) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (full(a) - full(b)).norm() <= ROUNDINGS * eps * full(b).norm(), f"{full(a)} is far from {full(b)}"


def assert_same_everywhere(found: Any) -> None:
    everywhere: list[Any] = [None] * world()
    dist.all_gather_object(everywhere, found)
    assert all(one == found for one in everywhere), everywhere


def assert_agree(model: nn.Module, optimizer: LossScalingOptimizer) -> None:
    """Weights, state and loss scale are the same in all processes, to the bit."""
    bits = [full(t).float().view(torch.int32).tolist() for t in tensors_of(model, optimizer)]
    assert_same_everywhere((bits, optimizer.loss_scaler.state_dict()))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def aims(output: Tensor, is_bad: bool) -> Tensor:
    """Targets, of which one cannot be reached."""
    target = torch.ones(output.shape)
    if is_bad:
        target[0, 0] = math.inf
    return target


def poison(model: nn.Module) -> None:
    """Inf in one element of one gradient, in what this process holds of it."""
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    next(g for g in grads if g.numel()).view(-1)[0] = math.inf


Run = tuple[list[bool], list[float], list[float]]


def train(
    model: nn.Module,
    optimizer: LossScalingOptimizer,
    data: Callable[[int], Tensor],
    *,
    bad: Sequence[int] = BAD,
    poisons: bool = False,
    max_norm: float | None = 1.0,
    steps: Iterator[int] | Sequence[int] = range(STEPS),
) -> Run:
    """Train, and check that a skipped step changes nothing; steps skipped, scales, norms of the others.

    In the steps ``bad`` the last process overflows: by a target that it alone has, or by a gradient that it alone
    holds a part of.
    """
    run: Run = ([], [], [])
    for step in steps:
        optimizer.zero_grad()
        x = data(step)
        output = model(x.to(next(model.parameters()).dtype))
        optimizer.backward(squares(output, aims(output, step in bad and last() and not poisons)))
        if step in bad and last() and poisons:
            poison(model)
        norm = None if max_norm is None else optimizer.clip_grad_norm_(max_norm)
        before = copy.deepcopy([local(t) for t in tensors_of(model, optimizer)])
        optimizer.step()
        result = optimizer.last_step
        assert norm is None or result.skipped or result.grad_norm == norm.item()
        if result.skipped:
            had_state = len(before) > len(list(model.parameters())) + len(optimizer.masters)
            after = tensors_of(model, optimizer) if had_state else [*model.parameters(), *optimizer.masters.masters]
            assert_equal([local(t) for t in after], before)
            assert had_state or all(not torch.any(full(t)) for s in state_of(optimizer) for t in s.values())
            assert not poisons or len(result.culprits) == (1 if last() else 0), result.culprits
        run[0].append(result.skipped)
        run[1].append(result.scale)
        if not result.skipped:
            run[2].append(result.grad_norm)
    assert run[0] == [step in bad for step in steps]
    assert_agree(model, optimizer)
    return run


def train_alone(model: nn.Module, kind: str, *, max_norm: float | None = 1.0) -> tuple[nn.Module, Run]:
    """The same in one process: the gradients of all processes' batches one after the other."""
    optimizer = optimizer_of(model, kind, process_group=None)
    run: Run = ([], [], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        for process in range(world()):
            output = model(batch(process, step).to(next(model.parameters()).dtype))
            is_bad = step in BAD and process == world() - 1
            optimizer.backward(squares(output, aims(output, is_bad)) / world())
            optimizer.accumulate()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        run[0].append(optimizer.last_step.skipped)
        run[1].append(optimizer.last_step.scale)
        if not optimizer.last_step.skipped:
            run[2].append(optimizer.last_step.grad_norm)
    return model, run


def assert_as_alone(model: nn.Module, run: Run, alone: tuple[nn.Module, Run], eps: float = EPS) -> None:
    assert run[:2] == alone[1][:2]
    assert_close(list(model.parameters()), list(alone[0].parameters()), eps)
    assert_close([torch.tensor(run[2])], [torch.tensor(alone[1][2])], eps)


def own(step: int) -> Tensor:
    return batch(rank(), step)


# -- data parallel ----------------------------------------------------------------------------------------------------


@case(*OPTIMIZERS)
def ddp(kind: str) -> None:
    """Gradients, and so overflows, are the same in all processes: nothing else is exchanged."""
    parallel = DistributedDataParallel(made())
    optimizer = optimizer_of(parallel, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", None)  # DDP itself calls it from C++
        run = train(parallel, optimizer, own)
    assert_as_alone(parallel, run, train_alone(made(), kind))


@case(*((low, kind) for low in (torch.float16, torch.bfloat16) for kind in OPTIMIZERS))
def ddp_of_a_converted_model(option: tuple[torch.dtype, str]) -> None:
    low, kind = option
    parallel = DistributedDataParallel(converted(low))
    run = train(parallel, optimizer_of(parallel, kind), own)
    assert_as_alone(parallel, run, train_alone(converted(low), kind))


@case(*OPTIMIZERS)
def ddp_of_a_model_with_working_copies(kind: str) -> None:
    models = [DistributedDataParallel(converted(torch.bfloat16, weights)) for weights in ("cast", "cached")]
    runs = [train(model, optimizer_of(model, kind), own) for model in models]
    assert runs[0] == runs[1]
    assert_equal(list(models[1].parameters()), list(models[0].parameters()))


@case("momentum", "fused")
def ddp_of_a_half_model(kind: str) -> None:
    """The gradients are averaged in float16; the masters are float32, and the weights their roundings."""
    parallel = DistributedDataParallel(made().half())
    optimizer = optimizer_of(parallel, kind)
    run = train(parallel, optimizer, own)
    assert [m.dtype for m in optimizer.masters.masters] == [torch.float32] * 6
    assert_equal([m.half() for m in optimizer.masters.masters], list(parallel.parameters()))
    assert_as_alone(parallel, run, train_alone(made().half(), kind), EPS_HALF)


@case()
def ddp_accumulates_without_synchronising() -> None:
    """Two micro-batches a step, the first of which overflows in one process and is not synchronised by itself."""
    parallel = DistributedDataParallel(converted(torch.float16))
    optimizer = optimizer_of(parallel, "fused")
    skipped = []
    for step in range(4):
        optimizer.zero_grad()
        with parallel.no_sync():
            output = parallel(own(step))
            optimizer.backward(squares(output, aims(output, step == 1 and last())) / 2)
        optimizer.backward(squares(parallel(own(step + 10)), torch.ones(4, 3)) / 2)
        optimizer.step()
        skipped.append(optimizer.last_step.skipped)
    assert skipped == [False, True, False, False]
    assert_agree(parallel, optimizer)


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


def sharded(model: nn.Module, *parts: str, **options: Any) -> nn.Module:
    for part in parts:
        fully_shard(model.get_submodule(part), **options)
    fully_shard(model, **options)
    return model


@case(*OPTIMIZERS)
def fsdp(kind: str) -> None:
    for poisons in (False, True):
        model = sharded(made(), "up", "down")
        run = train(model, optimizer_of(model, kind), own, poisons=poisons)
        assert_as_alone(model, run, train_alone(made(), kind))


@case()
def fsdp_clips_the_largest_element() -> None:
    """Of four processes the last one holds nothing of the smallest parameters."""
    model, alone = sharded(made()), made()
    for one, x, group in ((model, own(0), "sharded"), (alone, whole_batch(0), None)):
        optimizer = optimizer_of(one, "momentum", process_group=group)
        optimizer.backward(squares(one(x), torch.ones(len(x), 3)))
        assert optimizer.clip_grad_norm_(0.1, math.inf).item() > 0.1
    largest = [max(float(full(p.grad).abs().max()) for p in one.parameters()) for one in (model, alone)]
    assert abs(largest[0] - 0.1) <= ROUNDINGS * 1e-6  # torch adds 1e-6 to the norm
    assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


@case(*OPTIMIZERS)
def fsdp_with_its_own_mixed_precision(kind: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = sharded(made(), "up", "down", mp_policy=policy)
    run = train(model, optimizer_of(model, kind), own, max_norm=None)
    expected = train_alone(made(), kind, max_norm=None)[1]
    assert abs(run[2][0] - expected[2][0]) <= ROUNDINGS * EPS_HALF * expected[2][0]


@case(*((low, kind) for low in (torch.float16, torch.bfloat16) for kind in OPTIMIZERS))
def fsdp_of_a_converted_model(option: tuple[torch.dtype, str]) -> None:
    low, kind = option
    model = sharded(converted(low))
    run = train(model, optimizer_of(model, kind), own, poisons=True)
    assert_as_alone(model, run, train_alone(converted(low), kind))


@case()
def fsdp_of_a_model_converted_without_inputs() -> None:
    """Captured inside the first forward, between its all-gather and its computation."""
    model = sharded(autocastfx.convert(made(), dtype=torch.bfloat16))
    run = train(model, optimizer_of(model, "momentum"), own)
    assert_as_alone(model, run, train_alone(converted(torch.bfloat16), "momentum"))
    with torch.no_grad():
        assert_equal([model.eval()(own(0)[:2])], [model.eval()(own(0))[:2]])


@case()
def fsdp_of_a_model_that_was_converted_on_no_device() -> None:
    """No process ever holds all weights."""
    with torch.device("meta"):
        model, inputs = Net(), torch.empty(4, 6)
    amp_model = sharded(autocastfx.convert(model, (inputs,), dtype=torch.bfloat16, device="cpu"))
    amp_model.to_empty(device="cpu")
    set_model_state_dict(amp_model, made().state_dict(), options=StateDictOptions(full_state_dict=True))
    run = train(amp_model, optimizer_of(amp_model, "momentum"), own)
    assert_as_alone(amp_model, run, train_alone(converted(torch.bfloat16), "momentum"))


@case()
def fsdp_has_no_working_copies() -> None:
    model = sharded(converted(torch.bfloat16, "cached"))
    with pytest.raises(UnsupportedError, match="does not work under fully_shard"):
        model(own(0))


@case()
def fsdp_of_a_submodule_is_refused() -> None:
    model = sharded(converted(torch.bfloat16), "up")
    with pytest.raises(UnsupportedError, match=r"'up.weight' is a DTensor: the graph reads parameters directly"):
        model(own(0))


@case()
def fsdp_of_blocks_that_are_converted_one_by_one() -> None:
    torch.manual_seed(0)
    block = autocastfx.convert(
        nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)), (own(0),), dtype=torch.bfloat16
    )
    blocks = nn.Sequential(block, copy.deepcopy(block))
    parallel, model = DistributedDataParallel(copy.deepcopy(blocks)), sharded(blocks, "0", "1")
    runs = [train(m, optimizer_of(m, "momentum"), own) for m in (model, parallel)]
    assert_as_alone(model, runs[0], (parallel, runs[1]))


@case("momentum", "fused")
def fsdp_of_a_half_model(kind: str) -> None:
    model = sharded(made().half(), "up", "down")
    optimizer = optimizer_of(model, kind)
    run = train(model, optimizer, own, poisons=True)
    assert all(isinstance(m, DTensor) and m.dtype == torch.float32 for m in optimizer.masters.masters)
    assert_equal([local(m).half() for m in optimizer.masters.masters], [local(p) for p in model.parameters()])
    assert_as_alone(model, run, train_alone(made().half(), kind), EPS_HALF)


@case()
def fsdp_keeps_what_16_bits_would_lose() -> None:
    """Steps of a tenth of half a unit in the last place: the masters add them up."""
    model = sharded(nn.Linear(6, 8, bias=False).half())
    with torch.no_grad():
        local(model.weight).fill_(1.0)
    optimizer = LossScalingOptimizer(torch.optim.SGD(model.parameters(), EPS_HALF / 20), SCALE)
    for _ in range(30):
        optimizer.zero_grad()
        optimizer.backward(model(torch.full((1, 6), -1.0).half()).float().sum())
        optimizer.step()
    assert torch.equal(full(model.weight), torch.full((8, 6), 1 + 2 * EPS_HALF).half())


@case()
def fsdp_splits_masters() -> None:
    """Updates that bfloat16 would lose are in the rests, to the bit those of masters in float32."""
    values = list[torch.Tensor]()
    for masters in ("float32", "split"):
        model = sharded(nn.Linear(6, 8, bias=False).bfloat16())
        with torch.no_grad():
            local(model.weight).fill_(1.0)
        bare = torch.optim.AdamW(model.parameters(), 2.0**-12)
        optimizer = LossScalingOptimizer(bare, SCALE, masters=masters)
        for _ in range(30):
            optimizer.zero_grad()
            optimizer.backward(model(torch.full((1, 6), -1.0).bfloat16()).float().sum())
            optimizer.step()
        values.append(full(optimizer.state_dict()["masters"][0]))
        assert torch.equal(full(model.weight), values[-1].bfloat16())
    assert torch.equal(*values)
    assert not torch.equal(values[0], values[0].bfloat16().float())


@case(*OPTIMIZERS)
def fsdp_checkpoints(kind: str) -> None:
    """torch.distributed.checkpoint takes the wrapper for its optimizer; the loss scale is saved beside it."""
    model = sharded(made(), "up")
    optimizer = optimizer_of(model, kind)
    train(model, optimizer, own)
    saved = copy.deepcopy((get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)))
    assert set(saved[1]) == {"state", "param_groups"}
    again = sharded(made(), "up")
    other = optimizer_of(again, kind)
    set_model_state_dict(again, saved[0])
    set_optimizer_state_dict(again, other, saved[1])
    assert other.loss_scaler.value == SCALE.init
    other.loss_scaler.load_state_dict(optimizer.loss_scaler.state_dict())
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] > 0
    runs = [train(m, o, own, bad=(6,), steps=(5, 6, 7)) for m, o in ((model, optimizer), (again, other))]
    assert runs[0] == runs[1]
    assert_equal(*([local(t) for t in tensors_of(m, o)] for m, o in ((model, optimizer), (again, other))))


@case()
def fsdp_checkpoints_of_a_half_model() -> None:
    """The masters are in the wrapper's own state_dict, whose DTensors torch.distributed.checkpoint saves."""
    folder = os.fspath(Path.cwd() / "checkpoint")
    model = sharded(made().half())
    optimizer = optimizer_of(model, "fused")
    train(model, optimizer, own)
    checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    again = sharded(made().half())
    other = optimizer_of(again, "fused")
    train(again, other, own, steps=(4, 3), bad=())  # it has to have a state to load into
    loaded = {"model": again.state_dict(), "optimizer": other.state_dict()}
    checkpoint.load(loaded, checkpoint_id=folder)
    again.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    runs = [train(m, o, own, bad=(6,), steps=(5, 6, 7)) for m, o in ((model, optimizer), (again, other))]
    assert runs[0] == runs[1]
    assert_equal(*([local(t) for t in tensors_of(m, o)] for m, o in ((model, optimizer), (again, other))))


# -- tensor parallel --------------------------------------------------------------------------------------------------


def tensor_parallel(mesh: Any, *, with_norm: bool) -> nn.Module:
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if with_norm:
        plan |= {"norm": SequenceParallel(sequence_dim=0), "up": ColwiseParallel(input_layouts=Shard(0))}
    return parallelize_module(made(Sequence8), mesh, plan)


def alone_on_all(kind: str) -> tuple[nn.Module, Run]:
    return train_alone(made(Sequence8), kind)


@case(*OPTIMIZERS)
def tensor_parallel_and_sequence_parallel(kind: str) -> None:
    """Gradients are shards, replicas and, of the norm, sums that are not added up yet."""
    model = tensor_parallel(init_device_mesh("cpu", (world(),)), with_norm=True)
    optimizer = optimizer_of(model, kind)
    run = train_on_shards(model, optimizer)
    assert_as_alone(model, run, alone_on_all(kind))


def train_on_shards(model: nn.Module, optimizer: LossScalingOptimizer, data: Any = None) -> Run:
    """As ``train``; the last process has an Inf in its own shard of a weight's gradient."""
    run: Run = ([], [], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model((data or own)(step))
        optimizer.backward(squares(output, torch.ones(output.shape)))
        if step in BAD and last():
            local(model.up.weight.grad).view(-1)[0] = math.inf
        before = copy.deepcopy([local(p) for p in model.parameters()])
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        result = optimizer.last_step
        assert result.skipped == (step in BAD)
        if result.skipped:
            assert_equal([local(p) for p in model.parameters()], before)
            assert [name.endswith("up.weight") for name in result.culprits] == ([True] if last() else [])
        run[0].append(result.skipped)
        run[1].append(result.scale)
        if not result.skipped:
            run[2].append(result.grad_norm)
    assert_agree(model, optimizer)
    return run


@case("momentum", "fused")
def tensor_parallel_of_a_half_model(kind: str) -> None:
    model = tensor_parallel(init_device_mesh("cpu", (world(),)), with_norm=True).half()
    optimizer = optimizer_of(model, kind)
    run = train_on_shards(model, optimizer, lambda step: own(step).half())
    assert all(isinstance(m, DTensor) and m.dtype == torch.float32 for m in optimizer.masters.masters)
    assert_equal([local(m).half() for m in optimizer.masters.masters], [local(p) for p in model.parameters()])
    assert_as_alone(model, run, train_alone(made(Sequence8).half(), kind), EPS_HALF)


@case()
def sums_are_added_up_before_their_elements_are_clipped() -> None:
    model, alone = tensor_parallel(init_device_mesh("cpu", (world(),)), with_norm=True), made(Sequence8)
    for one, x, group in ((model, own(0), "sharded"), (alone, whole_batch(0), None)):
        optimizer = optimizer_of(one, "momentum", process_group=group)
        optimizer.backward(squares(one(x), torch.zeros(4 * world(), 3)))
        optimizer.clip_grad_value_(0.02)
    assert all(p.grad.placements == p.placements for p in model.parameters())
    assert 0 < sum(int((p.grad.abs() < 0.02).sum()) for p in alone.norm.parameters()) < 12
    assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


@case(*OPTIMIZERS)
def tensor_parallel_beside_plain_parameters(kind: str) -> None:
    """torch's foreach and fused kernels take either kind: a group for each."""
    model = tensor_parallel(init_device_mesh("cpu", (world(),)), with_norm=False)
    named = list(model.named_parameters())
    groups = [{"params": [(n, p) for n, p in named if isinstance(p, DTensor) is sharded]} for sharded in (True, False)]
    optimizer = LossScalingOptimizer(OPTIMIZERS[kind](groups), SCALE)
    run = train_on_shards(model, optimizer, whole_batch)
    assert_as_alone(model, run, alone_on_all(kind))


@case()
def tensor_parallel_under_torch_autocast() -> None:
    model = tensor_parallel(init_device_mesh("cpu", (world(),)), with_norm=False)
    optimizer = optimizer_of(model, "momentum")
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(whole_batch(step))
        optimizer.backward(squares(output, aims(output, step in BAD)))
        optimizer.step()
        assert output.dtype == torch.bfloat16
        assert optimizer.last_step.skipped == (step in BAD)
    assert_agree(model, optimizer)


@case(*OPTIMIZERS)
def fsdp_of_a_tensor_parallel_model(kind: str) -> None:
    """Two meshes: the norm's parameters are on one of them only."""
    mesh = init_device_mesh("cpu", (world() // 2, 2), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(mesh["tensor"], with_norm=False)
    fully_shard(model, mesh=mesh["data"])
    run = train_on_shards(model, optimizer_of(model, kind), whole_batch)
    assert_as_alone(model, run, alone_on_all(kind))


@case()
def what_cannot_be_converted_is_refused() -> None:
    mesh = init_device_mesh("cpu", (world(),))
    for model in (tensor_parallel(mesh, with_norm=False), sharded(made())):
        for inputs in ((own(0),), None):
            with pytest.raises(UnsupportedError, match=r"'up.weight' of .* is a DTensor"):
                autocastfx.convert(model, inputs, dtype="float16")


# -- processes without a wrapper --------------------------------------------------------------------------------------


@case(*OPTIMIZERS)
def all_skip_what_one_overflows_in(kind: str) -> None:
    """Nothing but the decision is shared: models that are trained apart skip the same steps."""
    model = made()
    optimizer = optimizer_of(model, kind, process_group="world")
    skipped, scales = steps_alone(model, optimizer)
    assert skipped == [step in BAD for step in range(STEPS)]
    assert_same_everywhere(scales)


def steps_alone(model: nn.Module, optimizer: LossScalingOptimizer) -> tuple[list[bool], list[float]]:
    skipped, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(own(step))
        optimizer.backward(squares(output, aims(output, step in BAD and last())))
        before = copy.deepcopy(tensors_of(model, optimizer))
        optimizer.step()
        if optimizer.last_step.skipped and step > 0:
            assert_equal(tensors_of(model, optimizer), before)
        skipped.append(optimizer.last_step.skipped)
        scales.append(optimizer.loss_scaler.value)
    return skipped, scales


@case(("foreach", None), ("fused", None), ("fused", "sharded"))
def each_process_for_itself(option: tuple[str, str | None]) -> None:
    """By default, too: no parameter has parts in other processes."""
    kind, group = option
    model = made()
    skipped, _ = steps_alone(model, optimizer_of(model, kind, process_group=group))
    assert skipped == [step in BAD and last() for step in range(STEPS)]


@case()
def processes_that_step_other_optimizers_wait_for_none() -> None:
    """As where each process trains a part of its own: a number that all exchange would never arrive."""
    models = [made() for _ in range(rank() + 1)]
    for model in models:
        optimizer = optimizer_of(model, "fused")
        optimizer.backward(squares(model(own(0)), torch.ones(4, 3)))
        optimizer.step()
        assert not optimizer.last_step.skipped


@case()
def flat_parameters_of_fsdp1() -> None:
    """An overflow in the part that one process holds."""
    for whole in (True, False):
        model = FullyShardedDataParallel(made(), use_orig_params=whole, device_id=torch.device("cpu"))
        optimizer = optimizer_of(model, "fused")
        skipped = []
        for step in range(STEPS):
            optimizer.zero_grad()
            optimizer.backward(squares(model(own(step)), torch.ones(4, 3)))
            if step in BAD and last():
                poison(model)
            optimizer.step()
            skipped.append(optimizer.last_step.skipped)
        assert skipped == [step in BAD for step in range(STEPS)]
        assert_same_everywhere(optimizer.loss_scaler.value)
        optimizer.backward(squares(model(own(0)), torch.ones(4, 3)))
        with pytest.raises(UnsupportedError, match=r"call unscale_\(\) and then the model's own clip_grad_norm_"):
            optimizer.clip_grad_norm_(1.0)
        model.clip_grad_norm_(1.0)


@case("foreach", "fused")
def a_group_of_processes(kind: str) -> None:
    half = world() // 2
    groups = [dist.new_group(list(part)) for part in (range(half), range(half, world()))]
    model = made()
    mine = groups[rank() // half]
    skipped, _ = steps_alone(model, optimizer_of(model, kind, process_group=mine))
    assert skipped == [step in BAD and rank() >= half for step in range(STEPS)]


@case()
def a_process_without_gradients_skips_too() -> None:
    model = made()
    optimizer = optimizer_of(model, "momentum", process_group="world")
    if last():
        optimizer.backward(squares(model(own(0)), torch.full((4, 3), math.inf)))
    optimizer.step()
    assert optimizer.last_step.skipped
    assert optimizer.loss_scaler.value == SCALE.init / 2


@case()
def an_overflow_at_the_floor_is_an_error_everywhere() -> None:
    model = made()
    scale = DynamicLossScale(init=1.0, min=1.0)
    optimizer = LossScalingOptimizer(torch.optim.SGD(model.named_parameters(), 0.1), scale, process_group="world")
    optimizer.backward(squares(model(own(0)), torch.full((4, 3), math.inf if last() else 0.0)))
    with pytest.raises(LossScaleError, match="up.weight" if last() else "of another process's parameters"):
        optimizer.step()


@case()
def the_page_about_many_devices_runs() -> None:
    if world() > 2:  # once is enough
        return
    printed = run_markdown(PAGE, Path.cwd())
    for code, shown in outputs(PAGE):
        assert printed[code.start] == shown.text, printed[code.start]


# -- all of them ------------------------------------------------------------------------------------------------------


def run(folder: Path, names: Sequence[str] = ()) -> None:
    """Run those cases, or all, in this process of the group, and write what ran and what failed."""
    os.chdir(folder)  # the cases write where they are
    warnings.filterwarnings("error", module="autocastfx")
    ran, failed = [], {}
    for name in names or CASES:
        try:
            CASES[name]()
        except Exception:  # the others may be waiting for this process now: no further case
            failed[name] = traceback.format_exc()
            break
        ran.append(name)
    (folder / f"{rank()}.json").write_text(json.dumps({"ran": ran, "failed": failed}))
