"""Products in float8: which are chosen and why not, what readers share, and what the graph then computes."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx import OpList
from autocastfx.errors import OpListError, UnmatchedPlanWarning, UnmatchedRuleWarning, UnsupportedError, VerifyError
from autocastfx.passes.verify import verify_float8
from autocastfx.plan.plan import Plan, PlannedFloat8
from autocastfx.policy.float8 import Product
from autocastfx.runtime import working_copies
from autocastfx.runtime.operators.float8 import float8_linear, quantize
from benchmarks.models.tiny import Attention
from tests.helpers import Function, listing, relative_error, saved_bytes, text

LOW = torch.bfloat16
EPS8 = 2**-3  # of e4m3


def rules(modules: list[dict[str, Any]] | None = None, **keys: Any) -> OpList:
    return OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear"], **keys}], "modules": modules or []})


def convert(model: nn.Module, *inputs: Tensor, lists: OpList | None = None, **options: Any) -> autocastfx.AmpModule:
    return autocastfx.convert(model, inputs, **{"dtype": LOW, "op_list": lists or rules(), **options})


def planned(amp_model: autocastfx.AmpModule) -> dict[str, str]:
    return {node.module or node.name: str(node.float8) for node in amp_model.plan.nodes if node.float8 is not None}


def attention() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Attention(), torch.randn(2, 16, 64)


# -- change -----------------------------------------------------------------------------------------------------------


TRAINED = """\
+ args_0_bfloat16: bf16 = to(args_0)
+ args_1_bfloat16: bf16 = to(args_1)
+ args_0_float8_rows: torch.float8_e4m3fn,f32 = autocastfx::quantize(args_0_bfloat16)
+ args_1_float8_rows: torch.float8_e4m3fn,f32 = autocastfx::quantize(args_1_bfloat16)
+ args_0_float8_columns: torch.float8_e4m3fn,f32 = autocastfx::quantize(args_0_bfloat16)
+ args_1_float8_columns: torch.float8_e4m3fn,f32 = autocastfx::quantize(args_1_bfloat16)
  linear: bf16 = autocastfx::float8_linear(args_0_bfloat16, args_1_bfloat16, args_0_float8_rows, \
args_1_float8_rows, args_0_float8_columns, args_1_float8_columns)
+ linear_float32: f32 = to(linear)
  return linear_float32
"""
EVALUATED = """\
+ args_0_bfloat16: bf16 = to(args_0)
+ args_1_bfloat16: bf16 = to(args_1)
+ args_0_float8_rows: torch.float8_e4m3fn,f32 = autocastfx::quantize(args_0_bfloat16)
+ args_1_float8_rows: torch.float8_e4m3fn,f32 = autocastfx::quantize(args_1_bfloat16)
  linear: bf16 = autocastfx::float8_linear(args_0_bfloat16, args_1_bfloat16, args_0_float8_rows, \
args_1_float8_rows)
+ linear_float32: f32 = to(linear)
  return linear_float32
"""


IN_BLOCKS = """\
+ args_0_bfloat16: bf16 = to(args_0)
+ args_1_bfloat16: bf16 = to(args_1)
+ args_0_float8_blocks: torch.float8_e4m3fn,torch.float8_e8m0fnu = autocastfx::quantize(args_0_bfloat16)
+ args_1_float8_blocks: torch.float8_e4m3fn,torch.float8_e8m0fnu = autocastfx::quantize(args_1_bfloat16)
+ args_0_float8_column_blocks: torch.float8_e4m3fn,torch.float8_e8m0fnu = autocastfx::quantize(args_0_bfloat16)
+ args_1_float8_column_blocks: torch.float8_e4m3fn,torch.float8_e8m0fnu = autocastfx::quantize(args_1_bfloat16)
  linear: bf16 = autocastfx::float8_linear(args_0_bfloat16, args_1_bfloat16, args_0_float8_blocks, \
args_1_float8_blocks, args_0_float8_column_blocks, args_1_float8_column_blocks)
+ linear_float32: f32 = to(linear)
  return linear_float32
"""


@pytest.mark.parametrize(("training", "expected"), [(True, TRAINED), (False, EVALUATED)])
def test_a_linear_reads_its_operands_in_float8(training: bool, expected: str) -> None:
    model = Function(lambda *args: nn.functional.linear(*args)).train(training)
    assert listing(convert(model, torch.randn(4, 32), torch.randn(16, 32)).graph) == text(expected)


def test_a_linear_reads_its_operands_in_blocks() -> None:
    amp_model = convert(
        Function(lambda *args: nn.functional.linear(*args)),
        *(torch.randn(4, 32), torch.randn(32, 32)),
        lists=rules(recipe="mxfp8"),
    )
    assert listing(amp_model.graph) == text(IN_BLOCKS)
    assert Plan.from_json(amp_model.plan.to_json()) == amp_model.plan


def test_readers_share_what_is_quantised() -> None:
    model, x = attention()
    amp_model = convert(model, x)
    readers = {one.name: one.readers for one in amp_model.plan.quantized if len(one.readers) > 1}
    assert list(readers.values()) == [("linear", "linear_1", "linear_2")] * 2, "query, key and value: rows and columns"
    assert [one.layout.value for one in amp_model.plan.quantized if len(one.readers) > 1] == ["rows", "columns"]
    tensorwise = convert(model, x, lists=rules(recipe="tensorwise")).plan.quantized
    assert [len(one.readers) for one in tensorwise].count(3) == 1, "one layout for both products"
    assert len(tensorwise) < len(amp_model.plan.quantized)


def test_values_that_are_written_into_are_quantised_anew() -> None:
    def twice(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        first = nn.functional.linear(y, w)
        y.neg_()
        return first - nn.functional.linear(y, w)

    x, w = torch.randn(16, 16), torch.randn(16, 16)
    amp_model = convert(Function(twice).eval(), x, w)
    assert all(str(node.placement.run) == "low" for node in amp_model.plan.nodes if node.op in ("matmul", "neg_"))
    exact = x @ w @ w.t() * 2
    assert relative_error(amp_model(x, w), exact) < EPS8


@pytest.mark.parametrize("op", ["addmm", "mm", "matmul"])
def test_products_with_a_parameter_on_the_right(op: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(48))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight) if op == "addmm" else getattr(torch, op)(x, self.weight)

    torch.manual_seed(0)
    model, x = Product(), torch.randn(16, 32)
    lists = OpList.of({"extends": "bfloat16", "float8": [{"ops": [op]}]})
    amp_model = convert(model, x, lists=lists)
    assert planned(amp_model) == {op: "rowwise"}
    results = [m(x) for m in (model, amp_model)]
    grads = [torch.autograd.grad(r.square().sum(), model.weight)[0] for r in results]
    assert 0 < relative_error(results[1], results[0]) < EPS8
    assert 0 < relative_error(grads[1], grads[0]) < EPS8
    with pytest.warns(UnmatchedRuleWarning, match=r"no product of the model runs in it; mat2 is no parameter \(1\)"):
        convert(Function(lambda x, w: x.mm(w)), x, torch.randn(32, 16), lists=rules(ops=["mm"]))


# -- no change, and why -----------------------------------------------------------------------------------------------


def test_without_rules_the_graph_is_that_of_the_list_extended() -> None:
    model, x = attention()
    plain, same = convert(model, x, lists=OpList.of({"extends": "bfloat16"})), convert(model, x, op_list="bfloat16")
    assert listing(plain.graph) == listing(same.graph)
    assert planned(plain) == {}
    assert "float8" not in plain.plan.to_json()
    assert "quantized" not in plain.plan.to_json()


WHY_NOT: dict[str, tuple[OpList, str, str]] = {
    "module": (
        rules([{"path": "q", "float8": False, "reason": "by hand"}]),
        "q",
        "no float8: the rule at OpList:modules[0] (by hand) leaves it out",
    ),
    "odd": (rules(), "head", "no float8: N is 50, no multiple of 16"),
    "odd for blocks": (rules(recipe="mxfp8"), "head", "no float8: N is 50, no multiple of 32"),
    "small": (rules(least={"M": 64}), "q", "no float8: M is 32, less than 64"),
    "small N": (rules(least={"M": 32, "N": 65}), "q", "no float8: N is 64, less than 65"),
    "last": (rules(last=False), "head", "no float8: no other product is computed from it"),
    "float32": (rules([{"path": "k", "category": "float32"}]), "k", "no float8: the node runs in float32"),
    "recipe": (
        rules(recipe="rowwise_gw_hp"),
        "q",
        "rowwise_gw_hp output, input_gradient; weight_gradient in 16 bits: rowwise_gw_hp keeps it in 16 bits",
    ),
    "products": (
        rules(products=["output"]),
        "q",
        "rowwise output; input_gradient, weight_gradient in 16 bits: the rule at OpList:float8[0].ops[0] leaves it out",
    ),
    "other op": (
        OpList.of({"extends": "bfloat16", "float8": [{"ops": ["mm"]}]}),
        "q",
        "no float8: no float8 rule covers it",
    ),
    "emulated": (rules(emulate=True), "q", "rowwise, emulated"),
    "in blocks": (
        rules(recipe="mxfp8", products=["input_gradient"]),
        "q",
        "mxfp8 input_gradient; output, weight_gradient in 16 bits: the rule at OpList:float8[0].ops[0] leaves it out",
    ),
}


@pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")
@pytest.mark.parametrize(("lists", "module", "expected"), WHY_NOT.values(), ids=list(WHY_NOT))
def test_what_stays_in_16_bits_says_why(lists: OpList, module: str, expected: str) -> None:
    model, x = attention()
    amp_model = convert(model, x, lists=lists)
    assert planned(amp_model)[module] == expected
    if "computed from it" in expected:
        assert planned(amp_model)["q"] == "rowwise", "the others are followed by products"
    assert f"products: {expected}." in autocastfx.explain(amp_model, module)
    assert Plan.from_json(amp_model.plan.to_json()) == amp_model.plan


def test_sizes_that_the_call_decides() -> None:
    def some(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.linear(x[x[:, 0] > 0], w)

    x, w = torch.randn(16, 32), torch.randn(16, 32)
    amp_model = convert(Function(some), x, w)
    assert list(planned(amp_model).values()) == ["rowwise"]
    assert relative_error(amp_model(x, w), some(x, w)) < EPS8
    with pytest.warns(UnmatchedRuleWarning, match="M is not known before the call"):
        convert(Function(some), x, w, lists=rules(least={"M": 4}))
    model = Attention()
    later = autocastfx.convert(model, dtype=LOW, op_list=rules())
    later(torch.randn(2, 16, 64))
    assert planned(later)["q"] == "rowwise"


def test_blocks_of_any_number_of_rows() -> None:
    model, x = nn.Linear(64, 32, bias=False), torch.randn(40, 64)
    amp_model = autocastfx.convert(model, dtype=LOW, op_list=rules(recipe="mxfp8"))
    for rows in (40, 33, 7, 32):  # the first call has a graph of its size, the next ones one of any
        (found,) = torch.autograd.grad(amp_model(x[:rows]).square().sum(), [model.weight])
        (exact,) = torch.autograd.grad(model(x[:rows]).square().sum(), [model.weight])
        assert 0 < relative_error(found, exact) < EPS8
    assert len(amp_model.variants) == 2


# -- numerics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_gw_hp", "mxfp8"])
@pytest.mark.parametrize("weights", ["cast", "cached"])
def test_outputs_and_gradients_are_near_float32(recipe: str, weights: str) -> None:
    model, x = attention()
    amp_model = convert(model, x, lists=rules(recipe=recipe), weights=weights)
    target = torch.randn(2, 16, 50)
    results = [m(x) for m in (model, amp_model)]
    assert 0 < relative_error(results[1], results[0]) < EPS8
    grads = [torch.autograd.grad((r - target).square().sum(), list(model.parameters())) for r in results]
    exact, found = (torch.cat([g.flatten() for g in one]) for one in grads)
    assert all(g.dtype == torch.float32 for g in grads[1])
    assert 0 < relative_error(found, exact) < EPS8


def test_both_modes_and_other_sizes_give_the_same_gradients() -> None:
    model, x = attention()
    amp_model = convert(model, x)
    for size in ((2, 16, 64), (3, 5, 64), (1, 1, 64)):
        x = torch.randn(size)
        grads = [torch.autograd.grad(amp_model.train(t)(x).sum(), list(model.parameters())) for t in (True, False)]
        assert all(a.equal(b) for a, b in zip(*grads, strict=True)), size


def test_it_copies_pickles_compiles_and_exports() -> None:
    model, x = attention()
    amp_model = convert(model, x).eval()
    expected = amp_model(x)
    for again in (copy.deepcopy(amp_model), pickle.loads(pickle.dumps(amp_model))):
        assert torch.equal(again(x), expected)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(amp_model, backend="aot_eager")(x), expected)
    exported = torch.export.export(amp_model, (x,))
    assert torch.equal(exported.module()(x), expected)
    assert any(node.target is float8_linear for node in exported.graph.nodes)
    low = convert(model, x, weights="low").eval()
    assert torch.equal(low(x), expected)


def test_enable_computes_the_same() -> None:
    model, x = attention()
    expected = convert(model, x)(x)
    torch._dynamo.reset()
    enabled = copy.deepcopy(model)
    backend = autocastfx.CompileBackend(dtype=LOW, op_list=rules(), inner="aot_eager")
    backend.compile(enabled)
    assert torch.equal(enabled(x), expected)
    torch._dynamo.reset()
    other = autocastfx.CompileBackend(dtype=LOW, op_list=rules(least={"M": 64}), inner="eager")
    other.compile(other_model := copy.deepcopy(model).train())
    with pytest.warns(UnmatchedRuleWarning, match="no product of the model runs in it; M is 32, less than 64"):
        other_model(x)


def test_it_keeps_fewer_bytes_for_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    x = torch.randn(64, 256)
    plain, float8 = (convert(model, x, op_list=lists) for lists in ("bfloat16", rules()))
    kept = [saved_bytes(lambda m=m: m(x)) for m in (plain, float8)]
    # Of each layer: its input and its weight, in one byte a number instead of two, and a scale for each column. The
    # first layer's input asks for no gradient, so that its weight is not kept.
    numbers, scales = 4 * 64 * 256 + 3 * 256 * 256, 7 * 256 * 4
    assert kept == [2 * numbers, numbers + scales]


def test_reasons_name_a_list_without_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: bfloat16\nfloat8:\n  - ops: [linear]\n"
        'modules:\n  - {path: "0", reason: by hand, float8: {products: [output]}}\n'
    )
    amp_model = autocastfx.convert(
        nn.Sequential(nn.Linear(32, 32)), torch.ones(16, 32), dtype=LOW, op_list=path, check=False
    )
    for said in (*(autocastfx.dump(amp_model, format=kind) for kind in ("text", "html")), str(amp_model.plan.nodes[0])):
        assert str(tmp_path) not in said
    assert "the rule at mine.yaml:5:5 (by hand) leaves it out" in autocastfx.explain(amp_model, "linear")


def test_a_plan_alone_does_not_bring_float8_and_says_so(tmp_path: Path) -> None:
    model, x = nn.Linear(32, 32), torch.ones(16, 32)
    made = convert(model, x)
    path = tmp_path / "plan.json"
    path.write_text(made.plan.to_json())
    for plan in (made.plan, str(path)):
        with pytest.warns(UnmatchedPlanWarning, match="1 nodes of the plan .* have products in float8, and here in 16"):
            autocastfx.convert(model, x, dtype=LOW, plan=plan)
        again = convert(model, x, plan=plan)
        assert planned(again) == planned(made)


def test_a_weight_that_stays_float32_is_not_quantised() -> None:
    lists = OpList.of({"extends": "bfloat16", "keep_args": {"linear": ["weight"]}, "float8": [{"ops": ["linear"]}]})
    with pytest.raises(OpListError, match="cannot run in bfloat16 with 'weight' in float32"):  # no kernel takes it so
        convert(nn.Linear(32, 32), torch.ones(16, 32), lists=lists)


class Offset(nn.Module):
    """A product whose bias has a row for each row of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(32, 16)), nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def test_a_bias_of_two_dimensions_is_no_bias() -> None:
    lists = OpList.of({"extends": "bfloat16", "float8": [{"ops": ["addmm"]}]})
    with pytest.warns(UnmatchedRuleWarning, match="self has 2 dimensions, not 1"):
        convert(Offset(), torch.ones(16, 32), lists=lists)


# -- weights quantised once an update ---------------------------------------------------------------------------------


class Products(nn.Module):
    """A linear layer, whose weight is read as it is, and a product that reads its weight transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 32)
        self.weight, self.bias = nn.Parameter(torch.randn(32, 16) / 8), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, torch.relu(self.layer(x)), self.weight)


BOTH = OpList.of({"extends": "bfloat16", "float8": [{"ops": ["linear", "addmm"]}]})


def quantized_weights(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layouts in which working copies are quantised from now on."""
    made, real = [], working_copies.quantize

    def counting(x: Tensor, layout: str, *rest: Any) -> Any:
        made.append(layout)
        return real(x, layout, *rest)

    monkeypatch.setattr(working_copies, "quantize", counting)
    return made


def test_cached_weights_are_quantised_once_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x, results = quantized_weights(monkeypatch), torch.randn(16, 32), list[list[Tensor]]()
    for weights in ("cast", "cached"):
        amp_model = convert(Products(), x, lists=BOTH, weights=weights)
        optimizer = torch.optim.SGD(amp_model.parameters(), lr=0.1)
        made.clear()
        results.append([])
        for _ in range(2):
            for _ in range(3):  # gradients of three calls are added up
                amp_model(x).square().mean().backward()
            results[-1] += [p.grad.clone() for p in amp_model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    assert made == ["rows", "columns"] * 4
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("how", ["written", "loaded", "replaced"])
def test_weights_that_change_are_quantised_anew(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Products().eval(), torch.randn(16, 32)
    amp_model = convert(model, x, lists=BOTH, weights="cached")
    made = quantized_weights(monkeypatch)
    with torch.inference_mode():
        before = [amp_model(x), amp_model(x)]
    assert (made, torch.equal(*before)) == (["rows", "rows"], True)
    changed = torch.randn(32, 16)
    if how == "written":
        with torch.no_grad():
            model.weight.copy_(changed)
    elif how == "loaded":
        amp_model.load_state_dict({**amp_model.state_dict(), "weight": changed})
    else:
        amp_model.weight = model.weight = nn.Parameter(changed)
    expected = convert(model, x, lists=BOTH)(x)
    assert torch.equal(amp_model(x), expected)
    amp_model(x).sum().backward()  # what inference has quantised is no obstacle


def test_a_copy_in_two_layouts_is_quantised_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    amp_model = convert(Products(), x := torch.randn(16, 32), lists=BOTH, weights="cached")
    made = quantized_weights(monkeypatch)
    amp_model(x)
    assert sorted(made) == ["columns", "columns", "rows", "rows"]
    assert [planned.layout.value for planned in amp_model.plan.quantized if "weight" in planned.value] == [
        "rows",
        "columns",
        "rows",
        "columns",
    ]


def test_where_no_copies_are_read_weights_are_quantised_in_each_call() -> None:
    model, x = Products(), torch.randn(16, 32)
    amp_model = convert(model, x, lists=BOTH, weights="cached")
    expected = amp_model(x)
    with pytest.warns(UserWarning, match="has no effect under torch.compile"):
        compiled = torch.compile(amp_model, backend="aot_eager")(x)
    assert torch.equal(compiled, expected)


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_finds_what_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    from autocastfx.passes import float8 as module

    model, x = attention()
    rewrite = module._Rewriting.rewrite

    def other_value(self: Any, node: Any, *rest: Any) -> None:
        rewrite(self, node, *rest)
        if node.name == "linear_1":
            node.update_arg(4, next(n for n in self.graph.nodes if n.target is quantize and "q_weight" in n.name))

    monkeypatch.setattr(module._Rewriting, "rewrite", other_value)
    with pytest.raises(
        VerifyError, match=r"'weight_forward' .* is q_weight_bfloat16 in float8, which it does not read"
    ):
        convert(model, x)

    def other_layout(self: Any, node: Any, *rest: Any) -> None:
        rewrite(self, node, *rest)
        if node.name == "linear_1":  # input and weight are square: rows for columns would change no size
            node.update_arg(5, node.args[3])

    monkeypatch.setattr(module._Rewriting, "rewrite", other_layout)
    with pytest.raises(VerifyError, match=r"'input_backward' .* quantised as \('rows', .*, not as rowwise reads it"):
        convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(32, 32))

    def left_out(self: Any, node: Any, *rest: Any) -> None:
        if node.name != "linear_1":
            rewrite(self, node, *rest)

    monkeypatch.setattr(module._Rewriting, "rewrite", left_out)
    with pytest.raises(VerifyError, match=r"'linear_1' .* runs in float8: none, planned: output, input_gradient"):
        convert(model, x)


def test_verify_compares_the_products_with_the_plan() -> None:
    model, x = attention()
    graph = convert(model, x).graph
    nodes = {node.name: node for node in graph.nodes}
    with pytest.raises(VerifyError, match=r"'linear' .* planned: none"):
        verify_float8(graph, {})
    everything = {n: PlannedFloat8("rowwise", tuple(Product)) for n in graph.nodes if n.target is float8_linear}
    verify_float8(graph, everything)
    with pytest.raises(VerifyError, match="planned: output"):
        verify_float8(graph, {**everything, nodes["linear"]: PlannedFloat8("rowwise", (Product.OUTPUT,))})


# -- reports ----------------------------------------------------------------------------------------------------------


def test_dump_explain_and_diff_tell_of_it() -> None:
    model, x = attention()
    amp_model = convert(model, x)
    dump = autocastfx.dump(amp_model, width=None)
    assert "products in float8: 12 of 15; values in float8: 12, of which 2 with several readers" in dump
    assert re.search(r"\n  linear +q .* low, float8 .* allow \[2\] \[3\]", dump)
    assert "\n[3] rowwise\n" in dump
    assert "no float8: N is 50, no multiple of 16" in dump
    assert "layer_norm by rows, as linear_1, linear_2 do." in autocastfx.explain(amp_model, "linear")
    plain = convert(model, x, op_list="bfloat16")
    found = autocastfx.diff(plain.plan, amp_model.plan)
    assert "4 from low to low, float8 rowwise" in str(found)
    assert "low, float8" in autocastfx.dump(amp_model, format="html")
    assert [n.name for n in autocastfx.compare(model, amp_model, x).nodes if n.op == "linear"] == [
        *("linear", "linear_1", "linear_2", "linear_3", "linear_4")
    ]


# -- refusal ----------------------------------------------------------------------------------------------------------


def refused(**options: Any) -> Callable[[], object]:
    model, x = attention()
    return lambda: convert(model, x, **options)


FOLLOWS = OpList.of({"extends": "torch_autocast_cpu", "float8": [{"ops": ["linear"]}]})
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float16": (
        {"dtype": torch.float16},
        OpListError,
        r"OpList:float8\[0\].ops\[0\]: 'float8 of linear' asks for float8 in backward, and float16 gradients",
    ),
    "device": ({"device": "mps"}, UnsupportedError, "needs float8 products, and mps has none: torch has none for mps"),
    "follow": (
        {"op_list": FOLLOWS},
        OpListError,
        r"cannot be in the list \w+, which follows torch.autocast's dispatch",
    ),
    "contradiction": (
        {"lists": rules([{"path": "q", "float8": False}, {"path": "?", "float8": True}])},
        OpListError,
        r"'float8 of products in q' is none here, and 'float8 of products in \?' is output, input_gradient",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_is_one_clear_error(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        refused(**options)()


def test_models_and_measurements_that_float8_is_not_for_are_refused() -> None:
    model, x = attention()
    with pytest.raises(UnsupportedError, match="the model's parameters are bfloat16 already"):
        convert(copy.deepcopy(model).to(LOW), x.to(LOW), dtype=None)

    def loss(output: Tensor, _: Tensor) -> Tensor:
        return output.square().mean()

    measured = autocastfx.sensitivity(model, [x], loss, dtype=LOW)
    for call in (
        lambda: convert(model, x, sensitivity=measured),
        lambda: autocastfx.sensitivity(model, [x], loss, dtype=LOW, op_list=rules()),
        lambda: autocastfx.tune(model, [x, x], loss, dtype=LOW, op_list=rules()),
    ):
        with pytest.raises(UnsupportedError, match="asks for float8, and a sensitivity measures 16 bits alone"):
            call()


def test_float16_and_other_devices_are_served_where_they_can() -> None:
    model, x = attention()
    amp_model = convert(model, x, lists=rules(products=["output"]), dtype=torch.float16)
    assert 0 < relative_error(amp_model(x), model(x)) < EPS8
    assert planned(convert(model, x, lists=rules(emulate=True), device="mps"))["q"] == "rowwise, emulated"
    off = rules([{"path": "**", "float8": False}], devices="cuda")
    convert(model, x, lists=off, dtype=torch.float16)


UNMATCHED: dict[str, tuple[nn.Module, tuple[int, ...], Any, str]] = {
    "no linears": (
        nn.Conv2d(3, 4, 3),
        (1, 3, 8, 8),
        "float8",
        "no product of the model runs in it: it has no such product",
    ),
    "too small": (
        nn.Linear(32, 32),
        (4, 32),
        "float8",
        r"no product of the model runs in it; no other product is computed from it",
    ),
    "module": (
        nn.Sequential(nn.Linear(32, 32)),
        (4, 32),
        rules([{"path": "lm_head", "float8": False}]),
        "OpList:modules.0.: no module of the model matches 'lm_head'",
    ),
    "op": (
        nn.Sequential(nn.Linear(32, 32)),
        (4, 32),
        [rules(), OpList.of({"float8": [{"ops": ["addmm"]}]})],
        "no node of the model is 'addmm'",
    ),
    "op of a module": (
        nn.Sequential(nn.Linear(32, 32)),
        (4, 32),
        rules([{"path": "0", "float8": False, "ops": ["mm"]}]),
        "none of mm runs in the modules '0'",
    ),
}


@pytest.mark.parametrize(("model", "size", "lists", "message"), UNMATCHED.values(), ids=list(UNMATCHED))
def test_rules_that_match_nothing_are_told(model: nn.Module, size: tuple[int, ...], lists: Any, message: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert(model, torch.randn(size), op_list=lists)
    said = [str(one.message) for one in caught if issubclass(one.category, UnmatchedRuleWarning)]
    assert len(said) == 1
    assert re.search(message, said[0])
