"""No tool leaves a trace: hooks, generators, gradients, optimizers, buffers, modes and torch's state are as before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.capture.leave_intact import isolated
from autocastfx.numerics.bisect import OutputDistance
from tests.thread_state import thread_state

pytestmark = pytest.mark.filterwarnings("ignore::autocastfx.errors.StateWarning")  # of the hooks

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(4, (6,), generator=torch.Generator().manual_seed(1))


class Calls:
    """A hook that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1


class Everything(nn.Module):
    """Draws, averages, writes into a parameter, and is trained by an optimizer that steps in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.bag = nn.Linear(8, 8), nn.Linear(8, 4), nn.Embedding(4, 4, max_norm=0.5)
        self.norm, self.drop, self.frozen = nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(3)
        self.frozen.requires_grad_(False).eval()
        self.a.bias.grad = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator) * 0.01
        hidden = self.drop(self.norm(self.a(x + noise)))
        return self.frozen(self.b(hidden)) + self.bag(hidden[:, :1].detach().gt(0).long()).sum(1)


class Training:
    """A model, and who counts its calls and trains it, unknown to the model."""

    def __init__(self) -> None:
        self.model, self.calls, self.seen = Everything(), Calls(), list[int]()
        self.model.a.register_forward_hook(self.calls)
        self.model.b.register_forward_pre_hook(lambda module, given: self.seen.append(1))
        self.model.b.weight.register_hook(self.calls)
        learning = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = {cast("Tensor", p): torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in learning}
        for parameter in learning:
            parameter.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter: Tensor) -> None:
        self.optimizers[parameter].step()


def world(training: Training) -> dict[str, object]:
    """Return all that a tool could change, by name, in values that compare."""
    model = training.model
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        **thread_state(),
        "tensors": {name: (id(one), one.tolist()) for name, one in tensors.items()},
        "versions": {name: one._version for name, one in tensors.items()},
        "learns": {name: one.requires_grad for name, one in tensors.items()},
        "gradients": {name: one.grad if one.grad is None else one.grad.tolist() for name, one in tensors.items()},
        "modes": [module.training for module in model.modules()],
        "hooks": [{key: len(one) for key, one in vars(m).items() if "hooks" in key} for m in model.modules()],
        "hooks of tensors": [len(one._backward_hooks or ()) for one in tensors.values()],
        "generator": model.generator.get_state().tolist(),
        "counters": (training.calls.count, list(training.seen)),
        "attributes": [sorted(k for k, v in vars(module).items() if v is not None) for module in model.modules()],
        "moments": [repr(one.state_dict()) for one in training.optimizers.values()],
        "example": (X.tolist(), X.requires_grad, X.grad),
    }


def changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, Y)


def converted(model: Everything) -> autocastfx.AmpModule:
    return autocastfx.convert(model, X, dtype="bfloat16", check=False)


def _watched(model: Everything) -> None:
    with autocastfx.watch(converted(model)) as watch:
        watch.step()


def _recorded(model: Everything) -> None:
    with autocastfx.gradient_histogram(model):
        pass


def _bisected(model: Everything) -> object:
    distance = OutputDistance(model, (X,), {})
    return autocastfx.bisect(model, X, distance, 1.0, dtype="bfloat16")


TOOLS: dict[str, Callable[[Everything], object]] = {
    "convert": lambda m: autocastfx.convert(m, X, dtype="bfloat16"),
    "convert, all rows": lambda m: autocastfx.convert(m, X, dtype="bfloat16", check=True),
    "convert, weights cached": lambda m: autocastfx.convert(m, X, dtype="bfloat16", weights="cached"),
    "convert, weights low": lambda m: autocastfx.convert(m, X, dtype="bfloat16", weights="low"),
    "convert, no inputs": lambda m: autocastfx.convert(m, dtype="bfloat16"),
    "check": lambda m: autocastfx.check(m, [X], loss, dtype="bfloat16"),
    "calibrate": lambda m: autocastfx.calibrate(m, [X]),
    "sensitivity": lambda m: autocastfx.sensitivity(m, [X], loss, probes=2, dtype="bfloat16"),
    "sensitivity, output": lambda m: autocastfx.sensitivity(m, [X], of="output", probes=2, dtype="bfloat16"),
    "tune": lambda m: autocastfx.tune(m, [X, X], loss, probes=2, dtype="bfloat16", saved=True),
    "bisect": _bisected,
    "compare": lambda m: autocastfx.compare(m, converted(m), X, gradients=True),
    "find_overflow": lambda m: autocastfx.find_overflow(converted(m), X),
    "logprob_gap": lambda m: autocastfx.logprob_gap(m, converted(m), [X], chosen=lambda _: Y),
    "watch": _watched,
    "gradient_histogram": _recorded,
    "explain": lambda m: autocastfx.explain(converted(m), "linear"),
    "dump": lambda m: autocastfx.dump(converted(m)),
    "show": lambda m: autocastfx.show(converted(m)),
    "time": lambda m: autocastfx.time(m, [X], loss, rounds=2, dtype="bfloat16"),
    "diff": lambda m: autocastfx.diff(converted(m).plan, converted(m).plan),
    "lint": lambda m: autocastfx.lint(converted(m)),
    "enable, disable": lambda m: autocastfx.disable(autocastfx.enable(m, dtype="bfloat16")),
}
# Names of the package that take no model, and types.
OTHERS = {"backend_of", "convert_function", "load_op_list", "presets", "suggest_loss_scale"}


def test_every_tool_is_here() -> None:
    functions = {name for name in autocastfx.__all__ if name.islower() and not name.startswith("__")}
    assert functions - OTHERS == {one for tool in TOOLS for one in tool.split(", ") if one in functions}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_leaves_no_trace(tool: str) -> None:
    training = Training()
    before = world(training)
    TOOLS[tool](training.model)
    assert changed(before, world(training)) == []


def _learn(model: Everything) -> None:
    model(X).sum().backward()


# A tool that left it would be seen: what changes, and by what.
PLANTED: dict[str, Callable[[Everything], object]] = {
    "counters": lambda m: m.a(X),
    "generator": lambda m: torch.randn(1, generator=m.generator),
    "gradients": lambda m: m.a.bias.grad.add_(1),  # type: ignore[union-attr]
    "moments": _learn,
    "tensors": lambda m: m.norm(X),
    "versions": lambda m: m.bag(torch.tensor([1])),
    "modes": lambda m: m.norm.eval(),
    "learns": lambda m: m.frozen.requires_grad_(),
    "hooks": lambda m: m.norm.register_forward_hook(Calls()),
    "hooks of tensors": lambda m: cast("Any", m.a.weight).register_hook(Calls()),
    "random": lambda _: torch.rand(1),
    "grad mode": lambda _: torch.set_grad_enabled(False),
    "autocast": lambda _: torch.set_autocast_enabled("cpu", True),
    "default dtype": lambda _: torch.set_default_dtype(torch.float64),
}


@pytest.mark.parametrize("trace", PLANTED)
def test_a_planted_trace_is_seen_and_none_is_left_in_isolation(trace: str) -> None:
    plant, training = PLANTED[trace], Training()
    before, model = world(training), training.model
    if trace not in ("hooks", "hooks of tensors", "gradients"):  # of modules: what a forward does not do
        with isolated(model):
            plant(model)
        assert changed(before, world(training)) == []
    try:
        plant(model)
        assert trace in changed(before, world(training))
    finally:
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        torch.set_default_dtype(torch.float32)


def test_a_trace_that_is_planted_in_a_tool_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    before = world(training)

    def nothing(*_: object, **options: object) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr("autocastfx.capture.leave_intact.intact", nothing)
    autocastfx.convert(training.model, X, dtype="bfloat16")
    assert changed(before, world(training)) == ["counters"]
