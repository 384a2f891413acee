"""``convert``: what it takes, what it refuses, and what its arguments do. See test_module_protocol.py for the messages
of the reserved arguments.
"""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autocastfx
from autocastfx import AmpModule, OpList
from autocastfx.conversion import convert_again, convert_captured
from autocastfx.errors import (
    CaptureError,
    StateWarning,
    UnmatchedPlanWarning,
    UnmatchedRuleWarning,
    UnsupportedError,
    VerifyError,
)
from autocastfx.graph.names import op_name
from autocastfx.graph.node import dtypes, origin
from autocastfx.passes import pipeline as pipeline_module
from autocastfx.passes.pipeline import PIPELINE, Converter
from autocastfx.passes.state import State
from autocastfx.plan.plan import Precision
from tests.helpers import heard

LOW = [torch.float16, torch.bfloat16]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.bn, self.b = nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: Any = 1.0, *, shift: Tensor | None = None) -> Tensor:
        y = self.b(self.drop(self.bn(self.a(x)))) * scale
        return y if shift is None else y + shift


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 8)


def off(result: Tensor, reference: Tensor) -> float:
    gap = (result.detach() - reference.detach()).double().norm()
    return float(gap / reference.detach().double().norm())


def tolerance(amp_model: AmpModule, low: torch.dtype) -> float:
    """An epsilon for each 16-bit value of the graph, which is more than the longest chain of them."""
    return sum(low in dtypes(n) for n in amp_model.graph.nodes) * torch.finfo(low).eps


def assert_agrees(amp_model: AmpModule, model: Any, low: torch.dtype, *args: Any, **kwargs: Any) -> None:
    torch.manual_seed(1)
    expected = model(*args, **kwargs)
    torch.manual_seed(1)
    assert off(amp_model(*args, **kwargs), expected) <= tolerance(amp_model, low)


# -- what can be converted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", LOW)
def test_a_graph_module_from_symbolic_trace(low: torch.dtype, x: Tensor) -> None:
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 8)))
    eager = copy.deepcopy(model)
    amp_model = autocastfx.convert(model, (x,), dtype=low)
    assert list(amp_model.state_dict()) == list(model.state_dict())
    for mode in (True, False):
        assert_agrees(amp_model.train(mode), eager.train(mode), low, torch.randn(5, 8))
        assert amp_model.plan.by_op()["linear", "low"] == 2
    assert torch.equal(model.get_submodule("2").running_mean, eager.get_submodule("2").running_mean) is False
    assert off(model.get_submodule("2").running_mean, eager.get_submodule("2").running_mean) <= 4 * torch.finfo(low).eps


def _program(model: nn.Module, x: Tensor, **kwargs: Any) -> torch.export.ExportedProgram:
    shapes = {"x": {0: torch.export.Dim.AUTO}, **dict.fromkeys(kwargs)}
    return torch.export.export(model, (x,), kwargs, dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("mode", [True, False])
def test_an_exported_program_with_its_own_example_inputs(mode: bool, low: torch.dtype, x: Tensor) -> None:
    model = Net().train(mode)
    eager = copy.deepcopy(model)
    amp_model = autocastfx.convert(_program(model, x), dtype=low)
    assert list(amp_model.state_dict()) == list(model.state_dict())
    assert_agrees(amp_model, eager, low, x)
    assert_agrees(amp_model, eager, low, torch.randn(6, 8))
    amp_model(x).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in amp_model.parameters())


@pytest.mark.parametrize("switch", [lambda m: m.train(), lambda m: m.eval(), lambda m: m.train(False)])
def test_the_mode_of_an_exported_program_cannot_be_switched(switch: Callable[[Any], Any], x: Tensor) -> None:
    amp_model = autocastfx.convert(_program(Net().eval(), x), dtype=torch.bfloat16)
    before = amp_model(x)
    with pytest.raises(NotImplementedError, match=r"Calling (train|eval)\(\) is not supported"):  # torch's own
        switch(amp_model)
    assert torch.equal(amp_model(x), before)


def test_an_exported_program_with_keywords_and_with_other_inputs(x: Tensor) -> None:
    model = Net().eval()
    program = _program(model, x, scale=2.0)
    for amp_model in (
        autocastfx.convert(program, dtype=torch.bfloat16),
        autocastfx.convert(program, (torch.randn(9, 8),), {"scale": 2.0}, dtype=torch.bfloat16),
    ):
        assert_agrees(amp_model, model, torch.bfloat16, x, scale=2.0)


def test_the_module_of_an_exported_program(x: Tensor) -> None:
    model = Net().eval()
    amp_model = autocastfx.convert(_program(model, x).module(), (x,), dtype=torch.bfloat16)
    assert_agrees(amp_model, model, torch.bfloat16, x)


@pytest.mark.parametrize("example", [lambda x: x, lambda x: (x,), lambda x: [x]], ids=["tensor", "tuple", "list"])
def test_example_inputs_in_several_forms(example: Callable[[Tensor], Any], x: Tensor) -> None:
    assert autocastfx.convert(nn.Linear(8, 8), example(x), dtype="float16")(x).shape == (3, 8)


def test_example_keywords_alone_and_beside_inputs(x: Tensor) -> None:
    for args, kwargs in [((), {"x": x}), ((x,), {"shift": torch.ones(2)}), (None, {"x": x, "scale": 3})]:
        amp_model = autocastfx.convert(Net(), args, kwargs, dtype=torch.bfloat16)
        amp_model(*(args or ()), **kwargs)
        assert len(amp_model.variants) == 1


@pytest.mark.parametrize(
    "kind", [torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.parametrizations.orthogonal]
)
def test_parametrised_weights(kind: Callable[..., nn.Module], x: Tensor) -> None:
    model = kind(nn.Linear(8, 8))
    amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16)
    assert list(amp_model.state_dict()) == list(model.state_dict())
    assert_agrees(amp_model, model, torch.bfloat16, x)


def test_an_ambient_autocast_region_does_not_change_the_result(x: Tensor) -> None:
    model = Net()
    usual = autocastfx.convert(model, (x,), dtype="float16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = autocastfx.convert(model, (x,), dtype="float16")
        inside(x, 2.0)
    assert inside.code == usual.code
    assert inside.plan == usual.plan
    usual(x, 2.0)
    assert [v.code for v in inside.variants] == [v.code for v in usual.variants]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"do not fit Net\.forward: missing a required argument: 'x'"),
        ((1, 2, 3), {}, r"do not fit Net\.forward: too many positional arguments"),
        ((1,), {"x": 1}, r"do not fit Net\.forward: multiple values for argument 'x'"),
        ((1,), {"other": 1}, r"do not fit Net\.forward: got an unexpected keyword argument 'other'"),
    ],
)
def test_example_inputs_that_do_not_fit_the_signature(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        autocastfx.convert(Net(), args, kwargs, dtype="float16")


@pytest.mark.parametrize("example", [torch.randn(3, 5), torch.randn(4), "text", None])
def test_example_inputs_that_do_not_fit_the_model(example: Any) -> None:
    with pytest.raises(CaptureError, match=r"^Net (fails|cannot be captured in train mode, in one graph): .+\n.+\n.+"):
        autocastfx.convert(Net(), (example,), dtype="float16")


CANNOT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "branch": (lambda x: x if x.sum() > 0 else -x, "control flow depends on tensor values"),
    "item": (lambda x: x * 2 if x[0, 0].item() > 0 else x, "control flow depends on tensor values"),
    "loop": (lambda x: [x for _ in range(int(x.sum()))], "control flow depends on tensor values"),
    "list": (lambda x: [x * one for one in x.sum(1).tolist() if one > 0], "Python code needs one of them as a number"),
    "print": (lambda x: x * len(input(str(x.shape))), "Write this line so that one graph holds it"),
}


class Plain(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_captured_says_why_and_what_helps(name: str, x: Tensor) -> None:
    function, advice = CANNOT[name]
    with pytest.raises(CaptureError, match=advice) as caught:
        autocastfx.convert(Plain(function), (x,), dtype="float16")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3, "what happened, where, and what to do"
    assert lines[1].startswith("At ")
    assert lines[1].endswith("alled with x=float32[3, 8]")
    assert lines[0].startswith("Plain cannot be captured in train mode, in one graph: ")
    assert caught.value.__context__ is not None
    assert caught.value.__suppress_context__, "its hundreds of lines are for whoever asks for them"


@pytest.mark.parametrize(
    ("name", "default", "known", "others"),
    [
        ("weights", "cast", "'cast', 'cached', 'low'", ["half", "", None]),
        ("fold", "exact", "'none', 'exact', 'kernel'", ["all", None]),
    ],
)
def test_a_choice_is_one_of_those_known(name: str, default: Any, known: str, others: list[Any], x: Tensor) -> None:
    for other in others:
        with pytest.raises(ValueError, match=f"^{name} is one of {known}, not {re.escape(repr(other))}$"):
            autocastfx.convert(nn.Linear(8, 8), (x,), **{name: other})
    assert inspect.signature(autocastfx.convert).parameters[name].default == default


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn, "float8"])
def test_other_dtypes_are_refused(dtype: Any, x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"dtype is torch\.float16 or torch\.bfloat16, not " + re.escape(repr(dtype))):
        autocastfx.convert(nn.Linear(8, 8), (x,), dtype=dtype)


@pytest.mark.parametrize(("device", "expected"), [(None, "bfloat16"), ("cpu", "bfloat16"), ("cuda", "float16")])
def test_the_default_dtype_is_that_of_the_device_and_is_told(device: str | None, expected: str, x: Tensor) -> None:
    with heard() as lines:
        plan = autocastfx.convert(nn.Linear(8, 8), (x,), device=device).plan
    assert (plan.low, plan.op_list) == (expected, expected)
    assert lines[0] == f"dtype: {expected}, the default on {device or 'cpu'}"
    with heard() as lines:
        autocastfx.convert(nn.Linear(8, 8), (x,), device=device, dtype="float16")
    assert not any(line.startswith("dtype") for line in lines)


def test_the_default_dtype_is_that_of_where_the_model_is() -> None:
    model, x = nn.Linear(8, 8, device="meta"), torch.empty(3, 8, device="meta")
    assert autocastfx.convert(model, x).plan.low == "float16"
    assert autocastfx.convert(model)._converter.low == torch.float16
    assert autocastfx.convert(nn.ReLU(), x).plan.low == "float16"
    assert autocastfx.convert(nn.ReLU())._converter.low == torch.bfloat16


def test_a_model_of_both_16_bit_dtypes_is_told(x: Tensor) -> None:
    told = r"the parameters of this Sequential are bfloat16 and float16 already, and only float32 values"
    for convert in (autocastfx.convert, autocastfx.enable):
        with pytest.warns(StateWarning, match=told) as caught:
            convert(nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8).half()), dtype="bfloat16")
        assert caught[0].filename == __file__
    mixed = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8))
    autocastfx.enable(mixed, dtype="bfloat16")
    autocastfx.convert(nn.ReLU(), (x,), dtype="bfloat16")


@pytest.mark.parametrize("model", [len, nn.Linear, None, torch.ones(1)])
def test_what_is_no_module_is_refused(model: Any, x: Tensor) -> None:
    with pytest.raises(TypeError, match=r"convert takes an nn\.Module, a GraphModule, an ExportedProgram or a fu"):
        autocastfx.convert(model, (x,), dtype="float16")


def test_a_converted_model_is_refused_inside_and_out(x: Tensor) -> None:
    amp_model = autocastfx.convert(nn.Linear(8, 8), (x,), dtype="float16")
    for again in (amp_model, copy.deepcopy(amp_model)):
        with pytest.raises(UnsupportedError, match="the model is converted already: convert the original again"):
            autocastfx.convert(again, (x,), dtype=torch.bfloat16)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", LOW)
def test_outputs_can_stay_low(low: torch.dtype, x: Tensor) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.a(x)
            return {
                "low": y,
                "softmax": y.softmax(-1),
                "input": x,
                "double": y.double(),
                "long": x.long(),
                "float": y.float(),
            }

    usual = autocastfx.convert(Mixed(), (x,), dtype=low)(x)
    kept = autocastfx.convert(Mixed(), (x,), dtype=low, keep_output_dtype=False)(x)
    f32, f64, i64 = torch.float32, torch.float64, torch.int64
    assert [t.dtype for t in usual.values()] == [f32, f32, f32, f64, i64, f32]
    assert [t.dtype for t in kept.values()] == [low, f32, f32, f64, i64, f32]


def test_the_device_is_decided_for_but_not_moved_to(x: Tensor) -> None:
    model = nn.Linear(8, 8)
    for device in ("cuda", torch.device("cuda", 0), "cpu", torch.device("meta")):
        amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16, device=device)
        assert amp_model.plan.device == torch.device(device).type
        assert amp_model(x).device.type == "cpu"
        amp_model(x[0])  # a further capture is decided for it too
        assert {v.plan.device for v in amp_model.variants} == {torch.device(device).type}
    assert autocastfx.convert(model, (x,), dtype="float16").plan.device == "cpu"


def test_the_default_list_is_that_of_the_dtype(x: Tensor) -> None:
    for low, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        plan = autocastfx.convert(nn.Linear(8, 8), (x,), dtype=low).plan
        assert (plan.low, plan.op_list) == (name, name)
    assert autocastfx.convert(nn.Linear(8, 8), (x,), dtype="float16").plan.low == "float16", "the default dtype"


def test_of_several_lists_the_later_wins(tmp_path: Path, x: Tensor) -> None:
    deny, allow = tmp_path / "deny.yaml", tmp_path / "allow.yaml"
    deny.write_text("deny: [linear]\n")
    allow.write_text("allow: [linear]\n")

    def placed(*lists: Any) -> Precision:
        (node,) = autocastfx.convert(nn.Linear(8, 8), (x,), op_list=list(lists), dtype="float16").plan.nodes
        return node.placement.run

    assert placed("default", deny) is Precision.FLOAT32
    assert placed("default", str(deny), allow) is Precision.LOW
    assert placed(allow, autocastfx.load_op_list(deny)) is Precision.FLOAT32
    assert placed("default", autocastfx.OpList()) is Precision.LOW


CONVOLUTIONS = {
    "conv1d": (lambda: nn.Conv1d(8, 8, 1), (1, 8, 4)),
    "two conv2d": (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)), (1, 8, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 8, 1), (1, 8, 4, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_slow_convolutions_are_warned_of_once(name: str) -> None:
    make, shape = CONVOLUTIONS[name]
    with pytest.warns(UserWarning, match=r"float16 convolutions on a CPU .* use dtype=torch\.bfloat16") as caught:
        amp_model = autocastfx.convert(make(), (torch.rand(shape),), dtype="float16")
    assert [w.filename for w in caught] == [__file__], "it points to the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp_model.eval()(torch.rand(shape))
        amp_model.train()(torch.rand(shape)[0])


def test_no_warning_without_a_slow_convolution(tmp_path: Path) -> None:
    deny = tmp_path / "deny.yaml"
    deny.write_text("deny: [conv1d]\n")
    x = torch.rand(1, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autocastfx.convert(nn.Conv1d(8, 8, 1), (x,), dtype=torch.bfloat16)
        autocastfx.convert(nn.Conv1d(8, 8, 1), (x,), device="cuda", dtype="float16")
        autocastfx.convert(nn.Conv1d(8, 8, 1), (x,), op_list=["default", deny], dtype="float16")
        autocastfx.convert(nn.Linear(8, 8), (x,), dtype="float16")


# -- the pipeline -----------------------------------------------------------------------------------------------------


def test_the_pipeline_reads_like_its_description() -> None:
    written = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = re.findall(r"^   │  (\w+(?: \w+)*)  ", written, re.MULTILINE)
    assert steps == ["capture", *(step.name for step in PIPELINE)]


def test_a_planted_wrong_cast_is_refused(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is handed out that verify has not seen."""

    def plant(state: State) -> State:
        cast = next(n for n in state.graph.nodes if origin(n) is not None and op_name(n) == "to")
        cast.args = (cast.args[0], torch.float64)
        return state

    steps = list(PIPELINE)
    monkeypatch.setattr(pipeline_module, "PIPELINE", (*steps[:-1], lambda policy: plant, steps[-1]))
    with pytest.raises(VerifyError, match=r"(?s)is float64, planned float16.*>>> "):
        autocastfx.convert(Net(), (x,), dtype="float16")


def test_what_was_captured_stays_as_it_is(x: Tensor) -> None:
    amp_model = autocastfx.convert(Net(), (x,), dtype="float16")
    captured = amp_model.variants[0].captured
    before = str(captured.graph)
    assert not any(origin(n) for n in captured.graph.nodes)
    rebuilt = convert_captured(amp_model, amp_model._original.converter)
    assert rebuilt is not None
    assert str(captured.graph) == before
    assert rebuilt.variants[0].code == amp_model.variants[0].code


def test_a_converter_pickles(x: Tensor) -> None:
    amp_model = autocastfx.convert(Net(), (x,), dtype="float16")
    converter: Converter = pickle.loads(pickle.dumps(amp_model._original.converter))
    assert converter == amp_model._original.converter
    again = convert_captured(amp_model, converter)
    assert again is not None
    assert again.plan == amp_model.plan


def test_what_was_captured_is_decided_again_by_a_further_list() -> None:
    model, x = Net(), torch.randn(3, 8)
    amp_model = autocastfx.convert(model, (x,), dtype=torch.bfloat16)
    further = autocastfx.OpList.of({"modules": [{"path": "a", "category": "float32"}]})
    again = convert_again(amp_model, further)
    assert again is not None
    expected = autocastfx.convert(model, (x,), dtype=torch.bfloat16, op_list=["default", further])
    assert [v.plan.nodes for v in again.variants] == [v.plan.nodes for v in expected.variants]
    assert amp_model.plan["linear"].placement.run is Precision.LOW, "it stays as it was"
    assert all(a is b for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert torch.equal(again.eval()(x), expected.eval()(x))
    assert convert_again(autocastfx.convert(model.eval(), (x,), weights="low", dtype="float16"), further) is None


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * scale


@pytest.mark.parametrize("said", ["bfloat16", "bf16", "torch.bfloat16", "BF16"])
def test_a_dtype_can_be_named_and_keyword_inputs_be_a_dict(said: str) -> None:
    torch.manual_seed(0)
    model, given = Named(), {"scale": torch.rand(8), "x": torch.randn(2, 8)}
    amp_model = autocastfx.convert(model, given, dtype=said)
    usual = autocastfx.convert(model, example_kwargs=given, dtype=torch.bfloat16)
    assert torch.equal(amp_model(**given), usual(**given))
    assert amp_model.plan == usual.plan


def test_inputs_and_dtypes_that_cannot_be_are_said() -> None:
    model, given = Named(), {"scale": torch.rand(8), "x": torch.randn(2, 8)}
    with pytest.raises(ValueError, match=r"dtype is torch\.float16 or torch\.bfloat16, not 'float8'"):
        autocastfx.convert(model, given, dtype="float8")
    with pytest.raises(
        TypeError, match=r"example_inputs is a dict, which holds keyword inputs, and example_kwargs has"
    ):
        autocastfx.convert(model, given, {"x": given["x"]}, dtype="float16")
    with pytest.raises(CaptureError, match=r"do not fit Named\.forward: .*A dict that is an argument itself goes into"):
        autocastfx.convert(model, {"y": given["x"]}, dtype="float16")


@pytest.mark.parametrize("again", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_what_matches_nothing_is_told_after_the_first_call_of_a_model_that_was_given_no_inputs(again: Any) -> None:
    rules = autocastfx.OpList.of({"deny": ["gelu", "exp2"]}, name="mine")
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.ones(2, 8)
    amp_model = again(autocastfx.convert(model, op_list=["default", rules]))
    with pytest.warns(UnmatchedRuleWarning, match=r"mine:deny\[1\]: no node of the model is 'exp2'") as told:
        amp_model(x)
    assert len(told) == 1
    amp_model.eval()(x)  # not again


def test_lines_of_a_plan_and_ranges_that_match_nothing_are_told_after_the_first_call() -> None:
    x = torch.ones(2, 8)
    other = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    given: list[tuple[dict[str, Any], type[Warning], str]] = [
        (
            {"plan": autocastfx.convert(other, (x,)).plan},
            UnmatchedPlanWarning,
            "no node is named 'tanh'",
        ),
        ({"calibrate": autocastfx.calibrate(other, [(x,)])}, UserWarning, "the first being 'tanh' .* Calibrate again"),
    ]
    for arguments, kind, words in given:
        amp_model = autocastfx.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), dtype="bfloat16", **arguments)
        with pytest.warns(kind, match=words):
            amp_model(x)


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        (nn.ReLU(), {}, r"ReLU: no op of the model runs in 16 bits\. relu: this moves the fewest bytes; its category"),
        (
            nn.Sequential(nn.Unflatten(1, (4, 4)), nn.Linear(4, 4)),
            {},
            r"Sequential: no op .* fewer than product_depth 8",
        ),
        (nn.Softmax(-1), {"weights": "cached"}, r"Softmax: no op of the model runs in 16 bits\. softmax: .* deny"),
        (nn.Linear(16, 16), {"fold": "kernel"}, r'Linear: fold="kernel" changes nothing: '),
        (
            nn.Linear(16, 16),
            {"op_list": ["default", OpList.of({"deny": ["linear"]})]},
            r"no op .*linear: its category is deny",
        ),
        (nn.Linear(16, 16), {}, ""),
        (nn.Linear(16, 16), {"weights": "cached"}, ""),
        (
            nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)),
            {"fold": "kernel", "weights": "cached"},
            "",
        ),
        (nn.Linear(16, 16), {"op_list": "float32"}, ""),
        (nn.Linear(16, 16).bfloat16(), {}, ""),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_what_a_conversion_was_asked_for_and_does_not_change_is_told_once(
    model: nn.Module, options: dict[str, Any], told: str, first: bool
) -> None:
    inputs = torch.ones(2, 16, dtype=next((p.dtype for p in model.parameters()), None))
    options = {"dtype": "bfloat16", "check": False, **options}
    with heard(level=logging.WARNING) as warned:
        amp_model = autocastfx.convert(model, None if first else inputs, **options)
        for _ in range(2):
            amp_model(inputs)
    assert len(warned) == bool(told)
    assert all(re.search(told, one) for one in warned)


def test_what_a_conditional_gives_keeps_its_dtype() -> None:
    """Other values of its readers, and the model's output, are as captured, whatever its branches compute in."""
    layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = torch.cond(x.sum() > 0, lambda x: self.layers[0](x), lambda x: self.layers[1](x), (x,))
            return y, y.exp()

    x = torch.randn(4, 16)
    amp_model = autocastfx.convert(Conditional(), (x,), dtype="bfloat16", check=False)
    assert [one.dtype for one in amp_model(x)] == [torch.float32, torch.float32]
