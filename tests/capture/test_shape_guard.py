"""A captured graph is used for the sizes that it holds for, and for no others."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import autocastfx
from autocastfx import AmpModule, OpList
from autocastfx.capture.shape_guard import ShapeGuard, shape_guard
from autocastfx.errors import VariantError
from tests.helpers import examples

pytestmark = pytest.mark.filterwarnings("ignore::autocastfx.errors.ManyVariantsWarning")  # each size may be its own

Sizes = tuple[tuple[int, int], ...]


class Shaped(nn.Module):
    """A module whose Python reads the sizes of its inputs."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function


class One(Shaped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Two(Shaped):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(x, y)


def loop(x: torch.Tensor) -> torch.Tensor:
    state = torch.zeros_like(x[0])
    for i in range(x.shape[0]):
        state = state * 0.5 + x[i]
    return state


def halving(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    while n > 2:
        x, n = x * 2, n // 2
    return x


def pieces(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([piece * i for i, piece in enumerate(x.chunk(3))])


def windows(x: torch.Tensor) -> torch.Tensor:
    return x.unfold(0, 2, 2).sum(-1) if x.shape[0] % 2 == 0 else x


def padded(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(x, (0, -x.shape[1] % 4))


def table(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(5, 4)[: x.shape[0], : x.shape[1]]


def shorter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    n = min(x.shape[0], y.shape[0])
    return x[:n].sum(1) - y[:n].sum(1)


# Per module: a function, and the sizes of its example.
MODULES: dict[str, tuple[Callable[..., torch.Tensor], Sizes]] = {
    "if shape": (lambda x: x * 2 if x.shape[0] > 3 else x + 1, ((4, 3),)),
    "if shape, other branch": (lambda x: x * 2 if x.shape[0] > 3 else x + 1, ((2, 3),)),
    "chain of comparisons": (lambda x: x * 2 if 2 < x.shape[0] <= 5 else x * 3, ((4, 3),)),
    "or": (lambda x: x * 2 if x.shape[0] == 3 or x.shape[1] > 3 else x * 3, ((4, 3),)),
    "loop over a length": (loop, ((3, 2),)),
    "list of rows": (lambda x: sum((r * i for i, r in enumerate(x)), torch.zeros(())), ((3, 2),)),
    "while": (halving, ((6, 2),)),
    "pieces": (pieces, ((4, 2),)),
    "multiple": (lambda x: x.view(-1, 4) * 2 if x.numel() % 4 == 0 else x + 1, ((4, 3),)),
    "no multiple": (lambda x: x.view(-1, 4) * 2 if x.numel() % 4 == 0 else x + 1, ((3, 3),)),
    "even": (windows, ((4, 3),)),
    "padded to a multiple": (padded, ((2, 3),)),
    "product": (lambda x: x * 2 if x.shape[0] * x.shape[1] > 8 else x * 3, ((4, 3),)),
    "batch of 1": (lambda x: x.squeeze(0) * 2 if x.shape[0] == 1 else x.amax(1), ((1, 3),)),
    "no batch of 1": (lambda x: x.squeeze(0) * 2 if x.shape[0] == 1 else x.amax(1), ((4, 3),)),
    "empty": (lambda x: x.new_ones(2) if x.shape[0] == 0 else x * 2, ((4, 3),)),
    "nothing in it": (lambda x: x.new_ones(2) if x.numel() == 0 else x * 2, ((4, 3),)),
    "floor division": (lambda x: x[: x.shape[0] // 3] * 2, ((4, 3),)),
    "floor division of one by the other": (lambda x: x * 2 if x.shape[0] // x.shape[1] > 1 else x * 3, ((4, 2),)),
    "true division": (lambda x: x * 2 if x.shape[0] / x.shape[1] > 0.6 else x * 3, ((4, 3),)),
    "rounded": (lambda x: x[: int(x.shape[0] * 0.6)] * int(x.shape[0] * 0.6), ((4, 3),)),
    "ceiling": (lambda x: x * math.ceil(x.shape[0] * 0.7), ((4, 3),)),
    "root": (lambda x: x * 2 if x.shape[0] ** 0.5 > 1.5 else x * 3, ((4, 3),)),
    "square": (lambda x: x * 2 if x.shape[0] ** 2 > 10 else x * 3, ((4, 3),)),
    "scale": (lambda x: x * x.shape[-1] ** -0.5, ((4, 3),)),
    "bits": (lambda x: x * 2 if x.shape[0] & 1 else x * 3, ((4, 3),)),
    "shape as a tuple": (lambda x: x * 2 if x.shape == (4, 3) else x * 3, ((4, 3),)),
    "table of sizes": (lambda x: x * {2: 5.0, 4: 2.0}.get(x.shape[0], 3.0), ((4, 3),)),
    "slice of a table": (table, ((4, 3),)),
    "length as a number": (lambda x: x * float(len(x)), ((4, 3),)),
    "equal sizes": (lambda x, y: x @ y.mT if x.shape[1] == y.shape[1] else x.sum() + y.sum(), ((4, 3), (2, 3))),
    "unequal sizes": (lambda x, y: x @ y.mT if x.shape[1] == y.shape[1] else x.sum() + y.sum(), ((4, 3), (2, 2))),
    "broadcast": (lambda x, y: x + y, ((4, 3), (4, 3))),
    "twice": (lambda x, y: x + y.repeat(2, 1) if x.shape[0] == 2 * y.shape[0] else x * 3, ((4, 3), (2, 3))),
    "sum": (lambda x, y: x * 2 if x.shape[0] + y.shape[0] > 5 else x * 3, ((4, 3), (2, 3))),
    "smaller": (shorter, ((4, 3), (2, 3))),
    "larger": (lambda x, y: x * 2 if max(x.shape[0], y.shape[0]) > 4 else x * 3, ((4, 3), (2, 3))),
    "divisor": (lambda x, y: x * 2 if x.shape[0] % y.shape[0] == 0 else x * 3, ((4, 3), (2, 3))),
    "reshaped like": (lambda x, y: x.reshape(y.shape[0], -1) * 2, ((4, 3), (2, 3))),
}


@functools.cache
def converted(name: str) -> tuple[Shaped, AmpModule]:
    function, sizes = MODULES[name]
    module = (One if len(sizes) == 1 else Two)(function).eval()
    return module, autocastfx.convert(module, inputs(sizes), dtype=torch.bfloat16, op_list=OpList(), check=False)


def inputs(sizes: Sizes) -> tuple[torch.Tensor, ...]:
    """Tensors of ``sizes`` with values of their own."""
    return tuple(torch.arange(1.0, 1 + a * b).reshape(a, b).sin() + i for i, (a, b) in enumerate(sizes))


def run(call: Callable[..., Any], *args: Any) -> torch.Tensor | str:
    """A result, or that there is none."""
    try:
        return call(*args)
    except (RuntimeError, IndexError, ZeroDivisionError, VariantError) as error:
        return f"raised: {error}"


def agree(result: torch.Tensor | str, expected: torch.Tensor | str) -> bool:
    if isinstance(result, str) or isinstance(expected, str):
        return isinstance(result, str) and isinstance(expected, str)
    return result.shape == expected.shape and torch.equal(result, expected)


@pytest.mark.parametrize("name", MODULES)
@examples(12, 40)
@given(data=st.data())
def test_a_graph_is_the_module_for_all_sizes_that_its_guard_holds_for(name: str, data: st.DataObject) -> None:
    """The frozen graph, which checks its guard alone, and the model, which captures where no guard holds."""
    module, model, frozen = converted_and_frozen(name)
    sizes = tuple(data.draw(st.tuples(st.integers(0, 8), st.integers(0, 5))) for _ in MODULES[name][1])
    if data.draw(st.booleans()):  # the second dimension as captured: more sizes hold
        sizes = tuple((n, captured[1]) for (n, _), captured in zip(sizes, MODULES[name][1], strict=True))
    expected = run(module, *inputs(sizes))
    result = run(frozen, *inputs(sizes))
    assert (isinstance(result, str) and "sizes" in result) or agree(result, expected)
    assert agree(run(model, *inputs(sizes)), expected)


@functools.cache
def converted_and_frozen(name: str) -> tuple[Shaped, AmpModule, nn.Module]:
    """A module, its conversion, and the graph that is there after a second size."""
    module, model = converted(name)
    for sizes in OTHER.get(name, ([], []))[0][:1]:
        run(model, *inputs(sizes))
    return module, model, model.freeze(*inputs(MODULES[name][1]))


# Sizes at which the module does the same, and sizes at which it does something else.
OTHER: dict[str, tuple[list[Sizes], list[Sizes]]] = {
    "if shape": ([((9, 1),)], [((3, 3),), ((1, 3),)]),
    "if shape, other branch": ([((1, 5),), ((3, 3),)], [((4, 3),)]),
    "chain of comparisons": ([((3, 3),), ((5, 1),)], [((2, 3),), ((6, 3),)]),
    "loop over a length": ([((3, 7),)], [((4, 2),), ((1, 2),)]),
    "list of rows": ([((3, 7),)], [((4, 2),)]),
    "while": ([((7, 2),), ((8, 2),)], [((5, 2),), ((2, 2),), ((12, 2),)]),
    "multiple": ([((2, 2),), ((1, 8),)], [((3, 3),)]),
    "no multiple": ([((1, 1),)], [((4, 1),)]),
    "even": ([((2, 3),), ((8, 1),)], [((3, 3),)]),
    "product": ([((3, 3),), ((1, 9),)], [((2, 4),)]),
    "batch of 1": ([((1, 8),)], [((2, 3),)]),
    "no batch of 1": ([((2, 3),), ((9, 1),)], [((1, 3),)]),
    "empty": ([((1, 3),), ((9, 1),)], [((0, 3),)]),
    "nothing in it": ([((1, 3),), ((9, 1),)], [((0, 3),), ((3, 0),)]),
    "floor division": ([((1, 3),), ((9, 1),)], []),
    "rounded": ([((4, 5),)], [((6, 3),), ((2, 3),)]),
    "ceiling": ([((4, 5),), ((8, 3),)], []),
    "root": ([((3, 3),), ((9, 1),)], [((2, 3),)]),
    "square": ([((9, 3),)], [((3, 3),)]),
    "shape as a tuple": ([((4, 3),)], [((4, 2),), ((3, 3),)]),
    "table of sizes": ([((4, 3),)], [((2, 3),), ((3, 3),)]),
    "slice of a table": ([((5, 4),), ((1, 1),)], [((6, 3),), ((2, 5),)]),
    "length as a number": ([((4, 5),)], [((5, 3),)]),
    "equal sizes": ([((1, 2), (7, 2))], [((4, 3), (2, 2))]),
    "unequal sizes": ([((1, 1), (1, 3))], [((4, 3), (2, 3))]),
    "broadcast": ([((2, 5), (2, 5)), ((1, 1), (1, 1))], [((4, 3), (1, 3)), ((4, 3), (4, 1))]),
    "twice": ([((2, 1), (1, 1)), ((6, 3), (3, 3))], [((3, 3), (1, 3))]),
    "sum": ([((3, 3), (3, 3))], [((2, 3), (3, 3))]),
    "larger": ([((4, 1), (1, 1))], [((5, 3), (2, 3)), ((2, 3), (5, 3))]),
    "divisor": ([((6, 3), (3, 3)), ((5, 3), (1, 3))], [((5, 3), (2, 3)), ((4, 3), (0, 3))]),
    "reshaped like": ([((6, 3), (9, 3))], [((4, 3), (5, 3)), ((4, 3), (0, 3))]),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_sizes_get_a_graph_of_their_own(name: str) -> None:
    module, model = converted(name)
    for sizes in (*OTHER[name][0], *OTHER[name][1], MODULES[name][1]):
        assert agree(run(model, *inputs(sizes)), run(module, *inputs(sizes)))


# -- the guard itself -------------------------------------------------------------------------------------------------

NAMES = ("x", "y")
GUARD = ShapeGuard(
    symbols=(("s7", 0, 0), ("s77", 1, 0)),
    conditions=("s7 > 0", "sizes[0][1] == 3", "s77 == 2*s7", "s77 % (s7 - 4) == 0"),
)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (((5, 3), (10,)), None),
        (((0, 3), (0,)), "x.shape[0] > 0 does not hold with x.shape[0]=0"),
        (((5, 4), (10,)), "x.shape[1] is 4, and the graph takes 3"),
        (((5, 3), (11,)), "y.shape[0] == 2*x.shape[0] does not hold with x.shape[0]=5, y.shape[0]=11"),
        (((4, 3), (8,)), "y.shape[0] % (x.shape[0] - 4) == 0 does not hold with x.shape[0]=4, y.shape[0]=8"),
        (((0, 4), (1,)), "x.shape[0] > 0 does not hold with x.shape[0]=0"),
    ],
)
def test_broken_says_which_condition_and_which_numbers(sizes: Any, message: str | None) -> None:
    assert GUARD.broken(sizes, NAMES) == message
    assert GUARD.holds(sizes) is (message is None)


def test_a_guard_pickles_and_compares() -> None:
    for guard in (GUARD, ShapeGuard(), converted("root")[1].variants[0].guard):
        again = pickle.loads(pickle.dumps(guard))
        assert again == guard == copy.deepcopy(guard)
        for n in range(8):
            sizes = ((n, 3), (2 * n,))
            assert again.holds(sizes) == guard.holds(sizes)
    assert ShapeGuard() != GUARD
    assert ShapeGuard().holds([]) is True
    assert ShapeGuard().broken(((1, 2),), NAMES) is None


def test_a_frozen_graph_says_which_size_is_wrong() -> None:
    model = autocastfx.convert(One(loop).eval(), torch.ones(3, 2), dtype=torch.bfloat16, op_list=OpList())
    alone = model.freeze(torch.ones(3, 2))
    with pytest.raises(VariantError, match=r"x\.shape\[0\] is 4, and the graph takes 3"):
        alone(torch.ones(4, 2))


# -- made from expressions --------------------------------------------------------------------------------------------


def traced(function: Callable[..., Any], *sizes: tuple[int, ...]) -> list[fx.Node]:
    """Placeholders as capture makes them."""
    module = (One if len(sizes) == 1 else Two)(function)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        program = torch.export.export(
            module,
            tuple(torch.ones(size) for size in sizes),
            dynamic_shapes=(*(dict.fromkeys(range(len(size)), torch.export.Dim.AUTO) for size in sizes),),
            strict=False,
        )
    return [node for node in program.graph.nodes if node.op == "placeholder"]


def test_what_was_captured_empty_serves_nothing_else() -> None:
    """torch takes a symbolic size for positive even where the example's is 0, so that graph knows of no other size."""
    (node,) = traced(lambda x: x * 2, (0, 3))
    guard = shape_guard([node])
    assert guard.holds(((0, 5),))
    assert not guard.holds(((1, 3),))
    assert not guard.holds(((0, 0),))


def test_static_sizes_are_pinned() -> None:
    (node,) = traced(lambda x: nn.functional.linear(x, torch.ones(5, 3)), (4, 3))
    guard = shape_guard([node])
    assert [name for name, *_ in guard.symbols] == [str(node.meta["val"].shape[0])]
    assert guard.conditions == (f"{node.meta['val'].shape[0]} > 0", "sizes[0][1] == 3")
    assert shape_guard([]) == ShapeGuard()


def test_a_condition_that_python_cannot_say_pins_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute:
        def doprint(self, expression: Any) -> str:
            raise NotImplementedError

    (node,) = traced(lambda x: x * 2 if x.shape[0] > 3 else x, (4, 3))
    assert shape_guard([node]).holds(((9, 9),))
    monkeypatch.setattr("torch.utils._sympy.printers.PythonPrinter", Mute)
    guard = shape_guard([node])
    assert guard.holds(((4, 9),))
    assert not guard.holds(((9, 9),))

    monkeypatch.undo()
    x, y = traced(lambda x, y: x + y, (4, 3), (4, 3))
    assert shape_guard([x, y]).holds(((2, 5), (2, 5)))
    monkeypatch.setattr("torch.utils._sympy.printers.PythonPrinter", Mute)
    assert [shape_guard([x, y]).holds(sizes) for sizes in (((4, 3), (4, 3)), ((2, 3), (2, 3)))] == [True, False]
