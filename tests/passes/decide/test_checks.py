"""The checks decide in their order, bind whoever asks, and are told on the page that lists them."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from autocastfx.graph.names import op_name
from autocastfx.passes.decide import checks, demands, widening
from autocastfx.passes.decide.checks import CHECKS, Case, Check, Classifier
from autocastfx.plan import plan
from autocastfx.plan.plan import Forced
from autocastfx.policy.kernel_facts import load_kernel_facts
from autocastfx.policy.op_list import load_op_list
from autocastfx.policy.rule import Category
from tests.decided import traced
from tests.golden.list_tables import OTHER_TABLES, filled, names
from tests.golden.readme import PLACEMENT

REASONS = {n: r for m in (plan, checks, demands, widening) for n, r in vars(m).items() if isinstance(r, Forced)}


def test_the_table_of_reasons_is_up_to_date() -> None:
    text = PLACEMENT.read_text(encoding="utf-8")
    assert text == filled(text), "run `python -m tests.golden` and review what changed"
    assert names(text) == list(OTHER_TABLES)


@pytest.mark.parametrize("reason", REASONS.values(), ids=str)
def test_each_reason_says_what_to_do_and_is_on_the_page(reason: Forced) -> None:
    assert reason.remedy
    assert f"`{reason}`" in PLACEMENT.read_text(encoding="utf-8")


def test_each_reason_but_those_of_other_nodes_has_a_check() -> None:
    assert {check.forces for check in CHECKS} == {None, *REASONS.values()} - {demands.UPDATE, widening.STAYS_LOW}


def test_what_binds_whoever_asks_and_what_is_no_end() -> None:
    binding = {"sub-graph", "eligibility"} | {f"forced:{n}" for n in ("tensor-class", "dtype", "no-kernel", "constant")}
    assert {str(check.forces) for check in CHECKS if check.binds} == binding | {"forced:user-cast"}
    assert [check.look for check in CHECKS if check.goes_on] == [Case.is_square, Case.is_small_product]


def test_a_reason_is_its_name_and_reads_back() -> None:
    for reason in REASONS.values():
        assert reason == str(reason)
        assert plan._source(str(reason)) == reason
        assert isinstance(plan._source(str(reason)), Forced)
        again = pickle.loads(pickle.dumps(reason))
        assert (again, vars(again)) == (reason, vars(reason))
    assert {n for n, reason in REASONS.items() if reason.by_numbers} == {
        *("CONSTANT", "WIDE", "EPSILON", "RANGE", "WHOLE", "CANCELLATION", "UPDATE")
    }


MADE_UP = Forced("forced:made-up", "nothing")


def classified(monkeypatch: pytest.MonkeyPatch, *first: Check) -> tuple[plan.Decision, str | None]:
    """The decision on ``tanh`` with some checks that are asked first, and why it cannot run in 16 bits."""
    monkeypatch.setattr(checks, "CHECKS", (*first, *CHECKS))
    graph = traced(lambda x: x.tanh(), torch.ones(4))
    found = Classifier(load_op_list("float16"), load_kernel_facts(), torch.float16, "cpu")(graph, {})
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    return found.decisions[node], found.unable.get(node)


def is_tanh(case: Case) -> str | None:
    return "made up" if op_name(case.node) == "tanh" else None


def test_a_check_decides_by_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    decision, unable = classified(monkeypatch, Check(is_tanh, MADE_UP))
    assert str(decision) == "deny, made up (forced:made-up)"
    assert unable is None


def test_a_check_that_is_not_asked_decides_nothing_but_may_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Check(is_tanh, MADE_UP, when=lambda case: False)
    decision, unable = classified(monkeypatch, never)
    assert (decision.category, decision.source != MADE_UP, unable) == (Category.INFER, True, None)
    decision, unable = classified(monkeypatch, replace(never, binds=True))
    assert (decision.category, unable) == (Category.INFER, "made up")


def test_a_check_that_goes_on_changes_what_the_next_ones_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Category] = []

    def look(case: Case) -> None:
        seen.append(case.listed.category)

    decision, _ = classified(monkeypatch, Check(look), Check(is_tanh, MADE_UP, goes_on=True), Check(look))
    assert seen[:2] == [Category.INFER, Category.DENY]
    assert decision.source == MADE_UP


def test_a_check_without_a_reason_gives_what_the_list_says(monkeypatch: pytest.MonkeyPatch) -> None:
    decision, _ = classified(monkeypatch, Check(when=lambda case: True))
    assert (decision.category, isinstance(decision.source, Forced)) == (Category.INFER, False)
