"""TensorFlow's scenarios for its graph rewrite (auto_mixed_precision_test.cc), and what is added to its rule here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

import autocastfx
from autocastfx.plan.plan import Precision
from tests.decided import decided, rewritten
from tests.helpers import Function, listing, op_list, relative_error, text

pytestmark = pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")

LIST = """
placement: simple
unlisted: keep
allow: [matmul]
deny: [exp]
infer: [sqrt, log, tanh, add, mul, batch_norm]
clear: [relu, abs, view, cat, split, getitem, transpose, add_, copy]
promote: [maximum, gt]
keep_args: {batch_norm: [weight, bias, running_mean, running_var]}
"""


@pytest.fixture
def rules(tmp_path: Path) -> autocastfx.OpList:
    return op_list(tmp_path, LIST)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(4, 4)


def test_what_leads_from_a_deny_to_an_infer_is_float32_beside_an_allow_too(
    rules: autocastfx.OpList, x: torch.Tensor
) -> None:
    def branches(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        clear = x.exp().relu()
        return clear.sqrt(), clear @ clear

    assert rewritten(branches, x, op_list=rules) == text("""
          exp: f32 = exp(args_0)
          relu: f32 = relu(exp)
        + relu_float16: f16 = to(relu)
          sqrt: f32 = sqrt(relu)
          matmul: f16 = matmul(relu_float16)
        + matmul_float32: f32 = to(matmul)
          return sqrt, matmul_float32
    """)


def test_without_an_allow_op_the_graph_stays_as_it_was(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    assert rewritten(lambda x: x.exp().sqrt().relu() + x, x, op_list=rules) == text("""
          exp: f32 = exp(args_0)
          sqrt: f32 = sqrt(exp)
          relu: f32 = relu(sqrt)
          add: f32 = add(relu, args_0)
          return add
    """)


def test_what_is_already_float16_stays_as_it_was(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    assert rewritten(lambda x: (x @ x).relu().exp(), x.half(), op_list=rules) == text("""
          matmul: f16 = matmul(args_0)
          relu: f16 = relu(matmul)
          exp: f16 = exp(relu)
          return exp
    """)


def test_a_chain_from_deny_through_allow_to_deny_takes_two_casts(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        clear = x.exp().relu().sqrt().relu()  # deny, clear, infer, clear
        return (clear @ clear).relu().log().relu().exp()  # allow, clear, infer, clear, deny

    assert rewritten(chain, x, op_list=rules) == text("""
          exp: f32 = exp(args_0)
          relu: f32 = relu(exp)
          sqrt: f32 = sqrt(relu)
        + sqrt_float16: f16 = to(sqrt)
          relu_1: f16 = relu(sqrt_float16)
          matmul: f16 = matmul(relu_1)
          relu_2: f16 = relu(matmul)
        + relu_2_float32: f32 = to(relu_2)
          log: f32 = log(relu_2_float32)
          relu_3: f32 = relu(log)
          exp_1: f32 = exp(relu_3)
          return exp_1
    """)


def test_clear_ops_follow_an_allow_in_both_directions(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, third = x.relu(), y.abs().relu()
        return (first @ first).exp(), torch.cat([third, first]).exp()

    assert rewritten(chain, x, x + 1, op_list=rules, dtype=torch.bfloat16) == text("""
        + args_0_bfloat16: bf16 = to(args_0)
          relu: bf16 = relu(args_0_bfloat16)
        + args_1_bfloat16: bf16 = to(args_1)
          abs_1: bf16 = abs(args_1_bfloat16)
          relu_1: bf16 = relu(abs_1)
          matmul: bf16 = matmul(relu)
        + matmul_float32: f32 = to(matmul)
          exp: f32 = exp(matmul_float32)
          cat: bf16 = cat(relu_1, relu)
        + cat_float32: f32 = to(cat)
          exp_1: f32 = exp(cat_float32)
          return exp, exp_1
    """)


def test_the_models_own_casts_stay(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    assert rewritten(lambda x: (x.half() @ x.half()).relu().float().exp(), x, op_list=rules) == text("""
          to: f16 = to(args_0)
          to_1: f16 = to(args_0)
          matmul: f16 = matmul(to, to_1)
          relu: f16 = relu(matmul)
          to_2: f32 = to(relu)
          exp: f32 = exp(to_2)
          return exp
    """)


def test_list_arguments_and_tuple_outputs(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def lists(x: torch.Tensor) -> torch.Tensor:
        x = x.exp()
        product = x @ x
        first, second = torch.cat([product, x, product.exp()]).split(6)
        return (first @ x).exp() @ second.transpose(0, 1)

    assert rewritten(lists, x, op_list=rules) == text("""
          exp: f32 = exp(args_0)
        + exp_float16: f16 = to(exp)
          matmul: f16 = matmul(exp_float16)
        + matmul_float32: f32 = to(matmul)
          exp_1: f32 = exp(matmul_float32)
        + exp_1_float16: f16 = to(exp_1)
          cat: f16 = cat(matmul, exp_float16, exp_1_float16)
          split: f16,f16 = split(cat)
          getitem: f16 = getitem(split)
          getitem_1: f16 = getitem(split)
          matmul_1: f16 = matmul(getitem, exp_float16)
        + matmul_1_float32: f32 = to(matmul_1)
          exp_2: f32 = exp(matmul_1_float32)
        + exp_2_float16: f16 = to(exp_2)
          transpose: f16 = transpose(getitem_1)
          matmul_2: f16 = matmul(exp_2_float16, transpose)
        + matmul_2_float32: f32 = to(matmul_2)
          return matmul_2_float32
    """)


def test_loop_carried_values_keep_their_dtype_and_the_body_is_converted(
    rules: autocastfx.OpList, x: torch.Tensor
) -> None:
    def loop(x: torch.Tensor) -> torch.Tensor:
        def body(i: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, (v @ v).tanh() @ v

        _, v = while_loop(lambda i, v: i < 3, body, (torch.tensor(0), x))
        return v @ x

    amp_model = autocastfx.convert(Function(loop), (x,), op_list=rules, dtype=torch.bfloat16)
    lines = listing(amp_model.get_submodule("_variants.0.while_loop_body_graph_0").graph)  # pyright: ignore
    assert "matmul: bf16" in lines
    assert "tanh: bf16" in lines
    assert lines.endswith("return add, matmul_1_float32")
    assert "getitem_1: f32 = getitem(while_loop)" in listing(amp_model.graph)
    # Seven products in a row and as many roundings of their inputs; all terms are positive, so errors do not grow.
    assert relative_error(amp_model(x), loop(x)) < 2 * 7 * torch.finfo(torch.bfloat16).eps


def test_batch_norm_reads_low_and_keeps_float32_statistics(rules: autocastfx.OpList) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x @ x) @ x

    model = Net()
    x = torch.rand(4, 4)
    amp_model = autocastfx.convert(model, (x,), op_list=rules, dtype=torch.bfloat16)
    batch_norm = next(n for n in amp_model.graph.nodes if n.name == "batch_norm")
    assert [n.name for n in batch_norm.all_input_nodes] == [
        "matmul", "norm_weight", "norm_bias", "norm_running_mean", "norm_running_var"
    ]  # fmt: skip
    assert amp_model.plan["batch_norm"].dtype == "bfloat16"
    amp_model(x)
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.dtype == torch.float32
    assert model.norm.running_mean.abs().sum() > 0


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        (torch.abs, -10, 10),
        (torch.neg, -10, 10),
        (torch.sqrt, 0.1, 100),
        (torch.tanh, -3, 3),
        (torch.sigmoid, -6, 6),
        (torch.relu, -10, 10),
        (torch.nn.functional.relu6, -10, 10),
        (torch.nn.functional.gelu, -4, 4),
        (torch.nn.functional.silu, -6, 6),
        (torch.nn.functional.elu, -4, 4),
        (torch.nn.functional.leaky_relu, -10, 10),
        (torch.nn.functional.hardswish, -6, 6),
        (torch.erf, -2, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_unary_ops_between_allow_ops_run_low(function, low: float, high: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.rand(16, 16) * (high - low) + low

    def between(x: torch.Tensor, eye: torch.Tensor) -> torch.Tensor:
        return function(x @ eye) @ eye

    eye = torch.eye(16)
    amp_model = autocastfx.convert(Function(between), (values, eye), dtype=dtype)
    (entry,) = [n for n in amp_model.plan.nodes if n.op not in ("matmul", "getitem")]
    in_float32 = function is torch.sqrt and dtype == torch.float16  # a sum of products may leave its range
    assert entry.placement.run is (Precision.FLOAT32 if in_float32 else Precision.LOW)
    # The input, the result of each product and of the op are rounded, half an ulp each; the op's slope is at most 1.6
    # here (sqrt at 0.1), which scales the roundings before it.
    error = (amp_model(values, eye) - between(values, eye)).abs().max()
    largest = max(abs(low), abs(high))
    assert error <= (2 * 1.6 + 2) * 0.5 * torch.finfo(dtype).eps * largest


def test_a_promote_op_is_low_only_if_all_its_inputs_are(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        low = x @ x
        return torch.maximum(low, low.tanh()) @ x

    def one(x: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x @ x, x.exp()) @ x

    assert "maximum: f16" in rewritten(both, x, op_list=rules)
    assert "maximum: f32" in rewritten(one, x, op_list=rules)


def test_a_comparison_sees_the_values_as_they_are_stored(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def compare(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        low = x @ x
        return low > 1, x.exp() > low, low @ x

    lines = rewritten(compare, x, op_list=rules)
    assert "gt: bool = gt(matmul)" in lines
    assert "gt_1: bool = gt(exp, matmul)" in lines


def test_all_views_and_writers_of_one_storage_take_one_precision(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def low(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        y.view(16).add_(1)
        return y @ x

    def high(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y.view(16).add_(1)
        return y @ x

    assert rewritten(low, x, op_list=rules).count("view: f16") == 1
    assert "add_: f16" in rewritten(low, x, op_list=rules)
    assert "add_: f32" in rewritten(high, x, op_list=rules)
    for function in (low, high):
        amp_model = autocastfx.convert(Function(function), (x,), op_list=rules, dtype=torch.bfloat16)
        # The row sums of both products are at most 4 and 12; each of three roundings is half an ulp.
        assert relative_error(amp_model(x), function(x)) < 3 * torch.finfo(torch.bfloat16).eps


def test_a_mutated_value_is_cast_anew_after_each_write(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        first = y @ x
        y.add_(1)
        return (first + y @ x).exp()

    lines = rewritten(twice, x, op_list=rules)
    assert lines.index("exp_float16: f16 = to(exp)") < lines.index("add_: f32") < lines.index("f16 = to(add_)")
    amp_model = autocastfx.convert(Function(lambda x: twice(x).log()), (x,), op_list=rules, dtype=torch.bfloat16)
    assert relative_error(amp_model(x), twice(x).log()) < 4 * torch.finfo(torch.bfloat16).eps


def test_reasons_name_the_neighbour(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        low = (x @ x).tanh()
        return (low @ x) + x.exp().sqrt()

    plan = decided(chain, x, op_list=rules, dtype="float16").plan
    assert str(plan["tanh"].placement.because) == "between matmul and matmul_1"
    assert str(plan["sqrt"].placement.because) == "after exp"
    assert str(plan["matmul"].placement.because) == "allow"
    assert str(plan["exp"].placement.because) == "deny"
