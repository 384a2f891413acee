"""What forward reads or changes outside tensors is noticed: captured again, refused with the line, or said."""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.capture.python_state import is_same
from autocastfx.errors import CaptureError, StateWarning, UnsupportedError, VariantError
from tests.helpers import relative_error

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
    assert {r.path for r in amp_model.variants[0].state.reads} >= set(CHANGES) - {"cap"}


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
    assert {r.path for r in amp_model.variants[0].state.reads} >= set(INSIDE)
    count = len(amp_model.variants)
    for change in (INSIDE[path], _replaced):
        change(model)
        assert_agrees(amp_model, model)
        count += 1
        assert len(amp_model.variants) == count
    amp_model = pickle.loads(pickle.dumps(amp_model))
    assert_agrees(amp_model, model)


@pytest.fixture
def _compiled_anew() -> Generator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_compiled_anew")
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


@pytest.mark.usefixtures("_compiled_anew")
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


def test_an_object_that_forward_changes_is_said_and_not_watched() -> None:
    model = Configured()
    model.config.calls, model.config.kind = 0, None

    def counted(module: Any, args: Any) -> None:
        module.config.calls += 1
        module.config.kind = module.config.kind or "linear"

    model.register_forward_pre_hook(counted)
    with pytest.warns(StateWarning, match=r"config\.calls|hooks on the model ran") as told:
        amp_model = converted(model)
    assert [("config.calls" in str(one.message)) for one in told] == [True, False]
    count = len(amp_model.variants)
    model.config.calls = 9
    assert_agrees(amp_model, model)
    assert len(amp_model.variants) == count
    model.config.kind = "another"  # what was filled in is watched
    assert_agrees(amp_model, model)
    assert len(amp_model.variants) > count


def test_dropout_changed_is_dropout_changed() -> None:
    model = Model().train()
    amp_model = autocastfx.convert(model, (X,), dtype=torch.bfloat16)
    model.drop.p = 1.0
    assert not amp_model(X).any()


def test_what_cannot_be_captured_again_names_the_attribute() -> None:
    model = Model(lambda m, y: y if m.tau == 1.0 or y.sum() > 0 else None)
    amp_model = converted(model)
    model.tau = 0.5
    with pytest.raises(
        VariantError, match=r"no variant holds attribute 'tau' as it is: it was 1\.0, and is 0\.5; a fur"
    ):
        amp_model(X)
    del model.tau
    with pytest.raises(VariantError, match=r"it was 1\.0, and is gone"):
        amp_model(X)


def test_a_converted_model_passes_what_is_set_on_it_to_the_original() -> None:
    model = Model()
    amp_model = converted(model)
    amp_model.tau = 0.25
    assert model.tau == amp_model.tau == 0.25
    assert_agrees(amp_model, model)
    alone = pickle.loads(pickle.dumps(amp_model))
    with pytest.raises(UnsupportedError, match="on the value of attribute 'tau', and the original is not at"):
        alone.tau = 1.0
    alone.unused = 4
    assert alone.unused == 4


def test_copies_watch_the_original_too() -> None:
    model = Model()
    copied = copy.deepcopy(converted(model))
    model.tau = 0.25
    assert_agrees(copied, model)


def test_what_is_saved_is_the_model_as_it_is_now() -> None:
    """A loaded model cannot watch the original: it has no variant for what the original was before."""
    model = Model()
    amp_model = converted(model)
    model.tau = 0.25
    with pytest.raises(
        VariantError, match=r"attribute 'tau' is 0\.25 now, and no variant was captured with this value: call"
    ):
        pickle.dumps(amp_model)
    assert_agrees(amp_model, model)
    loaded = pickle.loads(pickle.dumps(amp_model))
    assert 0 < len(loaded.variants) < len(amp_model.variants)
    assert_agrees(loaded, model)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (1.5, 1.5, True),
        (0.0, 0.0, True),
        (1j, complex(0, 1), True),
        (math.nan, float("nan"), True),
        ("a", "".join("a"), True),
        ((1, (2.0,)), (1, (2.0,)), True),
        ((1,), (True,), False),
        ((1,), (1, 2), False),
        (None, 0, False),
        ([], [], False),
    ],
)
def test_plain_values_are_one(a: Any, b: Any, same: bool) -> None:
    assert is_same(a, b) is same


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), 3

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.linear(x) * self.factor, lambda x: x - self.factor, (x,))


def test_what_a_branch_of_the_graph_reads_counts_too() -> None:
    """torch.compile traces the branches, and reads attributes by ways of its own."""
    model = Branches()
    amp_model = converted(model)
    model.factor = 7
    assert_agrees(amp_model, model)


# -- attributes that forward changes ----------------------------------------------------------------------------------


def count(m: Any, y: Tensor) -> None:
    m.steps += 1


def count_longer(m: Any, y: Tensor) -> None:
    m.steps = (m.steps + 1) % m.unused


@pytest.mark.parametrize(
    ("does", "names"),
    [
        (count, "'steps'"),
        (count_longer, "'steps'"),
        (lambda m, y: m.log.append(1), "'log'"),
        (lambda m, y: setattr(m, "last", y), "'last'"),
        (lambda m, y: setattr(m.block, "seen", True), r"'block\.seen'"),
    ],
)
def test_what_does_not_take_part_is_said(does: Any, names: str) -> None:
    model = Model(does)
    before = (model.steps, list(model.log), model.last, vars(model.block).get("seen"))
    with pytest.warns(
        StateWarning, match=f"^forward changes {names}, which the converted model leaves as they are"
    ) as w:
        amp_model = converted(model)
    assert len(w) == 1  # for both modes
    assert (model.steps, list(model.log), model.last, vars(model.block).get("seen")) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp_model(X)
        amp_model(X[:2])
    model.steps = 0
    assert_agrees(amp_model, model)


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, log: list[Any], more: dict[str, Any]) -> Tensor:
        y = self.linear(x)
        log.append(y)
        more["y"] = y
        return y


def test_arguments_that_are_changed_are_said() -> None:
    """A list given by the caller is taken apart, so what forward appends reaches nobody."""
    log: list[Any] = [1]
    with pytest.warns(StateWarning, match=r"^forward changes 'argument log', 'argument more', which the converted"):
        amp_model = autocastfx.convert(Appends(), (X, log, {}), dtype=torch.bfloat16)
    amp_model(X, log, {})
    assert log == [1]


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


@pytest.mark.parametrize("does", [scaled, scaled_before, kept, only_first, summed, by_name])
def test_a_number_that_changes_and_takes_part_is_refused_with_the_line(does: Any) -> None:
    model = Model(does)
    line = does.__code__.co_firstlineno
    lines = "|".join(str(line + n) for n in range(4)) if does is not summed else r"\d+"
    with pytest.raises(CaptureError, match=rf"forward changes '\w+' .* computes with it, at .*\.py:({lines}): a graph"):
        converted(model)
    assert (model.steps, model.first, model.tau) == (0, True, 1.0)


@pytest.mark.parametrize(
    ("draw", "source"),
    [
        (random.random, "Python's random module"),
        (lambda: random.choice([1, 2]), "Python's random module"),
        (lambda: float(np.random.rand()), r"numpy\.random"),
    ],
)
def test_random_numbers_outside_torch_are_refused(draw: Any, source: str) -> None:
    state = random.getstate(), repr(np.random.get_state())
    with pytest.raises(CaptureError, match=f"Model draws random numbers of {source} in forward: a graph would use"):
        converted(Model(lambda m, y: y * draw()))
    assert (random.getstate(), repr(np.random.get_state())) == state


@pytest.mark.parametrize("generator", [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)])
@pytest.mark.parametrize(
    "draw", [lambda m, y: y * float(m.part.rng.random()), lambda m, y: y if m.part.rng.random() < 1 else -y]
)
def test_random_numbers_of_the_models_own_generator_are_refused(generator: Any, draw: Any) -> None:
    model = Model(draw)
    model.part = nn.Identity()
    model.part.rng = generator
    state = pickle.dumps(generator)
    with pytest.raises(CaptureError, match=r"Model draws random numbers of its own 'part\.rng' in forward"):
        converted(model)
    assert pickle.dumps(generator) == state
    unused = Model(lambda m, y: y * 2)
    unused.rng = generator
    converted(unused)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_the_parameters_that_a_recurrent_layer_lists_are_no_change(kind: Callable[..., nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", StateWarning)
        autocastfx.convert(kind(8, 8), (torch.randn(3, 2, 8),), dtype=torch.bfloat16)
