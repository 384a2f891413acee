"""Where the float32 values of a 16-bit model flow on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autocastfx.plan.plan import Cause, Why
from tests.passes.test_widen import Weighted, X, converted, raised

pytestmark = pytest.mark.filterwarnings("ignore::autocastfx.errors.UnmatchedRuleWarning")  # the rules of all functions


def test_float32_flows_through_views_and_elementwise_ops_that_lead_to_float32_alone() -> None:
    amp_model = converted(lambda w, x: (x @ w).exp().view(-1).tanh().log(), rules={"deny": ["exp", "log"]})
    assert raised(amp_model) == {"exp", "view", "tanh", "log"}
    assert [c.value for c in amp_model.plan.casts] == ["matmul", "log"]
    assert amp_model.plan["tanh"].placement.because == Cause(Why.AFTER, ("view",))


def test_a_value_that_others_read_is_rounded_for_them_once() -> None:
    def fan(w: Tensor, x: Tensor) -> Tensor:
        y = x.exp()
        return (y @ w) + (y.t() @ w) * y.log()

    amp_model = converted(fan, rules={"deny": ["exp", "log"]})
    assert raised(amp_model) == {"exp", "log"}  # t leads to a product
    assert [(c.value, c.dtype, len(c.readers)) for c in amp_model.plan.casts] == [
        ("args_0", "float32", 1),
        ("exp", "bfloat16", 2),
        ("log", "bfloat16", 1),
    ]


def test_an_op_that_reads_something_else_in_16_bits_stays() -> None:
    assert raised(converted(lambda w, x: (x.exp() + w).log(), rules={"deny": ["exp", "log"]})) == {"exp", "log"}
    assert raised(converted(lambda w, x: (x.exp() + w.exp()).log(), rules={"deny": ["exp", "log"]})) == {
        *("exp", "exp_1", "add", "log")
    }


@pytest.mark.parametrize("keeps", [True, False])
def test_outputs_keep_their_dtype_or_stay_raised(keeps: bool) -> None:
    amp_model = converted(
        lambda w, x: ((x @ w).exp().view(-1), x @ w), rules={"deny": ["exp"]}, keep_output_dtype=keeps
    )
    wide, low = amp_model(X.bfloat16())
    assert (wide.dtype, low.dtype) == (torch.bfloat16 if keeps else torch.float32, torch.bfloat16)
    assert raised(amp_model) == ({"exp"} if keeps else {"exp", "view"})


def test_a_size_is_read_without_a_cast() -> None:
    def picked(w: Tensor, x: Tensor) -> Tensor:
        y = x[x[:, 0] > 0]
        return y.log() + torch.ones(y.shape[0], 1)

    amp_model = converted(picked, rules={"deny": ["index", "log"]})
    assert "sym_size" in {node.op for node in amp_model.plan.nodes if node.placement.as_stored}
    assert [c.value for c in amp_model.plan.casts] == ["args_0", "log"]
    everything = {"modules": [{"path": "re:.*", "category": "float32"}]}
    whole = converted(picked, rules=everything)
    assert {whole.plan[name].op for name in raised(whole)} == {"gt", "index", "log", "add"}


def test_members_of_a_tuple_go_with_the_op_that_made_it() -> None:
    rules = {"deny": ["exp", "log", "topk"], "clear": ["split"]}

    def parts(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        first, second = x.exp().split(4)
        values, places = (x @ w).topk(2)
        return first.log(), second.log(), values @ w[:2], places

    amp_model = converted(parts, rules=rules)
    assert {"exp", "split", "topk", "log", "log_1"} < raised(amp_model)
    expected = Weighted(
        lambda w, x: (*(p.log().bfloat16() for p in x.float().exp().split(4)), (x @ w).topk(2)[0] @ w[:2])
    )
    for ours, theirs in zip(amp_model(X.bfloat16()), expected.bfloat16()(X.bfloat16()), strict=False):
        assert torch.equal(ours, theirs)
    both = converted(lambda w, x: x.exp().split(4)[0] @ w[:, :4] + x.exp().split(4)[1].log()[:, :4], rules=rules)
    assert "split" not in raised(both)


def test_float32_does_not_flow_through_memory_that_is_written_into() -> None:
    amp_model = converted(lambda w, x: x.exp().tanh().add_(2).log(), rules={"deny": ["exp", "log"]})
    assert raised(amp_model) == {"exp", "log"}
    by_hand = Weighted(lambda w, x: x.float().exp().bfloat16().tanh().add(2).float().log().bfloat16()).bfloat16()
    assert torch.equal(amp_model(X.bfloat16()), by_hand(X.bfloat16()))
