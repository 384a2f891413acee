"""The dump of an enabled model tells what of the model is in no graph, and which graphs run no longer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autocastfx
from autocastfx.errors import UncapturedGraphWarning, VariantError
from tests.integrations.test_skipped_code import Experts, Shrink, Whole

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.linspace(-1, 1, 40).reshape(5, 8)
MOVED = ", which runs no longer: its code has moved to torch.autocast"


def called(model: nn.Module, **arguments: object) -> nn.Module:
    autocastfx.enable(model, dtype="bfloat16", **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncapturedGraphWarning)
        model(X)
    return model


def lines(model: nn.Module, *starts: str) -> list[str]:
    return [line for line in autocastfx.dump(model, width=None).splitlines() if line.startswith(starts)]


def modules_by_title(model: nn.Module) -> dict[str, set[str]]:
    """The modules of the nodes in each graph, by what the dump says of the graph."""
    backend = autocastfx.backend_of(model)
    assert backend is not None
    plans = [graph.plan for graph in backend.graphs if graph.plan is not None]
    titles = lines(model, "variant: ")
    return {title: {n.module for n in plan.nodes} for title, plan in zip(titles, plans, strict=True)}


def test_graphs_of_code_that_has_moved_say_so_and_the_code_is_named() -> None:
    model = called(Whole(Experts()))
    found = modules_by_title(model)
    assert [modules for title, modules in found.items() if not title.endswith(MOVED)] == [{"before"}, {"after"}]
    moved = set[str]().union(*(modules for title, modules in found.items() if title.endswith(MOVED)))
    assert "inner.gate" in moved
    (said,) = lines(model, "not captured: ")
    assert re.fullmatch(
        r"not captured: forward at integrations/test_skipped_code\.py:\d+ \(.+\)\. What was not captured of it has run "
        r"in float32; from now on inner runs under torch\.autocast, in bfloat16\.",
        said,
    )


def test_code_before_a_break_has_moved_with_its_module() -> None:
    """Its nodes are in no module that Dynamo names: their source lines tell."""
    found = modules_by_title(called(Whole(Shrink())))
    assert [modules for title, modules in found.items() if not title.endswith(MOVED)] == [{"before"}, {"after"}]


def test_a_whole_model_that_has_moved() -> None:
    titles = lines(called(Experts()), "variant: ")
    assert titles
    assert all(title.endswith(MOVED) for title in titles)


def test_what_stays_converted_has_not_moved() -> None:
    model = called(Whole(Experts()), uncaptured="float32")
    assert not [title for title in lines(model, "variant: ") if title.endswith(MOVED)]
    assert lines(model, "not captured: ")[0].endswith("What was not captured of it runs in float32.")


def test_rules_that_match_nothing_are_told_in_evaluation_too() -> None:
    rules = autocastfx.OpList.of({"deny": ["exp2"]}, name="mine")
    model = called(nn.Sequential(nn.Linear(8, 8)).eval(), op_list=["default", rules])
    assert lines(model, "mine:") == ["mine:deny[0]: no node of the model is 'exp2'."]


def test_the_page_and_the_other_formats_tell_it() -> None:
    model = called(Whole(Experts()))
    page = autocastfx.dump(model, format="html")
    assert "not captured: forward at integrations/test_skipped_code.py" in page
    assert MOVED in page


def test_a_model_of_which_nothing_is_captured_says_so() -> None:
    class Looping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = x * float(x.detach().abs().max().numpy())
            return x

    model = called(Looping())
    with pytest.raises(VariantError, match=r"could be converted: not captured: forward at .*float32"):
        autocastfx.dump(model)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale + self.shift


class Stacked(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(2))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.way == "checkpoint" else layer(x)
            if self.way == "break":
                torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("way", ["plain", "checkpoint", "break"])
def test_parameters_and_buffers_have_the_names_of_the_model(way: str) -> None:
    model = called(Stacked(way))
    rows = [line.split() for line in autocastfx.dump(model, width=None, full=True).splitlines()]
    held = {(row[1], row[2]) for row in rows if len(row) > 2 and row[1] in ("parameter", "buffer")}
    assert held == {
        *(("parameter", name) for name, _ in model.named_parameters()),
        *(("buffer", name) for name, _ in model.named_buffers()),
    }
    assert "l_self" not in autocastfx.dump(model, width=None, full=True)
    assert re.search(r"linear +layers\.0\.fc .*, weight, bias → bfloat16", autocastfx.dump(model, width=None))


def test_names_in_graphs_that_torch_compile_hands_to_a_backend() -> None:
    backend = autocastfx.CompileBackend(dtype="bfloat16", inner="eager")
    torch.compile(Stacked("checkpoint"), backend=backend)(X)
    (graph,) = backend.graphs
    text = graph.dump()
    assert "l_self" not in text
    assert "layers.0.fc" in text
    assert "weight, bias →" in text


@pytest.mark.parametrize("show", [autocastfx.dump, autocastfx.show, partial(autocastfx.explain, what="linear")])
def test_a_model_that_torch_compile_has_compiled_is_told_what_shows_plans(show: Callable[[nn.Module], object]) -> None:
    def compiled_in_place() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8))
        model.compile(backend="eager")
        return model

    advice = r"autocastfx\.enable\(model\) instead.*backend = autocastfx\.CompileBackend\(\).*graphs has a plan"
    compiled: Any = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="autocastfx")
    for model in (compiled, compiled_in_place()):
        with pytest.raises(TypeError, match=advice):
            show(model)
    converted: Any = torch.compile(autocastfx.convert(nn.Linear(8, 8), X, dtype="bfloat16"), backend="eager")
    with pytest.raises(TypeError, match=r"converted model that torch\.compile has compiled: give the converted"):
        show(converted)
