"""``convert`` and ``enable`` decide the same on every model of the corpus: the same graph, the same dtypes."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch

import autocastfx
from autocastfx import Plan
from autocastfx.errors import UncapturedGraphWarning
from tests.helpers import sampled
from tests.numerics.corpus import CASES

pytestmark = pytest.mark.filterwarnings("ignore:.* are float64, and only float32 values are converted")
# They read numbers from tensors: `convert` holds that in one graph, and `enable` goes on behind a break.
BROKEN = ("edge-weights", "cumulative-norm", "length-by-values")


def decided(plan: Plan) -> Counter[tuple[str, ...]]:
    """What computes with tensors, and in which dtypes; a number that is read has none."""
    return Counter((n.op, str(n.placement.run), n.captured, n.dtype) for n in plan.nodes if n.dtype)


@pytest.mark.parametrize("number", sampled(range(len(CASES)), lambda number, _: number % 40 == 7))
def test_a_model_of_the_corpus_is_the_same_by_both_ways(number: int) -> None:
    case = CASES[number]
    call = case.call(case.sizes[0])
    model = case.model()
    torch.manual_seed(0)
    ours = autocastfx.convert(model, call.args, call.kwargs, dtype="bfloat16", check=False)
    other = autocastfx.enable(case.model(), dtype="bfloat16")
    with warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("always", category=UncapturedGraphWarning)
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # Dynamo itself asks for it
        other(*call.args, **call.kwargs)
    backend = autocastfx.backend_of(other)
    assert backend is not None
    plans = [graph.plan for graph in backend.graphs if graph.plan is not None]
    assert (bool(told) or len(plans) > 1) is (case.name in BROKEN), [str(one.message) for one in told]
    if case.name not in BROKEN:
        assert decided(plans[0]) == decided(ours.plan)
        assert len(plans[0].casts) == len(ours.plan.casts)
