"""A fused step writes the 16-bit copies of its weights too, and trains as one that does not, to the bit."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import DynamicLossScale, LossScalingOptimizer, NoLossScale
from autocastfx.training import copying_step
from autocastfx.training.loss_scale import LossScale

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "Adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.01, fused=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "SGD without momentum": partial(torch.optim.SGD, lr=1e-2, fused=True),
}
STEPS, OVERFLOWS, SAVED, MICRO = 50, (0, 7, 8, 30), 25, 2


class Kernels:
    """Stands in for Triton's: torch's step on a CPU, and a copy."""

    def __init__(self) -> None:
        self.written: list[int] = []  # how many copies, by call

    def of(self, kind: str, device: torch.device) -> Callable[..., None]:
        return partial(self.step, kind)

    def step(
        self, kind: str, lists: Sequence[Sequence[Tensor]], numbers: Mapping[str, Any], copies: Sequence[Tensor]
    ) -> None:
        getattr(torch, f"_fused_{kind}_")(*lists, **numbers)
        found_inf = numbers.get("found_inf")
        if found_inf is None or found_inf.item() != 1:
            for parameter, low in zip(lists[0], copies, strict=True):
                low.data.copy_(parameter)  # no version counter sees it, as of a kernel
        self.written.append(len(copies))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(copying_step, "kernel_of", made.of)
    return made


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 4))


class Run:
    """A model in training: converted, with cached copies, or made 16-bit, with masters."""

    def __init__(self, weights: str, dtype: torch.dtype, optimizer: str, rule: LossScale, **options: Any) -> None:
        self.plain, x = network(), torch.randn(6, 8)
        if weights == "cached":
            self.model: Any = autocastfx.convert(self.plain, (x,), dtype=dtype, weights="cached")
        else:
            self.model = self.plain.to(dtype)
        self.optimizer = LossScalingOptimizer(OPTIMIZERS[optimizer](self.model.parameters()), rule, **options)
        self.overflows = OVERFLOWS if rule.is_checked else ()

    def backward(self, index: int) -> None:
        for micro in range(MICRO):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(index * MICRO + micro), device="cpu")
            x = x.to(next(self.model.parameters()))
            loss = self.model(x).float().square().mean()
            self.optimizer.backward(loss * (float("inf") if index in self.overflows else 1.0))
            self.optimizer.accumulate()

    def step(self, index: int) -> None:
        self.optimizer.zero_grad()
        self.backward(index)
        if index % 3 == 0:
            self.optimizer.clip_grad_norm_(0.1)
        self.optimizer.step()

    def reloaded(self) -> None:
        stream = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), stream)
        stream.seek(0)
        model, optimizer = torch.load(stream)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def numbers(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values() if value is not None]
        own = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [t.detach().clone() for t in (*self.model.parameters(), *own, *states, *grads)]


def trained(run: Run) -> Iterator[list[Tensor]]:
    for index in range(STEPS):
        run.step(index)
        yield run.numbers()
        if index == SAVED:
            run.reloaded()


def assert_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other) or torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("weights", ["cached", "masters"])
@pytest.mark.parametrize(("dtype", "rule"), [
    (torch.float16, DynamicLossScale(init=2.0**10, interval=5)), (torch.bfloat16, NoLossScale()),
])  # fmt: skip
def test_training_is_the_same_to_the_bit(
    weights: str, dtype: torch.dtype, rule: LossScale, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over overflows, clipping, accumulation and a checkpoint, with a model's outputs read from the copies."""
    expected = list(trained(Run(weights, dtype, optimizer, rule)))
    kernels = Kernels()
    monkeypatch.setattr(copying_step, "kernel_of", kernels.of)
    run = Run(weights, dtype, optimizer, rule)
    for index, found in enumerate(trained(run)):
        assert_same(found, expected[index])
    assert sum(kernels.written) > 0.8 * STEPS * (4 if weights == "cached" else 6)


def copies_in(model: Any) -> list[Any]:
    return list(model._autocastfx_copies.held.values())


def assert_copies_agree(model: Any) -> None:
    for one in copies_in(model):
        assert torch.equal(one.tensor, one.master().detach().to(one.dtype))


def warm(optimizer: str = "AdamW", weights: str = "cached", dtype: torch.dtype = torch.bfloat16) -> Run:
    """After a step, so that there are copies and a state."""
    run = Run(weights, dtype, optimizer, NoLossScale())
    run.step(1)
    return run


def test_the_next_call_copies_nothing(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    run = warm()
    before = {id(one): one.tensor.data_ptr() for one in copies_in(run.model)}
    kernels.written.clear()
    run.step(2)
    assert kernels.written == [4]
    assert_copies_agree(run.model)
    renewed: list[Any] = []
    monkeypatch.setattr(run.model._autocastfx_copies, "_renew", renewed.extend)
    run.model(torch.randn(6, 8))
    assert renewed == []
    assert {id(one): one.tensor.data_ptr() for one in copies_in(run.model)} == before


@pytest.mark.parametrize("change", ["write", "other memory", "expire"])
def test_what_changes_after_the_step_is_copied(change: str, kernels: Kernels) -> None:
    run = warm()
    weight = run.model.get_submodule("0").weight
    if change == "write":
        with torch.no_grad():
            weight.mul_(2)
    else:
        weight.data = weight.data * 2
    run.model(torch.randn(6, 8))
    assert_copies_agree(run.model)
    # A copy that is not what its master rounds to is left to the next call, which a skipped step needs.
    with torch.no_grad():
        weight.mul_(2)
    if change == "expire":
        run.model._autocastfx_copies.expire()
    kernels.written.clear()
    run.optimizer.step() if change != "expire" else run.optimizer.optimizer.step()
    assert kernels.written == ([3] if change != "expire" else [])
    run.model(torch.randn(6, 8))
    assert_copies_agree(run.model)


def test_a_backward_after_the_step_reads_what_its_forward_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Tensor]:
        run = warm()
        late = run.model(torch.ones(6, 8)).float().square().mean()
        run.backward(3)
        run.optimizer.step()
        run.optimizer.zero_grad()
        late.backward()
        found = [p.grad.clone() for p in run.model.parameters()]
        run.step(4)
        return [*found, *run.numbers()]

    expected = gradients()
    monkeypatch.setattr(copying_step, "kernel_of", Kernels().of)
    assert_same(gradients(), expected)


def test_autograd_notices_that_a_16_bit_parameter_was_written(kernels: Kernels) -> None:
    run = warm(weights="masters")
    x = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True)
    late = run.model(x).sum()
    run.optimizer.step()
    assert kernels.written[-1] == 6
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_a_write_into_a_16_bit_parameter_before_the_step_reaches_its_master(kernels: Kernels) -> None:
    run = warm(weights="masters")
    run.backward(3)
    run.optimizer.unscale_()
    with torch.no_grad():
        run.model[0].weight.fill_(7)
    kernels.written.clear()
    run.optimizer.step()
    assert kernels.written == [6]
    assert run.model[0].weight.ge(6).all()
    for working, master in zip(run.optimizer.masters.working, run.optimizer.masters.masters, strict=True):
        assert torch.equal(working, master.to(torch.bfloat16))


def hooked(run: Run) -> None:
    run.optimizer.optimizer.register_step_post_hook(lambda *given: None)


def replaced(run: Run) -> None:
    step = run.optimizer.optimizer.step
    run.optimizer.optimizer.step = lambda *given: step(*given)  # type: ignore[method-assign]


def scaled(run: Run) -> None:
    """As by a GradScaler, whose step is the bare optimizer's."""
    inner: Any = run.optimizer.optimizer
    inner.grad_scale, inner.found_inf = torch.tensor(2.0), torch.tensor(0.0)


def grouped(**changed: Any) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        for group in run.optimizer.param_groups:
            group.update(changed)
        if changed.get("amsgrad"):
            for state in run.optimizer.state.values():
                state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])

    return change


@pytest.mark.parametrize(
    "change",
    [
        hooked,
        replaced,
        scaled,
        grouped(fused=False, foreach=False),
        grouped(amsgrad=True),
        grouped(lr=torch.tensor(1e-2)),
    ],
    ids=["hook", "replaced step", "grad scale", "not fused", "amsgrad", "tensor as a rate"],
)
@pytest.mark.parametrize("weights", ["cached", "masters"])
def test_other_steps_are_torchs(weights: str, change: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def ran() -> list[Tensor]:
        run = warm("Adam", weights)
        change(run)
        kernels.written.clear()
        run.step(3)
        run.step(4)
        return run.numbers()

    kernels = Kernels()
    expected = ran()
    monkeypatch.setattr(copying_step, "kernel_of", kernels.of)
    assert_same(ran(), expected)
    assert kernels.written == []


def test_a_capture_a_subclass_and_split_masters_are_left_to_torch(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("masters", torch.bfloat16, "AdamW", NoLossScale(), masters="split")
    run.step(1)
    assert kernels.written == []
    run = warm()
    kernels.written.clear()
    monkeypatch.setattr(copying_step, "is_capturing", lambda tensors: True)
    run.step(2)
    assert kernels.written == []
    monkeypatch.undo()

    class Own(torch.optim.AdamW):
        pass

    optimizer = LossScalingOptimizer(Own(run.model.parameters(), fused=True), NoLossScale())
    optimizer.step()
    assert kernels.written == []


def test_the_first_step_of_a_momentum_is_left_to_torch(kernels: Kernels) -> None:
    run = warm("SGD")
    assert kernels.written == []
    run.step(2)
    assert kernels.written == [4]


def test_masters_agree_with_what_the_step_wrote(kernels: Kernels) -> None:
    """No later step has to compare them."""
    run = warm(weights="masters")
    assert kernels.written == [6]
    masters: Any = run.optimizer.masters
    assert all(mark.fits(working) for mark, working in zip(masters._marks, masters.working, strict=True))


def test_a_step_that_only_makes_state_keeps_what_was_written(kernels: Kernels) -> None:
    """As torch.distributed.checkpoint does one: no master has followed its parameter then."""
    run = Run("masters", torch.bfloat16, "AdamW", DynamicLossScale())
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in (*run.model.parameters(), *run.optimizer.masters.masters):
        parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        run.model[0].weight.fill_(7)
    run.optimizer.step()
    assert run.optimizer.state
    assert run.model[0].weight.eq(7).all()
    assert kernels.written == [5]


def test_a_scheduler_keeps_the_kernel(kernels: Kernels) -> None:
    run = warm()
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer.optimizer, 1)
    kernels.written.clear()
    run.step(2)
    scheduler.step()
    assert kernels.written == [4]


def test_two_models_share_a_parameter(kernels: Kernels) -> None:
    """In two dtypes: one copy is written, the other renewed by the next call."""
    run = warm()
    other = autocastfx.convert(run.plain, (torch.randn(6, 8),), dtype="float16", weights="cached")
    other(torch.randn(6, 8)).sum().backward()
    run.optimizer.step()
    for model in (run.model, other):
        model(torch.randn(6, 8))
        assert_copies_agree(model)


def test_what_lies_otherwise_or_is_empty_is_left_to_torch(kernels: Kernels) -> None:
    """A 16-bit parameter in other strides than its master; no numbers; a frozen one; one without a gradient."""
    apart = nn.Parameter(torch.randn(6, 4).bfloat16())
    parameters = [apart, *(nn.Parameter(torch.randn(*shape).bfloat16()) for shape in ((0, 4), (3,), (5,), (4,)))]
    parameters[3].requires_grad_(False)
    optimizer = LossScalingOptimizer(torch.optim.AdamW(parameters, fused=True), NoLossScale())
    apart.data = apart.data.t().contiguous().t()
    for parameter in parameters[:3]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert kernels.written == [1]
    for working, master in zip(optimizer.masters.working, optimizer.masters.masters, strict=True):
        assert torch.equal(working, master.to(torch.bfloat16))


def test_where_there_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA with Triton, where its trial gave torch's bits, if the variable asks for it."""
    tried = SimpleNamespace(step=lambda *given: given, gives_torchs_bits=lambda *given: given[0] != "sgd")
    monkeypatch.setitem(sys.modules, "autocastfx.training.step_kernel", tried)
    monkeypatch.setattr(autocastfx.training, "step_kernel", tried, raising=False)
    monkeypatch.setattr(copying_step, "find_spec", lambda name: object())
    monkeypatch.delenv("AUTOCASTFX_TRITON", raising=False)
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(copying_step, "kernel_of", copying_step.kernel_of.__wrapped__)  # which keeps its answers
    assert copying_step.kernel_of("adam", cuda) is None
    monkeypatch.setenv("AUTOCASTFX_TRITON", "all")
    kernel = copying_step.kernel_of("adam", cuda)
    assert kernel is not None
    assert kernel([], {}, []) == ("adam", [], {}, [])
    assert copying_step.kernel_of("sgd", cuda) is None
    assert copying_step.kernel_of("adam", torch.device("cpu")) is None
    for value, is_there in (("none", False), ("rms_norm", False), ("all", True), ("rms_norm,optimizer_step", True)):
        monkeypatch.setenv("AUTOCASTFX_TRITON", value)
        assert (copying_step.kernel_of("adam", cuda) is not None) is is_there
    monkeypatch.setattr(copying_step, "find_spec", lambda name: None)
    assert copying_step.kernel_of("adam", cuda) is None


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["cached", "masters"])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD"])
def test_a_gpu_trains_the_same_to_the_bit(weights: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = DynamicLossScale(init=2.0**10, interval=5)
    with torch.device("cuda"):
        monkeypatch.setattr(copying_step, "kernel_of", lambda *given: None)
        expected = list(trained(Run(weights, torch.float16, optimizer, rule)))
        monkeypatch.undo()
        monkeypatch.setenv("AUTOCASTFX_TRITON", "all")
        copying_step.kernel_of.cache_clear()
        for index, found in enumerate(trained(Run(weights, torch.float16, optimizer, rule))):
            assert_same(found, expected[index])
