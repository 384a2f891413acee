"""The cheapest way to label values low or float32, as a minimum s-t cut. Knows nothing of graphs of operators.

Every cost has one form: so many bytes *if any of these is low while any of those is float32*. That is what a cut can
minimise exactly (V. Kolmogorov and R. Zabih, "What energy functions can be minimized via graph cuts?", 2004).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

Label = Hashable
OUTSIDE = "float32"  # the label of what is float32 whatever is placed: graph inputs, parameters, outputs


@dataclass(frozen=True)
class Term:
    """``cost`` is paid if any of ``lows`` is low and any of ``float32s`` is float32; an empty tuple counts as given.

    A cost of None forbids it.
    """

    cost: int | None
    lows: tuple[Label, ...] = ()
    float32s: tuple[Label, ...] = ()


def total(terms: Iterable[Term], low: frozenset[Label] | set[Label]) -> int | None:
    """The cost of a labelling; None if it is forbidden. Labels outside ``low`` are float32."""
    paid = 0
    for term in terms:
        any_low = not term.lows or any(label in low for label in term.lows)
        if any_low and (not term.float32s or any(label not in low for label in term.float32s)):
            if term.cost is None:
                return None
            paid += term.cost
    return paid


def cheapest(terms: Iterable[Term], fixed: Mapping[Label, bool]) -> frozenset[Label]:
    """The labels that are low in the cheapest labelling; of several, the one with the fewest of them.

    Args:
        terms: costs in bytes, each at least 0.
        fixed: labels that must be low (True) or float32 (False). A float32 one wins where a forbidding term links two.
    """
    network = _Network()
    for index, term in enumerate(terms):
        network.add(term, index)
    network.fix(fixed)
    for component in network.components():
        network.solve(component)
    return frozenset(label for label, is_low in network.found.items() if is_low and not isinstance(label, _Any))


@dataclass(frozen=True)
class _Any:
    """An auxiliary label for several: low if any of them is, or float32 if any of them is."""

    term: int
    is_low: bool


Capacity = int | None  # None: without bound


class _Network:
    """Arcs a → b with a capacity paid if a is low and b float32; ``pull`` is what float32 costs more than low."""

    def __init__(self) -> None:
        self.after: dict[Label, dict[Label, Capacity]] = defaultdict(dict)
        self.before: dict[Label, dict[Label, Capacity]] = defaultdict(dict)
        self.pull: dict[Label, int] = defaultdict(int)
        self.found: dict[Label, bool] = {}
        self.forced: dict[Label, bool] = {}

    def add(self, term: Term, index: int) -> None:
        a = self._any(term.lows, index, is_low=True)
        b = self._any(term.float32s, index, is_low=False)
        if a is None and b is None:
            return
        if a is None or b is None:
            self._lean(a, b, term.cost)
        elif a != b:
            self._arc(a, b, term.cost)

    def _lean(self, low: Label | None, float32: Label | None, cost: Capacity) -> None:
        """The cost of one label alone: of ``low`` being low, or of ``float32`` being float32."""
        label, sign = (float32, 1) if low is None else (low, -1)
        if cost is None:
            self.forced[label] = low is None
        else:
            self.pull[label] += sign * cost

    def _any(self, labels: tuple[Label, ...], index: int, *, is_low: bool) -> Label | None:
        distinct = tuple(dict.fromkeys(labels))
        if len(distinct) < 2:
            return distinct[0] if distinct else None
        whole = _Any(index, is_low)
        for label in distinct:
            if is_low:
                self._arc(label, whole, None)
            else:
                self._arc(whole, label, None)
        return whole

    def _arc(self, a: Label, b: Label, capacity: Capacity) -> None:
        known = self.after[a].get(b, 0)
        both = None if known is None or capacity is None else known + capacity
        self.after[a][b] = self.before[b][a] = both
        self.pull[a] += 0
        self.pull[b] += 0

    def fix(self, fixed: Mapping[Label, bool]) -> None:
        """Settle what is given and all that follows from it, so that the cut need only decide the rest.

        A label is settled too where one choice is best whatever its neighbours are.
        """
        wanted = {**self.forced, **fixed}
        queue: deque[Label] = deque()
        for is_low in (False, True):  # in this order, so that float32 wins
            for label in (label for label, low in wanted.items() if low is is_low):
                self._settle(label, is_low, queue)
        queue.extend(self.pull)
        while queue:
            label = queue.popleft()
            if label not in self.found:
                best = self._obvious(label)
                if best is not None:
                    self._settle(label, best, queue)

    def _settle(self, label: Label, is_low: bool, changed: deque[Label]) -> None:
        pending = [(label, is_low)]
        while pending:
            label, is_low = pending.pop()
            if label in self.found:
                continue
            self.found[label] = is_low
            ahead, sign = (self.after, 1) if is_low else (self.before, -1)
            for other, capacity in ahead[label].items():
                if other in self.found:
                    continue
                if capacity is None:
                    pending.append((other, is_low))
                else:
                    self.pull[other] += sign * capacity
            changed.extend(o for o in (*self.after[label], *self.before[label]) if o not in self.found)

    def _obvious(self, label: Label) -> bool | None:
        pull = self.pull[label]
        if pull > 0:
            loss = self._capacity(self.after[label])
            return True if loss is not None and pull > loss else None
        gain = self._capacity(self.before[label])
        return False if gain is not None and -pull >= gain else None

    def _capacity(self, arcs: Mapping[Label, Capacity]) -> Capacity:
        open_capacity = 0
        for other, capacity in arcs.items():
            if other not in self.found:
                if capacity is None:
                    return None
                open_capacity += capacity
        return open_capacity

    def components(self) -> list[set[Label]]:
        import networkx as nx

        rest = nx.Graph()
        rest.add_nodes_from(label for label in self.pull if label not in self.found)
        rest.add_edges_from((a, b) for a in rest.nodes for b in self.after[a] if b not in self.found)
        return list(nx.connected_components(rest))

    def solve(self, component: set[Label]) -> None:
        """Arcs run from float32 to low here: what still reaches the sink is then the least set that is low."""
        import networkx as nx
        from networkx.algorithms.flow import boykov_kolmogorov

        low, float32 = object(), object()
        network = nx.DiGraph()
        network.add_nodes_from((float32, low))
        for label in component:
            if self.pull[label] > 0:
                network.add_edge(label, low, capacity=self.pull[label])
            elif self.pull[label] < 0:
                network.add_edge(float32, label, capacity=-self.pull[label])
            for other, capacity in self.after[label].items():
                if other in component:
                    bound = {} if capacity is None else {"capacity": capacity}
                    network.add_edge(other, label, **bound)
        _, (_, reaching) = nx.minimum_cut(network, float32, low, flow_func=boykov_kolmogorov)
        self.found.update({label: label in reaching for label in component})
