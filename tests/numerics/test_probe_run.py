"""The taps of a run against torch's own derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import autocastfx
from autocastfx.capture.call import CallSignature
from autocastfx.graph.node import Use
from autocastfx.numerics.flat_graph import flatten
from autocastfx.numerics.probe_run import ProbeRun, Read, Taken


class Small(nn.Module):
    """Whose hidden value is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 1)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        return self.last(hidden * hidden.exp()).sum()


def nothing_stays(node: Any, use: Use) -> bool:
    return False


def setup() -> tuple[Small, torch.Tensor, ProbeRun]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model, x = Small(), torch.randn(3, 5)
    amp_model = autocastfx.convert(model, x, dtype="bfloat16")
    captured = amp_model.variants[0].captured
    assert captured is not None
    held = {**captured.attributes, **dict(model.named_parameters())}
    call = CallSignature.of(model.forward).bind((x,), {})
    return model, x, ProbeRun.of(flatten(captured.graph, held.__getitem__), call, nothing_stays)


def test_tangents_and_adjoints_are_torchs_own() -> None:
    model, x, run = setup()
    results = run.first_pass(run.output[0], Taken())
    names = list(run.parameters)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(p.shape, generator=generator) for p in run.parameters.values()]
    tangents: dict[str, torch.Tensor] = {}
    adjoints: dict[str, torch.Tensor] = {}

    def tangent(read: Read, found: torch.Tensor) -> None:
        tangents[f"{read.node.name}.{read.use.node.name}"] = found

    def value(node: Any, number: int, found: torch.Tensor) -> None:
        adjoints[node.name] = found

    run.pass_from(results, given, Taken(value=value, tangent=tangent), again=False)

    parameters = {name: dict(model.named_parameters())[name].detach() for name in names}
    direction = dict(zip(names, given, strict=True))

    def hidden(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, values["first.weight"], values["first.bias"]))

    inner = nn.functional.linear(x, direction["first.weight"], direction["first.bias"])
    expected = (1 - hidden(parameters).square()) * inner
    readers = [key for key in tangents if key.endswith(".tanh")]
    assert sorted(readers) == ["exp.tanh", "mul.tanh"]
    for key in readers:  # what comes back from either reader meets the same tangent
        torch.testing.assert_close(tangents[key], expected)

    def projected(change: torch.Tensor) -> torch.Tensor:
        """The gradient's projection, if the hidden value were changed where it is made."""
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        made = torch.tanh(nn.functional.linear(x, leaves["first.weight"], leaves["first.bias"])) + change
        loss = nn.functional.linear(made * made.exp(), leaves["last.weight"], leaves["last.bias"]).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        return torch.stack([(g * direction[n]).sum() for n, g in zip(leaves, found, strict=True)]).sum()

    change = torch.zeros(3, 4, requires_grad=True)
    (by_change,) = torch.autograd.grad(projected(change), change)
    torch.testing.assert_close(adjoints["tanh"], by_change)  # what tanh's own backward reads is not changed


def test_the_callers_tensors_get_no_gradients() -> None:
    model, _, run = setup()
    run.first_pass(run.output[0], Taken())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    run.close()
    assert not run.values


def test_a_parameter_that_the_loss_does_not_reach_has_a_gradient_of_zeros() -> None:
    _, _, run = setup()
    bias_alone = next(leaf for name, leaf in run.parameters.items() if name == "last.bias").sum()
    found = run.first_pass(bias_alone, Taken())
    assert [bool(g.any()) for g in found] == [name == "last.bias" for name in run.parameters]
