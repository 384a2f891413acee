"""A model converted without inputs: what it is before its first call, and what the first call makes of it."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

import autocastfx
from autocastfx import AmpModule
from autocastfx.errors import (
    BannedOpError,
    CaptureError,
    NotCapturedError,
    UnmatchedRuleWarning,
    UnsupportedError,
)

LOW = torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.bn, self.b = nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.config = {"width": 8}

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.b(self.drop(self.bn(self.a(x))) * torch.tensor([1.0, 2.0, 3.0, 4.0] * 2)) * scale


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 8)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients of a seeded step."""
    torch.manual_seed(1)
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- before the first call --------------------------------------------------------------------------------------------


def test_parameters_buffers_and_keys_are_there_at_once() -> None:
    model = Net()
    amp_model = autocastfx.convert(model, dtype=LOW)
    assert isinstance(amp_model, AmpModule)
    assert list(amp_model.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(amp_model.parameters(), model.parameters(), strict=True))
    assert amp_model.config == {"width": 8}
    assert amp_model.variants == ()
    assert isinstance(amp_model.a, nn.Module)
    amp_model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert not model.a.weight.any()


def test_an_optimizer_built_before_the_first_call_trains(x: Tensor) -> None:
    model = Net()
    given = autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW)
    late = autocastfx.convert(model, dtype=LOW)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (given, late)]
    for _ in range(3):
        assert_same(step(late, x), step(given, x))
        for optimizer in optimizers:
            optimizer.step()
    assert_same(list(late.state_dict().values()), list(given.state_dict().values()))


SHOWN: dict[str, Callable[[AmpModule], Any]] = {
    "graph": lambda m: m.graph,
    "code": lambda m: m.code,
    "plan": lambda m: m.plan,
    "dump": autocastfx.dump,
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_cannot_be_shown_says_what_to_do(name: str, x: Tensor) -> None:
    amp_model = autocastfx.convert(Net(), dtype=LOW)
    with pytest.raises(NotCapturedError, match=r"no graph to show before the first call: call the model once"):
        SHOWN[name](amp_model)
    amp_model(x)
    assert SHOWN[name](amp_model)


def test_it_prints(x: Tensor) -> None:
    amp_model = autocastfx.convert(Net(), dtype=LOW)
    assert repr(amp_model) == "AmpModule of Net, captured at its first call"
    assert "captured at its first call" in str(amp_model)
    amp_model(x)
    assert repr(amp_model).startswith("AmpModule of Net: bfloat16 on cpu")


# -- the first call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False])
def test_the_first_call_gives_what_conversion_with_inputs_gives(mode: bool, x: Tensor) -> None:
    model = Net().train(mode)
    given = autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW)
    late = autocastfx.convert(model, dtype=LOW)
    assert_same(step(late, x), step(given, x))
    assert [v.code for v in late.variants] == [v.code for v in given.variants]
    assert [v.plan for v in late.variants] == [v.plan for v in given.variants]
    assert torch.equal(late.eval()(torch.ones(7, 8)), given.eval()(torch.ones(7, 8)))


def test_a_call_that_does_not_fit_captures_nothing() -> None:
    amp_model = autocastfx.convert(Net(), dtype=LOW)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        amp_model()
    assert amp_model.variants == ()


def test_a_first_call_that_cannot_be_captured_fails_as_conversion_does(x: Tensor) -> None:
    amp_model = autocastfx.convert(Net(), dtype=LOW)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"Net fails: .*\n.*in module 'a' \(Linear\)"):
            amp_model(torch.randn(3, 5))
    assert amp_model.variants == ()
    assert amp_model(x).shape == (3, 2)


class Powers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cumprod(x, 0)


def test_a_banned_op_is_refused_at_the_first_call(tmp_path: Path, x: Tensor) -> None:
    ban = tmp_path / "ban.yaml"
    ban.write_text("ban: [{ops: [cumprod], reason: not here}]\n")
    amp_model = autocastfx.convert(Powers(), dtype=LOW, op_list=["default", ban])
    with pytest.raises(BannedOpError, match=r"cumprod.*not here"):
        amp_model(x)


def test_unlisted_ops_are_refused_at_the_first_call(tmp_path: Path, x: Tensor) -> None:
    class Inverted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.bitwise_not(x > 0)

    strict = tmp_path / "strict.yaml"
    strict.write_text("unlisted: error\n")
    amp_model = autocastfx.convert(Inverted(), dtype=LOW, op_list=["default", strict])
    with pytest.raises(BannedOpError, match="unlisted bans"):
        amp_model(x)


def test_rules_that_match_nothing_are_told_at_the_first_call(tmp_path: Path, x: Tensor) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("deny: [not_loaded.function]\n")
    amp_model = autocastfx.convert(Net(), dtype=LOW, op_list=["default", path])
    with pytest.warns(UnmatchedRuleWarning, match=r"not_loaded\.function"):
        amp_model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp_model(x)


def test_slow_convolutions_are_warned_of() -> None:
    amp_model, x = autocastfx.convert(nn.Conv1d(8, 8, 1), dtype="float16"), torch.ones(2, 8, 4)
    with pytest.warns(UserWarning, match="float16 convolutions on a CPU"):
        amp_model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp_model(x)
        autocastfx.convert(nn.Conv1d(8, 8, 1), dtype=LOW)(x)
        autocastfx.convert(nn.Conv1d(8, 8, 1), device="cuda", dtype="float16")(x)


# -- copies, devices, wrappers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_captures_at_its_own_first_call(make: Callable[[Any], Any], x: Tensor) -> None:
    amp_model = autocastfx.convert(Net(), dtype=LOW)
    expected = step(autocastfx.convert(copy.deepcopy(amp_model._original.model), (x,), dtype=LOW), x)
    again = make(amp_model)
    assert again.a.weight is not amp_model.a.weight
    assert again.variants == ()
    with torch.no_grad():
        for p in amp_model.parameters():
            p.zero_()
    assert_same(step(again, x), expected)
    assert amp_model.variants == ()


def test_a_shallow_copy_shares_tensors_and_captures_for_itself(x: Tensor) -> None:
    amp_model = autocastfx.convert(Net().eval(), dtype=LOW)
    again = copy.copy(amp_model)
    assert again.a.weight is amp_model.a.weight
    assert torch.equal(again(x), amp_model(x))


def test_it_moves_to_a_device_before_the_first_call() -> None:
    amp_model = autocastfx.convert(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), dtype=LOW)
    amp_model.to("meta")
    assert all(p.is_meta for p in amp_model.parameters())
    assert amp_model(torch.empty(3, 8, device="meta")).shape == (3, 2)
    assert {v.plan.device for v in amp_model.variants} == {"meta"}
    with pytest.raises(UnsupportedError, match="parameters stay float32"):
        autocastfx.convert(Net(), dtype=LOW).half()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_before_the_first_call(backend: str, x: Tensor) -> None:
    model = Net().eval()
    expected = autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW)(x)
    amp_model = autocastfx.convert(model, dtype=LOW)
    compiled = torch.compile(amp_model, backend=backend)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
    torch._dynamo.reset()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_wrapped_in_data_parallel_before_the_first_call(options: dict[str, Any], x: Tensor) -> None:
    model = Net()
    alone = autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW)
    parallel = DistributedDataParallel(autocastfx.convert(model, dtype=LOW), **options)
    for _ in range(2):
        assert_same(step(parallel, x), step(alone, x))
    assert list(parallel.state_dict()) == [f"module.{name}" for name in Net().state_dict()]


# -- what is converted ------------------------------------------------------------------------------------------------


def test_a_graph_module(x: Tensor) -> None:
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8)))
    given, late = autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW), autocastfx.convert(model, dtype=LOW)
    assert_same(step(late, x), step(given, x))


def test_an_exported_program_has_inputs_of_its_own(x: Tensor) -> None:
    program = torch.export.export(Net().eval(), (x,), strict=False)
    assert len(autocastfx.convert(program, dtype=LOW).variants) == 1


def test_the_module_of_an_exported_program(x: Tensor) -> None:
    module = torch.export.export(Net().eval(), (x,), strict=False).module()
    given, late = autocastfx.convert(module, (x,), dtype=LOW), autocastfx.convert(module, dtype=LOW)
    assert torch.equal(late(x), given(x))
    assert len(late.variants) == 1


def test_no_inputs_are_not_empty_inputs() -> None:
    assert autocastfx.convert(Net(), None, None, dtype=LOW).variants == ()
    for inputs in (((),), (None, {})):
        with pytest.raises((CaptureError, TypeError), match="missing a required argument: 'x'"):
            autocastfx.convert(Net(), *inputs, dtype=LOW)  # pyright: ignore[reportArgumentType]


def test_transformers_are_captured_at_their_first_call() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(**sizes, intermediate_size=16, num_key_value_heads=1, use_cache=False)
    bert = transformers.BertConfig(**sizes, intermediate_size=16)
    call = {"input_ids": torch.randint(11, (2, 5)), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    for model in (transformers.BertModel(bert).eval(), transformers.LlamaForCausalLM(llama).eval()):
        given = autocastfx.convert(copy.deepcopy(model), example_kwargs=call, dtype=LOW)
        late = autocastfx.convert(model, dtype=LOW)
        assert late.config is model.config
        found, expected = late(**call), given(**call)
        assert type(found) is type(expected)
        assert torch.equal(found[0], expected[0])
        assert (late.code, late.plan) == (given.code, given.plan)
