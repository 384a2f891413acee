"""The cut against brute force, and what it promises beside the cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autocastfx.passes.analysis.min_cut import Label, Term, cheapest, total
from tests.helpers import examples

NAMES = "abcdefg"


def brute_force(terms: list[Term], fixed: Mapping[Label, bool]) -> tuple[int, frozenset[Label]] | None:
    """The least cost, and of all labellings that cost it the one with the fewest low labels."""
    best: tuple[int, frozenset[Label]] | None = None
    for size in range(len(NAMES) + 1):
        for chosen in itertools.combinations(NAMES, size):
            low = frozenset(chosen)
            if any((label in low) is not is_low for label, is_low in fixed.items()):
                continue
            cost = total(terms, low)
            if cost is not None and (best is None or cost < best[0]):
                best = cost, low
    return best


labels = st.lists(st.sampled_from(NAMES), max_size=3, unique=True).map(tuple)
costs = st.one_of(st.none(), st.integers(0, 12))
some_terms = st.lists(st.builds(Term, costs, labels, labels), max_size=14)
some_fixed = st.dictionaries(st.sampled_from(NAMES), st.booleans(), max_size=3)


@examples(150, 500)
@given(some_terms, some_fixed, st.randoms(use_true_random=False))
def test_the_cut_is_what_brute_force_finds(terms: list[Term], fixed: dict[Label, bool], order: random.Random) -> None:
    best = brute_force(terms, fixed)
    if best is None:
        return
    found = cheapest(terms, fixed)
    assert total(terms, found) == best[0]
    assert found == best[1]
    order.shuffle(terms)
    assert cheapest(terms, fixed) == found


def test_a_tie_is_float32() -> None:
    assert cheapest([Term(6, ("a",), ()), Term(6, (), ("a",))], {}) == frozenset()
    assert cheapest([Term(6, ("a",), ()), Term(7, (), ("a",))], {}) == {"a"}


def test_a_tie_is_float32_where_labels_depend_on_each_other() -> None:
    together = [Term(9, ("a",), ("b",)), Term(9, ("b",), ("a",))]  # which no label can decide alone
    assert cheapest([*together, Term(5, (), ("a",)), Term(5, ("b",), ())], {}) == frozenset()
    assert cheapest([*together, Term(6, (), ("a",)), Term(5, ("b",), ())], {}) == {"a", "b"}
    assert cheapest([Term(6, (), ("a",)), Term(6, ("a",), ("b",)), Term(6, ("b",), ())], {}) == frozenset()


def test_float32_wins_where_what_is_given_clashes() -> None:
    link = Term(None, ("a",), ("b",))
    assert cheapest([link], {"a": True, "b": False}) == frozenset()
    assert cheapest([link, Term(None, (), ("a",)), Term(None, ("b",), ())], {}) == frozenset()
    assert cheapest([link, Term(None, (), ("a",))], {}) == {"a", "b"}


def test_terms_between_the_same_labels_add_up() -> None:
    own = Term(5, ("b",), ())
    assert cheapest([Term(3, ("a",), ("b",)), own], {"a": True}) == {"a"}
    assert cheapest([Term(3, ("a",), ("b",))] * 2 + [own], {"a": True}) == {"a", "b"}
    assert cheapest([Term(3, ("a",), ("b",)), Term(None, ("a",), ("b",)), own], {"a": True}) == {"a", "b"}


def test_a_cost_is_paid_once_for_all_readers() -> None:
    terms = [Term(6, ("a", "b", "c"), ("x",)), *(Term(3, (), (name,)) for name in "abc")]
    assert cheapest(terms, {"x": False}) == {"a", "b", "c"}
    assert total(terms, {"a", "b", "c"}) == 6
    assert total(terms, set()) == 9


@pytest.mark.parametrize("is_low", [True, False])
def test_what_forbidding_terms_link_follows(is_low: bool) -> None:
    chain = [Term(None, (a,), (b,)) for a, b in itertools.pairwise(NAMES)]
    first, last = NAMES[0], NAMES[-1]
    found = cheapest(chain, {first if is_low else last: is_low})
    assert found == (frozenset(NAMES) if is_low else frozenset())


def test_a_forbidden_labelling_has_no_total() -> None:
    assert total([Term(None, ("a",), ("b",))], {"a"}) is None
    assert total([Term(None, ("a",), ("b",)), Term(2)], {"a", "b"}) == 2
