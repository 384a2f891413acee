"""What an op list names and an enabled model does not have is told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import autocastfx
from autocastfx import CompileBackend
from autocastfx.errors import UnmatchedRuleWarning

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.ones(2, 8)


class Net(nn.Module):
    """A dropout written by hand, which runs in training alone, a break of the graph, and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x * torch.bernoulli(torch.full_like(x, 0.5)) if self.training else x
        torch._dynamo.graph_break()
        return self.last(x).exp()


def rules(**data: Any) -> autocastfx.OpList:
    return autocastfx.OpList.of(data, name="mine")


def told(model: nn.Module, lists: autocastfx.OpList, *modes: bool) -> list[str]:
    """What is told by calls of ``model`` in training (True) or evaluation."""
    autocastfx.enable(model, op_list=["default", lists])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnmatchedRuleWarning)
        for training in modes:
            model.train(training)(X)
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught]


def test_a_rule_that_matches_nothing_is_told_once_after_the_first_call_in_training() -> None:
    lists = rules(deny=["exp", "exp2"], modules=[{"path": "lats", "category": "float32"}])
    assert told(Net(), lists, False, False, True, True, False) == [
        "mine:deny[1]: no node of the model is 'exp2' (did you mean 'exp'?). Captured so far: 3 graphs.",
        "mine:modules[0]: no module of the model matches 'lats' (did you mean 'last'?). Captured so far: 3 graphs.",
    ]


def test_a_rule_for_a_later_graph_or_for_training_alone_is_not_told() -> None:
    lists = rules(deny=["bernoulli", "exp"], modules=[{"path": "last", "category": "float32"}])
    assert told(Net(), lists, False, True) == []


def test_what_is_recomposed_or_stands_for_another_op_has_matched() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * X[0]

    assert told(Written(), rules(deny=["rms_norm", "square", "rsqrt"]), True) == []


def test_models_of_one_backend_are_told_of_when_all_have_been_called() -> None:
    lists = rules(deny=["gelu", "relu", "exp2"])
    backend = CompileBackend(dtype="bfloat16", inner="eager", op_list=["default", lists])
    one, other = (nn.Sequential(nn.Linear(8, 8), act) for act in (nn.GELU(), nn.ReLU()))
    for model in (one, other):
        backend.compile(model)
    one(X)
    assert len(backend.unmatched) == 2
    with pytest.warns(UnmatchedRuleWarning, match=r"exp2'\. Captured so far: 2 graphs\.$") as caught:
        other(X)
    assert len(caught) == 1


def test_rules_for_another_device_and_shipped_ones_are_left_out() -> None:
    lists = rules(deny=[{"exp2": {"devices": ["cuda"]}}, {"exp2": {"devices": ["cpu"]}}])
    (said,) = told(Net(), lists, True)
    assert said.startswith("mine:deny[1]")
    assert told(Net(), rules(), True) == []


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return gradients[0] * 2


def test_a_function_that_dynamo_traces_through_is_refused() -> None:
    lists = ["default", rules(allow=[f"{__name__}.Double"])]
    compiled = torch.compile(Net(), backend=CompileBackend(op_list=lists, inner="eager"))
    with pytest.raises(
        BackendCompilerFailed, match=rf"mine names {__name__}\.Double, which torch\.compile traces through"
    ):
        compiled(X)
