"""What Dynamo cannot capture is found, told, and run as asked for; nothing runs in float32 in silence."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import autocastfx
from autocastfx import CompileBackend
from autocastfx.errors import CaptureError, UncapturedGraphWarning
from autocastfx.integrations.skipped_code import InAutocast
from tests.helpers import Net, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16


class Experts(nn.Module):
    """Each row goes through the expert that a gate chooses for it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen, found = self.gate(x).argmax(-1), torch.zeros_like(x, dtype=torch.float32)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            if rows.numel() == 0:
                continue
            found = found.index_add(0, rows, expert(x[rows]).float())
        return found


class Shrink(nn.Module):
    """Repeats a layer until the values are small."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, most: int = 3) -> Tensor:
        while x.norm() > 1 and most:
            x, most = self.layer(x), most - 1
        return x


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x[None].expand(2, -1, -1), torch.tensor([5, 3]), batch_first=True)
        found, _ = self.lstm(packed)
        return self.head(pad_packed_sequence(found, batch_first=True)[0])


class Printing(nn.Module):
    """Breaks the graph between two layers, which are captured all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = float(x.detach().float().abs().max().numpy())
        return self.last(x / scale)


class Whole(nn.Module):
    """A captured layer before and after a module."""

    def __init__(self, inner: nn.Module, after: int = 8) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(8, 8), inner, nn.Linear(after, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "experts": (lambda: Whole(Experts()), "inner"),
    "while": (lambda: Whole(Shrink()), "inner"),
    "packed": (lambda: Whole(Tagger(), 4), "inner"),
    "root": (Experts, r"\(the model\)"),
}


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
def test_skipped_code_runs_under_autocast_from_the_second_call_on(name: str, inner: str) -> None:
    torch.manual_seed(0)
    made, path = MODELS[name]
    model, x = made(), torch.randn(5, 8)
    other = copy.deepcopy(model)
    backend = CompileBackend(dtype=LOW, inner=inner)
    assert backend.compile(model) is model
    told = r"torch\.compile cannot capture \w+ at \S+(?:test_skipped_code|rnn)\.py:\d+ \(.+\)\. "
    holds_nothing_else = name == "packed" and inner == "eager"  # an LSTM by itself
    told += f"{'It' if holds_nothing_else else 'What was not captured of it'} has run in float32;"
    then = rf"from now on {path}.* runs under torch\.autocast, in bfloat16\."
    with pytest.warns(UncapturedGraphWarning, match=f"{told} {then}"):
        model(x)
    assert backend.skipped
    for _ in range(2):
        model.zero_grad()
        found = model(x)
        found.sum().backward()
    with torch.autocast("cpu", LOW):
        wanted = other(x)
    wanted.sum().backward()
    assert found.dtype == torch.float32
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    grads = [(ours[key].grad, p.grad) for key, p in theirs.items() if p.grad is not None]
    if name == "packed":  # torch.autocast leaves an LSTM to the dtype of its input, which is float32 here
        assert relative_error(found.detach(), wanted.detach()) < 4 * torch.finfo(LOW).eps
    else:
        assert torch.equal(found, wanted.float())
        assert all(torch.equal(*pair) for pair in grads)


class Measured(nn.Module):
    """Reads a number in the middle, which breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x / max(x.detach().abs().max().item(), 1.0))


class Recomputed(nn.Module):
    """A block under activation checkpointing, in one of the ways in which people write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.block, self.head, self.way = Measured(), nn.Linear(8, 8), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "function":
            x = checkpoint(lambda x: self.block(x) * 2, x, use_reentrant=False)
        elif self.way == "disabled":
            x = self.disabled(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.way == "reentrant")
        return self.head(x)

    @torch.compiler.disable
    def disabled(self, x: Tensor) -> Tensor:
        return self.block(x)


@pytest.mark.parametrize("way", ["module", "reentrant", "function"])
def test_what_a_checkpoint_calls_and_the_graph_breaks_in_is_told(way: str) -> None:
    """Dynamo leaves the call of the checkpoint to Python, and looks at nothing in it."""
    torch.manual_seed(0)
    model, x = Whole(Recomputed(way)), torch.randn(5, 8)
    other = copy.deepcopy(model)
    autocastfx.enable(model, dtype=LOW)
    told = r"cannot capture forward at .*test_skipped_code\.py:\d+ \(the graph breaks in \S+, which it calls: .+\)\."
    told += " What was not captured of it has run in float32; from now on inner runs under"
    with pytest.warns(UncapturedGraphWarning, match=told) as found:
        model(x).sum().backward()  # recomputes in float32, as it was
    assert len(found) == 1
    model.zero_grad()
    result = model(x)
    result.sum().backward()
    with torch.autocast("cpu", LOW):
        wanted = other(x)
    wanted.sum().backward()
    assert torch.equal(result, wanted.float())
    ours = dict(model.named_parameters())
    assert all(torch.equal(ours[name].grad, p.grad) for name, p in other.named_parameters())  # type: ignore[arg-type]


class Bare(nn.Module):
    """A function of its own, without a module in it, that runs uncaptured for the reason that ``way`` names."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.randn(8, 8)), way
        self.excluded = torch.compiler.disable(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "checkpoint":
            return checkpoint(self.scaled, x, use_reentrant=False)
        if self.way == "generator":
            return next(iter(list(self.generated(x))))
        if self.way == "disabled module":
            return self.excluded(x)
        return self.disabled(x) if self.way == "disabled" else self.shallow(x)

    def scaled(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.weight)
        return x / max(x.detach().abs().max().item(), 1.0)

    def generated(self, x: Tensor) -> Iterator[Tensor]:
        yield self.scaled(x)

    @torch.compiler.disable
    def disabled(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)

    @torch.compiler.disable(recursive=False)
    def shallow(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def test_a_function_that_a_checkpoint_calls_and_the_graph_breaks_in_is_told() -> None:
    torch.manual_seed(0)
    model, x = Whole(Bare("checkpoint")), torch.randn(5, 8)
    with torch.autocast("cpu", LOW):
        wanted = copy.deepcopy(model)(x)
    autocastfx.enable(model, dtype=LOW)
    told = (
        r"cannot capture forward at .*test_skipped_code\.py:\d+ \(the graph breaks in scaled, which it calls: .*\)\. It"
    )
    with pytest.warns(
        UncapturedGraphWarning, match=f"{told} has run in float32; from now on inner runs under"
    ) as found:
        model(x)
    assert len(found) == 1
    assert torch.equal(model(x), wanted.float())


def test_a_function_that_the_graph_breaks_in_and_that_is_captured_by_itself_is_no_concern() -> None:
    model = Whole(Bare("generator"))
    model.inner.generated = model.inner.scaled  # type: ignore[assignment]
    autocastfx.enable(model, dtype=LOW)
    model(torch.randn(5, 8))
    assert autocastfx.backend_of(model).skipped == []  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["disabled", "shallow", "disabled module", "disabled block"])
def test_what_the_user_excludes_from_capture_runs_in_float32_and_is_told(way: str) -> None:
    torch.manual_seed(0)
    inner = Recomputed("disabled") if way == "disabled block" else Bare(way)
    model, x = Whole(inner), torch.randn(5, 8)
    autocastfx.enable(model, dtype=LOW)
    what = "module" if way == "disabled module" else "function"
    told = rf"cannot capture all of forward at .*\.py:\d+ \(it calls a {what} under torch\.compiler\.disable\)"
    with pytest.warns(UncapturedGraphWarning, match=rf"{told}\. What it computes there runs in float32\.") as found:
        model(x)
    assert len(found) == 1
    model(x)
    calls = (module.__dict__.get("_compiled_call_impl") for module in model.modules())
    assert not any(isinstance(call, InAutocast) for call in calls)


class Answer:
    """A class that torch's pytrees do not know."""

    def __init__(self, logits: Tensor, hidden: list[Tensor]) -> None:
        self.logits, self.hidden = logits, hidden


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    hidden: list[Tensor]


@dataclass
class Slotted:
    __slots__ = ("hidden", "logits")
    logits: Tensor
    hidden: list[Tensor]


class ByName(dict[str, Any]):
    """Its items are attributes as well."""

    def __init__(self, logits: Tensor, hidden: list[Tensor]) -> None:
        super().__init__(logits=logits, hidden=hidden)
        self.__dict__ = self


class Answering(nn.Module):
    """Gives its result, and a list of its values, in an object of a class of its own."""

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.shrink, self.kind = Shrink(), kind

    def forward(self, x: Tensor, store: Any = None) -> Any:
        found = self.shrink.layer(x)
        for _ in range(2):
            if found.norm() < 1e-3:
                continue
            found = self.shrink.layer(found)
        if store is not None:
            store.logits = found.to(LOW)
            return store
        return self.kind(found, [found])


@pytest.mark.parametrize("kind", [Answer, Frozen, Slotted, ByName])
def test_an_object_that_skipped_code_gives_holds_float32_too(kind: type[Any]) -> None:
    torch.manual_seed(0)
    model, x = Answering(kind), torch.randn(5, 8)
    autocastfx.enable(model, dtype=LOW)
    with pytest.warns(UncapturedGraphWarning, match="from now on"):
        model(x)
    found = model(x)
    assert type(found) is kind
    for values in (found.logits, *found.hidden, *(found.values() if isinstance(found, dict) else ())):
        assert (values[0] if isinstance(values, list) else values).dtype == torch.float32
    found.logits.sum().backward()
    assert model.shrink.layer.weight.grad is not None
    store = Answer(x, [])
    assert model(x, store) is store
    assert store.logits.dtype == LOW


def test_in_float32_it_is_told_and_left() -> None:
    model, x = Whole(Experts()), torch.randn(5, 8)
    CompileBackend(dtype=LOW, inner="eager", uncaptured="float32").compile(model)
    with pytest.warns(UncapturedGraphWarning, match=r"\)\. What was not captured of it runs in float32\."):
        model(x)
    assert not isinstance(model.inner.__dict__["_compiled_call_impl"], InAutocast)
    model(x)  # told once


def test_it_can_be_an_error() -> None:
    model = Whole(Experts())
    CompileBackend(dtype=LOW, inner="eager", uncaptured="error").compile(model)
    with pytest.raises(CaptureError, match=r"torch\.compile cannot capture forward at .*Dynamic shape operator"):
        model(torch.randn(5, 8))


def test_a_break_of_the_graph_leaves_nothing_out() -> None:
    torch.manual_seed(0)
    model, x = Printing(), torch.randn(5, 8)
    exact = model(x).detach()
    backend = CompileBackend(dtype=LOW, inner="eager")
    backend.compile(model)
    assert 0 < relative_error(model(x).detach(), exact) < 4 * torch.finfo(LOW).eps
    assert backend.skipped == []
    assert sum(node.op == "linear" for graph in backend.graphs if graph.plan for node in graph.plan.nodes) == 2


def test_a_captured_model_is_no_concern() -> None:
    backend = CompileBackend(dtype=LOW, inner="eager")
    model = backend.compile(nn.Sequential(nn.Linear(8, 8)), dynamic=True)
    model(torch.randn(5, 8))
    model(torch.randn(4, 8))
    assert (len(backend.graphs), backend.skipped) == (1, [])


def test_a_module_in_autocast_is_copied_and_saved_without_it(tmp_path: Path) -> None:
    model, x = Whole(Shrink()), 9 * torch.ones(5, 8)
    autocastfx.enable(model, dtype=LOW)
    with pytest.warns(UncapturedGraphWarning):
        model(x)
    assert list(inspect.signature(model.inner.forward).parameters) == ["x", "most"]
    assert torch.equal(model.inner(x, most=1), model.inner.layer.to(LOW)(x.to(LOW)).float())
    model.inner.layer.float()
    torch.save(model, tmp_path / "model.pt")
    known = [Whole, Shrink, nn.Linear]
    with torch.serialization.safe_globals(known):
        saved = torch.load(tmp_path / "model.pt", weights_only=True)
    plain = Shrink()
    plain.load_state_dict(model.inner.state_dict())
    exact = plain(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved):
        assert torch.equal(twin.inner(x), exact)
    assert list(model.state_dict()) == list(Whole(Shrink()).state_dict())


def test_an_enabled_lstm_is_copied_and_saved() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    for model in (Whole(Tagger(), 4), nn.LSTM(8, 8)):
        autocastfx.enable(model, dtype=LOW, inner="aot_eager")
        with pytest.warns(UncapturedGraphWarning):
            model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(module.__dict__.get("_compiled_call_impl") is None for module in twin.modules())
            twin(x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_captured_for_any_length(kind: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind(8, 8)
    other = copy.deepcopy(model)
    autocastfx.enable(model, dtype=LOW)
    for length in (5, 6, 9, 30, 100):
        x = torch.randn(length, 2, 8)
        found, wanted = model(x)[0], other(x)[0]
        found.sum().backward()
        wanted.sum().backward()
        error = relative_error(found.detach(), wanted.detach())
        assert error < 4 * torch.finfo(LOW).eps
        assert (error > 0) == (length <= 16)  # beyond it is float32 on a CPU
    grads = [torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (model, other)]
    assert relative_error(*grads) < 4 * torch.finfo(LOW).eps
    backend = autocastfx.backend_of(model)
    assert backend is not None
    assert not backend.skipped
    assert len(backend.graphs) <= 3
    ops = [{node.op for node in graph.plan.nodes} for graph in backend.graphs if graph.plan is not None]
    assert all(found & {"lstm", "gru", "rnn_tanh"} for found in ops)


def test_only_the_packed_layer_is_left_uncaptured() -> None:
    torch.manual_seed(0)
    model, x = Whole(Tagger(), 4), torch.randn(5, 8)
    autocastfx.enable(model, dtype=LOW)
    with pytest.warns(UncapturedGraphWarning, match=r"from now on inner\.lstm runs under torch\.autocast"):
        model(x)
    backend = autocastfx.backend_of(model)
    assert backend is not None
    assert len(backend.skipped) == 1
    plans = [graph.plan for graph in backend.graphs if graph.plan is not None]
    low = [node.op for plan in plans for node in plan.nodes if str(node.placement.run) == "low"]
    assert low.count("linear") == 2, "the last is too narrow for 16 bits"


def _runs(model: nn.Module) -> dict[str, str]:
    """The precision of each module's linear layer."""
    backend = autocastfx.backend_of(model)
    assert backend is not None
    plans = [graph.plan for graph in backend.graphs if graph.plan is not None]
    return {node.module: str(node.placement.run) for plan in plans for node in plan.nodes if node.op == "linear"}


def test_modules_have_their_paths_behind_a_break_and_in_a_part_called_by_itself(tmp_path: Path) -> None:
    rules = tmp_path / "mine.yaml"
    rules.write_text("modules:\n  - {path: '**.last', category: float32, ops: [linear]}\n")
    model, x = nn.Sequential(nn.Linear(8, 8), Printing()), torch.randn(4, 8)
    expected = {"0": "low", "1.first": "low", "1.last": "float32"}
    autocastfx.enable(model, dtype=LOW, op_list=["bfloat16", rules])
    model(x)
    assert _runs(model) == expected
    autocastfx.disable(model)
    autocastfx.enable(model, dtype=LOW, op_list=["bfloat16", rules])
    model[1](x)
    assert _runs(model) == {name: expected[name] for name in ("1.first", "1.last")}
    assert " 1.last.weight " in autocastfx.dump(model, full=True)


class Disabled(nn.Module):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


def test_a_model_of_which_nothing_is_captured_is_told() -> None:
    model, x = Disabled(), torch.randn(5, 8)
    with torch.autocast("cpu", LOW):
        wanted = model(x).float()
    CompileBackend(dtype=LOW, inner="eager").compile(model)
    with pytest.warns(UncapturedGraphWarning, match=r"torch\.compile cannot capture forward at .* \(there is nothing"):
        model(x)
    assert torch.equal(model(x), wanted)


def public() -> nn.Module:
    """torch's own loss for many classes, which looks which clusters have targets: the graph breaks inside it."""
    return Net(
        lambda m, x: m.loss(m.head(x), torch.arange(0, 512, 512 // len(x))).output,
        head=nn.Linear(16, 64),
        loss=nn.AdaptiveLogSoftmaxWithLoss(64, 512, cutoffs=[128], div_value=1),
    )


def test_a_break_inside_a_module_of_torchs_leaves_its_modules_converted() -> None:
    torch.manual_seed(0)
    model, x = public(), torch.randn(16, 16)
    exact = model(x).detach()
    autocastfx.enable(model, dtype=LOW)
    backend = autocastfx.backend_of(model)
    assert backend is not None
    told = r"adaptive\.py:\d+ \(.*\)\. Its modules are converted one by one; what it computes besides runs in"
    with pytest.warns(UncapturedGraphWarning, match=told):
        found = model(x)
    assert 0 < relative_error(found.detach(), exact) < 8 * torch.finfo(LOW).eps
    low = Counter(n.op for g in backend.graphs if g.plan for n in g.plan.nodes if str(n.placement.run) == "low")
    assert low["linear"] == 1 + 1 + 2  # the layer, the head of the loss and its one tail
    assert [one.is_in_parts for one in backend.skipped] == [True]
    assert torch.equal(model(x), found)  # and nothing more is told
    autocastfx.disable(model)
    assert torch.equal(model(x), exact)
    assert all(module.__dict__.get("_compiled_call_impl") is None for module in model.modules())


def test_a_module_of_torchs_that_came_later_is_captured_too() -> None:
    torch.manual_seed(0)
    model, x = public(), torch.randn(16, 16)
    autocastfx.enable(model, dtype=LOW)
    with pytest.warns(UncapturedGraphWarning):
        model(x)
    model.loss = nn.AdaptiveLogSoftmaxWithLoss(64, 512, cutoffs=[256], div_value=1)
    exact = copy.deepcopy(model)(x).detach()
    assert 0 < relative_error(model(x).detach(), exact) < 8 * torch.finfo(LOW).eps


class Asks(nn.Module):
    """Its forward calls a function of torch that breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        mask = torch.log(torch.tril(torch.ones(len(x), len(x))))
        return x + x if _detect_is_causal_mask(mask, None, len(x)) else x @ x.mT


def test_a_function_of_torchs_in_which_the_graph_breaks_is_told() -> None:
    torch.manual_seed(0)
    model, x = Asks(), torch.randn(5, 3, 16)
    with torch.autocast("cpu", LOW):
        wanted = model(x).float()
    autocastfx.enable(model, dtype=LOW)
    told = r"test_skipped_code\.py:\d+ \(in _detect_is_causal_mask: .*from now on \(the model\) runs under"
    with pytest.warns(UncapturedGraphWarning, match=f"cannot capture forward at .*{told}"):
        model(x)
    assert torch.equal(model(x), wanted)


def repeated(x: Tensor) -> Tensor:
    for _ in range(2):
        if x.sum().item() < 1e9:
            x = x @ x.mT @ x
    return x


class Repeats(nn.Module):
    """Calls a function that Dynamo skips, or has code like it after a graph break."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layer, self.breaks, self.is_on = nn.Linear(8, 8), breaks, True

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.breaks:
            torch._dynamo.graph_break()
            for _ in range(2):
                if x.sum().item() < 1e9:
                    x = x @ x.mT @ x
        return repeated(x) if self.is_on else x


def _told(model: nn.Module, x: Tensor, **given: Any) -> list[str]:
    """Enable a model, call it twice, and return what is told."""
    autocastfx.enable(model, dtype=LOW, **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UncapturedGraphWarning)
        model(x)
        model(x)
    return [str(one.message) for one in caught if one.category is UncapturedGraphWarning]


@pytest.mark.parametrize("uncaptured", ["autocast", "float32"])
@pytest.mark.parametrize("breaks", [False, True])
def test_what_is_skipped_for_one_model_is_told_for_another_of_its_class(breaks: bool, uncaptured: str) -> None:
    model, x = Repeats(breaks), torch.randn(3, 8)
    told = _told(model, x, uncaptured=uncaptured)
    assert "cannot capture" in told[0]
    assert _told(Repeats(breaks), x, uncaptured=uncaptured) == told
    autocastfx.disable(model)
    assert _told(model, x, uncaptured=uncaptured) == told


def test_what_is_skipped_for_torch_compile_is_told() -> None:
    x = torch.randn(3, 8)
    torch.compile(Repeats(), backend="eager")(x)
    assert "cannot capture repeated" in _told(Repeats(), x)[0]


def test_what_is_skipped_for_one_model_is_told_for_one_that_was_called_before() -> None:
    models, x = [Repeats(), Repeats()], torch.randn(3, 8)
    for model in models:
        model.is_on = False
        assert _told(model, x) == []
    for model in models:
        model.is_on = True
        with pytest.warns(UncapturedGraphWarning, match="cannot capture repeated"):
            model(x)


@torch._dynamo.config.patch(recompile_limit=2)
def test_the_limit_of_graphs_is_told_for_each_model() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            self.calls += 1
            return self.layer(x) * self.calls

    x = torch.randn(3, 8)
    for model in (Counts(), Counts()):
        autocastfx.enable(model, dtype=LOW)
        model(x)
        model(x)
        with pytest.warns(UncapturedGraphWarning, match="recompile limit exceeded"):
            model(x)


def test_graphs_of_one_model_stay_when_another_is_enabled() -> None:
    models, x = [Printing(), Printing()], torch.randn(3, 8)
    for model in models:
        autocastfx.enable(model, dtype=LOW)
        model(x)
    for model in models:
        model(x)
    assert [len(autocastfx.backend_of(model).graphs) for model in models] == [2, 2]  # type: ignore[union-attr]


def test_code_that_stays_skipped_is_not_tried_in_each_call() -> None:
    models, x = [Repeats(), Repeats()], torch.randn(3, 8)
    for model in models:
        _told(model, x, uncaptured="float32")
    for model in models:
        model(x)
    before = torch._dynamo.utils.counters["frames"]["total"]
    for model in models:
        model(x)
    assert torch._dynamo.utils.counters["frames"]["total"] == before
