"""weights="cached": graphs read 16-bit copies that always are what a cast of the parameters would give now."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

import autocastfx
from autocastfx import AmpModule, Plan
from autocastfx.errors import CaptureError, UnsupportedError
from autocastfx.graph.node import origin
from autocastfx.passes import insert_casts
from autocastfx.passes.analysis import place_cheaply
from autocastfx.plan.plan import Why
from autocastfx.runtime import working_copies
from autocastfx.runtime.working_copies import Filled, WorkingCopies, working_copy
from benchmarks.models.tiny import CNN, EncoderLayer
from tests.training.recorded import record

LOW = torch.bfloat16


class Tied(nn.Module):
    """A tied output, that reads its table once more through a view, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.between(self.table(tokens)))
        return self.head(hidden) + hidden @ self.table.weight.t()

    def between(self, hidden: Tensor) -> Tensor:
        return hidden


class Language(Tied):
    """The same around a layer of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = EncoderLayer()

    def between(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden, torch.zeros(1, device=hidden.device))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().train()


def inputs(kind: Callable[[], nn.Module]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return (torch.randn(2, 3, 8, 8),) if kind is CNN else (torch.randint(11, (2, 5)),)


def pair(kind: Callable[[], nn.Module] = Tied, **options: Any) -> tuple[AmpModule, AmpModule]:
    """A model converted with casts, and its twin with working copies."""
    cast, cached = (
        autocastfx.convert(made(kind), inputs(kind), dtype=LOW, weights=weights, check=False, **options)
        for weights in ("cast", "cached")
    )
    return cast, cached


def step(amp_model: Callable[..., Tensor], *args: Tensor) -> Tensor:
    torch.manual_seed(2)
    loss = amp_model(*args).square().mean()
    loss.backward()
    return loss


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether parameters, their gradients, and buffers are equal to the bit."""
    tensors = [[*m.parameters(), *(p.grad for p in m.parameters()), *m.buffers()] for m in (a, b)]
    return all(x is y or torch.equal(x, y) for x, y in zip(*tensors, strict=True))


@pytest.mark.parametrize("op_list", ["default", "torch_autocast_cpu", "tensorflow"])
@pytest.mark.parametrize("kind", [Language, CNN])
def test_training_is_that_with_casts_to_the_bit(kind: Callable[[], nn.Module], op_list: str) -> None:
    amp_models = pair(kind, op_list=op_list)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in amp_models]
    for _ in range(3):
        for _ in range(2):  # micro-batches
            losses = [step(m, *inputs(kind)) for m in amp_models]
            assert torch.equal(*losses)
        assert same(*amp_models)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert same(*(m.eval() for m in amp_models))
    with torch.no_grad():
        assert torch.equal(*(m(*inputs(kind)) for m in amp_models))


def test_two_models_that_train_against_each_other() -> None:
    """The discriminator runs three times a step, twice before one backward."""
    torch.manual_seed(0)
    noise, real = torch.randn(4, 8), torch.randn(4, 8)
    losses: list[list[Tensor]] = []
    for weights in ("cast", "cached"):
        torch.manual_seed(3)
        generator, critic = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
        g = autocastfx.convert(generator, (noise,), dtype=LOW, weights=weights)
        c = autocastfx.convert(critic, (real,), dtype=LOW, weights=weights)
        of_g, of_c = torch.optim.Adam(g.parameters(), 0.01), torch.optim.Adam(c.parameters(), 0.01)
        losses.append([])
        for _ in range(3):
            fake = g(noise)
            loss = (c(fake.detach()) - c(real)).mean()
            of_c.zero_grad()
            loss.backward()
            of_c.step()
            of_g.zero_grad()
            against = -c(fake).mean()
            against.backward()
            of_g.step()
            losses[-1] += [loss.detach(), against.detach()]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


# -- when copies are made anew ----------------------------------------------------------------------------------------


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many copies were made, each time that some were."""
    counts: list[int] = []
    foreach = torch._foreach_copy_  # pyright: ignore

    def counting(copies: list[Tensor], masters: list[Tensor]) -> None:
        counts.append(len(copies))
        foreach(copies, masters)

    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    return counts


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),  # writes without counting the version
    "fused sgd": lambda p: torch.optim.SGD(p, 0.1, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_that_a_step_changed_are_copied_at_once_and_only_then(optimizer: str, copied: list[int]) -> None:
    _, amp_model = pair()
    parameters = len({c.parameter for c in amp_model.plan.copies})
    chosen = OPTIMIZERS[optimizer](amp_model.parameters())
    step(amp_model, *inputs(Tied))
    assert sum(copied) == parameters
    copied.clear()
    step(amp_model, *inputs(Tied))
    assert copied == []
    chosen.step()
    step(amp_model, *inputs(Tied))
    step(amp_model, *inputs(Tied))
    assert copied == [parameters - 2]  # not the frozen layer's


def _load(model: AmpModule) -> None:
    torch.manual_seed(4)
    model.load_state_dict(Tied().state_dict())


def _assign(model: AmpModule) -> None:
    torch.manual_seed(4)
    model.load_state_dict(Tied().state_dict(), assign=True)


def _in_place(model: AmpModule) -> None:
    with torch.no_grad():
        model.frozen.weight.mul_(2)


def _in_inference_mode(model: AmpModule) -> None:
    with torch.inference_mode():
        model.frozen.weight.mul_(2)


def _detached(model: AmpModule) -> None:
    model.frozen.weight.detach().mul_(2)


def _other_data(model: AmpModule) -> None:
    model.frozen.weight.data = torch.ones(16, 16)


def _memory_at_the_same_address(model: AmpModule) -> None:
    weight, before = model.frozen.weight, model.frozen.weight.data_ptr()
    shape = weight.shape
    weight.data = torch.empty(0)
    kept: list[Tensor] = []
    while not kept or (kept[-1].data_ptr() != before and len(kept) < 1000):
        kept.append(torch.ones(shape))
    weight.data = kept[-1]


def _other_parameter(model: AmpModule) -> None:
    model.frozen.weight = nn.Parameter(torch.ones(16, 16))


def _other_layout(model: AmpModule) -> None:
    model.frozen.weight.data = torch.ones(16, 16).t()


def _average(model: AmpModule) -> None:
    average = AveragedModel(nn.Linear(16, 16))
    torch._foreach_lerp_(list(model.frozen.parameters()), list(average.module.parameters()), 0.5)  # pyright: ignore


def _data_copy(model: AmpModule) -> None:
    model.frozen.weight.data.copy_(torch.ones(16, 16))
    model.refresh_weights()


def _data_copy_then_eval(model: AmpModule) -> None:
    model.frozen.weight.data.mul_(2)
    model.eval()


CHANGES = [
    *(_load, _assign, _in_place, _in_inference_mode, _detached, _other_data, _memory_at_the_same_address),
    *(_other_parameter, _other_layout, _average, _data_copy, _data_copy_then_eval),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_is_followed(change: Callable[[AmpModule], None]) -> None:
    cast, cached = pair()
    before = cached(*inputs(Tied))
    for model in (cast, cached):
        step(model, *inputs(Tied))
        change(model)  # without a further switch between training and evaluation, after which all copies are stale
    found = cached(*inputs(Tied))
    assert torch.equal(found, cast(*inputs(Tied)))
    assert not torch.equal(found, before)


def test_a_write_into_data_is_not_seen_until_told() -> None:
    """Should torch begin to count these, the documentation has to change."""
    model = nn.Linear(8, 8)
    x = torch.ones(2, 8)
    amp_model = autocastfx.convert(model, (x,), dtype=LOW, weights="cached")
    before = amp_model(x)
    model.weight.data.copy_(torch.ones(8, 8))
    assert torch.equal(amp_model(x), before)
    amp_model.refresh_weights()
    assert not torch.equal(amp_model(x), before)


def test_another_device_is_followed() -> None:
    _, amp_model = pair()
    (tokens,) = inputs(Tied)
    amp_model(tokens)
    amp_model.to("meta")
    assert amp_model(tokens.to("meta")).device.type == "meta"


def test_a_backward_after_an_update_is_that_of_the_weights_that_were_used() -> None:
    """As with casts: copies are made anew elsewhere while a graph of autograd still holds those before."""
    amp_models = pair(CNN)
    (x,) = inputs(CNN)
    for amp_model in amp_models:
        loss = amp_model(x).sum()
        with torch.no_grad():
            amp_model.fc.weight.mul_(2)
            amp_model(x)
        loss.backward()
    assert same(*amp_models)


def test_inference_mode_first_and_training_afterwards() -> None:
    cast, cached = pair()
    for model in (cast, cached):
        with torch.inference_mode():
            model(*inputs(Tied))
        step(model, *inputs(Tied))
    assert same(cast, cached)


def test_a_tied_parameter_has_one_copy_in_all_variants() -> None:
    _, amp_model = pair()
    for mode in (True, False):
        amp_model.train(mode)(*inputs(Tied))
    copies = amp_model._working_copies
    assert isinstance(copies, WorkingCopies)
    low = {id(copies.held[id(p), LOW]) for p in amp_model.parameters() if (id(p), LOW) in copies.held}
    assert len(low) == len(copies.held) == len({c.parameter for c in amp_model.plan.copies})


def test_a_copy_is_read_as_soon_as_it_is_made(copied: list[int]) -> None:
    model = nn.Linear(8, 4)
    copies = WorkingCopies(model).fresh()
    for masters in ([model.weight], [model.weight, model.bias], [model.weight, model.bias]):
        read = working_copies.working_copies(copies, masters, LOW)
        assert copies is not None
        held = [copies.held[id(master), LOW].tensor for master in masters]
        assert [t.data_ptr() for t in read] == [t.data_ptr() for t in held]
    assert copied == [1, 1]


def test_another_parameter_with_the_number_of_one_that_is_gone_is_not_taken_for_it() -> None:
    owner = nn.Linear(2, 2)
    copies = WorkingCopies(owner).fresh()
    numbers, again = set[int](), False
    for value in range(50):  # CPython gives memory that is free again
        master = nn.Parameter(torch.full((2,), float(value)))
        again |= id(master) in numbers
        numbers.add(id(master))
        (read,) = working_copies.working_copies(copies, [master], LOW)
        assert torch.equal(read.float(), master)
        del master, read
    assert again


def test_copies_do_not_outlive_the_model_nor_keep_parameters() -> None:
    _, amp_model = pair()
    step(amp_model, *inputs(Tied))
    copies = amp_model._working_copies
    assert copies is not None
    held = copies.held[id(amp_model.frozen.weight), LOW]
    assert held is not None
    parameter, tensor = weakref.ref(amp_model.frozen.weight), weakref.ref(held.tensor)
    del held
    amp_model.frozen.weight = nn.Parameter(torch.ones(16, 16))
    gc.collect()
    assert (parameter(), tensor()) == (None, None)
    others = [weakref.ref(p) for p in amp_model.parameters()]
    before = len(_global_optimizer_post_hooks)
    del amp_model
    gc.collect()
    assert [other() for other in others if other() is not None] == []
    assert copies.held == {}
    del copies
    gc.collect()
    assert len(_global_optimizer_post_hooks) == before - 1


class Stream:
    """As far as a CUDA stream is needed here."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def record_event(self) -> Any:
        return ("filled", self)

    def wait_event(self, event: Any) -> None:
        self.log.append(("waits", self, event))


def test_another_stream_waits_until_copies_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are played here: on a GPU a read on a second stream could come before the copy is filled."""
    log: list[Any] = []
    streams = [Stream(log), Stream(log)]
    now = [0]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[now[0]])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(("keeps", tensor, stream)))
    amp_model, x = _cold("cached")
    amp_model(x)
    copies: Any = amp_model._working_copies
    for held in copies.held.values():
        held.filled = Filled(held.tensor.device)
    amp_model(x)
    assert log == []
    now[0] = 1
    amp_model(x)
    assert [entry[:2] for entry in log[::2]] == [("waits", streams[1])] * len(copies.held)
    assert {id(entry[1]) for entry in log[1::2]} == {id(held.tensor) for held in copies.held.values()}
    log.clear()
    with torch.no_grad():
        for parameter in amp_model.parameters():
            parameter.add_(1)
    amp_model(x)  # filled anew, on this stream
    assert log == []


@pytest.mark.parametrize("stale", ["none", "some", "all"])
def test_a_call_on_another_stream_has_an_autograd_node_of_its_own(stale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are played here. A node of the first stream would make the second one wait in backward."""
    now = [Stream([]), Stream([])]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    amp_model, x = _cold("cached")
    amp_model(x)
    copies: Any = amp_model._working_copies
    for held in copies.held.values():
        held.filled = Filled(held.tensor.device)
    copies._forget_groups()  # which were made before

    def nodes() -> list[Any]:
        for _ in range(2):  # the first one makes the groups, the second one their nodes
            copies.expire(list(amp_model.parameters())[: {"none": 0, "some": 1, "all": None}[stale]])
            loss = amp_model(x).sum()
            for held in copies.held.values():
                held.filled = held.filled or Filled(held.tensor.device)
            loss.backward()
        return [group.node for group in copies.groups.values()]

    first = nodes()
    assert first == nodes()
    now.reverse()
    second = nodes()
    assert second == nodes()
    assert not any(a is b for a, b in zip(first, second, strict=True))
    assert None not in (*first, *second)
    assert first


def test_a_graph_that_is_captured_casts_though_all_copies_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and the capture are played here: a captured stream must not wait for what came before the capture."""
    log: list[Any] = []
    now, captures = [Stream(log), Stream(log)], [False]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now[0])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(("keeps", tensor, stream)))
    monkeypatch.setattr(working_copies, "is_capturing", lambda tensors: bool(list(tensors)) and captures[0])
    model = nn.Linear(4, 4)
    parameters = list(model.parameters())
    copies = WorkingCopies(model)

    def read() -> list[Tensor]:
        return working_copies.working_copies(copies.fresh(), parameters, LOW)

    read()
    for held in copies.held.values():
        held.filled = Filled(held.tensor.device)
    now.reverse()
    captures[0] = True
    assert not {tensor.data_ptr() for tensor in read()} & {held.tensor.data_ptr() for held in copies.held.values()}
    assert log == []
    captures[0] = False
    for parameter in parameters:
        parameter.data.mul_(2)  # unseen, as a replay does it
    assert all(torch.equal(low, parameter.to(LOW)) for low, parameter in zip(read(), parameters, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:The AccumulateGrad node's stream does not match")
def test_on_a_gpu_calls_may_come_on_several_streams() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).cuda(), torch.randn(4, 8, device="cuda")
    amp_model = autocastfx.convert(model, (x,), dtype=LOW, weights="cached")
    found: list[list[Tensor]] = []
    for stream in (torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(2)), torch.cuda.current_stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                model.zero_grad()
                amp_model(x).square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        torch.cuda.current_stream().wait_stream(stream)
    assert len(found[0]) == 4
    assert all(torch.equal(a, b) for grads in found[1:] for a, b in zip(grads, found[0], strict=True))


@pytest.mark.parametrize("captured", ["a training step", "the step of an optimizer", "a backward"])
def test_weights_that_the_replay_of_a_graph_changes_are_followed(
    captured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs are played here, by recorded operators that are run again: Python sees nothing of it."""
    now = False
    monkeypatch.setattr(working_copies, "is_capturing", lambda _: now)
    model, x = nn.Linear(8, 4), torch.randn(3, 8)
    amp_model = autocastfx.convert(model, (x,), dtype=LOW, weights="cached")
    optimizer = torch.optim.SGD(amp_model.parameters(), 0.1, fused=True)

    def backward() -> None:
        amp_model(x).square().sum().backward()

    def step() -> None:
        backward()
        optimizer.step()

    step()
    now = True
    recorded = [record({"a training step": step, "a backward": backward}.get(captured, optimizer.step))]
    if captured == "a backward":  # with a step of one's own, which no hook sees
        parameters: Any = list(amp_model.parameters())
        gradients: Any = [p.grad for p in parameters]
        recorded.append(record(lambda: _step_by_hand(parameters, gradients)))
    now = False
    for _ in range(2):
        amp_model(x)
        before = model.weight.detach().clone()
        for graph in recorded:
            graph.replay()
        assert not torch.equal(model.weight, before)
        assert torch.equal(amp_model(x), F.linear(x.to(LOW), model.weight.to(LOW), model.bias.to(LOW)).float())


def _step_by_hand(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    with torch.no_grad():
        torch._fused_sgd_(
            *(parameters, gradients, []),
            **{"weight_decay": 0, "momentum": 0, "lr": 0.1, "dampening": 0, "nesterov": False, "maximize": False},
            **{"is_first_step": True},
        )


def test_threads_that_read_at_once_see_whole_copies() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(10))).requires_grad_(False)
    x = torch.ones(2, 16)
    expected = autocastfx.convert(model, (x,), dtype=LOW)(x)
    for _ in range(5):
        amp_model = autocastfx.convert(model, (x,), dtype=LOW, weights="cached")
        with ThreadPoolExecutor(4) as pool:
            assert all(torch.equal(found, expected) for found in pool.map(amp_model, [x] * 8))


@torch.library.custom_op("autocastfx_test_weights::halve", mutates_args=())
def _halve(x: Tensor) -> Tensor:
    with torch.no_grad():
        _HALVED[0].mul_(0.5)
    return x.clone()


_halve.register_fake(lambda x: x.clone())
_halve.register_autograd(lambda ctx, grad: grad)
_HALVED: list[Tensor] = []


def test_what_a_custom_operator_changes_unseen_is_read_after_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(_halve(self.b(self.a(x))))

    results: list[Tensor] = []
    for weights in ("cast", "cached"):
        model, x = made(Net), torch.ones(2, 8)
        _HALVED[:] = [torch.ones(())]
        amp_model = autocastfx.convert(model, (x,), dtype=LOW, weights=weights)
        amp_model(x)
        _HALVED[:] = [model.b.weight]
        results.append(amp_model(x))
    assert torch.equal(*results)


@pytest.mark.parametrize(("kind", "op"), [(nn.LSTM, "lstm"), (nn.GRU, "gru")])
def test_what_an_operator_reads_in_each_step_adds_up_as_with_casts(kind: Callable[..., nn.Module], op: str) -> None:
    grads: list[list[Tensor]] = []
    for weights in ("cast", "cached"):
        torch.manual_seed(0)
        model, x = kind(8, 8), torch.randn(6, 2, 8)
        rules = autocastfx.OpList.of({"allow": [op]})
        amp_model = autocastfx.convert(model, (x,), dtype=LOW, weights=weights, op_list=["default", rules])
        amp_model(x)[0].square().sum().backward()
        assert weights == "cast" or amp_model.plan.copies
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def _cold(weights: str) -> tuple[AmpModule, Tensor]:
    x = torch.ones(2, 8)
    model = made(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    return autocastfx.convert(model, (x,), dtype=LOW, weights=weights), x


@pytest.mark.parametrize("is_warm", [False, True])
def test_transforms_tracers_and_abstract_tensors_get_casts(is_warm: bool) -> None:
    grads: list[Tensor] = []
    for weights in ("cast", "cached"):
        amp_model, x = _cold(weights)
        if is_warm:
            amp_model(x)
            with torch.no_grad():
                amp_model.get_parameter("0.weight").mul_(2)
        grads.append(torch.func.grad(lambda x, run=amp_model: run(x).float().sum())(x))
    assert torch.equal(*grads)
    traced = make_fx(amp_model)(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert amp_model(x).shape == (2, 1)
    with FlopCounterMode(display=False), FakeTensorMode(allow_non_fake_inputs=True):
        assert amp_model(x).shape == (2, 1)
    assert torch.equal(traced(x), amp_model(x))
    assert all(type(held.tensor) is Tensor for held in amp_model._autocastfx_copies.held.values())


# -- what else a module does ------------------------------------------------------------------------------------------


def test_parameters_state_and_buffers_are_those_of_the_original() -> None:
    model = made(Tied)
    amp_model = autocastfx.convert(model, inputs(Tied), dtype=LOW, weights="cached")
    amp_model(*inputs(Tied))
    assert all(a is b for a, b in zip(amp_model.parameters(), model.parameters(), strict=True))
    assert list(amp_model.state_dict()) == list(model.state_dict())
    assert all(t.dtype == torch.float32 for t in (*amp_model.parameters(), *amp_model.buffers()))


def _pickled(amp_model: AmpModule) -> AmpModule:
    return pickle.loads(pickle.dumps(amp_model))


@pytest.mark.parametrize("twin_of", [copy.deepcopy, _pickled], ids=["copy", "pickle"])
def test_a_twin_has_copies_of_its_own(twin_of: Callable[[AmpModule], AmpModule]) -> None:
    _, amp_model = pair()
    amp_model.eval()
    with torch.no_grad():
        before = amp_model(*inputs(Tied))
        twin = twin_of(amp_model)
        assert torch.equal(twin(*inputs(Tied)), before)
        twin.frozen.weight.mul_(2)
        assert not torch.equal(twin(*inputs(Tied)), before)
        assert torch.equal(amp_model(*inputs(Tied)), before)
    assert len(pickle.dumps(amp_model)) < 1.2 * len(pickle.dumps(pair()[0].eval()))  # the copies are not in it


def test_without_inputs_the_first_call_captures() -> None:
    cast = autocastfx.convert(made(Tied), inputs(Tied), dtype=LOW)
    cached = autocastfx.convert(made(Tied), dtype=LOW, weights="cached")
    for model in (cast, cached):
        step(model, *inputs(Tied))
    assert same(cast, cached)
    assert cached.plan.copies


def test_tensors_in_place_of_parameters_are_cast() -> None:
    cast, cached = pair(CNN)
    with torch.no_grad():
        others = {name: 2 * p for name, p in cast.named_parameters()}
        results = [torch.func.functional_call(m.eval(), others, inputs(CNN)) for m in (cast, cached)]
    assert torch.equal(*results)


def test_the_interpreter_reads_copies_too() -> None:
    cast, cached = pair(CNN)
    with torch.no_grad():
        cached.eval().fc.weight.mul_(2)
        cast.eval().fc.weight.mul_(2)
        assert torch.equal(fx.Interpreter(cached.freeze(*inputs(CNN))).run(*inputs(CNN)), cast(*inputs(CNN)))


def test_second_gradients() -> None:
    found: list[Tensor] = []
    for model in pair(CNN):
        (x,) = inputs(CNN)
        (grad,) = torch.autograd.grad(model.eval()(x).square().mean(), model.fc.weight, create_graph=True)
        found += torch.autograd.grad(grad.square().sum(), model.fc.weight)
    assert torch.equal(*found)


class Three(nn.Module):
    """Three weights that are read together, in two results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.other = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ self.a + x @ self.b).sum(), x @ self.other


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_gradients_that_are_cast_by_one_kernel_are_the_same(
    keeps_graph: bool, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    torch.manual_seed(0)
    model, x = Three(), torch.randn(8, 8)
    amp_model = autocastfx.convert(model, (x,), dtype=LOW, weights="cached")
    found: list[list[Tensor | None]] = []
    amp_model(x)
    for together in (False, True):
        monkeypatch.setattr("autocastfx.runtime.working_copies.casts_together", lambda grad, held=together: held)
        copied.clear()
        used, _ = amp_model(x)
        parameters = list(amp_model.parameters())
        grads = torch.autograd.grad(used, parameters, create_graph=keeps_graph, allow_unused=True)
        assert copied == ([2] if together and not keeps_graph else [])
        found.append(list(grads))
    assert [grad is None for grad in found[0]] == [False, False, True]
    for one, other in zip(*found, strict=True):
        assert one is None or (torch.equal(one, other) and one.dtype == other.dtype == torch.float32)


@pytest.mark.parametrize("together", [False, True])
def test_what_backward_gives_is_float32_before_autograd_looks_at_it(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine casts once more what comes in another dtype than the parameter's: a kernel for each gradient."""
    monkeypatch.setattr("autocastfx.runtime.working_copies.casts_together", lambda _: together)
    model = nn.Linear(4, 4)
    read = working_copies.working_copies(WorkingCopies(model).fresh(), list(model.parameters()), LOW)
    node: Any = read[0].grad_fn
    with torch.no_grad():
        _, *grads = node.apply(*map(torch.ones_like, read))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    assert all(grad.eq(1).all() for grad in grads)


class Nothing(torch.autograd.Function):
    """Passes no gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


@pytest.mark.parametrize("together", [False, True])
def test_a_backward_that_brings_no_gradient_leaves_none(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autocastfx.runtime.working_copies.casts_together", lambda _: together)
    model = nn.Linear(4, 4)
    copies = WorkingCopies(model).fresh()
    parameters = list(model.parameters())
    read = working_copies.working_copies(copies, parameters, LOW)
    grads = torch.autograd.grad([Nothing.apply(t).sum() for t in read], parameters, allow_unused=True)
    assert grads == (None, None)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_casts_and_says_so_once(backend: str) -> None:
    cast, cached = pair(CNN)
    compiled = torch.compile(cached, backend=backend, fullgraph=True)
    with pytest.warns(UserWarning, match='weights="cached" has no effect under torch.compile'):
        step(compiled, *inputs(CNN))
    expected = torch.compile(cast, backend=backend, fullgraph=True)
    step(expected, *inputs(CNN))
    assert same(cast, cached)
    compiled(inputs(CNN)[0][:1])  # compiled anew, and silently
    assert all(p.grad is not None for p in cached.parameters())


def test_a_compiled_optimizer_is_followed(copied: list[int]) -> None:
    _, amp_model = pair(CNN)
    optimizer = torch.optim.SGD(amp_model.parameters(), 0.1)
    update = torch.compile(optimizer.step, backend="aot_eager")
    step(amp_model, *inputs(CNN))
    copied.clear()
    update()
    step(amp_model, *inputs(CNN))
    assert sum(copied) == len(amp_model.plan.copies)


def test_exported_it_casts_and_says_so() -> None:
    cast, cached = pair(CNN)
    with pytest.warns(UserWarning, match='weights="cached" has no effect under torch.compile and torch.export'):
        program = torch.export.export(cached.eval(), inputs(CNN), strict=False)
    casts = [n for n in program.graph.nodes if "to.dtype" in str(n.target) and "weight" in n.args[0].name]
    assert casts
    assert program.constants == {}
    assert torch.equal(program.module()(*inputs(CNN)), cast.eval()(*inputs(CNN)))


# -- plan and dump ----------------------------------------------------------------------------------------------------


def test_the_plan_counts_no_cast_of_a_parameter() -> None:
    cast, cached = pair(Language)
    assert [n.name for n in cast.plan.nodes] == [n.name for n in cached.plan.nodes]
    of_weights = [c for c in cast.plan.casts if c.value.endswith(("weight", "bias"))]
    assert {c.name for c in cast.plan.casts} - {c.name for c in cached.plan.casts} == {c.name for c in of_weights}
    assert {c.name for c in cached.plan.copies} == {c.name for c in of_weights}
    saved = cast.plan.traffic.moved - cached.plan.traffic.moved
    assert saved == sum(c.bytes for c in of_weights) > 0
    assert Plan.from_json(cached.plan.to_json()) == cached.plan


def test_the_dump_shows_which_parameter_is_read() -> None:
    cast, cached = pair(CNN)
    text = autocastfx.dump(cached)
    assert "working copies: of 4 parameters, made anew when a parameter has changed" in text
    assert "working copies" not in autocastfx.dump(cast)
    full = autocastfx.dump(cached, full=True, width=None)
    (row,) = [" ".join(line.split()) for line in full.splitlines() if "of fc.weight" in line]
    assert row.startswith("+ fc_weight_bfloat16 working copy float32 → bfloat16 ")
    assert row.endswith(" of fc.weight for linear")
    assert "weight, bias → bfloat16 (working copy)" in autocastfx.dump(cached, width=None)
    assert "# + working copy of fc.weight: float32 → bfloat16" in autocastfx.dump(cached, format="python")
    assert '"working copy\\nfloat32 → bfloat16"' in autocastfx.dump(cached, format="dot")
    twin = pickle.loads(pickle.dumps(cached))
    twin(*inputs(CNN))
    again = autocastfx.dump(twin, width=None)
    assert "weight, bias → bfloat16 (working copy)" in again


def test_an_edited_plan_is_obeyed(tmp_path: Path) -> None:
    _, cached = pair(CNN)
    path = tmp_path / "plan.json"
    path.write_text(cached.plan.to_json())
    again = autocastfx.convert(made(CNN), inputs(CNN), dtype=LOW, weights="cached", plan=path)
    assert again.plan.copies == cached.plan.copies
    path.write_text('{"nodes": [{"name": "linear", "op": "linear", "placement": {"run": "float32"}}]}')
    edited = autocastfx.convert(made(CNN), inputs(CNN), dtype=LOW, weights="cached", plan=path)
    assert {c.parameter for c in edited.plan.copies} == {"conv.weight", "conv.bias"}


# -- views of parameters ----------------------------------------------------------------------------------------------


class Views(nn.Module):
    """Parameters that are read through views: transposed, sliced, through two views, and expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
        self.d, self.row = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.a.t()
        x = F.linear(x, self.b[:4]) @ self.b[4:] + F.linear(x, self.b)
        x = x @ self.c.view(4, 2, 8).reshape(8, 8).t()
        turned = self.d.t()
        x = torch.softmax(turned, -1) @ (x @ turned).t()
        return x.t() @ self.row.expand(8, 8)


def test_a_view_of_a_parameter_is_one_of_its_copy_where_no_bit_changes() -> None:
    cast, cached = _views()
    x = torch.randn(4, 8)
    results = [m(x) for m in (cast, cached)]
    for result in results:
        result.square().mean().backward()
    assert torch.equal(*results)
    assert same(cast, cached)
    read = {c.parameter for c in cached.plan.copies}
    assert read >= {"a", "b", "c"}
    assert cached.plan["t"].placement.because.why is Why.VIEW_OF_WEIGHT
    assert cast.plan["t"].dtype == "float32"
    turned = [n.name for n in cached.plan.nodes if n.op == "t" and n.dtype == "float32"]
    assert turned  # d's, which the softmax reads too
    assert not place_cheaply._is_injective(torch.empty(1, 8).expand(8, 8))  # its gradient is a sum


def test_a_view_that_steps_by_an_inputs_size_is_read_in_float32() -> None:
    class Stepped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w.as_strided((8, 4), (x.shape[0], 1))

    x = torch.randn(4, 8)
    amp_model = autocastfx.convert(Stepped(), (x,), dtype=LOW, weights="cached")
    cast = autocastfx.convert(copy.deepcopy(amp_model._model), (x,), dtype=LOW)
    for rows in (4, 3, 5, 4):  # at 3 the rows overlap
        x = torch.randn(rows, 8)
        assert torch.equal(amp_model(x), cast(x))
    fixed, *others = [variant.plan["as_strided"].dtype for variant in amp_model.variants]
    assert (fixed, set(others)) == ("bfloat16", {"float32"})


def _views() -> tuple[AmpModule, AmpModule]:
    x = torch.randn(4, 8)
    cast, cached = (autocastfx.convert(made(Views), (x,), dtype=LOW, weights=w) for w in ("cast", "cached"))
    return cast, cached


def test_every_read_of_a_copy_is_marked_and_a_second_run_changes_nothing() -> None:
    _, cached = _views()
    reads = [n for n in cached.graph.nodes if n.target is working_copy]
    assert {origin(n).made_by for n in reads} == {"store_weights"}  # pyright: ignore[reportOptionalMemberAccess]
    assert len({n.args[0] for n in reads}) == 1  # the copies are looked at once
    before = str(cached.graph)
    insert_casts.read_copies(cached.graph, frozenset(cached._held()), {})
    assert str(cached.graph) == before


# -- distributed ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_data_parallel_training_is_that_with_casts_to_the_bit(options: dict[str, Any]) -> None:
    models = [DistributedDataParallel(m, **options) for m in pair()]
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, fused=True) for m in models]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            step(model, *inputs(Tied))
        assert same(*models)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a part"])
def test_sharded_it_is_refused(whole: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, amp_model = pair(CNN)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(amp_model if whole else amp_model.fc, mesh=mesh)
    error, said = (UnsupportedError, r'fully_shard.*weights="cast"') if whole else (CaptureError, "cannot be captured")
    with pytest.raises(error, match=said):
        amp_model(*inputs(CNN))
