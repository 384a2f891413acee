"""Models converted without inputs: the first call gives what conversion with its inputs gives, to the bit, and what is
shown before it, a draft, agrees with the original and with the plan that replaces it.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autocastfx
from autocastfx import AmpModule, Plan
from autocastfx.capture.call import CallSignature
from autocastfx.capture.draft.draft import capture_symbolically
from autocastfx.errors import CaptureError, NotCapturedError
from autocastfx.graph.names import of_function, op_name
from autocastfx.graph.node import dtypes
from autocastfx.plan.plan import Precision
from autocastfx.policy.rule import Category
from autocastfx.runtime.operators.casts import cast_if, saturating_cast
from autocastfx.runtime.variant_table import VariantTable
from tests.capture.small_models import DEFERRED, MODELS, made
from tests.helpers import sampled
from tests.invariants.pair import distance, roundings, settings_now, snapshot

# A small model has layers of float64, which are told.
pytestmark = pytest.mark.filterwarnings("ignore:.*are float64, and only float32 values:autocastfx.errors.StateWarning")

LOW = torch.bfloat16
TRACED = [name for name in MODELS if name not in DEFERRED]
_CAPTURE_MODES = VariantTable.capture_modes
IN_MODES = [(name, mode) for name in TRACED for mode in MODELS[name].modes]


@pytest.fixture(autouse=True)
def _one_thread() -> Generator[None, None, None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_and_call(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    small = MODELS[name]
    return small.make().train(small.modes[0]), small.args(), dict(small.kwargs())


@contextmanager
def only_its_modes(name: str) -> Generator[None, None, None]:
    """Skip the capture of a second mode in which a model does the same: it takes most of the time of these tests."""
    if len(MODELS[name].modes) == 2:
        with mock.patch.object(VariantTable, "capture_modes", _CAPTURE_MODES):  # which this room skips
            yield
        return

    def draft_one(self: VariantTable, now: tuple[bool, ...], held: Mapping[str, torch.Tensor]) -> None:
        with suppress(CaptureError):
            self.add(self.original.draft(now, held))

    one = {"capture_modes": VariantTable.capture, "draft": draft_one}
    with mock.patch.multiple(VariantTable, **one):
        yield


@functools.cache
def with_inputs(name: str) -> AmpModule:
    model, args, kwargs = model_and_call(name)
    with only_its_modes(name):
        return autocastfx.convert(model, args, kwargs, dtype=LOW)


@functools.cache
def shown(name: str) -> AmpModule:
    """Converted without inputs, and not called by any test."""
    return without_inputs(name)


def without_inputs(name: str) -> AmpModule:
    with only_its_modes(name):
        return autocastfx.convert(model_and_call(name)[0], dtype=LOW)


def ran(model: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    """Outputs, gradients and buffers of one seeded step."""
    args, kwargs = pytree.tree_map(_leaf, (args, kwargs))
    torch.manual_seed(1)
    leaves, spec = pytree.tree_flatten(model(*args, **kwargs))
    roots = [t.double().sum() for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    if roots:
        torch.stack(roots).sum().backward()
    inputs = [leaf.grad for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return [spec, *leaves, *inputs, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def _leaf(given: Any) -> Any:
    return given.clone().requires_grad_(given.is_floating_point()) if isinstance(given, Tensor) else given


def same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(-1).nan_to_num(), b.contiguous().view(-1).nan_to_num()
    )


@pytest.mark.parametrize("name", sampled(MODELS, lambda number, _: number % 2 == 0))
def test_the_first_call_gives_what_conversion_with_inputs_gives(name: str) -> None:
    _, args, kwargs = model_and_call(name)
    given, late = with_inputs(name), without_inputs(name)
    assert late.variants == ()
    for mode in MODELS[name].modes:
        given.zero_grad()
        late.zero_grad()
        with only_its_modes(name):
            results = ran(late.train(mode), args, kwargs), ran(given.train(mode), args, kwargs)
        assert len(results[0]) == len(results[1])
        assert all(map(same_bits, *results))
        assert (late.code, late.plan) == (given.code, given.plan)
        assert not late.plan.unverified
    assert [v.guard for v in late.variants] == [v.guard for v in given.variants]
    assert [v.modes for v in late.variants] == [v.modes for v in given.variants]


# -- drafts -----------------------------------------------------------------------------------------------------------


def test_how_many_are_traced() -> None:
    assert len(MODELS) >= 90
    assert len(DEFERRED) <= 5


@pytest.mark.parametrize("name", MODELS)
def test_what_is_traced_shows_a_draft_and_what_is_not_says_why(name: str) -> None:
    amp_model = shown(name)
    if name in DEFERRED:
        with pytest.raises(
            NotCapturedError, match=r"^there is no graph .* cannot be traced .+ Call the model once, or give"
        ):
            _ = amp_model.graph
    else:
        assert amp_model.plan.unverified
        assert all(node.op in ("placeholder", "get_attr", "call_function", "output") for node in amp_model.graph.nodes)


@pytest.mark.parametrize(("name", "mode"), IN_MODES)
def test_a_draft_agrees_with_the_original(name: str, mode: bool) -> None:
    model, args, kwargs = model_and_call(name)
    amp_model = without_inputs(name).train(mode)
    draft = next(v for v in amp_model._shown if v.modes == amp_model._modes())
    signature = CallSignature.of(model.forward)
    arguments = signature._arguments(args, kwargs)
    required = {p.name: arguments[p.name] for p in signature.parameters if p.name in arguments and p.default is p.empty}
    args, kwargs = signature.split(pytree.tree_map(torch.clone, required))
    torch.manual_seed(1)
    expected = pytree.tree_leaves(model.train(mode)(*args, **kwargs))
    tensors = signature.bind(*signature.split(pytree.tree_map(torch.clone, required))).tensors
    torch.manual_seed(1)
    found = draft.function(amp_model, *tensors)
    bound = roundings(draft.graph, LOW) * torch.finfo(LOW).eps
    for result, reference in zip(found, expected, strict=True):
        if not isinstance(reference, Tensor):
            assert result == reference
        elif reference.is_floating_point():
            assert result.dtype == reference.dtype
            assert distance(result, reference) <= bound
        else:
            assert torch.equal(result, reference)


# getitem in a draft is select, slice or index in an exported graph, which also spells out how a number is assigned
# and may leave out what copies nothing
SPELLED = {"getitem", "select", "slice", "index", "unsqueeze", "lift_fresh_copy", "contiguous"}
DIFFERENT = {
    "float_island": "without sizes a norm that is written out is not known for one",
    "optional_given": "a draft leaves optional arguments at their defaults",
    "rotary": "without sizes the dtype of a product with view_as_complex is not known, and taken for float32",
}
# A draft knows no sizes: fewer bytes move in another way where a value is expanded or a weight is small, and that zeros
# are added to a value of their own size is not known.
BY_SIZE = {
    "vision": {"flatten", "transpose", "expand", "cat", "add"},
    "experts": {"add"},
}


def precisions(plan: Plan) -> Counter[tuple[str, str]]:
    placed = [(n.op, str(n.placement.run)) for n in plan.nodes if n.op not in SPELLED | {"sym_size"}]
    return Counter(p for p in placed if p[1] != str(Precision.CAPTURED))


@pytest.mark.parametrize("name", TRACED)
def test_a_draft_has_the_precisions_of_the_plan_that_replaces_it(name: str) -> None:
    draft, verified = shown(name), with_inputs(name)
    for mode in MODELS[name].modes:
        found, expected = precisions(draft.train(mode).plan), precisions(verified.train(mode).plan)
        assert (found != expected) == (name in DIFFERENT or name in BY_SIZE)
        both = ({op for op, _ in found} & {op for op, _ in expected}) - BY_SIZE.get(name, set())
        assert {key: n for key, n in found.items() if key[0] in both} == {
            key: n for key, n in expected.items() if key[0] in both
        }


INPUTS = {
    "mlp": "input=float32[?d]",
    "cnn": "input=float32[4d]",
    "transposed": "input=float32[4d]",
    "lstm": "input=float32[3d]",
    "language_model": "tokens=int64[?d]",
    "cross_attention": "x=float32[?d], memory=float32[?d], mask=unknown[",
    "attention_of_inputs": "q=unknown[?d], k=unknown[?d]",
    "gathers": "x=float32[?d], index=int64[?d]",
    "classifies": "target=unknown[?d]",
    "double_path": "x=float64[?d]",
    "graph_convolution": "edges=",
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_taken_for_what_the_operators_take(name: str) -> None:
    assert INPUTS[name] in str(shown(name)._shown[0].structure)


def test_the_values_of_a_draft_have_the_dtypes_of_its_plan() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Softmax(-1))
    amp_model = autocastfx.convert(model, dtype=LOW)
    shown = {node.name: dtypes(node) for node in amp_model.graph.nodes}
    planned = {node.name: (getattr(torch, node.dtype.removesuffix("?")),) for node in amp_model.plan.nodes}
    assert {name: shown[name] for name in planned} == planned
    assert {*planned.values()} == {(LOW,), (torch.float32,)}


def test_nodes_know_their_module() -> None:
    amp_model = autocastfx.convert(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))), dtype=LOW)
    assert [(n.op, n.module) for n in amp_model.plan.nodes] == [("linear", "0"), ("relu", "1.0"), ("linear", "1.1")]


# -- values of unknown dtype ------------------------------------------------------------------------------------------


def test_a_cast_of_an_unknown_value_touches_float32_alone() -> None:
    def cross(self: Any, q: Tensor, k: Tensor) -> Tensor:
        return torch.relu(q @ k) @ k

    amp_model = autocastfx.convert(made(cross), dtype=LOW)
    assert [c.dtype for c in amp_model.plan.casts].count("bfloat16") == 2
    assert {n.captured for n in amp_model.plan.nodes} == {"float32?"}
    assert {n.dtype for n in amp_model.plan.nodes} == {"bfloat16?"}
    run = functools.partial(amp_model._shown[0].function, amp_model)
    for dtype in (torch.float64, torch.int64, torch.complex64):
        q, k = torch.ones(2, 2, dtype=dtype), torch.full((2, 2), 3, dtype=dtype)
        if dtype.is_complex:
            assert torch.equal(cast_if(q, torch.float32, LOW), q)
            continue
        (result,) = run(q, k)
        assert torch.equal(result, cross(None, q, k))
        assert result.dtype == dtype
    x = torch.rand(2, 2)
    (result,) = run(x, x)
    assert result.dtype == torch.float32
    assert 0 < distance(result, cross(None, x, x)) <= 3 * torch.finfo(LOW).eps


def test_recast() -> None:
    x = torch.rand(3)
    assert cast_if(x, torch.float32, LOW).dtype == LOW
    assert cast_if(x.double(), torch.float32, LOW).dtype == torch.float64
    assert cast_if(x.to(LOW), LOW, torch.float32).dtype == torch.float32
    assert cast_if(x, LOW, torch.float16) is x


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_nothing_of_an_unknown_value_is_clamped(low: torch.dtype) -> None:
    def cross(self: Any, q: Tensor) -> Tensor:
        return q @ q

    amp_model = autocastfx.convert(made(cross), dtype=low)
    assert of_function(saturating_cast) not in {op_name(node) for node in amp_model.graph.nodes}
    known = autocastfx.convert(nn.Linear(2, 2), dtype=low)
    assert (of_function(saturating_cast) in {op_name(node) for node in known.graph.nodes}) == (low == torch.float16)


# -- what tracing must not do -----------------------------------------------------------------------------------------


def branch(self: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def loop(self: Any, x: Tensor) -> Any:
    return [row * 2 for row in x]


def length(self: Any, x: Tensor) -> Any:
    return [x * i for i in range(len(x))]


def dimensions(self: Any, x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[0]


def kind(self: Any, x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else x.float()


def number(self: Any, x: Tensor) -> Tensor:
    return x * float(x.sum())


def array(self: Any, x: Tensor) -> Any:
    return torch.from_numpy(x.numpy())


def autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x


def member(self: Any, x: Any) -> Tensor:
    return x["a"]


def checkpoint(self: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)


REASONS: dict[Callable[..., Any], str] = {
    branch: "control flow depends on a size or on a tensor's values",
    loop: "cannot be iterated",
    length: "the length of 'x' is not known",
    dimensions: "the number of dimensions of 'x' is not known",
    kind: "the dtype of 'x' is not known",
    number: "a value is used as a plain number",
    array: "numpy",
    autocast: r"a region under torch\.autocast is not traced",
    member: "'x' is no tensor: it has a member 'a'",
    checkpoint: "uses activation checkpointing",
}


@pytest.mark.parametrize("forward", REASONS, ids=lambda f: f.__name__)
def test_what_cannot_be_traced_says_why(forward: Callable[..., Any]) -> None:
    with pytest.raises(
        CaptureError, match=f"^{forward.__name__} cannot be traced without inputs: .*{REASONS[forward]}"
    ):
        traced(made(forward))


def traced(model: nn.Module) -> Any:
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    training = [m.training for m in model.modules()]
    return capture_symbolically(model, CallSignature.of(model.forward), training=training, held=held)


@pytest.mark.parametrize("name", ["cnn", "moving_average", "item_assignment", "straight_through", *sorted(DEFERRED)])
def test_the_model_and_torch_are_as_they_were(name: str) -> None:
    model, _, _ = model_and_call(name)
    names = ("ones", "zeros", "arange", "tensor", "rand")
    before = snapshot(model), settings_now(), [getattr(torch, n) for n in names], torch.nn.functional.has_torch_function
    autocastfx.convert(model, dtype=LOW)
    after = snapshot(model), settings_now(), [getattr(torch, n) for n in names], torch.nn.functional.has_torch_function
    assert after == before


def test_random_numbers_and_new_tensors_are_made_anew_at_each_call() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = torch.zeros(2, 4)
        out += torch.randn(2, 4)
        out[0] = x
        return out

    amp_model = autocastfx.convert(made(forward), dtype=LOW)
    run = functools.partial(amp_model._shown[0].function, amp_model)
    (first,), (second,) = run(torch.ones(4)), run(torch.ones(4))
    assert torch.equal(first[0], torch.ones(4))
    assert not torch.equal(first[1], second[1])


def test_in_place_ops_write_into_inputs_and_buffers() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x += 1
        self.count[0] += 2
        return x * self.count

    model = made(forward, count=lambda: torch.zeros(2))
    amp_model = autocastfx.convert(model, dtype=LOW)
    x = torch.ones(2)
    (result,) = amp_model._shown[0].function(amp_model, x)
    assert x.tolist() == [2, 2]
    assert model.count.tolist() == [2, 0]
    assert result.tolist() == [4, 0]


def test_functions_that_a_list_names_stay_whole() -> None:
    op_list = autocastfx.OpList(
        {"tests.helpers.relative_error": autocastfx.policy.op_list.Rule("x", Category.DENY)}
    ).merged(autocastfx.OpList())
    from tests import helpers

    def forward(self: Any, x: Tensor) -> Any:
        return helpers.relative_error(x, x)

    amp_model = autocastfx.convert(made(forward), dtype=LOW, op_list=["default", op_list])
    assert [n.op for n in amp_model.plan.nodes] == ["tests.helpers.relative_error"]


def test_a_model_of_many_layers_is_traced_quickly() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()) for _ in range(60)))
    amp_model = autocastfx.convert(copy.deepcopy(model), dtype=LOW)
    assert sum(LOW in dtypes(n) for n in amp_model.graph.nodes) >= 120
