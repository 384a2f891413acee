"""e3nn: equivariant layers, whose own code generator writes and scripts torch.fx graphs."""

from __future__ import annotations

import torch
from e3nn import nn as enn
from e3nn import o3
from torch import Tensor, nn

from benchmarks.packages.case import Case, Given


class Convolution(nn.Module):
    """A tensor product of neighbours and spherical harmonics, with weights from a network on distances."""

    def __init__(self) -> None:
        super().__init__()
        self.harmonics = o3.Irreps.spherical_harmonics(2)
        self.first = o3.Linear("4x0e + 4x1o", "8x0e + 8x1o")
        self.product = o3.FullyConnectedTensorProduct(
            "8x0e + 8x1o", self.harmonics, "8x0e + 8x1o + 4x2e", shared_weights=False
        )
        self.weights = enn.FullyConnectedNet([10, 16, self.product.weight_numel], torch.nn.functional.silu)
        self.gate = enn.Gate("8x0e", [torch.tanh], "12x0e", [torch.sigmoid], "8x1o + 4x2e")
        self.before = o3.Linear(self.product.irreps_out, self.gate.irreps_in)
        self.norm = enn.BatchNorm(self.gate.irreps_out)
        self.last = o3.Linear(self.gate.irreps_out, "1x0e")

    def forward(self, x: Tensor, places: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        edges = places[sources] - places[targets]
        harmonics = o3.spherical_harmonics(self.harmonics, edges, normalize=True, normalization="component")
        distances = torch.linspace(0, 3, 10, device=x.device)
        basis = (-(edges.norm(dim=1, keepdim=True) - distances).square()).exp()
        messages = self.product(self.first(x)[sources], harmonics, self.weights(basis))
        summed = messages.new_zeros(x.shape[0], messages.shape[1]).index_add(0, targets, messages)
        return self.last(self.norm(self.gate(self.before(summed))))


def _inputs() -> Given:
    nodes = torch.arange(12)
    sources, targets = torch.cartesian_prod(nodes, nodes)[torch.randperm(144)[:60]].unbind(1)
    apart = sources != targets
    return (torch.randn(12, 16), torch.randn(12, 3), sources[apart], targets[apart]), {}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = o3.Linear("8x0e + 8x1o", "8x0e + 8x1o")
        self.square = o3.TensorSquare("8x0e + 8x1o", "8x0e + 4x1o")
        self.product = o3.ElementwiseTensorProduct("8x0e + 4x1o", "8x0e + 4x1o")
        self.last = o3.Linear(self.product.irreps_out, "4x0e + 4x1o")
        self.activation = enn.Activation("4x0e + 4x1o", [torch.tanh, None])
        self.norm = o3.Norm("4x0e + 4x1o")

    def forward(self, x: Tensor) -> Tensor:
        x = self.square(self.first(x))
        return self.norm(self.activation(self.last(self.product(x, x))))


def _features() -> Given:
    return (torch.randn(16, 32),), {}


CASES = (
    Case("convolution", lambda: Convolution().train(), _inputs),
    Case("products", lambda: Plain().train(), _features),
)
