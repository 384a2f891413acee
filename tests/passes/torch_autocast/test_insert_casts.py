"""torch.autocast's dispatch on a graph: what is cast, what runs as its inputs come, and how verify sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import autocastfx
from autocastfx.capture.captured import Captured
from autocastfx.errors import UnsupportedError, VerifyError
from autocastfx.graph.names import op_name
from autocastfx.graph.node import Origin, dtypes, set_origin, value
from autocastfx.graph.sizes import dtypes_of
from autocastfx.passes.casts import CastStyle, insert_casts
from autocastfx.passes.decide.checks import Classifier
from autocastfx.passes.pipeline import Converter
from autocastfx.passes.torch_autocast.dispatch import Dispatch, asked
from autocastfx.passes.torch_autocast.insert_casts import FollowedDtypes, ask_for_dtypes, follow
from autocastfx.passes.verify import verify
from autocastfx.plan.plan import Precision
from autocastfx.policy.kernel_facts import load_kernel_facts
from tests.decided import decided, rewritten
from tests.helpers import Function, op_list, text, unchecked

pytestmark = pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")

LIST = """
placement: follow
unlisted: keep
allow: [matmul, mm.default]
deny: [exp, sum, norm.Scalar]
set_dtype: [sum, norm]
promote: [dot, addcmul]
"""
LOW = torch.float16


@pytest.fixture
def rules(tmp_path: Path) -> autocastfx.OpList:
    return op_list(tmp_path, LIST)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(4, 4)


def follows(function: Any, *inputs: Any, rules: autocastfx.OpList, **options: Any) -> str:
    return rewritten(function, *inputs, op_list=rules, keep_output_dtype=False, **options)


# -- change -----------------------------------------------------------------------------------------------------------


def test_what_is_not_listed_runs_as_its_inputs_come(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    assert follows(lambda x: ((x @ x).relu() + x).exp(), x, rules=rules) == text("""
        + args_0_float16: f16 = to(args_0)
        + args_0_float16_1: f16 = to(args_0)
          matmul: f16 = matmul(args_0_float16_1, args_0_float16)
          relu: f16 = relu(matmul)
          add: f32 = add(relu, args_0)
          exp: f32 = exp(add)
          return exp
    """)


def test_the_plan_tells_in_what_values_come(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    """A single number does not widen what it is multiplied with; a matrix does."""

    def mixed(x: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ x
        return y * number, y + x, y.argmax(), x.bfloat16() @ x.bfloat16()

    plan = decided(mixed, x, torch.tensor(0.5), op_list=rules, dtype=LOW).plan
    found = {name: (plan[name].dtype, plan[name].placement.store) for name in ("mul", "add", "argmax", "matmul_1")}
    assert found == {
        "mul": ("float16", Precision.LOW),
        "add": ("float32", Precision.FLOAT32),
        "argmax": ("int64", Precision.CAPTURED),
        "matmul_1": ("float16", Precision.LOW),
    }


def test_each_reader_has_its_own_cast(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    listing = follows(lambda x, y: (x @ y.relu(), y.relu() @ x), x, x + 1, rules=rules)
    assert listing.count("f16 = to(args_0)") == 2


def test_a_parameter_is_cast_once(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.rand(4, 4))
            self.second = self.first
            self.frozen = nn.Parameter(torch.rand(4, 4), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.first @ self.second @ self.frozen @ self.frozen

    casts = autocastfx.convert(
        Tied(), x, op_list=rules, keep_output_dtype=False, dtype="float16", check=False
    ).plan.casts
    assert sorted(cast.value for cast in casts) == ["first", "frozen", "frozen", "x"]


def test_sixteen_bit_values_are_widened(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    assert follows(lambda x: x.exp(), x.half(), rules=rules) == text("""
        + args_0_float32: f32 = to(args_0)
          exp: f32 = exp(args_0_float32)
          return exp
    """)


def test_the_other_sixteen_bit_dtype_is_cast_too(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    assert "to(args_0)" in follows(lambda x: x @ x, x.bfloat16(), rules=rules)


def test_a_dtype_argument_replaces_the_cast(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    model = decided(lambda x: (x @ x).sum(0), x, op_list=rules, dtype="float16")
    (total,) = [node for node in model.graph.nodes if op_name(node) == "sum"]
    assert total.kwargs["dtype"] == torch.float32
    assert model.plan["sum_1"].placement.run is Precision.FLOAT32
    assert len(model.plan.casts) == 2  # of x, for each side of the product


def test_a_dtype_that_the_model_names_stays(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    model = autocastfx.convert(
        Function(lambda x: (x @ x).sum(0, dtype=torch.float16)),
        x,
        op_list=rules,
        keep_output_dtype=False,
        dtype="float16",
    )
    assert model(x).dtype == torch.float16
    assert str(model.plan["sum_1"].placement.because) == "the call names its dtype"


def test_another_overload_takes_the_dtype(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    model = autocastfx.convert(Function(lambda x: torch.ops.aten.norm.Scalar(x @ x)), x, op_list=rules, dtype="float16")
    (norm,) = [node for node in model.graph.nodes if op_name(node) == "norm"]
    assert norm.target is torch.ops.aten.norm.ScalarOpt_dtype
    assert torch.equal(model(x), (x.half() @ x.half()).norm(dtype=torch.float32))


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (torch.ops.aten.softmax.int, ("x", 1), (("x", 1), {"dtype": torch.float32})),
        (torch.ops.aten.softmax.int, ("x", 1, None), (("x", 1), {"dtype": torch.float32})),
        (torch.ops.aten.sum.dim_IntList, ("x", [0], True), (("x", [0], True), {"dtype": torch.float32})),
        (torch.ops.aten.norm.Scalar, ("x",), (("x", 2), {"dtype": torch.float32})),
    ],
    ids=str,
)
def test_the_call_that_asks(target: Any, args: Any, expected: Any) -> None:
    assert asked(target, args, {})[1:] == expected


def test_promoted_operands_meet_in_the_widest(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    listing = follows(lambda x: torch.addcmul(x @ x, x @ x, x), x, rules=rules)
    assert "addcmul: f32 = addcmul(matmul_float32, matmul_1_float32, args_0)" in listing
    listing = follows(lambda x: torch.addcmul(x @ x, x @ x, x @ x), x, rules=rules)
    assert "addcmul: f16 = addcmul(matmul, matmul_1, matmul_2)" in listing


def test_the_device_is_that_of_the_weights_where_the_inputs_are_numbers(rules: autocastfx.OpList) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4, device="meta"))

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return self.weight @ self.weight * factor

    plan = decided(Held(), torch.tensor(2.0), op_list=rules, dtype=LOW).plan
    assert [cast.value for cast in plan.casts] == ["weight", "mul"]


# -- no change --------------------------------------------------------------------------------------------------------


def test_other_dtypes_are_not_cast(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    for inputs in (x.double(), torch.ones(4, 4, dtype=torch.long)):
        assert "+" not in follows(lambda x: (x @ x).sum(0), inputs, rules=rules)


def test_no_rule_is_forced(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    assert "masked_fill: f16" in follows(lambda x: (x @ x).masked_fill(x > 1, -1e4).mul(1e-9), x, rules=rules)
    model = autocastfx.convert(
        Function(lambda x: (x @ x) * 1e6), x, op_list=rules, keep_output_dtype=False, dtype="float16"
    )
    assert model(x).dtype == LOW
    assert not any(cast.saturates for cast in model.plan.casts)


def test_values_that_leave_the_graph_and_sizes_that_depend_on_data(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x @ x)[x > 0.5].exp() * (x @ x).sum().item()

    model = autocastfx.convert(Function(forward), x, op_list=rules, keep_output_dtype=False, dtype="float16")
    low = x.half() @ x.half()
    assert torch.equal(model(x), low[x > 0.5].float().exp() * low.sum(dtype=torch.float32).item())


@unchecked
def test_in_place_forms_and_other_overloads_are_not_listed(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    assert "exp_: f16 = exp_(matmul)" in follows(lambda x: (x @ x).exp_(), x, rules=rules)
    listing = follows(lambda x: torch.ops.aten.mm.dtype(x.half(), x.half(), torch.float32), x, rules=rules)
    assert "+" not in listing


def test_a_python_call_takes_captured_dtypes(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x + x

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * 2

    model = autocastfx.convert(Function(lambda x: Twice.apply(x @ x)), x, op_list=rules, dtype="float16")
    assert [(cast.value, cast.dtype) for cast in model.plan.casts] == [
        ("args_0", "float16"),
        ("args_0", "float16"),
        ("matmul", "float32"),  # for the call, whose result is float32 then
    ]
    assert torch.equal(model(x), (x.half() @ x.half()).float() * 2)


# -- numerics, idempotence, refusal -----------------------------------------------------------------------------------


def test_outputs_go_back_to_their_dtype(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    model = autocastfx.convert(Function(lambda x: (x @ x, x > 0, x.double())), x, op_list=rules, dtype="float16")
    assert [o.dtype for o in model(x)] == [torch.float32, torch.bool, torch.float64]
    assert torch.equal(model(x)[0], (x.half() @ x.half()).float())


def test_gradients_of_a_value_read_often_are_added_as_in_torch(x: torch.Tensor) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        return F.scaled_dot_product_attention(y, y, y)

    x = x.reshape(1, 1, 4, 4).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.autograd.grad(attend(x).float().square().sum(), x)
    model = autocastfx.convert(Function(attend), x.detach(), dtype=torch.bfloat16, op_list="torch_autocast_cpu")
    assert torch.equal(torch.autograd.grad(model(x).square().sum(), x)[0], expected[0])


def test_mixed_sixteen_bit_dtypes_are_refused(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match=r"reads torch.bfloat16, and torch.autocast with torch.float16"):
        autocastfx.convert(Function(lambda x: x[0].dot(x[1])), x.bfloat16(), op_list=rules, dtype="float16")


def test_a_conversion_without_listed_ops_changes_nothing(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    model = decided(lambda x: x.relu() + 1, x, op_list=rules, dtype="float16")
    assert model.plan.casts == ()
    assert {n.placement.run for n in model.plan.nodes} == {Precision.GIVEN}


class Walked:
    """A small graph on its way through the passes."""

    def __init__(self, rules: autocastfx.OpList, x: torch.Tensor) -> None:
        model = autocastfx.convert(
            Function(lambda x: (x @ x).sum(0) + x.exp()), x, op_list=rules, dtype="float16", check=False
        )
        captured = model.variants[0].captured
        assert isinstance(captured, Captured)
        self.converter = Converter(rules, load_kernel_facts(), LOW)
        self.graph = captured.graph
        self.dispatch = Dispatch(rules, LOW, "cpu")
        classifier = Classifier(rules, self.converter.facts, LOW, "cpu")
        self.captured = {node: dtypes(node) for node in self.graph.nodes}
        self.followed = follow(self.graph, classifier(self.graph, {}).decisions, self.dispatch)

    def recast(self) -> fx.Graph:
        insert_casts(self.graph, self.planned(), CastStyle("follow", LOW, for_each=True))
        ask_for_dtypes(self.followed)
        return self.graph

    def verify(self) -> None:
        verify(self.graph, self.planned(), self.captured, {})

    def planned(self) -> FollowedDtypes:
        return FollowedDtypes(self.followed, self.captured)


def test_follow_edits_nothing_and_is_deterministic(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    walked = Walked(rules, x)
    before = str(walked.graph)
    decisions = Classifier(rules, walked.converter.facts, LOW, "cpu")(walked.graph, {}).decisions
    again = follow(walked.graph, decisions, walked.dispatch)
    assert str(walked.graph) == before
    assert again == walked.followed
    assert all(dtypes_of(value(n)) == walked.captured[n] for n in walked.graph.nodes)


def test_what_recast_wrote_is_verified(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    walked = Walked(rules, x)
    walked.recast()
    walked.verify()


@pytest.mark.parametrize(
    ("op", "planted", "problem"),
    [
        ("matmul", torch.float32, "is float32, planned float16"),
        ("exp", torch.float16, "a cast, planned as it comes"),
        ("add", torch.float16, "a cast, planned as it comes"),
    ],
)
def test_a_planted_cast_is_refused(
    rules: autocastfx.OpList, x: torch.Tensor, op: str, planted: torch.dtype, problem: str
) -> None:
    walked = Walked(rules, x)
    graph = walked.recast()
    (reader,) = [node for node in graph.nodes if op_name(node) == op]
    with graph.inserting_before(reader):
        cast = graph.call_function(torch.ops.aten.to.dtype, (reader.all_input_nodes[0], planted))
    set_origin(cast, Origin("test", "planted", "x"))
    reader.args = (cast, *reader.args[1:])
    with pytest.raises(VerifyError, match=problem):
        walked.verify()


def test_a_missing_dtype_argument_is_refused(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    walked = Walked(rules, x)
    (total,) = [node for node in walked.recast().nodes if op_name(node) == "sum"]
    total.kwargs = {}
    with pytest.raises(VerifyError, match=r"gives float16, planned float32"):
        walked.verify()


def test_an_output_left_low_is_refused(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    walked = Walked(rules, x)
    output = walked.recast().output_node()
    (matmul,) = [node for node in walked.graph.nodes if op_name(node) == "matmul"]
    output.args = ((matmul,),)
    with pytest.raises(VerifyError, match="output matmul is float16, planned float32"):
        walked.verify()


def test_calls_are_dispatched_for_the_device_of_the_inputs() -> None:
    """Without parameters, too."""
    rules = autocastfx.OpList.of({"placement": "follow", "allow": [{"matmul": {"devices": "meta"}}]})
    for device, run in (("meta", Precision.LOW), ("cpu", Precision.GIVEN)):
        plan = decided(Function(lambda x: x @ x), torch.ones(16, 16, device=device), op_list=rules, dtype=LOW).plan
        assert plan["matmul"].placement.run is run
