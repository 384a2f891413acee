"""``convert`` and ``enable`` decide the same on every model of the corpus: the same graph, the same dtypes."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch

import autocastfx
from autocastfx import Plan
from tests.helpers import sampled
from tests.numerics.corpus import CASES

pytestmark = pytest.mark.filterwarnings("ignore:.* are float64, and only float32 values are converted")
# What one graph does not hold: `enable` goes on behind it.
BROKEN = frozenset[str]()


def decided(plan: Plan) -> Counter[tuple[str, ...]]:
    return Counter((node.op, str(node.placement.run), node.captured, node.dtype) for node in plan.nodes)


@pytest.mark.parametrize("number", sampled(range(len(CASES)), lambda number, _: number % 40 == 7))
def test_a_model_of_the_corpus_is_the_same_by_both_ways(number: int) -> None:
    case = CASES[number]
    call = case.call(case.sizes[0])
    model = case.model()
    torch.manual_seed(0)
    ours = autocastfx.convert(model, call.args, call.kwargs, dtype="bfloat16", check=False)
    other = autocastfx.enable(case.model(), dtype="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other(*call.args, **call.kwargs)
    backend = autocastfx.backend_of(other)
    assert backend is not None
    (graph,) = backend.graphs
    assert graph.plan is not None
    assert decided(graph.plan) == decided(ours.plan)
    assert len(graph.plan.casts) == len(ours.plan.casts)
