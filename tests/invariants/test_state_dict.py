"""State_dict keys identical."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from tests.invariants.pair import net

pytestmark = pytest.mark.filterwarnings("ignore:float16 convolutions on a CPU")


class Stateful(nn.Module):
    """Tied weights, a module under two names, buffers of all kinds, names that are no Python names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("early", torch.ones(8))
        self.embed = nn.Embedding(7, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.BatchNorm1d(8)])
        self.again = self.layers[0]
        self.table = nn.ModuleDict({"a-b": nn.Linear(8, 8), "0": nn.Linear(8, 8, bias=False)})
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(8), persistent=False)
        self.register_buffer("empty", None)
        self.register_parameter("absent", None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.lone = nn.Parameter(torch.ones(8))
        self.unused = nn.Linear(2, 2)

    def forward(self, i: Tensor) -> Tensor:
        self.steps.add_(1)
        x = self.embed(i) * self.early * self.scratch
        for layer in self.layers:
            x = layer(x)
        return self.head(self.table["a-b"](self.again(x)) + self.table["0"](x) * self.lone)


def test_state_dict_has_the_same_keys_in_the_same_order_with_the_same_tensors() -> None:
    model = Stateful()
    # A constant that the graph holds must not show.
    amp_model = autocastfx.convert(nn.Sequential(OrderedDict(inner=model)), (torch.tensor([1, 2, 3]),), dtype="float16")
    amp_model(torch.tensor([1, 2, 3, 4]))
    mine, theirs = amp_model.state_dict(), {f"inner.{k}": v for k, v in model.state_dict().items()}
    assert list(mine) == list(theirs)
    assert all(mine[k].data_ptr() == theirs[k].data_ptr() and mine[k].dtype == theirs[k].dtype for k in mine)
    expected = [f"inner.{n}" for n, _ in model.named_parameters()]
    assert [n for n, _ in amp_model.named_parameters()] == expected
    mine_all = dict(amp_model.named_parameters(remove_duplicate=False))
    assert list(mine_all) == [f"inner.{n}" for n, _ in model.named_parameters(remove_duplicate=False)]
    assert [n for n, _ in amp_model.named_buffers()] == [f"inner.{n}" for n, _ in model.named_buffers()]


def test_state_dict_does_not_show_constants_of_the_graph() -> None:
    model = net(lambda m, x: m.a(x) * torch.tensor([1.0, 2.0, 3.0, 1e6] * 2))
    amp_model = autocastfx.convert(model, (torch.randn(3, 8),), dtype="float16")
    assert list(amp_model.variants[0].buffers()), "no constant: the test tests nothing"
    assert list(amp_model.named_buffers()) == []
    assert list(amp_model.state_dict()) == list(model.state_dict())


def test_state_dict_hooks_are_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0]._register_state_dict_hook(lambda module, state, prefix, _: state.update({f"{prefix}scale": torch.ones(1)}))
    amp_model = autocastfx.convert(model, (torch.randn(3, 8),), dtype="float16")
    assert list(amp_model.state_dict()) == list(model.state_dict()) == ["0.weight", "0.bias", "0.scale"]


def test_state_dicts_are_interchangeable() -> None:
    i = torch.tensor([1, 2, 3])
    model = Stateful()
    amp_model = autocastfx.convert(model, (i,), dtype="float16")
    other = Stateful()
    assert other.load_state_dict(amp_model.state_dict()) == nn.Module().load_state_dict({})
    amp_model.load_state_dict(Stateful().state_dict())
    assert not torch.equal(model.head.weight, other.head.weight), "the caller's model is loaded too"
    other.load_state_dict(amp_model.state_dict())
    assert torch.equal(model.head.weight, other.head.weight)
