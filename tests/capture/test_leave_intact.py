"""The caller's module is bit for bit what it was, whatever its forward does while it is captured."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autocastfx
from autocastfx import OpList
from autocastfx.capture.leave_intact import intact, isolated
from autocastfx.errors import BannedOpError, CaptureError, UncheckedWarning
from autocastfx.policy.rule import Category
from tests.helpers import unchecked

pytestmark = pytest.mark.filterwarnings("ignore::autocastfx.errors.StateWarning")


@dataclass
class Statistics:
    calls: int = 0
    last: Any = None
    seen: list[Any] = field(default_factory=list)


class Frozen(dict[str, int]):
    """A dict that cannot be written to, and whose copies are something else."""

    def copy(self) -> Any:
        raise TypeError("no copies")

    def clear(self) -> None:
        raise TypeError("frozen")


class Busy(nn.Module):
    """A module whose forward changes all kinds of state besides computing."""

    def __init__(self, does: Callable[[Busy, torch.Tensor], Any]) -> None:
        super().__init__()
        self.does = does
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.count, self.last = 0, None
        self.log: list[Any] = [1]
        self.cache: dict[str, Any] = {"old": torch.ones(2)}
        self.ordered: OrderedDict[str, Any] = OrderedDict(b=1, a=2)
        self.tally: Counter[str] = Counter(a=1)
        self.groups: defaultdict[str, list[Any]] = defaultdict(list)
        self.names = {"x"}
        self.recent: deque[Any] = deque([1, 2], maxlen=2)
        self.deep: dict[str, Any] = {"list": [[1]], "tuple": ([2], {"set": {3}})}
        self.frozen = Frozen(a=1)
        self.state = torch.tensor([1.0, float("nan"), -0.0])
        self.states = [torch.zeros(2)]
        self.statistics = Statistics()
        self.space = SimpleNamespace(inner=SimpleNamespace(value=1))
        self.blocks = [nn.Linear(4, 4)]  # unknown to torch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.does(self, x)
        y = self.drop(self.linear(x))
        return y + made if isinstance(made, torch.Tensor) else y


def snapshot(value: Any, known: dict[int, Any] | None = None) -> Any:
    """All that can be told of a value: what objects there are, in which order, and every bit of every tensor."""
    known = {} if known is None else known
    if id(value) in known:
        return ("known", id(value))
    known[id(value)] = value
    if isinstance(value, torch.Tensor):
        assert type(value) in (torch.Tensor, nn.Parameter), "a fake tensor is left"
        bits = value.detach().numpy().tobytes()
        return (type(value), id(value), value.dtype, value.shape, value.requires_grad, id(value.grad), bits)
    if isinstance(value, dict):
        return (type(value), id(value), [(k, snapshot(v, known)) for k, v in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (type(value), id(value), [snapshot(v, known) for v in value])
    if isinstance(value, (nn.Module, Statistics, SimpleNamespace)):
        return (type(value), id(value), snapshot(vars(value), known))
    return repr(value)


def generators() -> Any:
    return (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()))


def busy(does: Callable[[Busy, torch.Tensor], Any]) -> Busy:
    torch.manual_seed(0)
    module = Busy(does)
    module.blocks[0].weight.grad = torch.ones(4, 4)
    return module


def add_submodule(module: Busy, x: torch.Tensor) -> None:
    module.late_module = nn.ReLU()
    module.drop = nn.Dropout(0.1)


def add_parameter(module: Busy, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "late_parameter"):
        module.late_parameter = nn.Parameter(torch.ones(4))
    return x * module.late_parameter


def in_order(module: Busy, x: torch.Tensor) -> None:
    module.ordered.move_to_end("b")
    module.cache["new"] = module.cache.pop("old", x)


def item_assignment(module: Busy, x: torch.Tensor) -> torch.Tensor:
    module.state[0] = 5.0
    return module.state.sum() * 0


ACTS: dict[str, Callable[[Busy, torch.Tensor], Any]] = {
    "nothing": lambda m, x: None,
    "tensor": lambda m, x: setattr(m, "last", x * 2),
    "counter": lambda m, x: setattr(m, "count", m.count + 1),
    "delete": lambda m, x: delattr(m, "count") if hasattr(m, "count") else None,
    "list": lambda m, x: m.log.append(x),
    "list in place": lambda m, x: m.log.__setitem__(0, x),
    "dict": lambda m, x: m.cache.update(old=x, new=x),
    "dict emptied": lambda m, x: m.cache.clear(),
    "order": in_order,
    "Counter": lambda m, x: m.tally.update("ab"),
    "defaultdict": lambda m, x: m.groups["k"].append(x),
    "set": lambda m, x: m.names.add("y"),
    "deque": lambda m, x: m.recent.append(x),
    "list in dict": lambda m, x: m.deep["list"][0].append(x),
    "set in tuple": lambda m, x: m.deep["tuple"][1]["set"].add(4),
    "list in tuple": lambda m, x: m.deep["tuple"][0].append(x),
    "object": lambda m, x: (setattr(m.statistics, "last", x), m.statistics.seen.append(x)),
    "container replaced": lambda m, x: setattr(m, "log", [x]),
    "plain tensor plus number": lambda m, x: [m.state.add_(1)],
    "plain tensor plus input": lambda m, x: [m.state.add_(x.detach().sum())],
    "plain tensor, item": item_assignment,
    "plain tensor replaced": lambda m, x: setattr(m, "state", m.state + 1),
    "plain tensor in list": lambda m, x: [m.states[0].add_(1)],
    "plain tensor in list replaced": lambda m, x: m.states.__setitem__(0, x),
    "buffer": lambda m, x: (m.average.mul_(0.9).add_(x.detach().mean(0)), m.steps.add_(1)),
    "buffer, operator": lambda m, x: setattr(m, "steps", m.steps + 1),
    "buffer replaced": lambda m, x: setattr(m, "average", m.average * 0.9 + x.detach().mean(0)),
    "buffer added": lambda m, x: m.register_buffer("late_buffer", x.detach().mean(0)),
    "not persistent buffer": lambda m, x: [m.scratch.add_(1)],
    "mode of a child": lambda m, x: setattr(m.drop, "training", not m.drop.training),
    "mode": lambda m, x: m.train(not m.training) and None,
    "hook": lambda m, x: m.linear.register_forward_hook(lambda *_: None),
    "requires_grad": lambda m, x: [m.linear.weight.requires_grad_(False)],
    "submodules": add_submodule,
    "parameter": add_parameter,
    "parameter replaced": lambda m, x: setattr(m.linear, "weight", nn.Parameter(m.linear.weight * 2)),
    "torch's random numbers": lambda m, x: torch.rand_like(x) + torch.rand(()),
    "Python's random numbers": lambda m, x: x * random.random(),
    "numpy's random numbers": lambda m, x: x * float(np.random.rand()),
}


@pytest.mark.parametrize("act", ACTS)
def test_what_a_forward_does_is_undone(act: str) -> None:
    module = busy(ACTS[act])
    before, state = snapshot(module), generators()
    with isolated(module):
        module(torch.ones(3, 4))
        module(torch.ones(3, 4))
    assert snapshot(module) == before
    assert generators() == state


@pytest.mark.parametrize("act", [act for act in ACTS if act not in ("nothing", "requires_grad")])
def test_the_snapshot_would_see_it(act: str) -> None:
    """A plain call leaves its traces, so that they would be noticed above."""
    module = busy(ACTS[act])
    module.drop.p = 0.0
    before, state = snapshot(module), generators()
    module(torch.ones(3, 4))
    assert snapshot(module) != before or generators() != state


# What capture does with these differs from what a plain call does; the rest is in the module that does it all.
CAPTURED = [
    *("plain tensor plus number", "plain tensor, item", "buffer", "buffer, operator", "buffer replaced", "submodules"),
    *("mode", "torch's random numbers"),
]


# Whether they can be captured is no matter here.
REFUSED = [
    *("hook", "requires_grad", "parameter", "parameter replaced"),
    *("Python's random numbers", "numpy's random numbers"),
]


@pytest.mark.parametrize("act", REFUSED)
def test_a_module_that_cannot_be_captured_is_what_it_was(act: str) -> None:
    module = busy(ACTS[act])
    before, state = snapshot(module), generators()
    with pytest.raises(CaptureError, match="cannot be captured"):
        autocastfx.convert(module, torch.ones(3, 4), dtype=torch.bfloat16, op_list=OpList())
    assert snapshot(module) == before
    assert generators() == state


@unchecked
@pytest.mark.parametrize("act", CAPTURED)
def test_a_converted_module_is_what_it_was(act: str) -> None:
    module = busy(ACTS[act])
    module.drop.eval()
    before, state = snapshot(module), generators()
    autocastfx.convert(module, torch.ones(3, 4), dtype=torch.bfloat16, op_list=OpList())
    assert snapshot(module) == before
    assert generators() == state


def everything(module: Busy, x: torch.Tensor) -> None:
    for name, act in ACTS.items():
        if name not in ("mode", "counter", "delete", "buffer added", *REFUSED):
            act(module, x)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_module_that_does_it_all_is_what_it_was(training: bool) -> None:
    module = busy(everything).train(training)
    before, state = snapshot(module), generators()
    autocastfx.convert(module, torch.ones(3, 4), dtype=torch.bfloat16, op_list=OpList())
    assert snapshot(module) == before
    assert generators() == state


def test_a_module_whose_forward_fails_is_what_it_was() -> None:
    def fails(module: Busy, x: torch.Tensor) -> None:
        everything(module, x)
        raise KeyError("in the middle")

    module = busy(fails)
    before, state = snapshot(module), generators()
    with pytest.raises(CaptureError, match="in the middle"):
        autocastfx.convert(module, torch.ones(3, 4), dtype=torch.bfloat16, op_list=OpList())
    assert snapshot(module) == before
    assert generators() == state


def test_a_refused_conversion_leaves_it_too() -> None:
    module = busy(everything)
    before, state = snapshot(module), generators()
    banned = OpList(unlisted=Category.BAN)
    with pytest.raises(BannedOpError):
        autocastfx.convert(module, torch.ones(3, 4), dtype=torch.bfloat16, op_list=banned)
    assert snapshot(module) == before
    assert generators() == state


def test_a_further_capture_leaves_it_too() -> None:
    """What a call leaves is the model's, whether the call captures or not."""
    module = busy(lambda m, x: m.log.append(x) if x.shape[0] > 2 else m.recent.append(x)).eval()
    model = autocastfx.convert(module, torch.ones(3, 4), dtype=torch.bfloat16, op_list=OpList())
    plain, x, count = copy.deepcopy(module), torch.ones(2, 4), len(model.variants)
    model.freeze(x)
    assert len(model.variants) == count + 1
    assert list(module.recent) == list(plain.recent)
    model(x)
    plain(x)
    assert len(module.recent) == len(plain.recent)
    assert module.recent[-1] is x
    assert len(module.log) == len(plain.log)


# -- what hooks count -------------------------------------------------------------------------------------------------


_CALLED, _COUNT = [0], 0


def _count_in_a_global(*_: Any) -> None:
    global _COUNT
    _COUNT += 1
    _CALLED.append(_COUNT)


class Counts:
    def __init__(self) -> None:
        self.count, self.seen = 0, [0]

    def __call__(self, *_: Any) -> None:
        self.count += 1

    def see(self, by: list[int], *_: Any) -> None:
        by.append(self.count)
        self.seen.append(1)


def _counting(kind: str) -> tuple[Callable[..., None], Callable[[], Any]]:
    """A hook, and what it has counted."""
    number, box, counts = 0, {"calls": 0}, Counts()

    def count(*_: Any) -> None:
        nonlocal number
        number += 1

    def fill(*_: Any) -> None:
        box["calls"] += 1

    hooks: dict[str, Callable[..., None]] = {
        "a number around it": count,
        "a dict around it": fill,
        "globals": _count_in_a_global,
        "its own object": counts,
        "an object's method": partial(counts.see, counts.seen),
        "what it wraps": torch.no_grad()(count),
    }
    return hooks[kind], lambda: (number, dict(box), _COUNT, list(_CALLED), counts.count, list(counts.seen))


KINDS = ("a number around it", "a dict around it", "globals", "its own object", "an object's method", "what it wraps")


@pytest.mark.parametrize("kind", KINDS)
def test_what_hooks_count_is_as_before(kind: str) -> None:
    module, (hook, counted) = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), _counting(kind)
    module[0].register_forward_hook(hook)
    before = counted()
    autocastfx.convert(module, torch.ones(3, 4), dtype=torch.bfloat16, op_list=OpList())
    assert counted() == before
    module(torch.ones(3, 4))
    assert counted() != before


def test_an_attribute_that_is_named_as_hooks_are_may_hold_nothing() -> None:
    """timm's models have ``feature_hooks``."""
    module = nn.Sequential(nn.Linear(4, 4))
    module.feature_hooks = None
    autocastfx.convert(module, torch.ones(3, 4), dtype=torch.bfloat16, check=True)


_HELD: dict[str, torch.Tensor] = {}
_DRAWN = torch.Generator()


class Slots:
    __slots__ = ("hidden",)

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None


def _closure() -> Callable[[torch.Tensor], torch.Tensor]:
    hidden = torch.zeros(())

    def step(h: torch.Tensor) -> torch.Tensor:
        nonlocal hidden
        before, hidden = hidden, h.detach().sum()
        return h + before

    return step


class Remembers(nn.Module):
    """Keeps what it has computed in places that are no attributes of it."""

    hidden: torch.Tensor | None = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind, self.slots, self.closed = nn.Linear(4, 4), kind, Slots(), _closure()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        match self.kind:
            case "class":
                h, Remembers.hidden = h if Remembers.hidden is None else h + Remembers.hidden, h.detach()
            case "slots":
                h, self.slots.hidden = h if self.slots.hidden is None else h + self.slots.hidden, h.detach()
            case "closure":
                h = self.closed(h)
            case "global":
                h = self.from_global(h)
            case _:
                h = h + torch.randn(h.shape, generator=_DRAWN)
        return h

    def from_global(self, h: torch.Tensor) -> torch.Tensor:
        before, _HELD["h"] = _HELD.get("h", torch.zeros(())), h.detach().sum()
        return h + before


@pytest.mark.parametrize("kind", ["class", "slots", "closure", "global", "generator"])
def test_what_forward_keeps_outside_of_the_modules_is_as_before(kind: str) -> None:
    """The comparison calls the model, too, and would take it for one that does not repeat itself."""
    _HELD.clear()
    Remembers.hidden = None
    torch.manual_seed(0)
    model, x, drawn = Remembers(kind), torch.randn(3, 4), _DRAWN.get_state()
    first, second = model(x), model(x)
    Remembers.hidden = model.slots.hidden = None
    _HELD.clear()
    _DRAWN.set_state(drawn)
    model.closed = _closure()
    amp_model = autocastfx.convert(model, x, dtype="bfloat16", op_list="float32", check=True)
    assert torch.equal(amp_model(x), first)
    assert torch.equal(amp_model(x), second)


# -- the context itself -----------------------------------------------------------------------------------------------


def test_shared_and_circular_values() -> None:
    module = busy(ACTS["nothing"])
    shared = nn.Linear(4, 4)
    module.first, module.second = shared, shared
    module.drop.owner = [module]  # a ring that does not go through named modules
    module.log.append(module.log)
    module.space.inner.module = module
    with intact(module):
        module.log.clear()
        shared.extra = 1
    assert module.log[1] is module.log
    assert not hasattr(shared, "extra")


def test_objects_inside_objects_are_left_alone() -> None:
    """A module may hold its trainer, which holds everything else."""
    module = busy(ACTS["nothing"])
    with intact(module):
        module.space.inner.value = 2
        module.space.inner = None
    assert module.space.inner.value == 2


class Makes(OrderedDict[str, Any]):
    """A registry: reading an entry makes an object of its class, as the activations of transformers do."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Counted(dict[str, int]):
    """What is set counts on."""

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value + self.get(key, 0))

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class Twice(list[int]):
    """Gives each of its numbers doubled."""

    def __iter__(self) -> Any:
        return (2 * number for number in range(len(self)))


class Sized(deque[int]):
    """Needs a size to be made."""

    def __init__(self, size: int) -> None:
        super().__init__(maxlen=size)


@pytest.mark.parametrize("keeps_added", [False, True])
@pytest.mark.parametrize("changed", [False, True])
def test_a_container_with_methods_of_its_own_holds_what_it_held(changed: bool, keeps_added: bool) -> None:
    """Its own methods may compute: what they give is not what it holds."""
    module = busy(ACTS["nothing"])
    module.table, module.counted, module.twice, module.sized = Makes(gelu=nn.GELU), Counted(a=1), Twice([1]), Sized(2)
    module.sized.append(1)
    with intact(module, keeps_added=keeps_added):
        if changed:
            OrderedDict.__setitem__(module.table, "gelu", nn.ReLU)
            module.counted["a"] = 5
            list.append(module.twice, 7)
            module.sized.extend([2, 3, 4])
    assert list(OrderedDict.items(module.table)) == [("gelu", nn.GELU)]
    assert module.counted == {"a": 1}
    assert list.__repr__(module.twice) == "[1]"
    assert list(module.sized) == [1]
    assert module.sized.maxlen == 2


def test_what_cannot_change_is_not_written_to() -> None:
    module = busy(ACTS["nothing"])
    with intact(module):
        module.count = 5
    assert module.frozen == {"a": 1}
    assert module.count == 0


def test_a_capture_on_a_cpu_does_not_wake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has used CUDA cannot fork, as the workers of a data loader do."""

    def wakes(*args: Any) -> Any:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("_lazy_init", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, wakes)
    amp_model = autocastfx.convert(
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), (torch.rand(2, 2),), dtype="float16"
    )
    assert amp_model(torch.rand(3, 2)).shape == (3, 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        (AssertionError, CaptureError, UncheckedWarning), match="CUDA was initialised"
    ):  # its random numbers are then kept as they were
        autocastfx.convert(nn.Linear(2, 2), (torch.rand(2, 2),), dtype="float16")


class Watched(nn.Parameter):
    """A parameter of a class of its own."""


def test_parameters_of_other_classes_and_with_attributes_are_so_in_isolation() -> None:
    model = nn.Linear(4, 4)
    model.weight = Watched(torch.ones(4, 4))
    model.weight.kept_apart = True  # type: ignore[attr-defined]
    with isolated(model):
        assert type(model.weight) is Watched
        assert model.weight.kept_apart  # type: ignore[attr-defined]


def test_a_model_made_in_inference_mode_is_compared(recwarn: pytest.WarningsRecorder) -> None:
    """Autograd takes no tensor of inference mode: it runs, and learns, on copies."""
    with torch.inference_mode():
        model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4)
    with torch.no_grad():
        amp_model = autocastfx.convert(model, x, dtype="bfloat16")
        assert (amp_model(x) - model(x)).norm() < 0.05 * model(x).norm()
    assert not [one for one in recwarn if one.category is UncheckedWarning]


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.data.mul_(2),
        lambda w: w.detach().add_(1),
        lambda w: torch.embedding_renorm_(w.detach(), torch.tensor([0]), 0.1, 2.0),
        lambda w: setattr(w, "data", w.data * 2),
        lambda w: w.data.view(-1)[:2].zero_(),
    ],
)
def test_what_is_written_into_parameters_is_undone_and_told(write: Callable[[torch.Tensor], Any]) -> None:
    model = nn.Linear(4, 4)
    before, version, memory = model.weight.detach().clone(), model.weight._version, model.weight.data_ptr()
    with isolated(model) as changed:
        assert not changed()
        write(model.weight)
        assert changed() == {id(model.weight)}
    assert torch.equal(model.weight, before)
    assert (model.weight._version, model.weight.data_ptr()) == (version, memory)


def test_tied_parameters_stay_tied_in_isolation_and_models_share_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    other = nn.Sequential(model[0])
    with isolated(model, other):
        assert model[1].weight is model[0].weight is other[0].weight
        model[1].weight.sum().backward()
        assert other[0].weight.grad is not None
    assert model[0].weight.grad is None


class Tally:
    """Counts at its class, as a registry of auxiliary losses does."""

    steps = 0
    losses: list[Any] = []  # noqa: RUF012


tally_module = ModuleType("tally_module")  # a module of the user's
vars(tally_module).update(steps=0, losses=[], Tally=Tally)
SEEN: list[int] = []


def _note(value: torch.Tensor) -> None:
    _note_further(value)


def _note_further(value: torch.Tensor) -> None:
    SEEN.append(1)
    Tally.losses.append(value)
    Tally.latest = value  # type: ignore[attr-defined]  # which was not there before


class Tallies(nn.Module):
    """Keeps what it counts where no module of its own is."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(16, 16), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.where == "class":
            Tally.steps += 1
            Tally.losses.append(y.mean())
        elif self.where == "module":
            tally_module.steps += 1
            tally_module.losses.append(y.mean())
        elif self.where == "class in a module":
            tally_module.Tally.steps += 1
            tally_module.Tally.losses.append(y.mean())
        else:
            _note(y)
        return y


def _tallies() -> tuple[object, ...]:
    return (
        Tally.steps,
        len(Tally.losses),
        vars(Tally).get("latest"),
        tally_module.steps,
        len(tally_module.losses),
        len(SEEN),
    )


@pytest.mark.parametrize("where", ["class", "module", "class in a module", "functions"])
@pytest.mark.parametrize("way", ["convert", "enable"])
def test_classes_modules_and_functions_that_forward_reaches_are_what_they_were(way: str, where: str) -> None:
    model, x, before = Tallies(where), torch.randn(4, 16), _tallies()
    if way == "convert":
        autocastfx.convert(model, x, dtype="bfloat16")
    else:
        autocastfx.enable(model, dtype="bfloat16", check=x)
    assert _tallies() == before


def test_a_part_that_the_user_compiles_is_compared(recwarn: pytest.WarningsRecorder) -> None:
    """torch.compile wraps it in a module that has no mode of its own."""
    part = torch.compile(nn.Linear(16, 16), backend="eager")
    autocastfx.convert(nn.Sequential(nn.Linear(16, 16), part), torch.randn(4, 16), dtype="bfloat16")
    assert not [one for one in recwarn if issubclass(one.category, UncheckedWarning)]
