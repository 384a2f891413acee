"""``fuse="inductor"`` compiles what lies between products, each kind of region once, and changes no plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import autocastfx
from autocastfx.errors import ArgumentError, MissingExtraError, UnsupportedError
from autocastfx.runtime import regions
from autocastfx.runtime.quick_graph import lift
from autocastfx.runtime.regions import Region, fuse_regions
from autocastfx.runtime.working_copies import ATTRIBUTE
from tests.helpers import relative_error
from tests.nearness import assert_near

LOW = torch.bfloat16
X = torch.linspace(-2, 2, 4 * 16 * 32).reshape(4, 16, 32)


class Block(nn.Module):
    """Products with memory-bound ops between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.tanh(self.outer(F.gelu(self.inner(x)) * 2.0)))


class Net(nn.Module):
    """Equal layers."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def converted(net: nn.Module, **options: Any) -> Any:
    return autocastfx.convert(net, (X,), dtype=LOW, check=False, **options)


def results(model: Any, net: nn.Module, x: Tensor = X) -> tuple[Tensor, Tensor]:
    """Return the output and all gradients as one vector."""
    net.zero_grad()
    made = model(x)
    made.square().mean().backward()
    return made.detach(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.slow
def test_what_is_compiled() -> None:
    """As many kinds at any depth; as near to float32 as without; other sizes, no gradients and copies run as well."""
    counts: list[tuple[int, int]] = []
    for depth in (2, 4):
        net = Net(depth)
        plain, fused = converted(net), converted(net, fuse="inductor")
        assert fused.plan == plain.plan
        assert_near(*(dict(enumerate(results(model, net))) for model in (fused, plain, net)))
        counts.append(fused._active.regions)
        assert f"regions: {counts[-1][0]} of {counts[-1][1]} kinds, compiled by Inductor" in autocastfx.dump(fused)
    assert counts[1][0] > counts[0][0] >= 2
    assert counts[1][1] == counts[0][1]
    few = X[:2, :7]
    assert relative_error(results(fused, net, few)[1], results(net, net, few)[1]) < 2**-5
    with torch.no_grad():
        torch.testing.assert_close(fused(X), plain(X), rtol=2**-5, atol=2**-5)
    again = copy.deepcopy(fused)
    torch.testing.assert_close(again(X), fused(X))
    enabled = autocastfx.enable(copy.deepcopy(net), dtype=LOW, fuse="inductor")
    torch.testing.assert_close(enabled(X), fused(X))
    batched = torch.func.vmap(lambda x: fused(x))(X[None])  # op by op
    torch.testing.assert_close(batched[0], plain(X), rtol=2**-5, atol=2**-5)
    loss = fused(X).square().mean()
    first, second = (torch.autograd.grad(loss, net.head.weight, retain_graph=again) for again in (True, False))
    assert torch.equal(first[0], second[0])
    grad = torch.autograd.grad(fused(X).square().mean(), net.head.weight, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        grad.square().sum().backward()


def test_regions_of_a_graph() -> None:
    """Equal regions are one kind, which nothing compiles before it is called; products and weights are in none."""
    fused = converted(Net(3), fuse="inductor")
    count, kinds = fused._active.regions
    assert count > kinds >= 2
    assert fused._active.fuse == "inductor"
    assert converted(Net(3))._active.regions == (0, 0)


def eagerly(self: Region, given: tuple[Tensor, ...]) -> Any:
    """Run the ops of a region one by one, in the place of compiling it."""
    return lambda *tensors: made if isinstance(made := self.module(*tensors), (tuple, list)) else (made,)


class Writing(Net):
    """Writes into a buffer between two ops that read it, and into a value."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("state", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.tanh(self.state) * 2
        x = self.layers[0](x) + before
        self.state.add_(1)
        after = torch.sigmoid(self.state) + 1
        y = torch.relu(x) * after
        z = y.exp()
        y.mul_(0)
        return self.head(self.layers[1](z + y))


class Switching(Net):
    """Switches gradients off between ops that would make one region."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x)) * 2
        with torch.no_grad():
            scale = torch.sigmoid(x) + 1
        return self.head(self.layers[1](torch.relu(x) * scale))


class Norms(Net):
    """Two batch norms, of which one's statistics are read before and after."""

    def __init__(self) -> None:
        super().__init__(1)
        self.one, self.two = nn.BatchNorm1d(16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(self.layers[0](x)) + 1)
        mean = self.two.running_mean
        assert mean is not None
        before = torch.tanh(mean + 1)[:, None]
        x = torch.relu(self.two(x)) + before
        return self.head(x * torch.tanh(mean)[:, None])


@pytest.mark.parametrize("kind", [Writing, Switching, Norms, lambda: Net(3)])
def test_order_stays(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops that write, or switch gradients, have the same before and behind them: results are the same to the bit."""
    monkeypatch.setattr(Region, "_compile", eagerly)
    ours, other = kind(), kind()
    fused, plain = converted(ours, fuse="inductor"), converted(other)
    assert fused._active.regions[0] > 0
    for factor in (1.0, 2.0):
        for one, two in zip(results(fused, ours, X * factor), results(plain, other, X * factor), strict=True):
            assert torch.equal(one, two)
        for one, two in zip(ours.buffers(), other.buffers(), strict=True):
            assert torch.equal(one, two)


def test_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """An enabled model runs the same regions."""
    called: list[Region] = []

    def note(self: Region, given: tuple[Tensor, ...]) -> Any:
        called.append(self)
        return eagerly(self, given)

    monkeypatch.setattr(Region, "_compile", note)
    one, two = Net(3), Net(3)
    fused = converted(one, fuse="inductor")
    expected = results(fused, one)
    kinds = len(called)
    enabled = autocastfx.enable(two, dtype=LOW, fuse="inductor")
    for ours, other in zip(results(enabled, two), expected, strict=True):
        assert torch.equal(ours, other)
    assert len(called) == 2 * kinds > 0


def test_products_and_losses_are_in_no_region() -> None:
    """Also those of this package, which have kernels of their own."""

    class Scores(nn.Module):
        _keep_in_fp32_modules = ("outer",)

        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(32, 1024)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.head(self.block(x) * 2 + 1)
            return F.cross_entropy(scores.view(-1, 1024) * 2 + 1, torch.arange(64))

    with mock.patch("autocastfx.options.check_compiler"):
        given = {"dtype": "float16", "device": "cuda", "check": False, "fuse": "inductor"}
        amp = autocastfx.convert(Scores(), (X,), **given)  # type: ignore[arg-type]
    names = {str(node.target) for node in amp.graph.nodes}
    assert {"autocastfx.tf32_product.default", "autocastfx.cross_entropy_loss.default"} <= names
    variant = amp._active
    constants = [f"{variant.prefix}.{name}" for name in variant._held.values() if name in variant._buffers]
    fused = fuse_regions(lift(variant.graph, [ATTRIBUTE, *variant.places, *constants]), "cuda")
    inside = ops_inside(fused)
    assert "add" in inside
    assert inside.isdisjoint(("tf32_product", "cross_entropy_loss", "linear"))


def ops_inside(graph: fx.Graph) -> set[str]:
    """The names of the ops in all regions of a graph."""
    regions_made = [one.target for one in graph.nodes if isinstance(one.target, Region)]
    nodes = (node for one in regions_made for node in one.module.graph.nodes if node.op == "call_function")
    return {str(node.target).partition(".")[2].partition(".")[0] for node in nodes}


class Ends(nn.Module):
    """A region gives two results; the loss may use either."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.left, self.right = (
            *(nn.Linear(32, 32), nn.LayerNorm(32)),
            *(nn.Linear(32, 32), nn.Linear(32, 32)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.first(x)
        shared = shared + torch.tanh(shared) * x
        return self.left(torch.relu(shared) * 2), self.right(self.norm(shared))


def test_what_no_loss_depends_on_gets_no_gradient() -> None:
    """As without regions: not zeros, by which weight decay and moments would change a parameter."""
    net = Ends()
    fused = converted(net, fuse="inductor")
    for ends in ((0,), (1,), (0, 1)):
        gradients = []
        for model in (net, fused):
            net.zero_grad()
            made = model(X)
            torch.stack([made[end].float().square().mean() for end in ends]).sum().backward()
            gradients.append({name: one.grad for name, one in net.named_parameters()})
        expected, found = gradients
        assert {name for name, one in found.items() if one is None} == {n for n, one in expected.items() if one is None}
        assert all(one is None or relative_error(one, expected[name]) < 2**-4 for name, one in found.items())


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: torch.randn(x.shape),
    "rand_like": torch.rand_like,
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "multinomial": lambda x: torch.multinomial(torch.sigmoid(x[0]), 2, True).sum().float(),
    "feature_dropout": lambda x: F.dropout1d(x, 0.5, True),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", DRAWN)
def test_other_random_numbers_are_torchs_own(name: str, device: str) -> None:
    fused = fuse_regions(traced(lambda x: (torch.tanh(x) * 2 + DRAWN[name](x)).exp() * 3 + 1), device)
    assert {"mul", "tanh"} <= ops_inside(fused)
    assert name not in ops_inside(fused)
    assert any(name in str(node.target) for node in fused.nodes)


@pytest.mark.parametrize(("device", "is_inside"), [("cpu", False), ("cuda", True)])
def test_dropout_is_torchs_own_on_a_cpu(device: str, is_inside: bool) -> None:
    """There it is faster, and draws the same numbers."""
    graph = traced(lambda x: torch.dropout(torch.tanh(x) * 2 + 1, 0.5, True) * 3 + 1)
    inside = ops_inside(fuse_regions(graph, device))
    assert {"mul", "tanh"} <= inside
    assert ("dropout" in inside) == is_inside


def traced(function: Callable[[Tensor], Tensor]) -> fx.Graph:
    return make_fx(function, pre_dispatch=True)(X).graph


@pytest.mark.parametrize("pool", [F.avg_pool1d, F.avg_pool2d])
def test_average_pools_are_in_no_region(pool: Callable[..., Tensor]) -> None:
    """Where a window reaches beyond the edge, Inductor divides its gradient by too much."""
    fused = fuse_regions(traced(lambda x: pool(torch.tanh(x) * 2, 5, ceil_mode=True) * 3 + 1), "cpu")
    inside = ops_inside(fused)
    assert {"mul", "tanh"} <= inside
    assert not any("pool" in name for name in inside)
    assert any("pool" in str(node.target) for node in fused.nodes)


def test_a_region_runs_op_by_op_in_a_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    region = Region(graph)
    monkeypatch.setattr(Region, "_compile", lambda *_: pytest.fail("compiles"))
    batched = torch.func.vmap(region)(torch.ones(2, 3))
    assert torch.equal(batched, torch.full((2, 3), 2.0))


def test_compiles_once_for_each_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, strides, dtypes and gradients are one; numbers are not."""
    compiled: list[Any] = []

    def note(self: Region, given: tuple[Tensor, ...]) -> Any:
        compiled.append(given)
        return lambda *tensors: (self.module(*tensors),)

    monkeypatch.setattr(Region, "_compile", note)
    region, x = Region(torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)), torch.ones(2, 3)
    for given in (x, x * 2, x.mT, x.bfloat16(), x[:1], x.clone().requires_grad_()):
        assert torch.equal(region(given), torch.relu(given) + 1)
    assert len(compiled) == 5
    with torch.no_grad():
        region(x)
        region(x.clone().requires_grad_())
    assert len(compiled) == 6


def test_what_cannot_be() -> None:
    with pytest.raises(ArgumentError, match="fuse is one of 'none', 'inductor', not 'triton'"):
        converted(Net(1), fuse="triton")
    with pytest.raises(UnsupportedError, match="leave one of the two out"):
        converted(Net(1), fuse="inductor", saved="recompute")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def missing() -> str:
        raise RuntimeError("No working C++ compiler found")

    regions.check_compiler.cache_clear()
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    try:
        with pytest.raises(MissingExtraError, match=r"No working C\+\+ compiler found.*or leave fuse out"):
            converted(Net(1), fuse="inductor")
        monkeypatch.setattr(regions, "_missing_triton", lambda: iter(("triton",)))
        with pytest.raises(MissingExtraError, match="triton, which is not installed"):
            regions.check_compiler("cuda")
    finally:
        regions.check_compiler.cache_clear()
