"""A model enabled in place stays what it is, follows what is changed in it, and can be disabled."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autocastfx
from autocastfx import AmpModule
from autocastfx.errors import UncapturedGraphWarning, UnsupportedError, VariantError
from tests.helpers import relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
EPS = torch.finfo(LOW).eps


class Scaled(nn.Module):
    """A body, a head, a plain attribute, and a method that calls the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), 1.0
        self.saves_memory = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.saves_memory else self.hidden(x)
        y = self.head(hidden) * self.scale
        return y if mask is None else y * mask

    def hidden(self, x: Tensor) -> Tensor:
        return self.body(x).exp().tanh()

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


def made() -> tuple[Scaled, Tensor]:
    torch.manual_seed(0)
    return Scaled(), torch.randn(4, 8)


def is_low(model: nn.Module, x: Tensor) -> bool:
    """True if the model computes what its class does, in part in 16 bits."""
    exact = copy.deepcopy(model)(x).detach()  # a copy is not enabled
    error = relative_error(model(x).detach(), exact)
    assert error < 16 * EPS
    return error > 0


def test_results_are_those_of_convert_to_the_bit() -> None:
    model, x = made()
    converted = autocastfx.convert(copy.deepcopy(model), x, dtype=LOW)
    assert autocastfx.enable(model, dtype=LOW) is model
    theirs, ours = converted(x), model(x)
    assert torch.equal(theirs, ours)
    theirs.sum().backward()
    ours.sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(converted.parameters(), model.parameters(), strict=True))  # type: ignore[arg-type]


def test_the_model_stays_what_it_is() -> None:
    model, x = made()
    names, signature = list(model.state_dict()), inspect.signature(model.forward)
    autocastfx.enable(model, dtype=LOW)
    assert type(model) is Scaled
    assert isinstance(model.head, nn.Linear)
    assert list(model.state_dict()) == names
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.twice(x), model(model(x)))
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not is_low(one, x)
        assert autocastfx.backend_of(one) is None
    assert is_low(model, x)


def test_what_is_changed_in_the_model_is_followed() -> None:
    model, x = made()
    autocastfx.enable(model, dtype=LOW)
    before = model(x).detach()
    model.scale = 3.0
    assert relative_error(model(x).detach(), 3 * before) < EPS
    assert is_low(model, x)
    model.head = nn.Linear(16, 4)
    assert model(x).shape == (4, 4)
    assert is_low(model, x)
    with torch.no_grad():
        model.head.weight.fill_(0)
        model.head.bias.fill_(7)
    assert torch.equal(model(x), torch.full((4, 4), 21.0))


def test_dropout_follows_the_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    x = torch.randn(16, 8)
    autocastfx.enable(model, dtype=LOW)
    assert 0.3 < (model(x) == 0).float().mean() < 0.7
    assert (model.eval()(x) != 0).all()


def test_hooks_run_wherever_they_are_registered() -> None:
    model, x = made()
    seen: list[str] = []
    model.body.register_forward_hook(lambda *_: seen.append("before"))
    autocastfx.enable(model, dtype=LOW)
    model(x)
    assert seen == ["before"]
    handle = model.head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 0,))
    assert relative_error(model(x).detach(), model.head.bias.detach().expand(4, 8)) < EPS
    handle.remove()
    model.register_forward_hook(lambda *_: seen.append("the whole"))
    assert is_low(model, x)
    assert seen.count("the whole") == 2


def doubling(kind: str, runs: list[str]) -> Callable[..., Any]:
    """A hook of this kind that doubles what it is given."""

    def hook(_: nn.Module, values: Any, *results: Any) -> Any:
        runs.append(kind)
        found = results[0] if kind == "forward" else values  # backward hooks may change gradients of the inputs
        return tuple(2 * t for t in found) if isinstance(found, tuple) else 2 * found

    return hook


REGISTER = {
    "forward": nn.Module.register_forward_hook,
    "forward_pre": nn.Module.register_forward_pre_hook,
    "backward": nn.Module.register_full_backward_hook,
    "backward_pre": nn.Module.register_full_backward_pre_hook,
}


@pytest.mark.parametrize("way", ["enable", "torch.compile"])
@pytest.mark.parametrize("path", ["", "head"])
@pytest.mark.parametrize("kind", REGISTER)
def test_the_first_hook_is_followed_and_so_is_its_end(kind: str, path: str, way: str) -> None:
    """By default torch.compile goes on as if the module had none."""
    model, x = made()
    x.requires_grad_()
    if way == "enable":
        called: Any = autocastfx.enable(model, dtype=LOW)
    else:
        called = torch.compile(model, backend=autocastfx.CompileBackend(dtype=LOW, inner="eager"))
    twin, (runs, others) = copy.deepcopy(model), (list[str](), list[str]())

    def agree() -> None:
        results: list[Tensor] = []
        for module, function in ((model, called), (twin, twin)):
            module.zero_grad()
            found = function(x)
            found.sum().backward()
            results.append(torch.cat([found.detach().flatten(), *(p.grad.flatten() for p in module.parameters())]))  # type: ignore[union-attr]
        assert 0 < relative_error(*results) < 16 * EPS

    agree()
    handles = [REGISTER[kind](m.get_submodule(path), doubling(kind, r)) for m, r in ((model, runs), (twin, others))]
    for _ in range(2):
        agree()
    assert len(runs) >= 2  # Dynamo may run a hook once more while it captures
    for handle in handles:
        handle.remove()
    runs.clear()
    agree()
    assert runs == []
    assert torch._dynamo.config.skip_nnmodule_hook_guards


def test_a_hook_in_the_place_of_another_runs() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    plain = autocastfx.enable(model, dtype=LOW)(x)
    for factor in (0.0, 2.0, 4.0):  # powers of 2, which are exact
        handle = model[1].register_forward_hook(lambda _, __, y, factor=factor: y * factor)
        assert torch.equal(model(x), plain * factor)
        handle.remove()
        assert torch.equal(model(x), plain)


def test_hooks_of_what_others_compile_are_left_to_torch() -> None:
    model, x = made()
    autocastfx.enable(model, dtype=LOW)(x)
    other, runs = made()[0], list[str]()
    other.compile(backend="eager")
    other(x)
    other.head.register_forward_hook(doubling("forward", runs))
    other(x)
    assert runs == []


def test_checkpointing_that_is_switched_on_later_saves_memory() -> None:
    model, x = made()
    autocastfx.enable(model, dtype=LOW)

    def step() -> tuple[int, list[Tensor]]:
        model.zero_grad()
        held: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(x).sum()
        loss.backward()
        return sum(held.values()), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    usual, gradients = step()
    model.saves_memory = True
    fewer, repeated = step()
    assert fewer < usual
    assert all(torch.equal(a, b) for a, b in zip(gradients, repeated, strict=True))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.saves_memory = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.dropped, x, use_reentrant=False) if self.saves_memory else self.dropped(x)

    def dropped(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x).exp(), 0.5)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_checkpointing_draws_the_same_random_numbers_again(inner: str) -> None:
    model, x = Dropping(), torch.randn(8, 64)
    autocastfx.enable(model, dtype=LOW, inner=inner)
    gradients: list[Tensor] = []
    for saves_memory in (False, True):
        model.saves_memory = saves_memory
        for _ in range(2):
            torch.manual_seed(0)
            gradients += torch.autograd.grad(model(x).sum(), [model.layer.weight])
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


def test_disable_gives_the_models_own_call_back() -> None:
    model, x = made()
    exact = model(x)
    autocastfx.enable(model, dtype=LOW)
    assert not torch.equal(model(x), exact)
    assert autocastfx.disable(model) is model
    assert torch.equal(model(x), exact)
    assert autocastfx.backend_of(model) is None
    assert autocastfx.disable(model) is model
    autocastfx.enable(model, dtype=LOW)
    assert is_low(model, x)


class Counted(nn.Module):
    """A loop whose length is in the values: Dynamo skips it as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if x.sum() > 1e9:
                continue
            x = self.layer(x)
        return x


def test_disable_takes_autocast_from_code_that_was_skipped() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Counted()), torch.randn(4, 8)
    exact = model(x)
    autocastfx.enable(model, dtype=LOW)
    with pytest.warns(UncapturedGraphWarning):
        model(x)
    assert model[1].__dict__["_compiled_call_impl"] is not None
    autocastfx.disable(model)
    assert model[1].__dict__["_compiled_call_impl"] is None
    assert torch.equal(model(x), exact)


class ByName(nn.Module):
    """A value of its Python code differs in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, name: str) -> Tensor:
        return self.layer(x) * len(name) if name != "a0" else self.layer(x)


def test_more_graphs_than_dynamo_makes_are_told_with_the_remedy() -> None:
    torch.manual_seed(0)
    model, x = ByName(), torch.randn(4, 8)
    autocastfx.enable(model, dtype=LOW)
    most = torch._dynamo.config.recompile_limit
    for i in range(most):
        model(x, f"a{i}")
    with pytest.warns(UncapturedGraphWarning, match=r"forward at .*recompile_limit allows more graphs"):
        model(x, "another")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = nn.functional.linear(x, model.layer.weight, model.layer.bias).detach() * 4
        assert 0 < relative_error(model(x, "more").detach(), exact) < 4 * EPS


def test_an_enabled_model_is_dumped_and_explained() -> None:
    model, x = made()
    for call in (autocastfx.dump, lambda m: autocastfx.explain(m, "tanh")):
        with pytest.raises(TypeError, match=r"not a Scaled: convert or enable the model first$"):
            call(model)
    autocastfx.enable(model, dtype=LOW)
    with pytest.raises(VariantError, match="nothing is captured yet: call the enabled model once"):
        autocastfx.dump(model)
    model(x)
    text = autocastfx.dump(model)
    assert text.splitlines()[1] == "model: Scaled"
    assert "variant: graph 1 of 1, captured by torch.compile" in text
    assert autocastfx.Plan.from_json(autocastfx.dump(model, format="json")).low == "bfloat16"
    why = autocastfx.explain(model, "tanh")
    assert why.startswith("tanh (tanh) in module")
    with pytest.raises(KeyError, match="tahn"):
        autocastfx.explain(model, "tahn")
    model.scale = 2.0
    model(x)
    text = autocastfx.dump(model)
    assert [f"graph {number} of 2, captured by torch.compile" in text for number in (1, 2)] == [True, True]
    assert "graph 2 of 2" in autocastfx.dump(model, format="html")
    assert autocastfx.dump(model, only="tanh").count("only tanh\n") == 2
    with pytest.raises(ValueError, match=r"not 'tahn' \(did you mean 'tanh'\?\)"):
        autocastfx.dump(model, only="tahn")
    assert autocastfx.explain(model, "tanh") == why, "the same of both graphs is said once"
    with pytest.raises(ValueError, match=r"has 2 graphs, and 'json' holds one: take 'text' or 'html', or dump one of"):
        autocastfx.dump(model, format="json")


def test_graphs_that_could_not_be_converted_have_no_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    autocastfx.enable(model, dtype=LOW)

    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("autocastfx.capture.dynamo_graph.aten_graph", fail)
    with pytest.warns(UncapturedGraphWarning):
        model(x)
    with pytest.raises(
        VariantError, match=r"no graph of the enabled model could be converted: .*RuntimeError: no such"
    ):
        autocastfx.dump(model)


def test_what_cannot_be_enabled_is_refused_and_left() -> None:
    model, x = made()
    autocastfx.enable(model, dtype=LOW)
    with pytest.raises(UnsupportedError, match="this Scaled is enabled already: call disable first"):
        autocastfx.enable(model, dtype="float16")
    converted: AmpModule = autocastfx.convert(made()[0], x, dtype=LOW)
    with pytest.raises(UnsupportedError, match="converted already"):
        autocastfx.enable(converted, dtype="float16")
    theirs, _ = made()
    theirs.compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"compiled already: enable it instead, with inner="):
        autocastfx.enable(theirs, dtype="float16")
    other, _ = made()
    with pytest.raises(ValueError, match=r"dtype is torch\.float16 or torch\.bfloat16"):
        autocastfx.enable(other, dtype=torch.float64)
    assert autocastfx.backend_of(other) is None
    assert not is_low(other, x)


def test_the_environment_switches_every_conversion_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    exact = model(x)
    exact.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    monkeypatch.setenv("AUTOCASTFX_DISABLE", "1")
    with pytest.warns(UserWarning, match="AUTOCASTFX_DISABLE=1 is set: nothing is converted"):
        converted = autocastfx.convert(model, x, dtype=LOW, op_list="conservative", weights="cached")
    assert isinstance(converted, AmpModule)
    assert not converted.plan.casts
    model.zero_grad()
    found = converted(x)
    found.sum().backward()
    assert torch.equal(found, exact)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if g is not None)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="AUTOCASTFX_DISABLE"):
        autocastfx.enable(model, dtype=LOW)
    assert torch.equal(model(x), exact)
    assert autocastfx.backend_of(model) is None
    compiled = torch.compile(model, backend="autocastfx", options={"dtype": LOW, "inner": "eager"})
    with pytest.warns(UserWarning, match="AUTOCASTFX_DISABLE"):
        found = compiled(x)
    assert torch.equal(found, exact)
    monkeypatch.setenv("AUTOCASTFX_DISABLE", "yes")
    with pytest.raises(ValueError, match="AUTOCASTFX_DISABLE is 0 or 1, not 'yes'"):
        autocastfx.convert(model, x, dtype="float16")
    monkeypatch.setenv("AUTOCASTFX_DISABLE", "0")
    assert is_low(autocastfx.enable(model, dtype=LOW), x)


def test_the_default_dtype_is_that_of_where_the_model_is() -> None:
    for device, expected in (("cpu", torch.bfloat16), ("meta", torch.float16)):
        backend = autocastfx.backend_of(autocastfx.enable(nn.Linear(8, 8, device=device)))
        assert backend is not None
        assert backend.low is expected
    assert autocastfx.CompileBackend().low is (torch.float16 if torch.cuda.is_available() else torch.bfloat16)


class Drawing(nn.Module):
    def __init__(self, generator: random.Random) -> None:
        super().__init__()
        self.linear, self.rng = nn.Linear(4, 4), generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.rng.random()


@pytest.mark.parametrize("generator", [random.Random(0), random.SystemRandom()])
def test_a_generator_of_the_model_draws_in_each_call(generator: random.Random) -> None:
    model, x = Drawing(generator), torch.ones(2, 4)
    autocastfx.enable(model, dtype="bfloat16")
    assert len({float(model(x).detach().norm()) for _ in range(4)}) == 4


@pytest.mark.parametrize("way", ["whole", "broken", "mode"])
def test_a_model_without_values_runs(way: str) -> None:
    """What is not captured runs in float32 there, for torch.autocast does not know the device."""

    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if way == "broken":
                torch._dynamo.graph_break()
            return super().forward(x)

    model = autocastfx.enable(nn.Sequential(Broken(8, 4)).to("meta"), dtype=LOW)
    with FlopCounterMode(display=False) if way == "mode" else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UncapturedGraphWarning)
        result = model(torch.empty(3, 8, device="meta"))
    assert (result.shape, result.dtype, result.device.type) == ((3, 4), torch.float32, "meta")
