"""Casts: where they stand, how many there are, and what they do to values that do not fit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autocastfx
from autocastfx.errors import ClippedValuesWarning
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.names import op_name
from autocastfx.graph.node import Origin, dtypes, origin, set_origin, set_value
from autocastfx.passes.insert_casts import store_low
from autocastfx.runtime.operators.casts import saturating_cast
from tests.decided import decided, rewritten
from tests.helpers import Function, examples, listing, relative_error, text, unchecked

LOW = [torch.float16, torch.bfloat16]


def test_outputs_can_stay_low() -> None:
    x = torch.rand(8, 8)
    amp_model = autocastfx.convert(Function(lambda x: x @ x), (x,), dtype=torch.bfloat16, keep_output_dtype=False)
    assert amp_model(x).dtype == torch.bfloat16


@unchecked
@pytest.mark.parametrize("dtype", LOW)
def test_inputs_saturate_and_infinities_stay(dtype: torch.dtype) -> None:
    def pick(x: torch.Tensor, eye: torch.Tensor) -> torch.Tensor:
        return x @ eye

    largest = torch.finfo(torch.float16).max
    x, eye = torch.diag(torch.tensor([1e30, -1e30, 1.0, largest, 1.0, 1.0, 1.0, 1.0])), torch.eye(8)
    amp_model = autocastfx.convert(Function(pick), (x, eye), dtype=dtype)
    if dtype == torch.float16:
        with pytest.warns(ClippedValuesWarning, match="^2 values"):
            result = amp_model(x, eye).diagonal()
        assert result.tolist() == [largest, -largest, 1.0, largest, *[1.0] * 4]
    else:
        result = amp_model(x, eye).diagonal()
        assert relative_error(result, x.diagonal()) < torch.finfo(dtype).eps
    row = torch.zeros(8, 2)
    row[0] = torch.tensor([float("inf"), float("-inf")])
    infinite = autocastfx.convert(Function(lambda x: x.t() @ torch.ones(8, 1)), (row,), dtype=dtype)(row)
    assert infinite.flatten().tolist() == [float("inf"), float("-inf")]


@pytest.mark.parametrize("dtype", LOW)
def test_an_additive_mask_from_outside_has_headroom(dtype: torch.dtype) -> None:
    def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(-1, -2) * -20 + mask[:, None]
        return (scores @ x).relu() + masked_attention(x, mask)

    x = torch.rand(2, 8, 8)
    mask = torch.zeros(2, 8)
    mask[0, 1:3] = mask[1] = torch.finfo(torch.float32).min  # the second item is masked everywhere
    amp_model = autocastfx.convert(Function(attend), (x, mask), dtype=dtype)
    assert amp_model(x, mask).isfinite().all()
    attention = autocastfx.convert(Function(masked_attention), (x, mask), dtype=dtype)
    # Values and weights are averages of numbers below 1: each is rounded on its way in, and the result once more.
    assert relative_error(attention(x, mask)[0], masked_attention(x, mask)[0]) < 3 * torch.finfo(dtype).eps


def masked_attention(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask[:, None])


MASKED = """\
    + args_0_bfloat16: bf16 = to(args_0)
      matmul: bf16 = matmul(args_0_bfloat16)
      where: bf16 = where(args_1, matmul)
      scaled_dot_product_attention: bf16 = scaled_dot_product_attention(args_0_bfloat16, where)
    + scaled_dot_product_attention_float32: f32 = to(scaled_dot_product_attention)
      return scaled_dot_product_attention_float32
"""


def biased(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    mask = torch.where(keep, x @ x, torch.finfo(torch.float32).min)
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)


def test_a_number_that_only_hides_scores_is_written_as_one_that_16_bits_hold() -> None:
    x, keep = torch.rand(1, 8, 8), torch.ones(1, 8, 8, dtype=torch.bool)
    amp_model = autocastfx.convert(Function(biased), (x, keep), dtype=torch.bfloat16, check=False)
    assert listing(amp_model.graph) == text(MASKED)
    captured = amp_model.variants[0].captured.graph
    assert [fill_of(graph) for graph in (captured, amp_model.graph)] == [
        torch.finfo(torch.float32).min,
        -torch.finfo(torch.bfloat16).max / 2,
    ]
    again = autocastfx.convert(Function(biased), (x, keep), dtype=torch.bfloat16, check=False)
    assert again.code == amp_model.code
    positive = decided(lambda x, keep: (x @ x).masked_fill(keep, 3e38).softmax(-1), x, keep, dtype=torch.bfloat16)
    assert fill_of(positive.graph) == torch.finfo(torch.bfloat16).max / 2


def fill_of(graph: torch.fx.Graph) -> object:
    (node,) = (n for n in graph.nodes if op_name(n) in ("where", "masked_fill"))
    return node.args[-1]


UNARY: dict[str, Any] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": torch.nn.functional.gelu,
    "softmax": lambda x: x.softmax(-1),
    "exp": lambda x: x.clamp(max=0).exp(),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (8,)),
    "transpose": lambda x: x.transpose(0, 1),
    "view": lambda x: x.reshape(4, 16).reshape(8, 8),
    "island": lambda x: x.float() * 0.5,
    "halves": lambda x: torch.cat(x.split(4)[::-1]),
    "detour": lambda x: torch.where(x > 0, x, -x),
    "relu_": lambda x: x.relu_(),
    "add_": lambda x: x.add_(0.25),
    "row": lambda x: x.index_fill_(0, torch.tensor([1]), 0.5),
}
BINARY: dict[str, Any] = {
    "add": lambda x, y: 0.5 * (x + y),
    "mul": torch.mul,
    "matmul": lambda x, y: 0.125 * (x @ y),
    "maximum": torch.maximum,
    "copy_": lambda x, y: x.copy_(y),
}
STEPS = st.lists(
    st.tuples(st.sampled_from([*UNARY, *BINARY, *["matmul"] * 6]), st.integers(0, 99), st.integers(0, 99)),
    min_size=3,
    max_size=14,
)


def program(steps: list[tuple[str, int, int]]) -> Any:
    """A function that applies ``steps``, each to earlier values, and returns the last three values."""

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x * 1, y * 1]
        for name, i, j in steps:
            first, second = values[i % len(values)], values[j % len(values)]
            values.append(UNARY[name](first) if name in UNARY else BINARY[name](first, second))
        return tuple(v.clone() for v in values[-3:])

    return run


@examples(12, 200)
@given(STEPS)
def test_random_graphs(steps: list[tuple[str, int, int]]) -> None:
    torch.manual_seed(0)
    inputs = torch.rand(8, 8) - 0.5, torch.rand(8, 8) - 0.5
    function = program(steps)
    amp_model = autocastfx.convert(Function(function), inputs, dtype=torch.float16)
    plan = amp_model.plan

    storages = {n.name for n in alias_sets(amp_model.variants[0].captured.graph)}
    casts = Counter((c.value, c.dtype) for c in plan.casts if c.value not in storages)
    assert all(count == 1 for count in casts.values())

    again = autocastfx.convert(Function(function), inputs, dtype=torch.float16, check=False)
    assert again.code == amp_model.code
    assert again.plan == plan

    expected, results = function(*inputs), amp_model(*inputs)
    for result, reference in zip(results, expected, strict=True):
        assert result.dtype == torch.float32
        # Values stay below about 2, and no step magnifies an error more than the norm of rows that nearly agree does.
        assert (result - reference).abs().max() < 0.1 or any(s[0] in ("norm", "detour") for s in steps)
    assert all(
        origin(n) is not None or n.name in {p.name for p in plan.nodes}
        for n in amp_model.graph.nodes
        if n.op == "call_function"
    )


@pytest.mark.parametrize("dtype", LOW)
def test_a_0d_operand_is_not_cast_and_keeps_its_value(dtype: torch.dtype) -> None:
    def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return ((x @ x) * factor) @ x

    x, factor = torch.eye(8) * 1e-2, torch.tensor(1e6)
    amp_model = autocastfx.convert(Function(scaled), (x, factor), dtype=dtype)
    assert [c.value for c in amp_model.plan.casts] == ["args_0", "matmul_1"]
    assert relative_error(amp_model(x, factor), scaled(x, factor)) < 3 * torch.finfo(dtype).eps


def test_an_op_with_a_dtype_argument_widens_its_input_itself() -> None:
    """As torch.autocast does: no float32 copy of the scores is made."""
    x = torch.rand(8, 8)
    lines = rewritten(lambda x: (x @ x).softmax(-1) @ x, x, dtype=torch.bfloat16)
    assert "softmax: f32 = softmax(matmul)" in lines
    assert "matmul_float32" not in lines
    amp_model = autocastfx.convert(Function(lambda x: (x @ x).softmax(-1)), (x,), dtype=torch.bfloat16)
    assert "torch.ops.aten.softmax.int(matmul, -1, torch.float32)" in amp_model.code.replace("dtype = ", "")
    low = x.bfloat16()
    assert torch.equal(amp_model(x), (low @ low).softmax(-1, dtype=torch.float32))


def test_the_models_own_cast_widens_a_low_value_itself() -> None:
    lines = rewritten(lambda x: (x @ x).float() + 1, torch.rand(8, 8), dtype=torch.bfloat16)
    assert "to: f32 = to(matmul)" in lines


def test_a_parameter_that_is_added_is_no_mask() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.position = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.zeros(8))
            self.register_buffer("mask", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight + self.position + self.mask).softmax(-1) @ self.weight

    graph = decided(Model(), torch.ones(2, 8), dtype=torch.bfloat16, fold="kernel").graph
    assert {n.all_input_nodes[0].name for n in graph.nodes if origin(n) is not None} >= {"position", "mask"}
    assert {n.all_input_nodes[0].name for n in graph.nodes if n.target is saturating_cast} == {"mask"}


@pytest.mark.parametrize("dtype", LOW)
def test_a_view_of_a_mask_that_stays_float32_is_cast_as_the_mask_would_be(dtype: torch.dtype) -> None:
    def scores(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shown = mask.unsqueeze(0)
        return torch.baddbmm(shown, x, x.mT).softmax(-1), shown.exp()

    x, mask = torch.eye(8)[None], torch.full((8, 8), torch.finfo(torch.float32).min)
    amp_model = autocastfx.convert(Function(scores), (x, mask), dtype=dtype)
    assert [(c.value, c.saturates) for c in amp_model.plan.casts if c.readers == ("baddbmm",)] == [("unsqueeze", True)]
    assert amp_model(x, mask)[0].equal(torch.full((1, 8, 8), 0.125)), "as large as all others, and not NaN"


def test_a_weight_is_stored_low_where_all_its_names_are_read_so() -> None:
    def stored(numbers: dict[str, int]) -> list[torch.dtype]:
        graph = torch.fx.Graph()
        first, second = graph.get_attr("first"), graph.get_attr("second")
        low = graph.call_function(torch.ops.aten.to.dtype, (first, torch.bfloat16))
        set_origin(low, Origin("rewrite", "reader", first.name))
        graph.output((low, second))
        for node in (first, second):
            set_value(node, torch.empty(2))
        store_low(graph, numbers, torch.bfloat16)
        return [dtype for node in (first, second) for dtype in dtypes(node)]

    assert stored({"first": 1, "second": 2}) == [torch.bfloat16, torch.float32]
    assert stored({"first": 1, "second": 1}) == [torch.float32] * 2


# -- dtypes that the model names --------------------------------------------------------------------------------------

NAMING = ["softmax", "log_softmax", "sum", "nansum", "mean", "prod"]


@pytest.mark.parametrize("fold", ["none", "exact", "kernel"])
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("op", NAMING)
def test_a_dtype_that_the_model_names_is_obeyed(op: str, low: torch.dtype, fold: str) -> None:
    """The result has it, computed from the product as it is stored: no float32 copy and no other rounding."""
    names = (torch.float64, torch.bfloat16, torch.float16)

    def reduced(y: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(y, op)(-1, dtype=named) for named in names]

    x = torch.randn(3, 8)
    amp_model = autocastfx.convert(Function(lambda x: reduced(x @ x.t())), (x,), dtype=low, fold=fold)
    expected = reduced(x.to(low) @ x.to(low).t())
    given = x.clone().requires_grad_()
    for found, reference, named in zip(amp_model(given), expected, names, strict=True):
        assert found.dtype == named
        assert torch.equal(found, reference)
        (gradient,) = torch.autograd.grad(found.sum(), given, retain_graph=True)
        assert gradient.dtype == torch.float32


@pytest.mark.parametrize("category", ["allow", "infer"])
@pytest.mark.parametrize("op", NAMING)
def test_a_float32_operand_of_a_call_that_names_a_dtype_is_not_rounded(op: str, category: str) -> None:
    x = torch.randn(3, 8)
    lists = ["default", autocastfx.OpList.of({category: [op]})]

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y @ y.t(), getattr(y, op)(-1, dtype=torch.float64)

    amp_model = autocastfx.convert(Function(both), (x,), dtype=torch.bfloat16, op_list=lists)
    assert torch.equal(amp_model(x)[1], both(x)[1])
