"""Tensors that are known before any input hold what the graph computes, for all sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental.proxy_tensor import make_fx

from autocastfx.capture.masks import Affine, Choice, Known, known_values
from autocastfx.graph.node import tensors
from tests.helpers import Function

LEAST = torch.finfo(torch.float32).min
CAPTURED = (2, 6)


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries, as a column, and of keys, as a row."""
    i = torch.arange(x.shape[1])
    return i[:, None], i[None, :]


def causal(x: Tensor) -> Tensor:
    rows, columns = positions(x)
    return columns <= rows


def looked_up(x: Tensor) -> Tensor:
    """As transformers does: functions of four places, applied to all at once."""
    number = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
    part = torch.cumsum(torch.diff(number, prepend=number[:, :1] - 1, dim=-1) != 1, -1)
    batch, rows, columns = torch.arange(x.shape[0])[:, None, None, None], *(p[None, None] for p in positions(x))
    same = part[batch, rows] == part[batch, columns]
    return same & (number[batch, columns] <= number[batch, rows])


def cut(x: Tensor) -> Tensor:
    everything = torch.arange(2 * x.shape[1])
    return everything[x.shape[1] :][:, None] * 1 - everything[3::2][: x.shape[1] - 2][None]


def moved(x: Tensor) -> Tensor:
    rows, columns = positions(x)
    apart = (rows - columns)[None, None].expand(x.shape[0], 3, -1, -1)
    return apart.permute(3, 0, 2, 1).transpose(0, 2).clone().detach().to(torch.int32)[1].select(1, 2)


KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a range": lambda x: torch.arange(2, x.shape[1] + 5, 3),
    "a range from a size": lambda x: torch.arange(x.shape[1], 2 * x.shape[1]) - 1,
    "causal": causal,
    "causal, the other way round": lambda x: ~causal(x).mT.logical_not().mT,
    "later": lambda x: positions(x)[1] > positions(x)[0],
    "not before": lambda x: positions(x)[0] >= positions(x)[1],
    "before": lambda x: positions(x)[0] < positions(x)[1],
    "a window": lambda x: causal(x) & (positions(x)[1] > positions(x)[0] - 2),
    "not in a window": lambda x: ~(causal(x) & (positions(x)[1] > positions(x)[0] - 2)),
    "looked up": looked_up,
    "cut": cut,
    "moved": moved,
    "a triangle": lambda x: torch.ones(x.shape[1], x.shape[0], dtype=torch.bool).tril(),
    "a triangle with a diagonal": lambda x: torch.ones(2, x.shape[1], x.shape[1] + 1).triu(2) == 0,
    "what torch's transformer adds": lambda x: torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1),
    "what a model adds": lambda x: (1.0 - causal(x).float()) * LEAST,
    "a choice": lambda x: torch.where(causal(x), 0.0, LEAST),
    "filled": lambda x: torch.zeros(x.shape[1], x.shape[1]).masked_fill(~causal(x), LEAST)[None, None],
    "chosen by what is the same": lambda x: torch.where(torch.ones(()) == 1, torch.arange(x.shape[1]), 7),
    "of a view": lambda x: positions(x)[0].view(1, x.shape[1], 1).squeeze(0).reshape(-1, 1, 1).expand(-1, 2, 3),
    "counted": lambda x: torch.ones(x.shape[1], 2, dtype=torch.int64).cumsum(0) - 1,
    "counted in rows": lambda x: torch.ones(2, x.shape[1], dtype=torch.bool).cumsum(1),
    "steps": lambda x: torch.diff(torch.arange(0, 2 * x.shape[1] + 6, 2)),
    "a fraction": lambda x: torch.full((2,), 0.1, dtype=torch.float64),
    "a sum of fractions": lambda x: torch.full((2,), 0.5) + torch.full((2,), 0.25),
    "nothing, whatever the input": lambda x: (x > 0) & torch.zeros((), dtype=torch.bool),
    "nothing is shown": lambda x: (positions(x)[0] < 0) & causal(x),
}

# Each with the known values that it is made of: those that a mistake would take it for.
UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda x: x[0, :, None] > positions(x)[1],
    "a square": lambda x: positions(x)[0] * positions(x)[1],
    "float positions": lambda x: torch.arange(x.shape[1], dtype=torch.float32),
    "small integers": lambda x: torch.arange(x.shape[1], dtype=torch.uint8),
    "the end of a range": lambda x: torch.arange(x.shape[1])[-2:],
    "the last place": lambda x: torch.arange(x.shape[1]).select(0, -1),
    "what wraps": lambda x: torch.full((2,), 2**31 - 1, dtype=torch.int32) + 1,
    "no number": lambda x: torch.zeros(2) * float("inf"),
    "a rounded number": lambda x: torch.full((2,), 0.1).to(torch.bfloat16),
    "a sum of positions": lambda x: torch.arange(x.shape[1]).cumsum(0),
    "a first difference of its own": lambda x: torch.diff(torch.arange(x.shape[1]), prepend=torch.full((1,), 5)),
    "second differences": lambda x: torch.diff(torch.arange(x.shape[1] + 3), n=2),
    "places from the end": lambda x: torch.arange(x.shape[1])[torch.arange(2) - 2],
    "rows alone": lambda x: (positions(x)[0] + positions(x)[1])[torch.arange(2)],
    "what is chosen": lambda x: (positions(x)[0] + positions(x)[1])[torch.ones(x.shape[1], dtype=torch.bool)],
    "either": lambda x: torch.where(causal(x), positions(x)[0], 0),
    "another layout": lambda x: (positions(x)[0] - positions(x)[1]).reshape(-1),
    "equal places": lambda x: positions(x)[0] == positions(x)[1],
    "bits": lambda x: torch.arange(x.shape[1]) & 1,
    "written": lambda x: torch.zeros(x.shape[1]).add_(1),
}


def exported(function: Callable[[Tensor], Tensor], sizes: tuple[int, int]) -> fx.GraphModule:
    model: nn.Module = Function(function)
    with fx_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined] # pyright: ignore
        program = torch.export.export(model, (torch.rand(sizes),), dynamic_shapes=(((Dim.AUTO, Dim.AUTO),),))
    return program.graph_module


class Values(fx.Interpreter):
    """All values of a run, by node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.held: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.held[n] = super().run_node(n)
        return self.held[n]


def elements(known: Known, like: Tensor, sizes: dict[Any, int]) -> Tensor:
    """The tensor that is ``known``, as large as ``like``, where symbols have these ``sizes``."""
    if isinstance(known, Choice):
        met = [elements(condition, like, sizes) >= 0 for condition in known.conditions]
        return torch.where(torch.stack(met).all(0), known.yes, known.no)
    start = known.start
    start = int(start.node.expr.xreplace(sizes)) if isinstance(start, torch.SymInt) else start
    total = torch.full(like.shape, start, dtype=like.dtype if isinstance(start, float) else torch.int64)
    for dim, slope in enumerate(known.slopes):
        total = total + slope * torch.arange(like.shape[dim]).view(-1, *(1,) * (like.ndim - dim - 1))
    return total


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_what_is_known_is_what_is_computed(name: str) -> None:
    module = exported((KNOWN | UNKNOWN)[name], CAPTURED)
    known = known_values(module.graph, set())
    (result,) = module.graph.output_node().all_input_nodes
    assert (result in known) == (name in KNOWN)
    (given,) = (n for n in module.graph.nodes if n.op == "placeholder")
    symbols = [size.node.expr for size in tensors(given)[0].shape]
    for sizes in (CAPTURED, (3, 8), (4, 5)):
        values = Values(module)
        values.run(torch.rand(sizes))
        bound = dict(zip(symbols, sizes, strict=True))
        for node, one in known.items():
            found = values.held[node]
            if node.name != "zeros" or name != "written":
                assert torch.equal(elements(one, found, bound).to(found.dtype), found), node


@pytest.mark.parametrize("rows", [(), (3,), (2, 3)])
def test_steps_are_known_if_what_stands_before_each_row_is_a_step_away(rows: tuple[int, ...]) -> None:
    def steps(x: Tensor, slope: int) -> Tensor:
        number = torch.arange(x.shape[-1]).expand(x.shape)
        before = torch.full((*rows, 1), -1)
        return torch.diff(number, prepend=before + slope * torch.arange(rows[-1])[:, None] if slope else before)

    for slope in (0, 1) if rows else (0,):
        graph = make_fx(partial(steps, slope=slope), tracing_mode="fake", pre_dispatch=True)(torch.rand(*rows, 6)).graph
        (result,) = graph.output_node().all_input_nodes
        assert known_values(graph, set()).get(result) == (Affine(1, (0,) * (len(rows) + 1)) if slope == 0 else None)


def test_what_is_written_to_is_not_known() -> None:
    graph = exported(UNKNOWN["written"], (2, 6)).graph
    zeros = next(n for n in graph.nodes if "zeros" in n.name)
    assert not known_values(graph, {zeros, *zeros.users})


def test_conditions_that_are_always_met_are_none() -> None:
    shape = (3, 4)
    assert Affine(2, (1, 0)).is_at_least(2, shape)
    assert not Affine(2, (1, -1)).is_at_least(0, shape)
    assert Affine(3, (1, -1)).is_at_least(0, shape)
    assert Choice((Affine(3, (1, -1)),), 1, 0).simplified(shape) == Affine(1, (0, 0))
    assert Choice((Affine(0, (1, -1)), Affine(-4, (1, 0))), 1, 0).simplified(shape) == Affine(0, (0, 0))
    assert Affine(5, (2, 3)).simplified((1, 4)) == Affine(5, (0, 3))


def test_where_one_of_two_numbers_stands() -> None:
    condition = Affine(0, (1, -1))
    assert Choice((condition,), 1, 0).where(bool) == (condition,)
    assert Choice((condition,), 0, 1).where(bool) == (Affine(-1, (-1, 1)),)
    for yes, no in ((1, 2), (0, 0)):
        assert Choice((condition,), yes, no).where(bool) is None
    assert Choice((condition, Affine(3, (1, 0))), 0, 1).where(bool) is None  # where one is not met, or the other
