"""An AmpModule does what a module does: move, copy, pickle, compile, export, train in parallel, forward attributes."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import autocastfx
from autocastfx.errors import CalibrationError, CaptureError, PlanError, UnsupportedError
from autocastfx.plan.plan import Plan
from tests.helpers import relative_error

convert = functools.partial(autocastfx.convert, check=False)


class Net(nn.Module):
    """Two linears around a normalisation, a mask, a constant, and a tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 8}
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.drop(torch.relu(self.first(x))) + torch.ones(8, device=x.device)
        hidden = hidden + torch.tensor([0.5] * 8).to(x.device)
        if mask is not None:
            hidden = hidden * mask
        return self.second(self.norm(hidden))

    def width(self) -> int:
        return self.config["width"]

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(x)

    def helper(this, x: torch.Tensor) -> torch.Tensor:
        return this(x)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 8)


@pytest.fixture
def amp_model(x: torch.Tensor) -> autocastfx.AmpModule:
    torch.manual_seed(1)
    return convert(Net().eval(), (x,), dtype=torch.bfloat16)


def same(a: autocastfx.AmpModule, b: autocastfx.AmpModule, x: torch.Tensor) -> bool:
    return torch.equal(a(x), b(x))


def test_a_deepcopy_is_apart_and_captures_further_calls(amp_model: autocastfx.AmpModule, x: torch.Tensor) -> None:
    twin = copy.deepcopy(amp_model)
    assert same(twin, amp_model, x)
    with torch.no_grad():
        twin.first.weight.zero_()
    assert not same(twin, amp_model, x)
    mask = torch.ones(3, 8)
    assert torch.equal(twin(x, mask), twin(x))
    assert (len(twin.variants), len(amp_model.variants)) == (2, 1)


def test_pickling_keeps_the_model_and_how_it_is_converted(amp_model: autocastfx.AmpModule, x: torch.Tensor) -> None:
    amp_model(x, torch.ones(3, 8))
    twin = pickle.loads(pickle.dumps(amp_model))
    assert twin.variants == ()
    assert same(twin, amp_model, x)
    assert twin.plan == amp_model.plan
    assert twin.code == amp_model.code
    assert list(twin.state_dict()) == list(amp_model.state_dict())
    assert torch.equal(twin(x[None]), amp_model(x[None]))
    for mode in (True, False):
        assert twin.train(mode).training is twin.first.training is mode


def test_torch_save_and_load(amp_model: autocastfx.AmpModule, x: torch.Tensor) -> None:
    file = io.BytesIO()
    torch.save(amp_model, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=False), amp_model, x)


def test_a_custom_function_pickles(x: torch.Tensor) -> None:
    amp_model = convert(Straight(), (x,), dtype=torch.bfloat16)
    twin = pickle.loads(pickle.dumps(amp_model))
    for model in (amp_model, twin):
        x.grad = None
        model(x.requires_grad_()).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 2.0))


class Through(torch.autograd.Function):
    """Rounds; its gradient is twice the incoming one."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


class Straight(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Through.apply(x)


def test_moving_moves_what_is_made_inside_too(amp_model: autocastfx.AmpModule, x: torch.Tensor) -> None:
    assert "cpu" in amp_model.code
    assert amp_model.to("meta") is amp_model
    assert amp_model(x.to("meta")).device.type == "meta"
    assert "cpu" not in amp_model.variants[-1].code
    assert {t.device.type for t in amp_model.parameters()} == {"meta"}


def test_moving_after_unpickling(amp_model: autocastfx.AmpModule, x: torch.Tensor) -> None:
    twin = pickle.loads(pickle.dumps(amp_model)).to("meta")
    assert twin(x.to("meta")).device.type == "meta"


@pytest.mark.parametrize("change", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()])
def test_another_dtype_is_refused_before_anything_changes(amp_model: autocastfx.AmpModule, change, x) -> None:
    before = amp_model(x)
    with pytest.raises(UnsupportedError, match="parameters stay float32"):
        change(amp_model)
    assert torch.equal(amp_model(x), before)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_gives_the_same_in_both_modes_and_at_other_sizes(
    amp_model: autocastfx.AmpModule, x: torch.Tensor, backend: str
) -> None:
    compiled = torch.compile(amp_model, backend=backend, fullgraph=True)
    for inputs in (x, torch.randn(5, 8), torch.randn(1, 8)):
        assert torch.equal(compiled(inputs), amp_model(inputs))
    amp_model.train()
    torch.manual_seed(2)
    expected = amp_model(x)
    torch.manual_seed(2)
    assert torch.equal(compiled(x), expected)
    compiled(x).sum().backward()
    assert amp_model.first.weight.grad.dtype == torch.float32


def test_compiled_it_captures_a_further_call(amp_model: autocastfx.AmpModule, x: torch.Tensor) -> None:
    compiled = torch.compile(amp_model, backend="eager")
    mask = torch.rand(3, 8)
    assert torch.equal(compiled(x, mask), amp_model(x, mask))
    assert len(amp_model.variants) == 2


def test_it_exports_with_its_casts(amp_model: autocastfx.AmpModule, x: torch.Tensor) -> None:
    program = torch.export.export(amp_model, (x,), strict=False)
    assert torch.equal(program.module()(x), amp_model(x))
    again = convert(program, dtype=torch.bfloat16)
    assert again.plan.casts == ()
    assert torch.equal(again(x), amp_model(x))


def test_the_interpreter_runs_it_as_the_model(amp_model: autocastfx.AmpModule, x: torch.Tensor) -> None:
    assert torch.equal(fx.Interpreter(amp_model.freeze(x)).run(x), amp_model(x))


class Nested(nn.Module):
    """Takes and gives nested values; its graph takes and gives tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(
        self, batch: dict[str, torch.Tensor], scale: float = 1.0, mask: torch.Tensor | None = None
    ) -> dict[str, Any]:
        hidden = self.norm(self.fc(batch["x"] + batch["y"])) * scale + torch.tensor([0.5] * 8)
        hidden = hidden if mask is None else hidden * mask
        return {"hidden": hidden, "parts": (hidden.sum(), [hidden.mean()])}


@pytest.fixture
def nested(x: torch.Tensor) -> tuple[autocastfx.AmpModule, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    batch = {"x": x, "y": torch.ones(8)}
    return convert(Nested().eval(), (batch, 2.0), dtype=torch.bfloat16), batch


@pytest.mark.parametrize("weights", ["cast", "cached"])
def test_a_transformer_and_an_interpreter_give_the_models_own_outputs(nested: Any, weights: str) -> None:
    amp_model, batch = nested
    if weights == "cached":
        amp_model = convert(Nested().eval(), (batch, 2.0), dtype=torch.bfloat16, weights="cached")
    expected, frozen = amp_model(batch, 2.0), amp_model.freeze(batch, 2.0)
    transformed = fx.Transformer(frozen).transform()
    for outputs in (
        transformed(batch, 2.0),
        transformed(batch=batch, scale=2.0),
        transformed(batch, 2.0, mask=None),
        fx.Interpreter(frozen).run(batch, 2.0),
        fx.Interpreter(transformed).run(batch, 2.0),
    ):
        torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


def test_a_transformer_changes_what_it_is_asked_to(nested: Any) -> None:
    amp_model, batch = nested

    class Doubled(fx.Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            made = super().call_function(target, args, kwargs)
            return made * 2 if target is torch.ops.aten.sum.default else made

    assert torch.equal(
        Doubled(amp_model.freeze(batch, 2.0)).transform()(batch, 2.0)["parts"][0], 2 * amp_model(batch, 2.0)["parts"][0]
    )


class Outputs(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.body = kind, nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        return {"y": y, "twice": 2 * y} if self.kind is dict else (y, 2 * y) if self.kind is tuple else y


_trace: Any = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch itself advises against it


@_trace
@pytest.mark.filterwarnings("ignore:the trace runs the graph for sizes where:torch.jit.TracerWarning")
@pytest.mark.parametrize("weights", ["cast", "cached", "low"])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.Tensor, tuple, dict])
def test_its_trace_gives_the_same(kind: type, low: torch.dtype, weights: Any, x: torch.Tensor) -> None:
    amp_model = convert(Outputs(kind).eval(), (x,), dtype=low, weights=weights)
    traced: Any = torch.jit.trace(amp_model, (x,), strict=kind is not dict)
    for inputs in (x, torch.randn(5, 8)):
        torch.testing.assert_close(traced(inputs), amp_model(inputs), rtol=0, atol=0)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(x), amp_model(x), rtol=0, atol=0)


@_trace
def test_a_trace_captures_first_and_says_for_which_sizes_it_holds(x: torch.Tensor) -> None:
    amp_model = convert(Outputs(tuple).eval(), dtype=torch.bfloat16)
    with pytest.warns(
        torch.jit.TracerWarning, match=r"the graph for sizes where .*sizes\[0\]\[1\] == 8.* does not check"
    ):
        traced: Any = torch.jit.trace(amp_model, (x,))
    torch.testing.assert_close(traced(x), amp_model(x), rtol=0, atol=0)
    assert len(amp_model.variants) == 1


def test_a_functional_call_may_come_first(x: torch.Tensor) -> None:
    amp_model = convert(Outputs(tuple).eval(), dtype=torch.bfloat16)
    others = {name: value.detach() for name, value in amp_model.named_parameters()}
    doubled = {name: 2 * value for name, value in others.items()}
    found = torch.func.functional_call(amp_model, doubled, (x,))
    torch.testing.assert_close(torch.func.functional_call(amp_model, others, (x,)), amp_model(x), rtol=0, atol=0)
    amp_model.load_state_dict(doubled)
    torch.testing.assert_close(found, amp_model(x), rtol=0, atol=0)


@pytest.mark.parametrize("weights", ["cast", "cached"])
def test_an_ensemble_is_stacked_and_mapped(nested: Any, weights: Any) -> None:
    """The recipe of torch.func: batch norm takes float32 parameters, and a constant is copied, under vmap too."""
    _, batch = nested
    ensemble = [Nested().eval() for _ in range(3)]
    for model in ensemble:
        model.norm.running_mean.normal_()
    members = [convert(one, (batch, 2.0), dtype=torch.bfloat16, weights=weights) for one in ensemble]
    parameters, buffers = torch.func.stack_module_state(members)

    def call(parameters: Any, buffers: Any, batch: Any) -> Any:
        return torch.func.functional_call(members[0], (parameters, buffers), (batch, 2.0))

    found = torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, batch)["hidden"]
    for mine, member in zip(found, members, strict=True):
        assert relative_error(mine.detach(), member(batch, 2.0)["hidden"].detach()) <= torch.finfo(torch.bfloat16).eps
    found.sum().backward()
    assert parameters["fc.weight"].grad.shape == (3, 8, 8)
    with pytest.raises(RuntimeError, match="all models to be of the same class"):
        torch.func.stack_module_state([members[0], convert(Net().eval(), (batch["x"],), dtype="float16")])


def test_an_edited_graph_runs_after_recompile(amp_model: autocastfx.AmpModule, x: torch.Tensor) -> None:
    before = amp_model(x)
    output = amp_model.graph.output_node()
    with amp_model.graph.inserting_before(output):
        doubled = amp_model.graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0][0], 2))
    output.args = ((doubled,),)
    amp_model.recompile()
    assert torch.equal(amp_model(x), 2 * before)
    assert "mul" in amp_model.code


def test_data_parallel_training_gives_the_same_gradients(
    amp_model: autocastfx.AmpModule, x: torch.Tensor, tmp_path: Path
) -> None:
    amp_model(x).sum().backward()
    expected = [p.grad.clone() for p in amp_model.parameters()]
    amp_model.zero_grad()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(amp_model)(x).sum().backward()
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(p.grad, g) for p, g in zip(amp_model.parameters(), expected, strict=True))


def test_an_ambient_autocast_region_decides_nothing(amp_model: autocastfx.AmpModule, x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        inside = amp_model(x)
    assert torch.equal(inside, amp_model(x))


def test_other_attributes_are_forwarded_and_what_runs_the_forward_is_converted(
    amp_model: autocastfx.AmpModule, x: torch.Tensor
) -> None:
    assert amp_model.config == {"width": 8}
    assert amp_model.width() == 8
    assert torch.equal(amp_model.generate(x), amp_model(x))
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        amp_model.missing  # noqa: B018


def test_the_plan_survives_json(amp_model: autocastfx.AmpModule) -> None:
    assert Plan.from_json(amp_model.plan.to_json()) == amp_model.plan


def test_slow_convolutions_are_warned_of_once_and_only_in_float16() -> None:
    x = torch.rand(1, 8, 4)
    with pytest.warns(UserWarning, match=r"use dtype=torch\.bfloat16") as caught:
        convert(nn.Conv1d(8, 8, 1), (x,), dtype=torch.float16)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(nn.Conv1d(8, 8, 1), (x,), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "half"}, ValueError, "weights is one of 'cast', 'cached', 'low', not 'half'"),
        ({"fold": "all"}, ValueError, "fold is one of 'none', 'exact', 'kernel', not 'all'"),
        ({"calibrate": []}, CalibrationError, "there are no batches to calibrate on"),
        ({"calibrate": False}, TypeError, "batches is an iterable of batches, not a bool"),
        ({"headroom": 10**5000}, ValueError, r"headroom is a finite factor of at least 1, not int of 16610 bits"),
        ({"headroom": 0.5}, ValueError, r"headroom is a finite factor of at least 1, not 0\.5"),
        ({"plan": "p.json"}, PlanError, r"^cannot read the plan p\.json: No such file"),
        ({"dtype": torch.float32}, ValueError, r"dtype is torch\.float16 or torch\.bfloat16, not torch\.float32"),
        (
            {"example_inputs": ()},
            CaptureError,
            r"do not fit Net\.forward: missing a required argument: 'x'",
        ),
        ({"model": len}, TypeError, "convert takes an nn.Module"),
    ],
)
def test_wrong_arguments(options, error: type[Exception], message: str, x: torch.Tensor) -> None:
    with pytest.raises(error, match=message):
        convert(**{"model": Net(), "example_inputs": (x,), **options})


class DataDependent(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (DataDependent(), "control flow depends on tensor values"),
    ],
)
def test_what_cannot_be_captured_says_why_and_what_helps(model: nn.Module, message: str, x, capfd) -> None:
    with pytest.raises(CaptureError, match=message):
        convert(model, (x,), dtype="float16")
    assert len(capfd.readouterr().err.splitlines()) < 20


class Opaque:
    def __init__(self, held: torch.Tensor | None) -> None:
        self.held = held


class ReturnsAnObject(nn.Module):
    def forward(self, x: torch.Tensor, holds: bool = True) -> object:
        return Opaque(2 * x if holds else None)


def test_an_object_is_returned_with_what_it_holds(x: torch.Tensor) -> None:
    amp_model = convert(ReturnsAnObject(), (x,), dtype="float16")
    found: Any = amp_model(x)
    assert torch.equal(found.held, 2 * x)
    found = amp_model(x, holds=False)
    assert found.held is None


def test_an_extra_state_is_kept(x: torch.Tensor) -> None:
    class Extra(nn.Linear):
        kept: object = None

        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, state: object) -> None:
            self.kept = state

    model = Extra(8, 8)
    amp_model = convert(model, (x,), dtype="float16")
    assert amp_model.state_dict()["_extra_state"] == 1
    amp_model.load_state_dict(amp_model.state_dict())
    assert model.kept == 1


def test_an_already_converted_model_is_refused(amp_model: autocastfx.AmpModule, x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="converted already: convert the original again"):
        convert(amp_model, (x,), dtype="float16")


def test_compiling_one_model_says_nothing_of_another() -> None:
    """Dynamo keeps what it found of a function by its code object, and may give up on it for the whole process."""
    codes = [convert(nn.Linear(2, 2), (torch.ones(1, 2),), dtype="float16").forward.__code__ for _ in range(2)]
    assert codes[0] is not codes[1]


class Named(nn.Module):
    """A model whose methods have names that a converted model once had for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def run(self) -> str:
        return "run"

    def capture(self) -> str:
        return "capture"

    def draft(self) -> str:
        return "draft"

    def held(self) -> str:
        return "held"


def test_a_models_own_methods_are_not_hidden() -> None:
    amp_model = convert(Named(), (torch.ones(2, 8),), dtype=torch.bfloat16)
    for name in ("run", "capture", "draft", "held"):
        assert getattr(amp_model, name)() == name


def test_a_converted_model_adds_few_public_names() -> None:
    own = {name for name in vars(autocastfx.AmpModule) if not name.startswith("_")} - set(dir(nn.Module))
    assert own == {"freeze", "plan", "recompile", "refresh_weights", "training", "variants"}


class Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor, twice: bool = False) -> torch.Tensor:
        return self.layer(a) - (2 * b if twice else b)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("by_position", [0, 1])
def test_keyword_arguments_are_exported_by_name(order: tuple[str, str], by_position: int) -> None:
    torch.manual_seed(0)
    given = dict(zip("ab", torch.randn(2, 2, 8), strict=True))
    amp_model = convert(Difference().eval(), example_kwargs=given, dtype=torch.bfloat16)
    expected = amp_model(**given)
    args = tuple(given[name] for name in ("a", "b")[:by_position])
    kwargs = {name: given[name] for name in order if name not in ("a", "b")[:by_position]}
    program = torch.export.export(amp_model, args, kwargs, strict=False)
    assert torch.equal(program.module()(*args, **kwargs), expected)
