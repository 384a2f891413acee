"""Products are chosen as brute force chooses them: exactly at a price, nearly always at a limit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from autocastfx.numerics.choice import Candidate, Choice

Numbers = Callable[[float, float], float]


def instance(generator: random.Random) -> Choice:
    values = [f"value {i}" for i in range(4)]
    costs = {value: generator.choice([1, 2, 3, 5]) * generator.uniform(0, 2) for value in values}
    gains, count = (1.0, 2.0, 2.0, 4.0, 8.0), generator.choice([6, 7, 8])
    return Choice(
        [
            Candidate(generator.choice(gains), 10 ** generator.uniform(-2, 0.5), tuple(generator.sample(values, 2)))
            for _ in range(count)
        ],
        costs,
    )


def brute(choice: Choice, rank: Numbers, keeps: Callable[[float, float], bool] = lambda _w, _e: True) -> float:
    """The least rank of all subsets within a limit; both get the worth and the error."""
    indices = range(len(choice.candidates))
    subsets = (few for n in range(len(indices) + 1) for few in itertools.combinations(indices, n))
    pairs = [(choice.worth(few), choice.error(few)) for few in subsets]
    return min(rank(*pair) for pair in pairs if keeps(*pair))


def test_at_a_price_the_cut_is_exact() -> None:
    generator = random.Random(0)
    for _ in range(60):
        choice, price = instance(generator), 10 ** generator.uniform(-1, 1)
        chosen = choice.at(price)
        expected = brute(choice, lambda worth, error, price=price: price * error - worth)
        assert price * choice.error(chosen) - choice.worth(chosen) == pytest.approx(expected, abs=1e-6)


def test_at_a_limit_the_choice_is_nearly_always_the_best() -> None:
    generator, right = random.Random(1), 0
    for number in range(300):
        choice = instance(generator)
        if number % 2:
            most = generator.uniform(0.05, 0.8) * choice.error(range(len(choice.candidates)))
            chosen = choice.most_worth(most)
            assert choice.error(chosen) <= most
            best = brute(choice, lambda worth, _: -worth, lambda _, error, most=most: error <= most)
            right += -choice.worth(chosen) == pytest.approx(best, abs=1e-9)
        else:
            choice = Choice(choice.candidates, {})
            need = generator.uniform(0.2, 0.9) * choice.worth(range(len(choice.candidates)))
            chosen = choice.least_error(need) or frozenset()
            assert choice.worth(chosen) >= need
            best = brute(choice, lambda _, error: error, lambda worth, _, need=need: worth >= need)
            right += choice.error(chosen) == pytest.approx(best, abs=1e-9)
    assert right >= 0.97 * 300


def test_readers_pay_for_a_value_once() -> None:
    both = Choice([Candidate(2.0, 0.0, ("x",)), Candidate(2.0, 0.0, ("x",))], {"x": 3.0})
    assert both.at(1.0) == {0, 1}
    assert both.worth({0, 1}) == 1.0
    apart = Choice([Candidate(2.0, 0.0, ("x",)), Candidate(2.0, 0.0, ("y",))], {"x": 3.0, "y": 3.0})
    assert apart.at(1.0) == frozenset()


def test_of_candidates_with_one_key_one_is_chosen() -> None:
    generator, right = random.Random(3), 0
    for _ in range(100):
        numbers = [(generator.uniform(1, 8), 10 ** generator.uniform(-2, 0.5), key) for key in "aabbbcd"]
        choice = Choice([Candidate(gain, error, (), key) for gain, error, key in numbers], {})
        most = generator.uniform(0.05, 0.8) * choice.error(range(len(numbers)))
        for chosen in (choice.at(0.5), choice.most_worth(most)):
            assert len(choice.keys(chosen)) == len(chosen)
        subsets = (few for n in range(5) for few in itertools.combinations(range(len(numbers)), n))
        apart = (few for few in subsets if len(choice.keys(few)) == len(few) and choice.error(few) <= most)
        right += choice.worth(choice.most_worth(most)) == pytest.approx(max(map(choice.worth, apart)), abs=1e-9)
    assert right >= 97


def test_more_than_all_is_none() -> None:
    choice = Choice([Candidate(2.0, 1.0)], {})
    assert choice.least_error(2.0) == {0}
    assert choice.least_error(2.5) is None
    assert choice.most_worth(0.5) == frozenset()
    assert Choice([], {}).least_error(0.0) == frozenset()


def test_hundreds_of_products_take_seconds_at_most() -> None:
    generator = random.Random(2)
    many = [Candidate(generator.choice((1.0, 2.0, 4.0)), 10 ** generator.uniform(-3, 0)) for _ in range(300)]
    choice = Choice(many, {})
    need = 0.6 * choice.worth(range(300))
    chosen = choice.least_error(need)
    assert chosen is not None
    order = sorted(range(300), key=lambda i: many[i].error / many[i].gain)
    greedy = next(order[:n] for n in range(301) if choice.worth(order[:n]) >= need)
    assert choice.error(chosen) <= choice.error(greedy)
