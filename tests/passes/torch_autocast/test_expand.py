"""Composite ops stand as their parts where torch.autocast decides inside them, and stay whole where it does not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autocastfx
from autocastfx.capture.captured import Captured
from autocastfx.graph.names import op_name
from autocastfx.graph.node import dtypes, module_path, tensors
from autocastfx.passes.torch_autocast.dispatch import Dispatch
from autocastfx.passes.torch_autocast.expand import expand
from tests.helpers import Function, op_list, with_low_lstm

pytestmark = [
    pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning"),
    pytest.mark.filterwarnings("ignore:.*are float64, and only float32 values:autocastfx.errors.StateWarning"),
]

LIST = """
placement: follow
unlisted: keep
allow: [linear, mm.default, bmm.default, mkldnn_rnn_layer]
deny: [nll_loss, log_softmax]
set_dtype: [log_softmax]
"""


@pytest.fixture
def rules(tmp_path: Path) -> autocastfx.OpList:
    return op_list(tmp_path, LIST)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(4, 6)


def convert(model: Any, *inputs: Any, rules: Any, **options: Any) -> autocastfx.AmpModule:
    module = model if isinstance(model, nn.Module) else Function(model)
    return autocastfx.convert(module, inputs, op_list=rules, dtype=torch.bfloat16, **options)


def ops(model: autocastfx.AmpModule) -> Counter[str]:
    return Counter(node.op for node in model.plan.nodes)


# -- change -----------------------------------------------------------------------------------------------------------


def test_an_einsum_is_a_product_inside(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    model = convert(lambda x, y: torch.einsum("ij,kj->ik", x, y), x, x + 1, rules=rules, keep_output_dtype=False)
    assert ops(model)["einsum"] == 0
    assert ops(model)["bmm"] == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.einsum("ij,kj->ik", x, x + 1)
    assert torch.equal(model(x, x + 1), expected)
    assert model(x[:3], x[:2]).shape == (3, 2)
    assert len(model.variants) == 2  # train and eval: other sizes are served by the same graph


def test_parts_of_parts(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    assert ops(convert(lambda x: torch.inner(x, x), x, rules=rules))["mm"] == 1  # through tensordot


def test_parts_depend_on_the_dtypes_that_autocast_gives(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(x), labels)

    model = convert(Classifier(), x, torch.zeros(4, dtype=torch.long), rules=rules)
    (node,) = [node for node in model.plan.nodes if node.op == "log_softmax"]
    assert str(node.placement.because) == "the call names its dtype"  # cross_entropy_loss names that of its input
    assert node.dtype == "bfloat16"
    assert ops(model)["nll_loss"] == 1


@with_low_lstm
def test_outputs_of_parts_take_the_place_of_the_tuple(rules: autocastfx.OpList) -> None:
    torch.manual_seed(0)
    lstm, x = nn.LSTM(6, 5, batch_first=True), torch.rand(2, 3, 6)
    model = convert(lstm, x, rules=rules)
    assert ops(model)["mkldnn_rnn_layer"] == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, (hidden, cell) = lstm(x)
    found, (found_hidden, found_cell) = model(x)
    for one, other in ((found, output), (found_hidden, hidden), (found_cell, cell)):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        longer = lstm(torch.ones(3, 7, 6))[0]
    assert torch.equal(model(torch.ones(3, 7, 6))[0], longer.float())


def test_parts_keep_the_module_and_get_names_of_their_own(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("ij,kj->ik", x, x)

    model = convert(nn.Sequential(Inner(), nn.ReLU()), x, rules=rules)
    product = next(node for node in model.graph.nodes if op_name(node) == "bmm")
    assert module_path(product) == "0"
    assert product.name.startswith("einsum_")


# -- no change --------------------------------------------------------------------------------------------------------


def test_a_composite_that_makes_a_tensor_of_a_number_stays_whole(x: torch.Tensor, rules: autocastfx.OpList) -> None:
    """Its parts read a tensor that its kernel alone has."""
    model = convert(lambda x: torch.where(x > 0, x, -1e9), x, rules=rules)
    assert ops(model) == {"gt": 1, "where": 1}
    assert torch.equal(model(x - 0.5), torch.where(x > 0.5, x - 0.5, -1e9))


def test_a_composite_without_listed_parts_stays_whole(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    whole = convert(lambda x: F.layer_norm(x, (6,)).reshape(-1), x, rules=rules)
    assert ops(whole) == {"layer_norm": 1, "reshape": 1}


@pytest.mark.parametrize(
    ("whole", "expanded"),
    [
        pytest.param("ij,ij->ij", "ij,ij->i", id="equations"),
        pytest.param("ij->ji", "ij,kj->ik", id="numbers of operands"),
    ],
)
def test_a_call_that_stays_whole_says_nothing_of_one_with_other_arguments(
    whole: str, expanded: str, rules: autocastfx.OpList, x: torch.Tensor
) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.einsum(e, *[x] * (e.count(",") + 1)) for e in (whole, expanded, whole, expanded))

    found = ops(convert(both, x, rules=rules))
    assert (found["einsum"], found["bmm"]) == (2, 2)


def test_a_call_that_stays_whole_says_nothing_of_one_with_other_dimensions(
    rules: autocastfx.OpList, x: torch.Tensor
) -> None:
    found = ops(convert(lambda x, v: (torch.inner(v, v), torch.inner(x, x)), x, x[0], rules=rules))
    assert (found["inner"], found["mm"]) == (1, 1)


def test_a_call_that_stays_whole_says_nothing_of_one_with_other_dtypes() -> None:
    rules = autocastfx.OpList.of({"placement": "follow", "unlisted": "keep", "allow": ["mkldnn_rnn_layer"]}, name="rnn")

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.single = nn.LSTM(6, 5).double(), nn.LSTM(6, 5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.wide(x.double())[0], self.single(x)[0]

    found = ops(convert(Both(), torch.rand(3, 2, 6), rules=rules))
    assert (found["lstm"], found["mkldnn_rnn_layer"]) == (1, 1)


def test_a_listed_composite_stays_whole(x: torch.Tensor) -> None:
    cuda = convert(lambda x: torch.einsum("ij,kj->ik", x, x), x, rules="torch_autocast_cuda")
    assert ops(cuda) == {"einsum": 1}


def test_other_placements_do_not_expand(x: torch.Tensor) -> None:
    assert ops(convert(lambda x: torch.einsum("ij,kj->ik", x, x), x, rules="bfloat16")) == {"einsum": 1}


# -- numerics, determinism --------------------------------------------------------------------------------------------


def test_the_source_is_left_alone_and_twice_gives_the_same(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    captured = convert(lambda x: torch.einsum("ij,kj->ik", x, x).relu(), x, rules=rules).variants[0].captured
    assert isinstance(captured, Captured)
    before = str(captured.graph)
    dispatch = Dispatch(rules, torch.bfloat16, "cpu")
    first, second = expand(captured.graph, dispatch), expand(captured.graph, dispatch)
    assert str(captured.graph) == before
    assert str(first) == str(second)
    assert str(expand(first, dispatch)) == str(first)  # nothing is left to expand
    assert [dtypes(n) for n in first.nodes if op_name(n) == "relu"] == [(torch.float32,)]
    assert all(tensors(n) or "sym_size" in n.name or n.op == "output" or "mul" in n.name for n in first.nodes)


def test_gradients(rules: autocastfx.OpList, x: torch.Tensor) -> None:
    weight = nn.Parameter(torch.rand(5, 6))

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("ij,kj->ik", x, self.weight)

    model = convert(Product(), x, rules=rules, keep_output_dtype=False)
    (gradient,) = torch.autograd.grad(model(x).float().square().sum(), weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = torch.einsum("ij,kj->ik", x, weight)
    assert torch.equal(gradient, torch.autograd.grad(result.float().square().sum(), weight)[0])
