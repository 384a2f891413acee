"""The derivatives of a run against torch's own, as a whole and segment by segment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

import autocastfx
from autocastfx.capture.call import CallSignature
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.node import Use
from autocastfx.numerics.flat_graph import flatten
from autocastfx.numerics.probe_run import ProbeRun, directions
from autocastfx.numerics.segments import Read, Receivers, Segment, whole

Divide = Callable[[fx.Graph], tuple[Segment, ...]]
BETWEEN = 4 * torch.finfo(torch.bfloat16).eps  # derivatives pass between segments in bfloat16


class Small(nn.Module):
    """Whose hidden value is read twice, and whose first weight is read again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 1)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        return self.last(hidden * hidden.exp()).sum() + self.first.weight.sin().sum()


class Random(nn.Module):
    """Draws random numbers in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.drop(self.first(x))))).sum()


class Counting(nn.Module):
    """Reads a buffer, writes into it, and reads it again."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.tanh(self.norm(self.first(x))) + self.count
        self.count.add_(1.0)
        return (before.exp() * self.count).sum()


def each(graph: fx.Graph) -> tuple[Segment, ...]:
    """Every node is a segment, but for those around the values of a storage that is written into."""
    (all_of_it,) = whole(graph)
    shared = {node for node in alias_sets(graph) if node.op.startswith("call_")}
    parts: list[list[fx.Node]] = []
    until: set[fx.Node] = set()  # that read what was written
    for node in all_of_it.nodes:
        if until:
            parts[-1].append(node)
        else:
            parts.append([node])
        until |= set(node.users) if node in shared else set()
        until.discard(node)
    return tuple(map(_segment, parts))


def _segment(nodes: list[fx.Node]) -> Segment:
    reads = dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in nodes)
    gives = tuple(node for node in nodes if any(user not in nodes for user in node.users))
    return Segment(tuple(nodes), tuple(reads), gives)


def stays(node: Any, use: Use) -> bool:
    return use.argument in ("running_mean", "running_var")


@dataclass
class Setup:
    model: nn.Module
    x: torch.Tensor
    run: ProbeRun


def setup(build: Callable[[], nn.Module], divide: Divide) -> Setup:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model, x = build(), torch.randn(3, 5)
        amp_model = autocastfx.convert(model, x, dtype="bfloat16")
        captured = amp_model._variant_for((x,), {}).captured
        assert captured is not None
        held = {**captured.attributes, **dict(model.named_parameters()), **dict(model.named_buffers())}
        flat = flatten(captured.graph, held.__getitem__)
        call = CallSignature.of(model.forward).bind((x,), {})
        return Setup(model, x, ProbeRun(flat, call, stays, divide(flat.graph)))


@pytest.fixture(params=[whole, each], ids=["whole", "each"])
def divide(request: pytest.FixtureRequest) -> Iterator[Divide]:
    with torch.random.fork_rng(devices=()):
        yield request.param


def by_name(run: ProbeRun) -> dict[str, torch.Tensor]:
    return {name: run.gradients[number] for name, (number, _) in run.parameters.items() if number in run.gradients}


def test_gradients_are_torchs_own(divide: Divide) -> None:
    made = setup(Small, divide)
    made.run.differentiate(made.run.output[0])
    made.model(made.x).backward()
    found = by_name(made.run)
    assert found.keys() == {name for name, _ in made.model.named_parameters()}
    for name, parameter in made.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_tangents_and_derivatives_are_torchs_own(divide: Divide) -> None:
    made = setup(Small, divide)
    model, x, run = made.model, made.x, made.run
    assert isinstance(model, Small)
    run.differentiate(run.output[0])
    signs = directions(run.gradients, 7)
    direction = {name: signs[number] for name, (number, _) in run.parameters.items()}
    tangents: dict[str, torch.Tensor] = {}
    derivatives: dict[str, torch.Tensor] = {}

    def tangent(read: Read, found: torch.Tensor) -> None:
        tangents[f"{read.node.name}.{read.use.node.name}"] = found

    def value(node: fx.Node, number: int, found: torch.Tensor) -> None:
        derivatives[node.name] = found

    for _, project in run.projections([7]):
        project(0, Receivers(value=value, tangent=tangent))

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def hidden(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, values["first.weight"], values["first.bias"]))

    near = {"rtol": BETWEEN, "atol": BETWEEN} if divide is each else {}
    inner = nn.functional.linear(x, direction["first.weight"], direction["first.bias"])
    expected = (1 - hidden(parameters).square()) * inner
    readers = [key for key in tangents if key.endswith(".tanh")]
    assert sorted(readers) == ["exp.tanh", "mul.tanh"]
    for key in readers:  # what comes back from either reader meets the same tangent
        torch.testing.assert_close(tangents[key], expected, **near)

    def projected(change: torch.Tensor) -> torch.Tensor:
        """The gradient's projection, if the hidden value were changed where it is made."""
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        changed = torch.tanh(nn.functional.linear(x, leaves["first.weight"], leaves["first.bias"])) + change
        loss = nn.functional.linear(changed * changed.exp(), leaves["last.weight"], leaves["last.bias"]).sum()
        loss = loss + leaves["first.weight"].sin().sum()
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        return torch.stack([(g * direction[n]).sum() for n, g in zip(leaves, found, strict=True)]).sum()

    change = torch.zeros(3, 4, requires_grad=True)
    (by_change,) = torch.autograd.grad(projected(change), change)
    torch.testing.assert_close(derivatives["tanh"], by_change, **near)  # what tanh's own backward reads is not changed


@pytest.mark.parametrize("build", [Random, Counting])
def test_a_segment_gives_the_same_when_it_runs_again(build: Callable[[], nn.Module]) -> None:
    made = setup(lambda: build().train(), each)
    first = {node: value for node, value in made.run._outside.items() if node.op.startswith("call_")}
    made.run.differentiate(made.run.output[0])
    compared = 0
    for i, segment in enumerate(made.run.segments):
        again = made.run._segment(i)
        for node in segment.gives:
            torch.testing.assert_close(again.values[node], first[node], rtol=0, atol=0)
            compared += 1
    assert compared == len(first) > 3


def test_what_later_segments_read_is_freed_once_they_are_done() -> None:
    made = setup(Small, each)
    run = made.run
    run.differentiate(run.output[0])
    gives = [set(segment.gives) for segment in run.segments]
    for i, (_, project) in zip(reversed(range(len(gives))), run.projections([0, 1]), strict=True):
        for held in (run._outside, run._returned or {}):
            assert {node for node in held if node.op.startswith("call_")} <= set().union(*gives[: i + 1])
        project(0, Receivers())
        project(1, Receivers())
    assert sum(map(len, gives)) > 3
    assert not [node for node in run._outside if node.op.startswith("call_")]


def test_the_callers_tensors_are_left_alone(divide: Divide) -> None:
    made = setup(lambda: Counting().train(), divide)
    before = {name: buffer.clone() for name, buffer in made.model.named_buffers()}
    made.run.differentiate(made.run.output[0])
    for _, project in made.run.projections([0]):
        project(0, Receivers())
    assert all(p.grad is None and p.requires_grad for p in made.model.parameters())
    assert all(torch.equal(buffer, before[name]) for name, buffer in made.model.named_buffers())
    made.run.close()
    assert not made.run._outside


def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient(divide: Divide) -> None:
    class Apart(Small):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            hidden = self.hidden(x)
            return self.last(hidden).sum(), hidden.sum()

    made = setup(Apart, divide)
    made.run.differentiate(made.run.output[1])
    assert by_name(made.run).keys() == {"first.weight", "first.bias"}


def test_directions_are_apart() -> None:
    like = dict.fromkeys(range(3), torch.empty(10_000))
    found = [sign for seed in (0, 1, 8) for sign in directions(like, seed).values()]
    assert all(bool((sign.abs() == 1).all()) for sign in found)
    for one, other in itertools.combinations(found, 2):
        assert abs(float((one * other).mean())) < 5 / 10_000**0.5
    assert all(map(torch.equal, directions(like, 8).values(), found[-3:]))
