"""Each value of a converted model against float32's, and what the comparison leaves alone."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from autocastfx import Comparison, OpList, Sensitivity, compare, convert, find_overflow
from autocastfx.errors import VariantError
from autocastfx.numerics.paired_run import Side, run_side_by_side
from autocastfx.plan.sensitivity import Effect
from tests.helpers import Function, Net, relative_error
from tests.numerics.faults import ERRORS, Fault, Inside

EPS = torch.finfo(torch.float16).eps


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 4))


def test_errors_are_those_of_the_models_outputs() -> None:
    model, x = network().eval(), torch.randn(16, 8)
    amp_model = convert(model, (x,), dtype="float16")
    found = compare(None, amp_model, x)
    with torch.no_grad():
        assert found["linear_1"].error == pytest.approx(relative_error(amp_model(x), model(x)), rel=1e-6)
    assert 0 < found["linear"].error < EPS
    assert [n.name for n in found.nodes] == ["linear", "batch_norm", "gelu", "linear_1"]
    assert {n.dtype for n in found.nodes} == {"float16"}
    assert (found.skipped, found.first_non_finite) == (0, None)
    assert found.worst == max(found.nodes, key=lambda n: n.error)
    assert compare(model, amp_model, x) == found


def test_inputs_in_a_tuple_are_told_to_go_one_by_one() -> None:
    x = torch.randn(2, 8)
    amp_model = convert(nn.Bilinear(8, 8, 4), (x, x), dtype="bfloat16", check=False)
    with pytest.raises(TypeError, match=r"The inputs of one call go one by one: .*\*batch"):
        compare(None, amp_model, (x, x))


def test_training_leaves_buffers_inputs_and_random_state_and_drops_the_same() -> None:
    model, x = network(), torch.randn(16, 8)
    amp_model = convert(model, (x,), dtype="float16")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, given = torch.get_rng_state(), x.clone()
    found = compare(None, amp_model, x)
    assert found["dropout"].error < 4 * EPS, "another mask would make it about 1"
    assert found["dropout"].underflow == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.set_rng_state(state)
    assert compare(None, amp_model, x) == found


def test_overflow_underflow_and_nan_are_shares() -> None:
    def faulty(x: Tensor) -> tuple[Tensor, Tensor]:
        large = torch.exp(x)
        return large - large, torch.exp(-x)

    x = torch.tensor([0.0, 1.0, 12.0, 13.0])
    amp_model = convert(
        Function(faulty), (x,), op_list=["default", OpList.of({"allow": ["exp", "sub"]})], dtype="float16"
    )
    found = compare(None, amp_model, x)
    assert (found["exp"].overflow, found["exp"].nan) == (0.5, 0.0)
    assert (found["sub"].overflow, found["sub"].nan) == (0.5, 0.5)
    assert (found["exp_1"].underflow, found["exp_1"].zeros) == (0.5, 0.0), "6.1e-6 is denormal, 2.3e-6 as well"
    assert found["exp"].severity == math.inf
    assert found.worst == found.first_non_finite == found.source == found["exp"]
    assert found.table().splitlines()[-2] == "Inf and NaN begin at exp (exp) in module (root)"
    assert found.table(1).splitlines()[1].split() == [
        "exp",
        "exp",
        "(root)",
        "low",
        "float16",
        *_shown(found["exp"].error),
    ]


def _shown(error: float) -> list[str]:
    return [f"{error:.2e}", "50.00%", "-", "-", "-"]


@pytest.mark.parametrize("fault", ERRORS, ids=str)
def test_where_a_wrong_number_begins_is_named(fault: Fault) -> None:
    x = torch.randn(4, 8)
    model = Inside(fault.function).eval()
    amp_model = convert(model, (x,), op_list=["default", OpList.of(fault.listed)], dtype="float16")
    found = compare(None, amp_model, x)
    assert found.first_non_finite is None
    assert found.source is not None
    assert (found.source.name, found.source.module, found.source.precision) == (fault.node, "inner", "low")
    assert found.source.error > 0.02 > 10 * found.source.inherited
    mended = OpList.of({"modules": [{"path": "inner", "category": "float32"}]})
    again = compare(
        None, convert(model, (x,), op_list=["default", OpList.of(fault.listed), mended], dtype="float16"), x
    )
    assert again.worst is not None
    assert again.worst.error < found.source.error / 10


def test_a_cast_passes_on_what_its_reader_inherits() -> None:
    x = torch.randn(8, 8)
    found = compare(None, convert(Function(lambda x: torch.exp(x @ x)), (x,), dtype="float16"), x)
    assert found["exp"].precision == "float32"
    assert found["exp"].inherited == found["matmul"].severity > 0
    assert found["matmul"].inherited == 0.0


def test_predicted_errors_are_told_and_the_worst_come_first() -> None:
    x, model = torch.randn(16, 8), network().eval()
    plain = convert(model, (x,), dtype="float16")
    nearer, farther = sorted(("linear", "linear_1"), key=lambda name: compare(None, plain, x)[name].error)
    errors = {nearer: 0.3, farther: 0.1}
    effects = tuple(Effect("eval", name, "linear", plain.plan[name].module, (error,)) for name, error in errors.items())
    measured = Sensitivity("output", "float16", 1, 1, effects)
    found = compare(
        None, convert(model, (x,), dtype="float16", sensitivity=measured), x, gradients=True, loss=lambda y: y.sum()
    )
    assert {node.name: node.predicted for node in found.nodes if node.predicted is not None} == errors
    for gradients in (False, True):
        title, first, second, *_ = found.table(gradients=gradients).splitlines()
        assert title.split()[:6] == ["node", "op", "module", "runs", "predicted", "dtype"]
        assert [line.split()[0] for line in (first, second)] == [nearer, farther]
        assert [line.split()[4] for line in (first, second)] == ["3.0e-01", "1.0e-01"]
        assert "predicted: what the 16 bits at this node change" in found.table(gradients=gradients)
    assert found.table(1, in_order=True).splitlines()[1].split()[0] == "linear"
    assert Comparison.from_json(found.to_json()) == found
    none = compare(None, plain, x)
    assert "predicted" not in none.table()
    assert not any(node.predicted for node in none.nodes)


def test_what_overflows_comes_before_the_predicted_worst() -> None:
    def faulty(x: Tensor, w: Tensor) -> Tensor:
        return torch.exp(torch.tanh(x @ w) * 20)

    x, w = torch.ones(4, 8), torch.ones(8, 8)
    listed = OpList.of({"allow": ["exp", "mul", "tanh"]})
    measured = Sensitivity("output", "float16", 1, 1, (Effect("eval", "matmul", "matmul", "", (0.5,)),))
    model = Function(faulty).eval()
    found = compare(
        None, convert(model, (x, w), dtype="float16", op_list=["default", listed], sensitivity=measured), x, w
    )
    assert [line.split()[0] for line in found.table(2).splitlines()[1:3]] == ["exp", "matmul"]


def test_the_table_and_json() -> None:
    x = torch.randn(16, 8)
    found = compare(None, convert(network().eval(), (x,), dtype="float16"), x)
    lines = found.table(2, in_order=True).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["node", "linear", "batch_norm"]
    assert lines[3] == "2 more nodes"
    assert lines[4].startswith("the error begins at linear (linear) in module 0: ")
    assert lines[5:] == ["0 nodes that only one of the graphs has"]
    ranked = [line.split()[0] for line in found.table().splitlines()[1:-2]]
    assert ranked == [n.name for n in sorted(found.nodes, key=lambda n: -n.error)]
    data = json.loads(found.to_json())
    assert [n["name"] for n in data["nodes"]] == [n.name for n in found.nodes]
    assert data["nodes"][0]["error"] == found.nodes[0].error
    with pytest.raises(KeyError, match="no node 'nothing' was compared"):
        found["nothing"]


def test_what_was_recomposed_is_skipped_and_counted() -> None:
    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    x = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), Function(gelu), nn.Linear(8, 8))
    amp_model = convert(model, (x,), dtype="float16")
    (whole,) = amp_model.plan.recomposed
    found = compare(None, amp_model, x)
    assert [n.name for n in found.nodes] == ["linear", "linear_1"]
    assert found.skipped == len(whole.replaced) + 1
    assert found.recomposed == (whole,)
    said = f"recomposed: {whole.node} (the tanh_gelu of {len(whole.replaced)} nodes)"
    assert found.table().endswith(f"{found.skipped} nodes that only one of the graphs has; {said}")


def test_a_node_that_became_another_op_is_compared_with_none() -> None:
    amp_model = convert(Function(lambda x: torch.exp(x @ x)), (torch.randn(4, 4),), dtype="float16")
    for variant in amp_model.variants:
        (product,) = (node for node in variant.graph.nodes if node.name == "matmul")
        product.target = torch.ops.aten.add.Tensor
    amp_model.recompile()
    assert [n.name for n in compare(None, amp_model, torch.randn(4, 4)).nodes] == ["exp"]


def test_a_node_that_is_all_nan_has_an_infinite_error() -> None:
    def lost(x: Tensor) -> Tensor:
        return torch.exp(x) - torch.exp(x)

    x = torch.full((4,), 20.0)
    amp_model = convert(
        Function(lost), (x,), op_list=["default", OpList.of({"allow": ["exp", "sub"]})], dtype="float16"
    )
    found = compare(None, amp_model, x)
    assert (found["sub"].nan, found["sub"].error, found["exp"].error) == (1.0, math.inf, math.inf)


def test_only_values_that_are_still_read_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(x: Tensor) -> Tensor:
        for _ in range(50):
            x = torch.tanh(x + 1)
        return x

    most, release = [0], Side.release

    def counted(side: Side, node: torch.fx.Node) -> None:
        release(side, node)
        most[0] = max(most[0], len(side.env))

    monkeypatch.setattr(Side, "release", counted)
    x = torch.randn(4)
    assert len(compare(None, convert(Function(deep), (x,), dtype="float16"), x).nodes) == 100
    assert most[0] == 1


def test_weights_stored_low_need_the_original() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(4, 8)
    low = convert(model, (x,), weights="low", dtype="float16")
    with pytest.raises(VariantError, match="Give compare the float32 model as its first argument"):
        compare(None, low, x)
    found = compare(model, low, x)
    assert [n.name for n in found.nodes] == ["linear", "relu"]
    assert 0 < found["linear"].error < EPS
    again = pickle.loads(pickle.dumps(convert(model, (x,), dtype="float16")))
    assert compare(model, again, x)["linear"] == found["linear"]


def own_loss(x: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(x @ x.t(), target)


def test_functions_that_the_conversion_kept_whole_are_whole_in_the_original() -> None:
    """A model that was unpickled holds no captured graph: it is captured again."""
    model, args = Function(own_loss), (torch.randn(8, 8), torch.arange(8))
    kept = OpList.of({"deny": ["torch.nn.functional.cross_entropy"]})
    amp_model = convert(model, args, op_list=["default", kept], dtype="float16")
    again = pickle.loads(pickle.dumps(amp_model))
    assert compare(model, again, *args) == compare(model, amp_model, *args)
    assert [n.op for n in compare(model, again, *args).nodes][-1] == "torch.nn.functional.cross_entropy"


def padded(x: Tensor) -> Tensor:
    return (x @ x.t()) * math.ceil(x.shape[0] / 3)


def test_functions_of_sizes_are_run_with_those_of_the_call() -> None:
    model, x = Function(padded), torch.randn(8, 8)
    amp_model = convert(model, (x,), dtype="float16")
    found = compare(model, amp_model, x)
    assert 0 < found["mul"].error < EPS
    amp_model(torch.randn(5, 8))  # from here on with symbols
    for rows in (6, 9):
        found = compare(model, amp_model, torch.randn(rows, 8))
        assert 0 < found["mul"].error < EPS
    assert compare(model, pickle.loads(pickle.dumps(amp_model)), x)["mul"] == compare(model, amp_model, x)["mul"]


def test_numbers_that_change_from_call_to_call_are_those_of_the_call() -> None:
    model, x = Net(lambda m, x, factor, steps=2: m.layer(x) * factor * steps, layer=nn.Linear(8, 8)), torch.randn(4, 8)
    amp_model = convert(model, (x, 0.5), dtype="float16")
    for factor, steps in ((0.25, 2), (0.125, 3), (0.125, 4)):  # graphs for any factor, and for any steps
        amp_model(x, factor, steps)
    assert any(graph.others for graph in amp_model._captures.graphs)
    for original in (None, model):
        assert compare(original, amp_model, x, 0.75, 5)["mul_1"].error < 4 * EPS
        low, full = run_side_by_side(original, amp_model, (x, 0.75), {"steps": 5}), model(x, 0.75, 5)
        list(low.steps())
        ours, theirs = low.outputs()
        assert torch.equal(theirs, full)
        assert relative_error(ours, full) < 4 * EPS
    for steps in (2, 6):
        assert find_overflow(amp_model, x, 0.75, steps) is None
        assert find_overflow(amp_model, x, 1e9, steps)


def test_a_16_bit_original_is_compared_with_itself_in_float32_captured_again() -> None:
    wide, ids = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 4), nn.Dropout(0.5)), torch.arange(9)
    amp_model = convert(copy.deepcopy(wide).bfloat16(), (ids,), op_list=["default", OpList.of({"deny": ["linear"]})])
    wide.eval()  # captured in the modes of the converted model all the same, and left so
    found = compare(wide, amp_model, ids)
    assert 0 < found["linear"].error < 0.02
    assert found["dropout"].error < 0.02
    assert not wide.training


def test_working_copies_and_a_model_that_was_trained_apart() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    amp_model = convert(model, (x,), weights="cached", dtype="float16")
    assert 0 < compare(None, amp_model, x)["linear"].error < EPS
    other = nn.Linear(8, 8)
    assert compare(other, amp_model, x)["linear"].error > 0.1


def test_a_loss_that_widens_its_logits_is_compared() -> None:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x @ x.t(), target)

    x, target = torch.randn(8, 8), torch.arange(8)
    amp_model = convert(Function(loss), (x, target), dtype="float16")
    found = compare(None, amp_model, x, target)
    assert found.nodes[-1].op == "cross_entropy_loss"
    assert 0 < found.nodes[-1].error < 8 * EPS
    assert found.skipped == 0


def test_what_the_model_calls_so_goes_to_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, *, scale: float) -> Tensor:
            return self.layer(x) * scale

    model, x = Scaled(), torch.randn(2, 8)
    amp_model = convert(model, (x,), {"scale": 3.0}, dtype="float16")
    assert compare(None, amp_model, x, scale=3.0)["mul"].error < 4 * EPS
    assert compare(None, amp_model, x, scale=3.0, gradients=True).scale == 1.0


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(8, 8, bias=False), "another model than was converted: it has no 'bias'. Give the float32 original"),
        (nn.Linear(8, 4), r"its 'weight' is float32\[4, 8\], and that of the converted model float32\[8, 8\]"),
        (nn.Linear(8, 8).half(), r"is not the float32 original: its 'weight' is float16\[8, 8\], and"),
    ],
)
def test_another_model_is_no_original(model: nn.Module, said: str) -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=said):
        compare(model, convert(nn.Linear(8, 8), (x,), dtype="float16"), x)


def test_an_original_with_tied_weights_is_one() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    model[1].weight = model[0].weight
    amp_model = convert(model, (x,), dtype="float16")
    assert compare(model, amp_model, x) == compare(None, amp_model, x)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_is_finite_and_positive(scale: float) -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="scale is a finite number above 0, not"):
        compare(None, convert(nn.Linear(8, 8), (x,), dtype="float16"), x, gradients=True, scale=scale)


def test_only_converted_models() -> None:
    with pytest.raises(TypeError, match="convert the model first"):
        compare(None, nn.Linear(2, 2), torch.ones(2))  # type: ignore[arg-type]
