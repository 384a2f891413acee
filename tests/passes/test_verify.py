"""verify refuses a graph in which one dtype is wrong, and says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import autocastfx
from autocastfx.errors import VerifyError
from autocastfx.graph.node import Origin, origin, set_origin
from autocastfx.passes import pipeline, verify
from autocastfx.passes.pipeline import ConvertedGraph
from autocastfx.passes.state import State
from autocastfx.plan.plan import Cause, Placement, Precision, Why
from tests.decided import decided
from tests.helpers import TORCH, Function


def planted(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Any], Any]) -> None:
    """Run ``damage`` between rewriting and verifying."""
    *before, verify = pipeline.PIPELINE

    def damaged(state: State) -> State:
        state = damage(state) or state
        state.graph.lint()
        return state

    monkeypatch.setattr(pipeline, "PIPELINE", (*before, lambda policy: damaged, verify))


KEPT = autocastfx.OpList.of({"unlisted": "keep", "allow": ["matmul"]}, name="kept")


def attend(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).softmax(-1) @ x.tanh()


def casts(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if origin(n) is not None and n.target is torch.ops.aten.to.dtype]


def convert() -> ConvertedGraph:
    return decided(attend, torch.rand(8, 8), dtype=torch.bfloat16)


def test_an_undamaged_graph_passes() -> None:
    assert len(convert().plan.casts) >= 4


def test_equal_layers_are_run_once_those_without_a_bias_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[Any]()

    def call(target: Any, *rest: Any) -> Any:
        ran.append(target)
        return original(target, *rest)

    original = verify.abstract_call
    monkeypatch.setattr(verify, "abstract_call", call)
    conv = torch.ops.aten.conv1d.default
    x, weight = torch.rand(2, 16, 8), torch.rand(16, 16, 3)
    decided(lambda x, w: conv(conv(conv(x, w, None, [1], [1]), w, None, [1], [1]), w, None, [1], [1]), x, weight)
    assert ran.count(conv) == 1


def test_only_what_reads_other_dtypes_than_captured_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[str]()

    def run(node: fx.Node, *rest: Any) -> Any:
        ran.append(node.name)
        return original(node, *rest)

    original = verify._run
    monkeypatch.setattr(verify, "_run", run)
    function = Function(lambda x: (x @ x.tanh()).softmax(-1).sqrt())
    autocastfx.convert(function, (torch.rand(8, 8),), dtype=torch.bfloat16)
    # softmax reads 16 bits and gives float32 as before: what sqrt reads is as captured
    assert ran == ["tanh_bfloat16", "args_0_bfloat16", "matmul", "softmax"]


@pytest.mark.parametrize("index", range(4))
def test_a_missing_cast_is_refused(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    def drop(state: Any) -> None:
        cast = casts(state.graph)[index]
        cast.replace_all_uses_with(cast.all_input_nodes[0])
        state.graph.erase_node(cast)

    planted(monkeypatch, drop)
    with pytest.raises(VerifyError, match="The graph is refused"):
        convert()


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_cast_to_another_dtype_is_refused(monkeypatch: pytest.MonkeyPatch, index: int, dtype: torch.dtype) -> None:
    def retype(state: Any) -> None:
        casts(state.graph)[index].update_arg(1, dtype)

    planted(monkeypatch, retype)
    with pytest.raises(VerifyError, match=str(dtype).removeprefix("torch.")):
        convert()


@pytest.mark.parametrize(
    ("name", "position"),
    [
        pytest.param("embedding", 1, marks=pytest.mark.skipif(TORCH < (2, 13), reason="no index is checked there")),
        ("gather", 2),
    ],
)
def test_a_cast_of_an_index_is_refused(name: str, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def cast_index(state: Any) -> None:
        (reader,) = [n for n in state.graph.nodes if n.name == name]
        with state.graph.inserting_before(reader):
            wrong = state.graph.call_function(torch.ops.aten.to.dtype, (reader.args[position], torch.bfloat16))
        reader.update_arg(position, wrong)

    planted(monkeypatch, cast_index)
    reads = {"embedding": lambda x, i: torch.embedding(x, i) @ x, "gather": lambda x, i: torch.gather(x @ x, 0, i)}
    with pytest.raises(VerifyError, match=rf"node '{name}' \({name}\)"):
        autocastfx.convert(Function(reads[name]), (torch.ones(2, 2), torch.tensor([[1, 0]])), dtype=torch.bfloat16)


@pytest.mark.parametrize("rule", ["reader", "storage"])
def test_a_write_into_a_cast_of_the_value_is_refused(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value itself would stay as it was; but a cast may hold it as it is stored."""

    def write(x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        y.add_(1)
        return y @ x

    def cast_what_is_written(state: Any) -> None:
        (writer,) = [n for n in state.graph.nodes if n.name == "add_"]
        (value,) = writer.all_input_nodes
        with state.graph.inserting_before(writer):
            cast = state.graph.call_function(torch.ops.aten.to.dtype, (value, torch.float32))
        set_origin(cast, Origin("rewrite", rule, value.name))
        writer.replace_input_with(value, cast)

    planted(monkeypatch, cast_what_is_written)
    if rule == "storage":
        autocastfx.convert(Function(write), (torch.rand(8, 8),), dtype=torch.bfloat16, op_list=KEPT)
        return
    with pytest.raises(VerifyError, match=r"node 'add_' \(add_\): writes into \w+, a cast that nobody"):
        autocastfx.convert(Function(write), (torch.rand(8, 8),), dtype=torch.bfloat16, op_list=KEPT)


def test_an_output_of_another_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_last(state: Any) -> None:
        last = state.graph.output_node().all_input_nodes[0]
        last.replace_all_uses_with(last.all_input_nodes[0])

    planted(monkeypatch, drop_last)
    with pytest.raises(VerifyError, match=r"output matmul_1 is bfloat16, planned float32"):
        convert()


def test_a_plan_that_the_graph_does_not_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def replan(state: Any) -> Any:
        softmax = next(n for n in state.placements if n.name == "softmax")
        low = Placement(Precision.LOW, Precision.LOW, Cause(Why.EDITED))
        return replace(state, placements={**state.placements, softmax: low})

    planted(monkeypatch, replan)
    with pytest.raises(VerifyError, match=r"node 'softmax' \(softmax\): gives float32, planned bfloat16"):
        convert()


def test_the_message_shows_the_graph_with_the_node_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda state: casts(state.graph)[0].update_arg(1, torch.float64))
    with pytest.raises(VerifyError) as caught:
        convert()
    marked = [line for line in str(caught.value).splitlines() if line.startswith(">>> ")]
    assert len(marked) == 1
    assert "%matmul" in marked[0]


def test_the_callers_model_is_as_it_was_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda state: casts(state.graph)[0].update_arg(1, torch.float64))
    model = nn.Linear(8, 8).eval()
    before = dict(model.__dict__), [p.clone() for p in model.parameters()]
    with pytest.raises(VerifyError):
        autocastfx.convert(model, (torch.rand(2, 8),), dtype=torch.bfloat16)
    assert model.__dict__ == before[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before[1], strict=True))
