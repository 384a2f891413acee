"""A model converted without inputs: what it is before its first call, and what the first call makes of it. That results
are the same as with inputs, for many models, is in capture/draft/test_draft.py.
"""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

import autocastfx
from autocastfx import AmpModule, Plan
from autocastfx.errors import BannedOpError, CaptureError, NotCapturedError, UnsupportedError, VariantError

pytestmark = pytest.mark.usefixtures("both_modes")

LOW = torch.bfloat16


class Net(nn.Module):
    """Tracing without inputs follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.bn, self.b = nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.config = {"width": 8}

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.b(self.drop(self.bn(self.a(x))) * torch.tensor([1.0, 2.0, 3.0, 4.0] * 2)) * scale


class Branching(Net):
    """Tracing without inputs does not follow it."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale) if x.shape[0] > 1 else self.b(x)


KINDS = [Net, Branching]


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


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_buffers_and_keys_are_there_at_once(kind: type[Net]) -> None:
    model = kind()
    amp_model = autocastfx.convert(model, dtype=LOW)
    assert isinstance(amp_model, AmpModule)
    assert list(amp_model.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(amp_model.parameters(), model.parameters(), strict=True))
    assert amp_model.config == {"width": 8}
    assert amp_model.variants == ()
    assert isinstance(amp_model.a, nn.Module)
    amp_model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert not model.a.weight.any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_built_before_the_first_call_trains(kind: type[Net], x: Tensor) -> None:
    model = kind()
    given = autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW)
    late = autocastfx.convert(model, dtype=LOW)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (given, late)]
    for _ in range(3):
        assert_same(step(late, x), step(given, x))
        for optimizer in optimizers:
            optimizer.step()
    assert_same(list(late.state_dict().values()), list(given.state_dict().values()))


def test_the_draft_is_that_of_the_mode() -> None:
    amp_model = autocastfx.convert(Net(), dtype=LOW)
    assert "dropout" in {n.op for n in amp_model.plan.nodes}
    assert "dropout" in amp_model.code
    assert "dropout" not in {n.op for n in amp_model.eval().plan.nodes}
    assert amp_model.train().plan != amp_model.eval().plan
    assert amp_model.variants == ()


def test_a_draft_says_that_it_is_unverified_until_the_first_call(x: Tensor) -> None:
    amp_model = autocastfx.convert(Net(), dtype=LOW)
    plan = amp_model.plan
    assert plan.unverified
    assert Plan.from_json(plan.to_json()) == plan
    for form in ("text", "python"):
        assert "unverified: made without inputs" in autocastfx.dump(amp_model, format=form)
    assert "variant: draft 1 of 2, train mode, called with x=float32[?d]" in autocastfx.dump(amp_model)
    assert Plan.from_json(autocastfx.dump(amp_model, format="json")).unverified
    amp_model(x)
    assert not amp_model.plan.unverified
    assert "unverified" not in autocastfx.dump(amp_model)
    assert "variant: 1 of 2, train mode, called with x=float32[2d]" in autocastfx.dump(amp_model)


def test_an_old_plan_is_verified() -> None:
    text = autocastfx.convert(nn.Linear(8, 8), (torch.ones(1, 8),), dtype=LOW).plan.to_json()
    assert '"unverified": false' in text
    assert not Plan.from_json(text.replace(',\n "unverified": false', "")).unverified


SHOWN: dict[str, Callable[[AmpModule], Any]] = {
    "graph": lambda m: m.graph,
    "code": lambda m: m.code,
    "plan": lambda m: m.plan,
    "dump": autocastfx.dump,
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_cannot_be_shown_says_why_and_what_to_do(name: str, x: Tensor) -> None:
    amp_model = autocastfx.convert(Branching(), dtype=LOW)
    message = (
        r"^there is no graph to show before the first call: Branching cannot be traced without inputs: its control "
        r"flow depends on a size or on a tensor's values\. Call the model once, or give convert the inputs of one "
        r"call\.$"
    )
    with pytest.raises(NotCapturedError, match=message) as caught:
        SHOWN[name](amp_model)
    assert isinstance(caught.value, VariantError)
    amp_model(x)
    assert SHOWN[name](amp_model)


@pytest.mark.parametrize("kind", KINDS)
def test_it_prints(kind: type[Net], x: Tensor) -> None:
    amp_model = autocastfx.convert(kind(), dtype=LOW)
    assert ("cannot be traced" in str(amp_model)) == (kind is Branching)
    assert repr(amp_model).startswith(f"AmpModule of {kind.__name__}")
    amp_model(x)
    assert "cannot be traced" not in str(amp_model)
    assert "def forward" in str(amp_model)


def test_an_edited_draft_can_be_looked_at() -> None:
    amp_model = autocastfx.convert(Net().eval(), dtype=LOW)
    for node in amp_model.graph.nodes:
        if node.target is torch.ops.aten.batch_norm.default:
            node.replace_all_uses_with(node.args[0])
            amp_model.graph.erase_node(node)
            break
    amp_model.recompile()
    assert "batch_norm" not in amp_model.code


# -- the first call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [True, False])
def test_the_first_call_captures_both_modes(kind: type[Net], mode: bool, x: Tensor) -> None:
    model = kind().train(mode)
    given = autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW)
    late = autocastfx.convert(model, dtype=LOW)
    late(x), given(x)  # training updates statistics
    assert [v.code for v in late.variants] == [v.code for v in given.variants]
    assert [v.plan for v in late.variants] == [v.plan for v in given.variants]
    assert late.training is mode
    assert torch.equal(late.eval()(torch.ones(7, 8)), given.eval()(torch.ones(7, 8)))
    assert len(late.variants) == 2


def test_a_call_that_does_not_fit_captures_nothing() -> None:
    amp_model = autocastfx.convert(Net(), dtype=LOW)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        amp_model()
    assert amp_model.plan.unverified


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_call_that_cannot_be_captured_fails_as_conversion_does(kind: type[Net], x: Tensor) -> None:
    amp_model = autocastfx.convert(kind(), dtype=LOW)
    for _ in range(2):
        with pytest.raises(CaptureError, match=rf"{kind.__name__} cannot be captured in train mode: \w+: .+\n.+"):
            amp_model(torch.randn(3, 5))
    assert amp_model.variants == ()
    assert amp_model(x).shape == (3, 2)


@torch.library.custom_op("without_inputs::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x * 2


def test_numbers_never_come_from_a_draft(x: Tensor) -> None:
    """A custom op without a fake kernel can be traced without inputs, but not captured with them."""

    class Opaque(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return opaque(x)

    amp_model = autocastfx.convert(Opaque(), dtype=LOW)
    assert [n.op for n in amp_model.plan.nodes] == ["without_inputs::opaque"]
    with pytest.raises(CaptureError, match="no fake impl registered"):
        amp_model(x)
    assert amp_model.plan.unverified


class Powers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cumprod(x, 0)


class BranchingPowers(Powers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[0] > 1 else x


def test_a_banned_op_is_refused_as_soon_as_it_is_seen(tmp_path: Path, x: Tensor) -> None:
    ban = tmp_path / "ban.yaml"
    ban.write_text("ban: [{ops: [cumprod], reason: not here}]\n")
    with pytest.raises(BannedOpError, match=r"cumprod.*not here"):
        autocastfx.convert(Powers(), dtype=LOW, op_list=["default", ban])
    amp_model = autocastfx.convert(BranchingPowers(), dtype=LOW, op_list=["default", ban])
    with pytest.raises(BannedOpError, match=r"cumprod.*not here"):
        amp_model(x)


def test_unlisted_ops_are_refused_at_the_first_call(tmp_path: Path, x: Tensor) -> None:
    """What a draft computes from sizes may be a constant in the graph that replaces it."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.bitwise_not(x > math.sqrt(x.shape[-1]))

    strict = tmp_path / "strict.yaml"
    strict.write_text("unlisted: error\n")
    amp_model = autocastfx.convert(Scaled(), dtype=LOW, op_list=["default", strict])
    assert [n.op for n in amp_model.plan.nodes] == ["sym_size", "math.sqrt", "gt", "bitwise_not"]
    with pytest.raises(BannedOpError, match="unlisted bans"):
        amp_model(x)


def test_a_list_that_follows_the_dispatch_shows_no_draft() -> None:
    follow = autocastfx.OpList(placement="follow")
    amp_model = autocastfx.convert(Net(), dtype=LOW, op_list=["default", follow])
    with pytest.raises(NotCapturedError, match=r"follows torch\.autocast's dispatch needs the inputs' dtypes"):
        _ = amp_model.plan


def test_slow_convolutions_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="float16 convolutions on a CPU"):
        autocastfx.convert(nn.Conv1d(8, 8, 1), dtype="float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autocastfx.convert(nn.Conv1d(8, 8, 1), dtype=LOW)
        autocastfx.convert(nn.Conv1d(8, 8, 1), device="cuda", dtype="float16")


# -- copies, devices, wrappers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_captures_at_its_own_first_call(make: Callable[[Any], Any], kind: type[Net], x: Tensor) -> None:
    """Until something is captured a pickle holds the original, as that of any model does: there is nothing else."""
    amp_model = autocastfx.convert(kind(), dtype=LOW)
    expected = step(autocastfx.convert(copy.deepcopy(amp_model._original.model), (x,), dtype=LOW), x)
    again = make(amp_model)
    assert again.a.weight is not amp_model.a.weight
    assert again.variants == ()
    if kind is Net:
        assert again.plan == amp_model.plan
        assert again.code == amp_model.code
    with torch.no_grad():
        for p in amp_model.parameters():
            p.zero_()
    assert_same(step(again, x), expected)
    assert len(again.variants) == 2
    assert amp_model.variants == ()


def test_a_shallow_copy_shares_tensors_and_captures_for_itself(x: Tensor) -> None:
    amp_model = autocastfx.convert(Net().eval(), dtype=LOW)
    again = copy.copy(amp_model)
    assert again.a.weight is amp_model.a.weight
    assert torch.equal(again(x), amp_model(x))


def test_after_the_first_call_a_pickle_holds_the_graphs_alone(x: Tensor) -> None:
    amp_model = autocastfx.convert(Net(), dtype=LOW)
    amp_model(x)
    again = pickle.loads(pickle.dumps(amp_model.eval()))
    assert torch.equal(again(x), amp_model(x))
    with pytest.raises(VariantError, match="the original model is not at hand"):
        again(x, 3.0)


def test_it_moves_to_a_device_before_the_first_call() -> None:
    amp_model = autocastfx.convert(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), dtype=LOW)
    amp_model.to("meta")
    assert all(p.is_meta for p in amp_model.parameters())
    assert amp_model.plan.device == "meta"
    assert amp_model.plan.unverified
    assert amp_model(torch.empty(3, 8, device="meta")).shape == (3, 2)
    assert {v.plan.device for v in amp_model.variants} == {"meta"}
    with pytest.raises(UnsupportedError, match="parameters stay float32"):
        autocastfx.convert(Branching(), dtype=LOW).half()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_before_the_first_call(backend: str, kind: type[Net], x: Tensor) -> None:
    model = kind().eval()
    expected = autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW)(x)
    amp_model = autocastfx.convert(model, dtype=LOW)
    compiled = torch.compile(amp_model, backend=backend)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
    assert len(amp_model.variants) == 2
    torch._dynamo.reset()


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_wrapped_in_data_parallel_before_the_first_call(options: dict[str, Any], kind: type[Net], x: Tensor) -> None:
    model = kind()
    alone = autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW)
    parallel = DistributedDataParallel(autocastfx.convert(model, dtype=LOW), **options)
    for _ in range(2):
        assert_same(step(parallel, x), step(alone, x))
    assert list(parallel.state_dict()) == [f"module.{name}" for name in kind().state_dict()]


# -- what is converted ------------------------------------------------------------------------------------------------


def test_a_graph_module(x: Tensor) -> None:
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8)))
    given, late = autocastfx.convert(copy.deepcopy(model), (x,), dtype=LOW), autocastfx.convert(model, dtype=LOW)
    assert [n.op for n in late.plan.nodes] == [n.op for n in given.plan.nodes]
    assert late.plan.unverified
    assert_same(step(late, x), step(given, x))


def test_an_exported_program_has_inputs_of_its_own(x: Tensor) -> None:
    program = torch.export.export(Net().eval(), (x,), strict=False)
    amp_model = autocastfx.convert(program, dtype=LOW)
    assert len(amp_model.variants) == 1
    assert not amp_model.plan.unverified


def test_the_module_of_an_exported_program(x: Tensor) -> None:
    module = torch.export.export(Net().eval(), (x,), strict=False).module()
    given, late = autocastfx.convert(module, (x,), dtype=LOW), autocastfx.convert(module, dtype=LOW)
    assert torch.equal(late(x), given(x))
    assert len(late.variants) == 1


def test_no_inputs_are_not_empty_inputs(x: Tensor) -> None:
    assert autocastfx.convert(Net(), None, None, dtype=LOW).plan.unverified
    with pytest.raises(CaptureError, match="missing a required argument: 'x'"):
        autocastfx.convert(Net(), (), dtype="float16")
    with pytest.raises(CaptureError, match="missing a required argument: 'x'"):
        autocastfx.convert(Net(), None, {}, dtype="float16")


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
        with pytest.raises(NotCapturedError, match=r"cannot be traced without inputs: You must specify exactly one"):
            _ = late.plan
        found, expected = late(**call), given(**call)
        assert type(found) is type(expected)
        assert torch.equal(found[0], expected[0])
        assert (late.code, late.plan) == (given.code, given.plan)
