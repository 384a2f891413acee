"""What forward reads or changes in Python, outside of tensors: the converted model does as the model does."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.errors import CaptureError
from tests.helpers import Net, relative_error

X = torch.randn(3, 8)
EPSILON = torch.finfo(torch.bfloat16).eps


class Block(nn.Module):
    """A block with settings of its own."""

    factor = 2.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.eps, self.dims = nn.Linear(8, 8), 0.5, (1, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).reshape(-1, *self.dims) * self.factor + self.eps


class Model(nn.Module):
    """Attributes of all plain kinds, and what ``does`` does with them."""

    def __init__(self, does: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.does = does
        self.block, self.norm, self.drop = Block(), nn.LayerNorm(8), nn.Dropout(0.0)
        self.tau, self.steps, self.kind, self.cap, self.unused = 1.0, 0, "abs", None, 3
        self.log: list[Any] = []
        self.last: Any = None
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.block(self.norm(x))) / self.tau
        y = y.abs() if self.kind == "abs" else y
        y = y if self.cap is None else y.clamp(max=self.cap)
        made = self.does(self, y) if self.does is not None else None
        return y if made is None else made


def converted(model: nn.Module, **options: Any) -> autocastfx.AmpModule:
    return autocastfx.convert(model.eval(), (X,), dtype=torch.bfloat16, **options)


def assert_agrees(amp_model: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        assert relative_error(amp_model(X), model(X)) <= 4 * EPSILON


# -- attributes that are read -----------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], Any]] = {
    "tau": lambda m: setattr(m, "tau", 0.25),
    "kind": lambda m: setattr(m, "kind", "none"),
    "cap": lambda m: setattr(m, "cap", 0.5),
    "block.eps": lambda m: setattr(m.block, "eps", -3.0),
    "block.dims": lambda m: setattr(m.block, "dims", (2, 2)),
    "block.factor": lambda m: setattr(m.block, "factor", 5.0),
    "norm.eps": lambda m: setattr(m.norm, "eps", 1.0),
}


@pytest.mark.parametrize("path", [path for path in CHANGES if path != "block.dims"])
def test_an_attribute_that_the_caller_changes_is_captured_again(path: str) -> None:
    model = Model()
    amp_model = converted(model)
    count, before = len(amp_model.variants), copy.deepcopy(model)
    CHANGES[path](model)
    with torch.no_grad():
        assert relative_error(model(X), before(X)) > 4 * EPSILON
    assert_agrees(amp_model, model)
    assert len(amp_model.variants) == count + 1
    assert_agrees(amp_model, model)
    assert len(amp_model.variants) == count + 1
    model.load_state_dict(before.state_dict())
    for name, held in vars(before).items():
        if not name.startswith("_"):
            setattr(model, name, held)
    model.block.__dict__.update({k: v for k, v in vars(before.block).items() if k in ("eps", "dims")})
    model.block.__dict__.pop("factor", None)
    model.norm.eps = before.norm.eps
    assert_agrees(amp_model, before)
    assert len(amp_model.variants) == count + 1


def test_an_attribute_that_is_not_read_changes_nothing() -> None:
    model = Model()
    amp_model = converted(model)
    count = len(amp_model.variants)
    model.unused, model.new = 4, 5
    model.tau = float("1.0")  # another object of the same value
    assert_agrees(amp_model, model)
    assert len(amp_model.variants) == count


class Configured(nn.Module):
    """Reads an object, a list and a dictionary, as models with a configuration do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.config = SimpleNamespace(scale=2.0, powers=[1, 2], head=None, hook=print)
        self.factors, self.gains = [1.0, 3.0], {"a": 1.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) * self.config.scale * self.config.powers[1] * self.gains["a"]
        for factor in self.factors:
            x = x * factor
        return x if self.config.head is None else x + self.config.head


def _replaced(model: Any) -> None:
    model.config = SimpleNamespace(scale=0.5, powers=[1, 2], head=None)


INSIDE: dict[str, Callable[[Any], Any]] = {
    "config.scale": lambda m: setattr(m.config, "scale", 3.0),
    "config.powers": lambda m: m.config.powers.insert(0, 7),
    "config.head": lambda m: setattr(m.config, "head", 1.0),
    "factors": lambda m: m.factors.append(5.0),
    "gains": lambda m: m.gains.update(a=2.5),
}


@pytest.mark.parametrize("path", INSIDE)
def test_what_an_object_or_a_container_holds_is_captured_again(path: str) -> None:
    torch.manual_seed(0)
    model = Configured()
    amp_model = converted(model)
    for change in (INSIDE[path], _replaced):
        before, count = amp_model(X), len(amp_model.variants)
        change(model)
        assert_agrees(amp_model, model)
        assert not amp_model(X).equal(before)
        assert len(amp_model.variants) <= count + 1  # a number that changes is an input of the second graph
    amp_model = pickle.loads(pickle.dumps(amp_model))
    assert_agrees(amp_model, model)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("path", INSIDE)
def test_compiled_what_is_read_is_one_graph_and_a_change_is_seen(path: str) -> None:
    torch.manual_seed(0)
    model = Configured()
    model.config.names = {"b", "a"}
    amp_model = converted(model).eval()
    compiled = torch.compile(amp_model, backend="eager", fullgraph=True)
    assert compiled(X).equal(amp_model(X))
    before = amp_model(X)
    INSIDE[path](model)
    after = amp_model(X)
    assert not after.equal(before)
    assert compiled(X).equal(after)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_models_of_other_numbers_are_one_graph_each() -> None:
    for number in (1.0, 1.5, 2.5, -0.0, 0.0, 0.25):  # from the second on, Dynamo takes the number for a variable
        model = Model()
        model.tau, model.block.eps, model.drop.p = number + 1, number, abs(number) / 4
        amp_model = converted(model).eval()
        compiled = torch.compile(amp_model, backend="eager", fullgraph=True)
        assert compiled(X).equal(amp_model(X))
        model.block.eps = number + 4
        assert compiled_again(compiled, amp_model).equal(amp_model(X))


def compiled_again(compiled: Any, amp_model: Any) -> Tensor:
    amp_model(X)  # captures, which a whole graph cannot
    result: Tensor = compiled(X)
    return result


def test_an_object_that_a_hook_changes_is_changed_and_watched() -> None:
    model = Configured()
    model.config.calls, model.config.kind = 0, None

    def counted(module: Any, args: Any) -> None:
        module.config.calls += 1
        module.config.kind = module.config.kind or "linear"

    model.register_forward_pre_hook(counted)
    amp_model = converted(model)
    assert (model.config.calls, model.config.kind) == (0, None)
    amp_model(X)
    assert (model.config.calls, model.config.kind) == (1, "linear")
    assert_agrees(amp_model, model)
    model.config.scale = 7.0
    assert_agrees(amp_model, model)
    assert model.config.calls == 5


def test_dropout_changed_is_dropout_changed() -> None:
    model = Model().train()
    amp_model = autocastfx.convert(model, (X,), dtype=torch.bfloat16)
    model.drop.p = 1.0
    assert not amp_model(X).any()


def test_what_cannot_be_captured_again_is_refused_with_the_line() -> None:
    model = Model(branches_later)
    amp_model = converted(model)
    first = amp_model(X)
    model.tau = 0.5
    line = branches_later.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"(?s)Model cannot be captured.*test_python_state\.py:{line}.*enable"):
        amp_model(X)
    del model.tau
    with pytest.raises(AttributeError, match="has no attribute 'tau'"):
        amp_model(X)
    model.tau = 1.0
    assert amp_model(X).equal(first)


def branches_later(m: Any, y: Tensor) -> Tensor | None:
    return y if m.tau == 1.0 or y.sum() > 0 else None


def test_a_converted_model_passes_what_is_set_on_it_to_the_original() -> None:
    model = Model()
    amp_model = converted(model)
    amp_model.tau = 0.25
    assert model.tau == amp_model.tau == 0.25
    assert_agrees(amp_model, model)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_have_the_numbers_of_now_and_of_their_own(make: Callable[[Any], Any]) -> None:
    model = Model()
    amp_model = converted(model)
    model.tau = 0.25
    copied, before = make(amp_model), copy.deepcopy(model)
    model.tau = 0.5
    assert_agrees(copied, before)
    copied.tau = before.tau = 2.0
    assert_agrees(copied, before)
    assert_agrees(amp_model, model)


def test_what_a_branch_of_the_graph_reads_counts_too() -> None:
    """torch.compile traces the branches, and reads attributes by ways of its own."""
    model = Net(
        lambda m, x: torch.cond(x.sum() > 0, lambda x: m.linear(x) * m.factor, lambda x: x - m.factor, (x,)),
        linear=nn.Linear(8, 8),
        factor=3,
    )
    amp_model = converted(model)
    model.factor = 7
    assert_agrees(amp_model, model)


# -- attributes that forward changes ----------------------------------------------------------------------------------


def count(m: Any, y: Tensor) -> None:
    m.steps += 1


def count_longer(m: Any, y: Tensor) -> None:
    m.steps = (m.steps + 1) % m.unused


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, log: list[Any], more: dict[str, Any]) -> Tensor:
        y = self.linear(x)
        log.append(y)
        more["y"] = y
        return y


def test_arguments_that_are_changed_are_changed() -> None:
    log: list[Any] = [1]
    more: dict[str, Any] = {}
    amp_model = autocastfx.convert(Appends(), (X, log, more), dtype=torch.bfloat16)
    assert (log, more) == ([1], {})
    y = amp_model(X, log, more)
    assert log[0] == 1
    assert log[1] is more["y"]
    assert log[1].equal(y)
    assert len(log) == 2


def scaled(m: Any, y: Tensor) -> Tensor:
    m.steps += 1
    return y * m.steps


def scaled_before(m: Any, y: Tensor) -> Tensor:
    y = y * m.steps
    m.steps += 1
    return y


def kept(m: Any, y: Tensor) -> Tensor:
    m.steps = now = m.steps + 1
    return y * now


def only_first(m: Any, y: Tensor) -> Tensor:
    if m.first:
        m.first = False
        return y * 2
    return y


def summed(m: Any, y: Tensor) -> Tensor:
    m.tau = m.tau + y.sum()
    return y * m.tau


def by_name(m: Any, y: Tensor) -> Tensor:
    setattr(m, "steps", getattr(m, "steps") + 1)  # noqa: B009, B010
    return y * m.__dict__["steps"]


def log_one(m: Any, y: Tensor) -> None:
    m.log.append(1)


def keep_last(m: Any, y: Tensor) -> None:
    m.last = y


def set_on_block(m: Any, y: Tensor) -> None:
    m.block.seen = True


UNUSED = [count, count_longer, log_one, keep_last, set_on_block]
USED = [scaled, scaled_before, kept, only_first, summed, by_name]


@pytest.mark.parametrize("does", [*UNUSED, *USED])
def test_what_forward_changes_is_changed_at_each_call_and_takes_part_in_the_next(does: Any) -> None:
    model = Model(does)
    original = copy.deepcopy(model.eval())
    before = state_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp_model = converted(model)
    assert state_of(model) == before  # whatever was captured and compared
    for x in (X, X, X[:2], X):
        with torch.no_grad():
            assert relative_error(amp_model(x), original(x)) <= 4 * EPSILON
        assert relative_error(as_tensor(model.tau), as_tensor(original.tau)) <= 4 * EPSILON
        assert state_of(model)[1:] == state_of(original)[1:]
    assert does is count_longer or state_of(model) != before


@pytest.mark.parametrize("does", [count, scaled])
def test_numbers_that_change_at_each_call_are_not_captured_at_each_call(does: Any) -> None:
    amp_model = converted(Model(does))
    for _ in range(6):
        amp_model(X)
    assert len(amp_model.variants) <= 2


def as_tensor(number: Any) -> Tensor:
    return torch.as_tensor(number).detach()


def state_of(model: Any) -> list[Any]:
    last = None if model.last is None else model.last.shape
    return [as_tensor(model.tau).item(), model.steps, model.first, list(model.log), last, vars(model.block).get("seen")]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("draw", [random.random, lambda: random.choice([1, 2]), lambda: float(np.random.rand())])
def test_random_numbers_outside_torch_are_refused(draw: Any) -> None:
    state = random.getstate(), repr(np.random.get_state())
    with pytest.raises(CaptureError, match=r"(?s)Model cannot be captured.*test_python_state\.py:\d+.*enable"):
        converted(Model(lambda m, y: y * draw()))
    assert (random.getstate(), repr(np.random.get_state())) == state


def test_random_integers_of_python_are_drawn_at_each_call() -> None:
    model = Model(lambda m, y: y * random.randint(1, 1000))
    amp_model = converted(model)
    for seed in range(3):
        results: list[Tensor] = []
        for one in (amp_model, model):
            random.seed(seed)
            results.append(one(X).detach())
            after = random.random()
        random.seed(seed)
        random.randint(1, 1000)
        assert random.random() == after
        assert relative_error(*results) <= 4 * EPSILON


@pytest.mark.parametrize("generator", [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)])
@pytest.mark.parametrize(
    "draw", [lambda m, y: y * float(m.part.rng.random()), lambda m, y: y if m.part.rng.random() < 1 else -y]
)
def test_random_numbers_of_the_models_own_generator_are_refused(generator: Any, draw: Any) -> None:
    model = Model(draw)
    model.part = nn.Identity()
    model.part.rng = generator
    state = pickle.dumps(generator)
    with pytest.raises(CaptureError, match=r"(?s)Model cannot be captured.*test_python_state\.py:\d+.*enable"):
        converted(model)
    assert pickle.dumps(generator) == state
    unused = Model(lambda m, y: y * 2)
    unused.rng = generator
    converted(unused)
