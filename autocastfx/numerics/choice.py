"""Choose by gains and errors: which products run in float8, and how values are kept for backward. Pure.

At a given price of an error this is the selection of projects that share tools, which a minimum cut solves exactly
(J.-C. Picard, "Maximal closure of a graph and applications to combinatorial problems", 1976): a product is a project,
and a value quantised for one layout is a tool, paid for once. At a limit no cut is exact: the cuts on both sides of it,
which lie on the convex hull, are improved by exchanging a few products.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autocastfx.passes.analysis.min_cut import Term, cheapest

_MOST_CUTS = 40
_NEAR = 10  # products on each side of a limit whose exchange is tried
_AT_ONCE = 2  # products that an exchange takes out, and puts in
_UNITS = 10**12  # of a cut, whose costs are whole numbers: all gains together


@dataclass(frozen=True)
class Choice:
    """All candidates, and the cost of each quantised value, in the unit of gains. Errors add up as if independent."""

    candidates: Sequence[Candidate]
    costs: Mapping[Hashable, float]

    def worth(self, chosen: Collection[int]) -> float:
        """The gains of these products, less the cost of quantising each value that they read."""
        needed = {value for i in chosen for value in self.candidates[i].reads}
        return sum(self.candidates[i].gain for i in chosen) - sum(self.costs.get(value, 0.0) for value in needed)

    def error(self, chosen: Collection[int]) -> float:
        """The squared relative error."""
        return sum(self.candidates[i].error for i in chosen)

    def keys(self, chosen: Collection[int]) -> set[object]:
        """The keys of these products."""
        return {self.candidates[i].key for i in chosen}

    @cached_property
    def _readers(self) -> dict[Hashable, tuple[int, ...]]:
        readers: dict[Hashable, list[int]] = {}
        for i, one in enumerate(self.candidates):
            for value in one.reads:
                readers.setdefault(value, []).append(i)
        return {value: tuple(own) for value, own in readers.items()}

    def at(self, price: float) -> Chosen:
        """Return the products of the most worth less ``price`` times their squared error; of several, the fewest."""
        all_gains = sum(one.gain for one in self.candidates)
        if not all_gains:
            return frozenset()
        unit = _UNITS / all_gains
        order = sorted(enumerate(self.candidates), key=lambda pair: pair[1].gain - price * pair[1].error)
        best = {i if one.key is None else one.key: (i, one) for i, one in order}  # the last of each key

        def terms() -> Iterator[Term]:
            for i, one in best.values():
                yield Term(round(unit * one.gain), (), (i,))
                yield Term(round(unit * price * one.error), (i,), ())
            for value, readers in self._readers.items():
                yield Term(round(unit * self.costs.get(value, 0.0)), readers, ())

        return frozenset(label for label in cheapest(list(terms()), {}) if isinstance(label, int))

    def most_worth(self, error: float) -> Chosen:
        """Return the products that are worth the most and whose squared errors are ``error`` at most."""
        return self._within(_Limit(most_error=error))

    def least_error(self, worth: float) -> Chosen | None:
        """Return the products of the least error that are worth at least ``worth``; None if that is beyond all."""
        return None if self.worth(self.at(0.0)) < worth else self._within(_Limit(least_worth=worth))

    def hull(self, limit: _Limit) -> Iterator[Chosen]:
        """Yield cuts on the convex hull of worth and error, ever nearer to a limit on both sides."""
        ends = [self.at(0.0), frozenset[int]()]  # the most worth, and no error
        yield from ends
        kept = [limit.keeps(self.worth(end), self.error(end)) for end in ends]
        if kept[0] == kept[1]:
            return
        inside, beyond = ends[kept.index(True)], ends[kept.index(False)]
        for _ in range(_MOST_CUTS):
            worth, error = self.worth(beyond) - self.worth(inside), self.error(beyond) - self.error(inside)
            between = self.at(worth / error) if error else inside
            own = self.worth(between) - self.worth(inside), self.error(between) - self.error(inside)
            if abs(own[0] * error - own[1] * worth) <= 1e-9 * abs(worth * error):  # on the line: no cut is between
                return
            yield between
            is_kept = limit.keeps(self.worth(between), self.error(between))
            inside, beyond = (between, beyond) if is_kept else (inside, between)

    def _within(self, limit: _Limit) -> Chosen:
        """Return the best choice within a limit that exchanges reach from the cuts next to it."""
        cuts = list(self.hull(limit))
        # Of each side the last, which is the nearest.
        sides = {limit.keeps(self.worth(cut), self.error(cut)): cut for cut in cuts}
        found = (*cuts[:2], *(self._exchanged(start, limit) for start in sides.values()))
        return min(found, key=lambda chosen: (limit.rank(self.worth(chosen), self.error(chosen)), sorted(chosen)))

    def _exchanged(self, chosen: Chosen, limit: _Limit) -> Chosen:
        """Exchange few products at a time, as long as that is better."""
        while True:
            worth, error = self.worth(chosen), self.error(chosen)
            needed = Counter(value for i in chosen for value in self.candidates[i].reads)
            best, move = limit.rank(worth, error), None
            outs, ins = self._near(chosen, needed, worth, error)
            for out, into in itertools.product(_few(outs), _few(ins)):
                if not self._are_apart(chosen, out, into):
                    continue
                more = sum(self.candidates[i].error for i in into) - sum(self.candidates[i].error for i in out)
                rank = limit.rank(worth + self._gained(out, into, needed), error + more)
                if rank < best and not _is_close(rank, best):
                    best, move = rank, (out, into)
            if move is None:
                return chosen
            chosen = chosen.difference(move[0]).union(move[1])

    def _are_apart(self, chosen: Chosen, out: Sequence[int], into: Sequence[int]) -> bool:
        """True if after an exchange no two candidates have one key."""
        keys = [key for i in into if (key := self.candidates[i].key) is not None]
        others = (self.candidates[i].key for i in chosen.difference(out))
        return not keys or (len(set(keys)) == len(keys) and set(keys).isdisjoint(others))

    def _gained(self, out: Sequence[int], into: Sequence[int], needed: Mapping[Hashable, int]) -> float:
        """The worth gained by taking some products out and putting others in."""
        gained, changes = 0.0, dict[Hashable, int]()
        for sign, moved in ((-1, out), (1, into)):
            for one in (self.candidates[i] for i in moved):
                gained += sign * one.gain
                for value in one.reads:
                    changes[value] = changes.get(value, 0) + sign
        for value, change in changes.items():
            before = needed.get(value, 0)
            gained -= self.costs.get(value, 0.0) * ((before + change > 0) - (before > 0))
        return gained

    def _near(
        self, chosen: Chosen, needed: Mapping[Hashable, int], worth: float, error: float
    ) -> tuple[list[int], list[int]]:
        """The chosen products and the others that are nearest to the price at which they would change sides."""
        price = worth / error if error else 0.0
        distances = {
            i: abs(self._gained((), (i,), {}) - price * one.error) if i in chosen or needed else one.error
            for i, one in enumerate(self.candidates)
        }
        near = sorted(distances, key=distances.__getitem__)
        sides = [i for i in near if i in chosen], [i for i in near if i not in chosen]
        return sides[0][:_NEAR], sides[1][:_NEAR]


@dataclass(frozen=True)
class Candidate:
    """A product, or several that a rule names together; or a form in which values are kept.

    Attributes:
        gain: what it gains, apart from what its operands cost, at least 0.
        error: the squared relative error that it makes.
        reads: the quantised values that it needs.
        key: what a rule says of it; of several candidates with one key, which then read nothing, one at most is chosen.
    """

    gain: float
    error: float
    reads: tuple[Hashable, ...] = ()
    key: object = None


Chosen = frozenset[int]


def _few(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    return [few for count in range(_AT_ONCE + 1) for few in itertools.combinations(numbers, count)]


def _is_close(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(one, other, strict=True))


@dataclass(frozen=True)
class _Limit:
    """The limit of a choice, one of the two: the most squared error, or the least worth."""

    most_error: float | None = None
    least_worth: float | None = None

    def keeps(self, worth: float, error: float) -> bool:
        return self.rank(worth, error)[0] == 0

    def rank(self, worth: float, error: float) -> tuple[float, float, float]:
        """The order of choices, the least first: by how far beyond the limit, then by what is wanted."""
        if self.most_error is not None:
            return max(0.0, error - self.most_error), -worth, error
        return max(0.0, (self.least_worth or 0.0) - worth), error, -worth
